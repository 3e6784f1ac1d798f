"""An engine that says what it is told: episodes without a model."""

import asyncio
from collections.abc import Callable

from fr_lightning.engines.base import Completion, Sampling
from fr_lightning.rollout.conversation import ChatFormat


class ScriptedEngine:
    """Answers every prompt by a function of its text; keeps what it was asked."""

    def __init__(self, chat: ChatFormat, answer: Callable[[str], str], *, seconds: float = 0.0):
        self.chat = chat
        self.answer = answer
        self.seconds = seconds
        self.version = 0
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.forgotten: list[str] = []

    async def generate(self, token_ids, sampling=None, *, session=None) -> Completion:
        self.prompts.append(token_ids)
        self.samplings.append(sampling)
        await asyncio.sleep(self.seconds)
        words = self.answer(self.chat.tokenizer.decode(token_ids))
        ids = [*self.chat.tokenizer(words, add_special_tokens=False)["input_ids"], self.chat.stop_token_ids[0]]
        reason = "stop"
        if len(ids) > sampling.max_tokens:
            ids, reason = ids[: sampling.max_tokens], "length"
        return Completion(ids, [-0.5] * len(ids), [self.version] * len(ids), reason)

    async def forget(self, session):
        self.forgotten.append(session)
