"""What a call printed, cut to what a model can be shown.

Invariant: memory stays within a few times the limit however much is fed, and the beginning and the end survive: the
end is where a traceback says what went wrong.
"""

from __future__ import annotations

import codecs


class Output:
    """The first and the last characters of a stream, in bounded memory."""

    def __init__(self, limit: int):
        self.limit = limit
        self.bytes = 0
        self.characters = 0
        self.head = ""
        self.tail = ""
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes, final: bool = False) -> None:
        text = self.decoder.decode(data, final)
        self.bytes += len(data)
        self.characters += len(text)
        room = self.limit - len(self.head)
        self.head += text[:room]
        self.tail = (self.tail + text[room:])[-self.limit :]

    def text(self, note: str = "") -> tuple[str, bool]:
        """At most `limit` characters, the note at their end included, and whether any were left out."""
        whole = self.head + self.tail
        joint = "\n" if note and whole and not whole.endswith("\n") else ""
        room = self.limit - len(joint) - len(note)
        if self.characters <= room:
            return whole + joint + note, False
        marker = "\n[... {} characters left out ...]\n"
        room = max(0, room - len(marker) - len(str(self.characters)) + 2)
        marker = marker.format(self.characters - room)
        ending = whole[len(whole) - (room - room // 2) :]
        return whole[: room // 2] + marker + ending + joint + note, True
