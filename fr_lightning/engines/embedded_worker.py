"""The process behind `EmbeddedEngine`: continuous batching over one causal language model.

Each step is one packed forward pass: the next token of every conversation being decoded, and as many prompt tokens of
new ones as fit the step's budget; one sampled token for every conversation whose prompt is complete. Conversations
join and leave between steps.

Invariants: what a step does depends on the messages received and never on time, and messages are read only between
steps, so that equal messages to an idle worker give equal bits; a token's log-probability and version are those of
the forward pass it was drawn from.
"""

from __future__ import annotations

import ctypes
import os
import queue
import random
import signal
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from fr_lightning.engines.base import Completion, Sampling
from fr_lightning.engines.kv_slots import KVSlots, Span, UnsupportedAttention
from fr_lightning.engines.sampling import sample
from fr_lightning.engines.shared_weights import SharedWeights, WeightLayout
from fr_lightning.engines.stop_strings import NoDecoder, StopStrings, decoder_of
from fr_lightning.models import fast_dtype
from fr_lightning.routing import ExpertRouting
from fr_lightning.trajectory import FinishReason

PREFILL_TOKENS = 1024
"""Most tokens of one forward pass, decoded ones included, while prompts are waiting."""

HEARTBEAT_SECONDS = 0.5

ATTENTION = "fr_lightning_slots"


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker is started with; `published` says which weight buffer to load, and None the model folder's own."""

    model: str
    dtype: str
    device: str
    max_context: int
    max_sequences: int
    threads: int
    keep_kv_on_update: bool
    buffers: tuple[int, ...]
    published: int | None = None
    version: int = 0
    record_routes: bool = False


@dataclass(frozen=True)
class ModelFacts:
    """What the parent must know of the loaded model."""

    vocab_size: int
    max_context: int
    layout: WeightLayout


@dataclass(frozen=True)
class Request:
    id: int
    token_ids: list[int]
    sampling: Sampling
    seed: int
    session: str | None


@dataclass(eq=False)
class Conversation:
    """A request being served, or, once finished, the keys and values kept for its session's next call."""

    request: Request
    max_context: int
    stop_strings: StopStrings | None = None
    slot: int = -1
    cached: int = 0  # tokens whose keys and values lie in the slot
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routed: int = 0  # tokens whose routes were told, by this or by an earlier completion of the session
    routes: list[Tensor] = field(default_factory=list)  # [n, L, k] each

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.tokens = list(self.request.token_ids)
        self.limit = min(len(self.tokens) + sampling.max_tokens, self.max_context)
        self.stop_tokens = frozenset(sampling.stop_token_ids)
        self.random = random.Random(self.request.seed)

    def add_routes(self, start: int, routes: Tensor) -> None:
        """Of the tokens from `start` on, [n, L, k]. What is run again, after an update, stays as it was."""
        fresh = routes[max(0, self.routed - start) :]
        self.routes.append(fresh)
        self.routed += len(fresh)

    def ended_by(self, token: int) -> bool:
        completes_a_string = self.stop_strings is not None and self.stop_strings.completed_by(token)
        return completes_a_string or token in self.stop_tokens

    def completion(self, reason: FinishReason) -> Completion:
        routes = torch.cat(self.routes).numpy() if self.routes else None
        return Completion(self.tokens[len(self.request.token_ids) :], self.logprobs, self.versions, reason, routes)


