"""A token-exact chat: messages in, token ids out, and nothing is ever tokenised twice.

Invariant: a conversation only grows. What the engine sampled is kept as sampled; what the template would write around
the next observation is worked out on a stand-in conversation and appended. A template that would rewrite earlier turns
(Qwen3 drops old `<think>` blocks) is therefore overruled: the conversation keeps its own tokens, and says so once. An
environment that wants the policy to see less begins a new context, behind the earlier ones.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from fr_lightning.engines.base import Completion, EngineError
from fr_lightning.trajectory import NO_EXPERT

logger = logging.getLogger(__name__)

MARK = "fr0lightning1mark"  # stands for the policy's words in a stand-in conversation; survives any template's strip()


class ChatFormat:
    """What one tokenizer's chat template writes around turns, found out by rendering it.

    Args:
        tokenizer: with a chat template.
        template_kwargs: passed to every rendering, such as `{"enable_thinking": False}`.
        stop_token_ids: further ids that end a turn (a generation config may list some).

    Attributes:
        stop_token_ids: ids that end the policy's turn: the template's end-of-turn token and the tokenizer's eos.

    Raises:
        ValueError: the tokenizer has no chat template, or one that does not show the assistant's words.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        stop_token_ids: Sequence[int] = (),
    ):
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template: choose an instruction-tuned model, "
                "or put a chat_template.jinja in its folder"
            )
        self.tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        self._special = sorted({str(token) for token in tokenizer.all_special_tokens}, key=len, reverse=True)
        asked = [_user("?"), {"role": "assistant", "content": MARK}]
        rendered = self._render(asked)
        if MARK not in rendered:
            raise ValueError(f"the chat template of {tokenizer.name_or_path!r} does not show assistant messages")
        self._tail = rendered[rendered.index(MARK) + len(MARK) :]  # "<|im_end|>\n" in ChatML
        tail_ids = self._encode(self._tail)
        self._end_of_turn = tail_ids[0] if tail_ids and tail_ids[0] in tokenizer.all_special_ids else None
        ends = [self._end_of_turn, tokenizer.eos_token_id, *stop_token_ids]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(end for end in ends if isinstance(end, int)))
        self._roles: dict[str, str] = {"user": "user"}
        thought = f"<think>\nwhy\n</think>\n\n{MARK}"
        if "<think>\nwhy" not in self._render([_user("?"), {"role": "assistant", "content": thought}, _user("!")]):
            logger.warning(
                "The chat template of %s drops earlier <think> blocks. Training is token-exact, so conversations keep "
                "them: the policy sees its own earlier thoughts, and contexts grow by them.",
                tokenizer.name_or_path,
            )

    def opening(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """Token ids of the first prompt: system prompt, tools and first observation, up to the policy's turn."""
        messages = [{**message, "content": self._harmless(message["content"])} for message in messages]
        return self._encode(self._render(messages, tools=tools, add_generation_prompt=True))

    def continuation(self, turn: Sequence[int], text: str, role: str = "user") -> list[int]:
        """Token ids from the end of the policy's turn to the start of its next one, around an observation.

        What the policy has written of that itself is not written again: the token that ends a turn or, of a template
        that ends turns by plain text, as much of it as the turn ends with (a stop string, mostly).
        """
        role = self._roles.get(role) or self._supported_role(role)
        text = self._harmless(text)
        written = self._after_mark({"role": role, "content": text})
        if self._end_of_turn is None:
            return self._encode(written[self._already_said(turn, written.partition(text or "\0")[0]) :])
        ids = self._encode(written)
        return ids[1:] if turn[-1] == self._end_of_turn else ids

    def words(self, completion: Completion) -> str:
        """What the policy wrote, as text for the environment (the token that ended the turn left out)."""
        ids = completion.token_ids
        if ids and ids[-1] in self.stop_token_ids:
            ids = ids[:-1]
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def shortened(self, text: str, max_tokens: int) -> str:
        """A text of at most about so many tokens: the middle of a longer one gives way to a note of how much is gone.

        For observations only, which are yet to be tokenised; what the policy wrote is never touched.
        """
        ids = self._encode(text)
        if len(ids) <= max_tokens:
            return text
        head, tail = (max_tokens + 1) // 2, max_tokens // 2
        before, after = (self.tokenizer.decode(part) for part in (ids[:head], ids[len(ids) - tail :]))
        return f"{before}\n[{len(ids) - head - tail} tokens left out]\n{after}"

    def _already_said(self, turn: Sequence[int], opening: str) -> int:
        """How much of the template's words before an observation the policy's turn ends with, in characters."""
        said = str(self.tokenizer.decode(list(turn), skip_special_tokens=False, clean_up_tokenization_spaces=False))
        return next(count for count in range(len(opening), -1, -1) if said.endswith(opening[:count]))

    def _after_mark(self, message: Mapping[str, Any]) -> str:
        rendered = self._render(
            [_user("?"), {"role": "assistant", "content": MARK}, message], add_generation_prompt=True
        )
        return rendered[rendered.index(MARK) + len(MARK) :]

    def _supported_role(self, role: str) -> str:
        try:
            written = self._after_mark({"role": role, "content": "observed0here"})
            supported = "observed0here" in written and written.startswith(self._tail)
        except Exception:  # a template refuses a role by whatever error its author chose
            supported = False
        if not supported:
            logger.warning(
                "The chat template of %s has no %r role: such observations come as user messages.",
                self.tokenizer.name_or_path,
                role,
            )
        self._roles[role] = role if supported else "user"
        return self._roles[role]

    def _harmless(self, text: str) -> str:
        """Observations are data: they may not end a turn or open another one, nor hold what UTF-8 cannot."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        for token in self._special:
            if token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        rendered = self.tokenizer.apply_chat_template(
            list(map(dict, messages)),
            tools=list(map(dict, tools)) if tools else None,  # pyright: ignore[reportArgumentType]
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self._kwargs,
        )
        assert isinstance(rendered, str)
        return rendered

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # pyright: ignore[reportArgumentType]


class Conversation:
    """One episode's tokens as they come: four aligned lists that only grow.

    `contexts` are the places in them where the policy was prompted anew.
    Routed experts, where the engine tells of them, come a turn late for the last token of each completion: what follows
    it is the next prompt.
    """

    def __init__(
        self,
        chat: ChatFormat,
        observation: str,
        *,
        system_prompt: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ):
        self.chat = chat
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._tools = tools
        self.token_ids: list[int] = []
        self.policy_mask: list[bool] = []
        self.behavior_logprobs: list[float] = []
        self.policy_versions: list[int] = []
        self.contexts: list[int] = []
        self._routes: np.ndarray | None = None  # [R, L, k] of the first R tokens
        self._turn = 0  # where the policy's latest begins
        self.begin_anew(observation)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def context(self) -> list[int]:
        """Token ids of what the policy sees now."""
        return self.token_ids[self.contexts[-1] :]

    @property
    def num_policy_tokens(self) -> int:
        return sum(self.policy_mask)

    @property
    def routed_experts(self) -> np.ndarray | None:
        """[N, L, k] int16, `NO_EXPERT` where no engine has told yet; None: of no token at all."""
        return None if self._routes is None else _lengthened(self._routes, len(self))

    def add_completion(self, completion: Completion) -> str:
        """Append what the policy sampled and return it as text.

        Raises:
            EngineError: nothing was sampled, a log-prob or version is missing, or there are routes of more tokens than
                were run.
        """
        count = len(completion.token_ids)
        if not count or len(completion.logprobs) != count or len(completion.policy_versions) != count:
            raise EngineError(
                f"the engine returned {count} tokens with {len(completion.logprobs)} log-probs and "
                f"{len(completion.policy_versions)} policy versions"
            )
        if not all(-float("inf") < logprob <= 0.0 for logprob in completion.logprobs):
            raise EngineError("the engine returned a log-prob that is positive or not finite")
        if min(completion.policy_versions) < 0:
            raise EngineError("the engine did not say which policy version sampled a token")
        self._turn = len(self.token_ids)
        self.token_ids += completion.token_ids
        self.policy_mask += [True] * count
        self.behavior_logprobs += completion.logprobs
        self.policy_versions += completion.policy_versions
        if completion.routed_experts is not None:
            self._add_routes(completion.routed_experts)
        return self.chat.words(completion)

    def add_observation(self, text: str, role: str = "user") -> None:
        """Append the environment's answer and the opening of the policy's next turn."""
        self._add_prompt(self.chat.continuation(self.token_ids[self._turn :], text, role))

    def begin_anew(self, observation: str) -> None:
        """Open a new context: system prompt, tools and this observation, and nothing of what was said before."""
        self.contexts.append(len(self))
        self._add_prompt(self.chat.opening([*self._system, _user(observation)], self._tools))

    def _add_prompt(self, ids: list[int]) -> None:
        self.token_ids += ids
        self.policy_mask += [False] * len(ids)
        self.behavior_logprobs += [0.0] * len(ids)
        self.policy_versions += [-1] * len(ids)

    def cut(self, length: int) -> None:
        """Forget the tokens after the first `length`: an observation that leaves no room for an answer."""
        for column in (self.token_ids, self.policy_mask, self.behavior_logprobs, self.policy_versions):
            del column[length:]
        self.contexts = [start for start in self.contexts if start < length]
        if self._routes is not None:
            self._routes = self._routes[:length]

    def _add_routes(self, routes: np.ndarray) -> None:
        """Those of the last tokens but one. What a token was sent to first, when the next one was drawn, stays."""
        start = len(self) - 1 - len(routes)
        if start < 0:
            raise EngineError(f"the engine told the routed experts of {len(routes)} of {len(self) - 1} tokens")
        before = routes[:0] if self._routes is None else self._routes
        before = _lengthened(before, max(start, len(before)))
        self._routes = np.concatenate([before, routes[max(0, len(before) - start) :]])


def _lengthened(routes: np.ndarray, length: int) -> np.ndarray:
    """[R, L, k] → [length, L, k], without a record at the end."""
    return np.pad(routes, [(0, length - len(routes)), (0, 0), (0, 0)], constant_values=NO_EXPERT)


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}
