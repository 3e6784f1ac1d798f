"""Strings that end a completion, looked for in the text of its tokens as they are drawn.

Invariants: the answer depends on the tokens alone; tokens stay whole, so a string may begin and end inside of them;
text is only ever read, never tokenised. For the embedded engine; vLLM looks by itself, in the same way and with the
same decoder (its `FastIncrementalDetokenizer`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

INVALID_PREFIX = "Invalid prefix encountered"
"""How the decoder says that bytes which are no UTF-8 changed the text before them; nothing but a fresh start helps."""


class NoDecoder(ValueError):
    """The model's tokenizer cannot turn tokens into text one by one."""


class StopStrings:
    """Watches the text of one completion. Special tokens count as the text they are written as.

    Args:
        tokenizer: of the model.
        strings: none of them empty.
        prompt: token ids that the completion follows. Their text is not searched; the first token's depends on them.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._longest = max(map(len, strings))
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=False)
        self._text = ""  # as much of it as may be the beginning of a string

    def completed_by(self, token: int) -> bool:
        """Whether the text holds one of the strings, now that this token has joined it."""
        self._text += self._decoded(token)
        if any(string in self._text for string in self._strings):
            return True
        self._text = self._text[max(0, len(self._text) - self._longest + 1) :]
        return False

    def _decoded(self, token: int) -> str:
        """The text that is sure by now: of a character of several tokens, nothing before the last of them."""
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception as error:  # the decoder has no class of its own for it
            if not str(error).startswith(INVALID_PREFIX):
                raise
            self._stream = DecodeStream(skip_special_tokens=False)
            return self._stream.step(self._tokenizer, token) or ""


@functools.lru_cache(maxsize=2)
def decoder_of(model: str) -> Tokenizer:
    """The tokenizer in a model's folder.

    Raises:
        NoDecoder: there is none, or not one of the `tokenizers` library's.
    """
    from fr_lightning.models import load_tokenizer

    try:
        tokenizer = getattr(load_tokenizer(model), "backend_tokenizer", None)
    except Exception as error:  # whatever is wrong with its files
        raise NoDecoder(f"stop strings need the tokenizer of {model}: {error}") from error
    if not isinstance(tokenizer, Tokenizer):
        raise NoDecoder(f"stop strings need a tokenizer of the tokenizers library; that of {model} is another's")
    return tokenizer