class Batcher:
    """All conversations and the model. Those being decoded occupy slots 0 to `decoding - 1`; others lie anywhere."""

    def __init__(
        self,
        model: Any,
        max_sequences: int,
        max_context: int,
        keep_kv_on_update: bool,
        version: int = 0,
        routing: ExpertRouting | None = None,
    ):
        self.model = model
        self.routing = routing
        self.max_context = max_context
        self.keep_kv_on_update = keep_kv_on_update
        self.version = version
        self.slots = KVSlots(max_sequences, max_context)
        self.owners: list[Conversation | None] = [None] * max_sequences
        self.decoding = 0
        self.prefilling: list[Conversation] = []  # in order of arrival
        self.waiting: deque[Conversation] = deque()
        self.kept: dict[str, Conversation] = {}  # by session, least recently used first
        config = model.config.get_text_config()
        self._groups = config.num_attention_heads // getattr(config, "num_key_value_heads", config.num_attention_heads)

    @property
    def busy(self) -> bool:
        return bool(self.decoding or self.prefilling or self.waiting)

    def add(self, request: Request) -> None:
        """Raises `NoDecoder` where it asks for stop strings and the model has no tokenizer that can look for them."""
        strings = request.sampling.stop
        stop = StopStrings(decoder_of(self.model.name_or_path), strings, request.token_ids) if strings else None
        self.waiting.append(Conversation(request, self.max_context, stop))

    def abort(self, request_id: int) -> None:
        for waiting in self.waiting:
            if waiting.request.id == request_id:
                self.waiting.remove(waiting)
                return
        for conversation in [*self._decoded(), *self.prefilling]:
            if conversation.request.id == request_id:
                self._leave(conversation, keep=False)

    def forget(self, session: str) -> None:
        if (kept := self.kept.pop(session, None)) is not None:
            self.owners[kept.slot] = None

    def weights_changed(self, version: int) -> None:
        """Called between two steps, after the model's parameters were replaced."""
        self.version = version
        if self.keep_kv_on_update:
            return
        for session in list(self.kept):
            self.forget(session)
        self.prefilling = [*self._decoded(), *self.prefilling]
        self.decoding = 0
        for conversation in self.prefilling:
            conversation.cached = 0

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Completion | str]]:
        """One forward pass; returns the requests that ended, each with its completion or why it failed."""
        self._admit()
        decoded = self._decoded()
        budget = PREFILL_TOKENS - len(decoded)
        sampled, spans, tokens = decoded, [Span(c.slot, c.cached, 1) for c in decoded], [c.tokens[-1] for c in decoded]
        last = list(range(len(decoded)))  # indices into `tokens` of what is sampled from
        run = list(decoded)  # whose tokens `spans` are
        for conversation in self.prefilling:
            count = min(len(conversation.tokens) - conversation.cached, budget)
            if count <= 0:
                break
            budget -= count
            start = conversation.cached
            run.append(conversation)
            spans.append(Span(conversation.slot, start, count))
            tokens.extend(conversation.tokens[start : start + count])
            conversation.cached = start + count
            if conversation.cached == len(conversation.tokens):
                sampled.append(conversation)
                last.append(len(tokens) - 1)
        with nullcontext({}) if self.routing is None else self.routing.record() as recorded:
            logits = self._forward(tokens, spans, self.decoding, last)
        if self.routing is not None:
            routes = self.routing.stack(recorded).split([span.tokens for span in spans])
            for conversation, span, of_span in zip(run, spans, routes, strict=True):
                conversation.add_routes(span.start, of_span)
        ids, logprobs, finite = self._draw(logits, sampled)
        for conversation in sampled[: self.decoding]:
            conversation.cached += 1
        for conversation in sampled[self.decoding :]:
            self._start_decoding(conversation)
        ended: list[tuple[int, Completion | str]] = []
        for conversation, token, logprob, ok in zip(sampled, ids, logprobs, finite, strict=True):
            if not ok:
                ended.append((conversation.request.id, "the model's logits are not finite"))
                self.slots.scrub(conversation.slot)
                self._leave(conversation, keep=False)
                continue
            conversation.tokens.append(token)
            conversation.logprobs.append(logprob)
            conversation.versions.append(self.version)
            stopped = conversation.ended_by(token)
            if stopped or len(conversation.tokens) >= conversation.limit:
                ended.append((conversation.request.id, conversation.completion("stop" if stopped else "length")))
                self._leave(conversation, keep=conversation.request.session is not None)
        return ended

    def probe(self, tokens: list[int]) -> Tensor:
        """Logits [len(tokens), V] by a prompt of all tokens but two, a piece of prompt, and a decoded token."""
        split = len(tokens) - 2
        first = self._forward(tokens[:split], [Span(0, 0, split)], 0, list(range(split)))
        piece = self._forward(tokens[split : split + 1], [Span(0, split, 1)], 0, [0])
        return torch.cat([first, piece, self._forward(tokens[-1:], [Span(0, split + 1, 1)], 1, [0])])

    def _forward(self, tokens: list[int], spans: list[Span], decoded: int, last: list[int]) -> Tensor:
        device = self.model.device
        positions = self.slots.plan(decoded, spans, device, self.model.dtype, self._groups)
        output = self.model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=positions,
            use_cache=False,
            logits_to_keep=torch.tensor(last, dtype=torch.long, device=device),
        )
        return output.logits[0]

    def _draw(self, logits: Tensor, conversations: list[Conversation]) -> tuple[list[int], list[float], list[bool]]:
        if not conversations:
            return [], [], []
        uniforms = torch.tensor([c.random.random() for c in conversations], dtype=torch.float64, device=logits.device)
        drawn = sample(logits, [c.request.sampling for c in conversations], uniforms)
        ids, logprobs, finite = torch.stack([column.double() for column in drawn]).tolist()
        return [int(token) for token in ids], logprobs, [bool(ok) for ok in finite]

    def _decoded(self) -> list[Conversation]:
        return [owner for owner in self.owners[: self.decoding] if owner is not None]

    def _admit(self) -> None:
        while self.waiting and self.decoding + len(self.prefilling) < len(self.owners):
            conversation = self.waiting.popleft()
            session = conversation.request.session
            kept = self.kept.pop(session, None) if session is not None else None
            if kept is not None:
                conversation.slot = kept.slot
                conversation.cached = min(common_prefix(kept.tokens, conversation.tokens), kept.cached)
                conversation.cached = min(conversation.cached, len(conversation.tokens) - 1)
                conversation.routed = conversation.cached
            else:
                if None not in self.owners:
                    self.forget(next(iter(self.kept)))
                conversation.slot = self.owners.index(None)
            self.owners[conversation.slot] = conversation
            self.prefilling.append(conversation)

    def _start_decoding(self, conversation: Conversation) -> None:
        self.prefilling.remove(conversation)
        self._swap(conversation.slot, self.decoding)
        self.decoding += 1

    def _leave(self, conversation: Conversation, keep: bool) -> None:
        if conversation in self.prefilling:
            self.prefilling.remove(conversation)
        else:
            self._swap(conversation.slot, self.decoding - 1)
            self.decoding -= 1
        session = conversation.request.session
        if keep and session is not None:
            self.forget(session)
            self.kept[session] = conversation
        else:
            self.owners[conversation.slot] = None

    def _swap(self, a: int, b: int) -> None:
        first, second = self.owners[a], self.owners[b]
        self.slots.swap(a, b, first.cached if first else 0, second.cached if second else 0)
        self.owners[a], self.owners[b] = second, first
        if first is not None:
            first.slot = b
        if second is not None:
            second.slot = a


