"""TextWorld's PDDL games without the work it does again and again; for use in an ALFWorld worker, before any game.

Invariant: what a game says and which commands it admits is letter for letter what stock TextWorld would say and admit.
Only repeated work goes: grammar fragments are parsed once, a problem is translated to SAS once (and, with a cache
folder, once per machine), contexts are copied as deep as they are written to, facts are sorted and commands put into
words again only when facts they read have changed, and the planner's own translation waits until somebody plans. All of
it is put on from outside, on the releases it was checked on and on no others.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib.metadata
import os
import pickle
import re
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

CHECKED = {"textworld": "1.7.0", "fast-downward-textworld": "20.6.4", "alfworld": "0.4.2"}
"""The releases whose stock transcripts the speed-ups were compared with."""

TRANSLATIONS_IN_MEMORY = 8
_TASK = re.compile(r'"rhs": "(Your task is to: [^"\\]*)"')
_NO_TASK = "Your task is to: UNKNOWN GOAL."


def obstacle() -> str | None:
    """Why the speed-ups must stay off here; None: they may be installed."""
    for package, checked in CHECKED.items():
        found = importlib.metadata.version(package)
        if found != checked:
            return f"{package} {found} is installed and the speed-ups were checked on {checked}"
    return None


def install(cache: Path | None = None) -> None:
    """Put the speed-ups on, for good. `cache`: folder for translations; None: none are kept on disk."""
    import fast_downward  # pyright: ignore[reportMissingImports]
    import textworld.logic  # pyright: ignore[reportMissingImports]
    from textworld.envs.pddl import logic, textgen  # pyright: ignore[reportMissingImports]
    from textworld.logic import Rule, State  # pyright: ignore[reportMissingImports]

    parse_fragment = textgen._parse_and_convert
    fragments = functools.lru_cache(8192)(lambda text, rule: parse_fragment(text, rule_name=rule))
    textgen._parse_and_convert = lambda text, rule_name, **_: _fresh(fragments(text, rule_name))
    textgen.deepcopy = _fresh
    textgen.copy_context = _copy_context

    parse_query = Rule.parse_conjunctive_query
    Rule.parse_conjunctive_query = functools.lru_cache(8192)(parse_query)

    _remember_facts(logic.PddlState, State)
    textworld.logic.sorted = lambda values: values if type(values) is _Sorted else sorted(values)
    grammar = textgen.ContextSensitiveGrammar
    grammar.derive = _remembering(grammar.derive, _Reads(textgen))

    logic._parse_and_convert = _GrammarParser(logic._parse_and_convert, textgen)
    fast_downward.pddl2sas = Translator(fast_downward.pddl2sas, cache)


def _fresh(symbols: Any) -> Any:
    """Symbols as if parsed anew. They are written to in one place, their context, and may hold one another."""
    if isinstance(symbols, list):
        return [_fresh(symbol) for symbol in symbols]
    new = copy.copy(symbols)
    for name in ("expression", "symbol"):
        part = getattr(new, name, None)
        if part is not None and not isinstance(part, str):
            setattr(new, name, _fresh(part))
    return new


def _copy_context(context: dict[str, Any]) -> dict[str, Any]:
    """The two tables that queries add to; what is in them is only read."""
    return {**context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}


class _Sorted(list[Any]):
    """Facts in order; not to be changed."""


class _Memory:
    """What was worked out from the facts of one state, until they change. `versions` counts changes by predicate."""

    def __init__(self) -> None:
        self.versions: defaultdict[str, int] = defaultdict(int)
        self.facts: list[Any] | None = None
        self.by_signature: dict[Any, _Sorted] = {}
        self.derived: dict[Any, str] = {}

    @staticmethod
    def of(state: Any) -> _Memory:
        try:
            return state.__dict__["memory"]
        except KeyError:
            return state.__dict__.setdefault("memory", _Memory())

    def change(self, signature: Any) -> None:
        self.versions[signature.name] += 1
        self.facts = None
        self.by_signature.pop(signature, None)


def _remember_facts(pddl_state: Any, state: Any) -> None:
    """All changes of a state go through two methods; in between, its facts are listed and sorted once."""

    def add_fact(self: Any, fact: Any) -> None:
        _Memory.of(self).change(fact.signature)
        state.add_fact(self, fact)

    def remove_fact(self: Any, fact: Any) -> None:
        _Memory.of(self).change(fact.signature)
        state.remove_fact(self, fact)

    def facts(self: Any) -> list[Any]:
        memory = _Memory.of(self)
        if memory.facts is None:
            memory.facts = list(state.facts.fget(self))
        return memory.facts

    def facts_with_signature(self: Any, signature: Any) -> _Sorted:
        known = _Memory.of(self).by_signature
        if signature not in known:
            known[signature] = _Sorted(sorted(state.facts_with_signature(self, signature)))
        return known[signature]

    pddl_state.add_fact = add_fact
    pddl_state.remove_fact = remove_fact
    pddl_state.facts = property(facts)
    pddl_state.facts_with_signature = facts_with_signature


class _Reads:
    """The predicates that a text reads when it is derived; None if rules of the grammar decide."""

    def __init__(self, textgen: Any):
        self._textgen = textgen
        self._of = functools.lru_cache(8192)(self._find)

    def __call__(self, text: str) -> tuple[str, ...] | None:
        return self._of(text)

    def _find(self, text: str) -> tuple[str, ...] | None:
        names: set[str] = set()
        waiting = list(self._textgen._parse_and_convert(text, rule_name="symbols"))
        while waiting:
            symbol = waiting.pop()
            if isinstance(symbol, self._textgen.NonterminalSymbol):
                return None
            if isinstance(symbol, self._textgen.ListSymbol):
                waiting.append(symbol.symbol)
            elif isinstance(symbol, self._textgen.ConditionalSymbol):
                waiting.append(symbol.expression)
                if symbol.given:
                    rule = self._textgen.Rule.parse_conjunctive_query(symbol.given)
                    names.update(condition.name for condition in rule.preconditions)
        return tuple(sorted(names))


def _remembering(derive: Callable[..., str], reads: _Reads) -> Callable[..., str]:
    """Derives a text again only where the facts it reads have changed since, for the same things of the same game."""

    def remembering(self: Any, start: str, context: dict[str, Any]) -> str:
        predicates = reads(start)
        if predicates is None:
            return derive(self, start, context)
        memory = _Memory.of(context["state"])
        versions = tuple(memory.versions[name] for name in predicates)
        key = start, tuple(context["mapping"].items()), versions
        if key not in memory.derived:
            memory.derived[key] = derive(self, start, context)
        return memory.derived[key]

    return remembering


class _GrammarParser:
    """Parses ALFWorld's grammar once: two games differ in the text of the task, one rule without any symbols."""

    def __init__(self, parse: Callable[..., Any], textgen: Any):
        self._parse = functools.lru_cache(64)(lambda text, rule: parse(text, rule_name=rule))
        self._textgen = textgen

    def __call__(self, text: str, rule_name: str) -> Any:
        tasks = _TASK.findall(text)
        if len(tasks) != 1 or not set(tasks[0]).isdisjoint("#{}[]|"):
            return self._parse(text, rule_name)
        actions, shared = self._parse(text.replace(tasks[0], _NO_TASK), rule_name)
        grammar = self._textgen.ContextSensitiveGrammar()
        grammar.update(shared)
        (rule,) = grammar._rules["task"]
        rule = copy.copy(rule)
        rule.rhs = self._textgen._parse_and_convert(tasks[0], rule_name="symbols")
        grammar._rules["task"] = [rule]
        return actions, grammar


class Translator:
    """`fast_downward.pddl2sas`, remembering. The planner's variant waits until `DeferredSas.text` is asked for."""

    def __init__(self, translate: Callable[..., tuple[Any, str]], cache: Path | None):
        self._translate = translate
        self._cache = cache
        self._recent: OrderedDict[str, tuple[Any, str]] = OrderedDict()

    def __call__(
        self, domain: str, problem: str, verbose: bool = False, optimize: bool = False
    ) -> tuple[Any, str | DeferredSas]:
        if optimize:
            return None, DeferredSas(lambda: self._translate(domain, problem, verbose=verbose, optimize=True)[1])
        key = hashlib.blake2b(f"{CHECKED}\0{domain}\0{problem}".encode(), digest_size=20).hexdigest()
        if key not in self._recent:
            self._recent[key] = self._from_disk(key) or self._anew(key, domain, problem, verbose)
            if len(self._recent) > TRANSLATIONS_IN_MEMORY:
                self._recent.popitem(last=False)
        self._recent.move_to_end(key)
        return self._recent[key]

    def _anew(self, key: str, domain: str, problem: str, verbose: bool) -> tuple[Any, str]:
        made = self._translate(domain, problem, verbose=verbose)
        if self._cache is not None:
            with suppress(OSError):  # a full disk costs time, not the game
                self._cache.mkdir(parents=True, exist_ok=True)
                unfinished = self._cache / f"{key}.{os.getpid()}"
                unfinished.write_bytes(zlib.compress(pickle.dumps(made, pickle.HIGHEST_PROTOCOL), 1))
                unfinished.replace(self._cache / key)
        return made

    def _from_disk(self, key: str) -> tuple[Any, str] | None:
        if self._cache is None:
            return None
        try:
            return pickle.loads(zlib.decompress((self._cache / key).read_bytes()))  # our own file, in the user's folder
        except FileNotFoundError:
            return None
        except Exception:  # half a file, or one of another Python
            return None


class DeferredSas:
    """Stands where TextWorld wants the planner's SAS text, and makes it when it is wanted."""

    def __init__(self, make: Callable[[], str]):
        self._make = make

    def encode(self, encoding: str) -> DeferredSas:
        return self

    @functools.cached_property
    def text(self) -> bytes:
        return self._make().encode()