def common_prefix(a: list[int], b: list[int]) -> int:
    """Number of leading tokens that two lists share."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(index for index in range(length) if a[index] != b[index])


def load_batcher(settings: WorkerSettings) -> tuple[Batcher, ModelFacts]:
    """Load the model and prove, on a few tokens, that it computes the same through slots as by itself.

    Raises:
        UnsupportedAttention: the model cannot be served this way.
        NotRouted: its routes are to be recorded, and it has none.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM

    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = fast_dtype(device) if settings.dtype == "auto" else getattr(torch, settings.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype, attn_implementation="sdpa")
    model.eval().to(device)
    config = model.config.get_text_config()
    name = type(model).__name__
    if config.is_encoder_decoder:
        raise UnsupportedAttention(f"{name} is an encoder-decoder; the embedded engine serves decoders only")
    other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other or model._is_stateful or not model._supports_attention_backend:
        raise UnsupportedAttention(f"{name} has layers without a plain key-value cache {sorted(other) or ''}")
    max_context = min(settings.max_context, getattr(config, "max_position_embeddings", None) or settings.max_context)
    routing = ExpertRouting(model) if settings.record_routes else None
    batcher = Batcher(model, settings.max_sequences, max_context, settings.keep_kv_on_update, routing=routing)

    tokens = [index * 7919 % config.vocab_size for index in range(1, 2 + min(12, max_context))][:max_context]
    with torch.inference_mode():
        expected = model(torch.tensor([tokens], device=device)).logits[0].float()
        AttentionInterface.register(ATTENTION, batcher.slots.attention)
        model.set_attn_implementation(ATTENTION)
        error = (batcher.probe(tokens).float() - expected).abs().mean() / expected.std()
    if not error < (1e-3 if dtype == torch.float32 else 0.1):
        raise UnsupportedAttention(
            f"{name} computes other logits when its attention is replaced (relative {error:.2g})"
        )

    layout = WeightLayout.of(model)
    if settings.published is not None:
        SharedWeights(settings.buffers[settings.published]).load_into(layout, model)
        batcher.version = settings.version
    return batcher, ModelFacts(config.vocab_size, max_context, layout)


def serve(connection: Connection, inbox: queue.SimpleQueue[list[tuple[Any, ...]]], settings: WorkerSettings) -> None:
    """Answer messages, each a list of commands, until the process is killed."""
    try:
        batcher, facts = load_batcher(settings)
    except Exception as error:
        connection.send([("refused", f"{type(error).__name__}: {error}")])
        raise
    connection.send([("ready", facts, batcher.version)])
    with torch.inference_mode():  # aborts and updates move keys and values about, too
        last_sent = time.monotonic()
        while True:
            messages = [] if batcher.busy else [inbox.get()]
            while not inbox.empty():
                messages.append(inbox.get())
            events: list[tuple[Any, ...]] = []
            for command, *arguments in (item for message in messages for item in message):
                if command == "add":
                    (request,) = arguments
                    try:
                        batcher.add(request)
                    except NoDecoder as error:
                        events.append(("ended", request.id, str(error)))
                elif command == "abort":
                    batcher.abort(*arguments)
                elif command == "forget":
                    batcher.forget(*arguments)
                elif command == "update":
                    buffer, version = arguments
                    SharedWeights(settings.buffers[buffer]).load_into(facts.layout, batcher.model)
                    batcher.weights_changed(version)
                    events.append(("updated", version))
            if batcher.busy:
                events.extend(("ended", *ended) for ended in batcher.step())
            if events or time.monotonic() - last_sent > HEARTBEAT_SECONDS:
                connection.send(events)
                last_sent = time.monotonic()


def _read(connection: Connection, inbox: queue.SimpleQueue[Any]) -> None:
    """Keep the pipe empty, so that the parent never waits for a step; its end is the parent's."""
    while True:
        try:
            inbox.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)


def main() -> None:
    """Entry point: `python -c … CONNECTION_FD`, started by `EmbeddedEngine`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    connection = Connection(int(sys.argv[1]))
    settings: WorkerSettings = connection.recv()
    torch.set_num_threads(settings.threads)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    try:
        serve(connection, inbox, settings)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # the reading thread waits for the parent's end, not for ours
