"""Sets of mathematical problems, from any table with a question and an answer in it, as rows an environment can play.

Invariant: every row that comes out has an `id`, a `set`, a `question` and an `answer` that can be graded, no question
comes twice, and none of training is in validation. A row that breaks this is refused by file and line (or skipped and
counted, by setting); it never turns into a task that scores zero.
"""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from fr_lightning.envs.answers import AnswerPolicy, extract
from fr_lightning.envs.base import NotReady
from fr_lightning.envs.math_generator import DIFFICULTIES, KINDS, make_problem

logger = logging.getLogger(__name__)

QUESTIONS = ("question", "problem", "prompt")
ANSWERS = ("answer", "reward_model.ground_truth", "final_answer", "solution")
IDS = ("id", "unique_id", "extra_info.index", "index")
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
Row = Mapping[str, Any]


class ProblemSetError(NotReady, ValueError):
    """A set of problems that cannot be used as it is: says where the fault is and which setting answers it."""


@dataclass(frozen=True)
class ProblemSet:
    """Where problems are, and which columns hold them.

    Attributes:
        path: `generated`, a file (.jsonl, .json, .csv, .parquet), or the name of a dataset on the Hugging Face hub.
        name: in tables and task names; null: the file's or the dataset's own.
        file: looked for before the hub is asked, so that a copy of your own serves where there is no hub.
        config: of a dataset on the hub.
        split: of a dataset on the hub.
        revision: of a dataset on the hub.
        question: column, with dots into nested ones; null: `question`, `problem` or `prompt`. A list of chat messages
            counts as its last user message.
        answer: column; null: `answer`, `reward_model.ground_truth`, `final_answer` or `solution`. Of a worked solution
            the part after `####` (GSM8K) or in the last box (MATH) is taken.
        id: column; null: `id`, `unique_id` or the row's number.
        limit: only the first so many rows.
        weight: share of this set among the training rows, relative to the other sets' weights; null: its size.
        kinds: of generated problems.
        difficulties: of generated problems, 1 to 5.
        rows: of generated problems.
    """

    path: str = "generated"
    name: str | None = None
    file: str | None = None
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    question: str | None = None
    answer: str | None = None
    id: str | None = None
    limit: int | None = None
    weight: float | None = None
    kinds: tuple[str, ...] = tuple(KINDS)
    difficulties: tuple[int, ...] = (1, 2, 3, 4, 5)
    rows: int = 6000

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", tuple(self.kinds))  # YAML gives lists
        object.__setattr__(self, "difficulties", tuple(self.difficulties))
        if (self.limit is not None and self.limit < 1) or self.rows < 1:
            raise ProblemSetError(f"{self.title}: limit and rows must be ≥ 1")
        if self.weight is not None and not 0 < self.weight < float("inf"):
            raise ProblemSetError(f"{self.title}: weight must be positive, got {self.weight}")
        if not (self.kinds and set(self.kinds) <= KINDS.keys()) or not (
            self.difficulties and set(self.difficulties) <= set(DIFFICULTIES)
        ):
            raise ProblemSetError(
                f"{self.title}: generated problems have kinds {', '.join(KINDS)} and difficulties 1 to 5; got "
                f"{self.kinds} and {self.difficulties}"
            )

    @property
    def title(self) -> str:
        return self.name or (Path(self.path).stem if self.path.endswith(SUFFIXES) else self.path.split("/")[-1])


@dataclass(frozen=True)
class ProblemMix:
    """Which problems are trained on, and which are kept for evaluation.

    Attributes:
        train: sets that are trained on, mixed by weight.
        validation: sets of the evaluation; empty: a part of the training sets is held out, chosen by the question.
        held_out: that part.
        bad_rows: `refuse` stops at a row that cannot be used, `skip` counts it and goes on.
        seed: of the order of rows and of generated problems.
    """

    train: tuple[ProblemSet, ...] = (ProblemSet(),)
    validation: tuple[ProblemSet, ...] = ()
    held_out: float = 0.1
    bad_rows: Literal["refuse", "skip"] = "refuse"
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "train", tuple(self.train))
        object.__setattr__(self, "validation", tuple(self.validation))
        if not 0 <= self.held_out < 1:
            raise ProblemSetError(f"held_out must be from 0 to 1, got {self.held_out}")
        if not self.train and not self.validation:
            raise ProblemSetError("no set of problems is named: set problems.train or problems.validation")
        for part in (self.train, self.validation):
            twice = [name for name, count in Counter(one.title for one in part).items() if count > 1]
            if twice:
                raise ProblemSetError(f"two sets are named {twice[0]!r}: give one of them a name of its own")

    def rows(self, split: str, check_answer: Callable[[str], str | None]) -> Sequence[Row]:
        """The rows of `train` or of any other split (all others are the evaluation), in a seeded order.

        Args:
            split: which.
            check_answer: None for a reference answer that responses can be checked against, else the reason.

        Raises:
            ProblemSetError: a set cannot be found or read, or a row cannot be used.
        """
        if split != "train":
            if self.validation:
                return [row for one in self.validation for row in self._loaded(one, check_answer)]
            return [row for one in self.train for row in self._loaded(one, check_answer) if self._is_held_out(row)]
        banned = {_same(row["question"]) for one in self.validation for row in self._loaded(one, check_answer)}
        parts: list[list[Row]] = []
        for one in self.train:
            rows = self._loaded(one, check_answer)
            kept = [row for row in rows if _same(row["question"]) not in banned]
            if len(kept) < len(rows):
                logger.warning("%s: %d questions are left out of training", one.title, len(rows) - len(kept))
            if not self.validation:
                kept = [row for row in kept if not self._is_held_out(row)]
            banned |= {_same(row["question"]) for row in kept}
            random.Random(f"{self.seed}/{one.title}").shuffle(kept)
            parts.append(kept)
        if not any(parts):
            raise ProblemSetError("no problem is left to train on: check problems.train, held_out and the filters")
        return _mixed(parts, [one.weight for one in self.train])

    def _loaded(self, one: ProblemSet, check_answer: Callable[[str], str | None]) -> Sequence[Row]:
        return _load(one, self.seed, self.bad_rows == "skip", check_answer)

    def _is_held_out(self, row: Row) -> bool:
        digest = hashlib.blake2b(_same(row["question"]).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.held_out * 2**64


@lru_cache(maxsize=64)
def _load(one: ProblemSet, seed: int, skip: bool, check_answer: Callable[[str], str | None]) -> tuple[Row, ...]:
    """All usable rows of a set, in its own order, each question once. Read once per process."""
    rows: list[Row] = []
    seen: dict[str, str] = {}
    bad: list[str] = []
    repeated = 0
    for where, number, raw in _records(one, seed):
        try:
            row = raw if isinstance(raw, Exception) else _row(one, raw, number)
            if isinstance(row, Exception):
                raise row
            reason = None if one.path == "generated" else check_answer(row["answer"])
            if reason:
                raise ValueError(f"the answer {_brief(row['answer'])} of row {row['id']} cannot be graded: {reason}")
        except (ValueError, KeyError, TypeError) as error:
            bad.append(f"{where}: {error}")
            if not skip:
                raise ProblemSetError(
                    f"{bad[0]}. Set problems.bad_rows to skip to leave such rows out, or name the columns with "
                    "question, answer and id"
                ) from error
            continue
        key = _same(row["question"])
        if key in seen:
            repeated += 1
            if seen[key] != row["answer"]:
                logger.warning("%s: asked before with the answer %s; the first stands", where, _brief(seen[key]))
            continue
        seen[key] = row["answer"]
        rows.append(row)
        if len(rows) == one.limit:
            break
    if repeated and one.path != "generated":
        logger.warning("%s: %d repeated questions are left out", one.title, repeated)
    if bad:
        logger.warning("%s: %d rows that cannot be used are left out; the first: %s", one.title, len(bad), bad[0])
    if not rows:
        raise ProblemSetError(f"{one.title}: no usable row in {one.path}")
    return tuple(rows)


def _row(one: ProblemSet, raw: Row, number: int) -> Row:
    question = _question(_column(raw, one.question, QUESTIONS, "question"))
    answer = _answer(_column(raw, one.answer, ANSWERS, "answer"))
    identity = raw.get("id", number) if one.id is None else _column(raw, one.id, (), "id")
    if one.id is None and "id" not in raw:
        identity = next((value for name in IDS if (value := _find(raw, name)) not in (None, "")), number)
    extra = {key: raw[key] for key in ("kind", "difficulty", "program") if one.path == "generated"}
    return {"id": f"{one.title}/{identity}", "set": one.title, "question": question, "answer": answer, **extra}


def _records(one: ProblemSet, seed: int) -> Iterator[tuple[str, int, Any]]:
    """Where each record is, its number, and the record, or the exception that reading it raised."""
    if one.path == "generated":
        rng = random.Random(f"generated/{seed}")
        for number in range(one.rows):
            problem = make_problem(rng.choice(one.kinds), rng.choice(one.difficulties), rng.getrandbits(48))
            yield f"generated problem {number}", number, vars(problem)
        return
    own = next((Path(name) for name in (one.file, one.path) if name and Path(name).is_file()), None)
    if own is not None:
        yield from _read_file(own)
    elif one.path.endswith(SUFFIXES):
        raise ProblemSetError(f"there is no file {one.path} (looked in {Path.cwd()}): set path of the problem set")
    else:
        yield from _read_hub(one)


def _read_file(path: Path) -> Iterator[tuple[str, int, Any]]:
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            number = 0
            for batch in parquet.ParquetFile(path).iter_batches(1024):
                for raw in batch.to_pylist():
                    yield f"{path}, row {number + 1}", number, raw
                    number += 1
        elif path.suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.DictReader(file, strict=True)
                for number, raw in enumerate(reader):
                    whole = None not in raw and None not in raw.values()
                    named = raw if whole else ValueError("as many fields are needed as the header names")
                    yield f"{path}, line {reader.line_num}", number, named
        elif path.suffix == ".json":
            whole = json.loads(path.read_text(encoding="utf-8-sig"))
            if not isinstance(whole, list):
                raise ProblemSetError(f"{path}: a .json file must hold a list of objects (one object a line is .jsonl)")
            for number, raw in enumerate(whole):
                yield f"{path}, entry {number + 1}", number, _object(raw)
        else:
            with path.open(encoding="utf-8-sig") as file:
                for number, line in enumerate(file):
                    if line.strip():
                        yield f"{path}, line {number + 1}", number, _parsed(line)
    except ImportError as error:
        raise ProblemSetError(f"{path}: reading Parquet takes pyarrow: pip install 'fr-lightning[math]'") from error
    except (OSError, UnicodeDecodeError, csv.Error, json.JSONDecodeError) as error:
        raise ProblemSetError(f"{path} cannot be read: {error}") from error
    except Exception as error:
        if type(error).__module__.startswith("pyarrow"):
            raise ProblemSetError(f"{path} cannot be read: {error}") from error
        raise


def _parsed(line: str) -> Any:
    try:
        return _object(json.loads(line))
    except (json.JSONDecodeError, RecursionError) as error:
        return ValueError(f"no JSON: {error}")


def _object(raw: Any) -> Any:
    return raw if isinstance(raw, dict) else ValueError(f"an object is needed, got {_brief(raw)}")


def _read_hub(one: ProblemSet) -> Iterator[tuple[str, int, Any]]:
    copy = one.file or f"data/{one.title}.jsonl"
    ways = (
        f"Either give a copy of your own (set `file` or `path` of the problem set {one.title} to a .jsonl, .csv or "
        f".parquet file, such as {copy}), or let it come from the hub: pip install 'fr-lightning[hub]', a network, and "
        "HF_HUB_OFFLINE unset"
    )
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ProblemSetError(
            f"{one.path} is no file here, and the datasets package is not installed. {ways}"
        ) from error
    try:
        loaded = load_dataset(one.path, one.config, split=one.split, revision=one.revision)
    except Exception as error:  # its many layers raise what they like
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ProblemSetError(f"{one.path} is no file here and did not come from the hub: {reason}. {ways}") from error
    for number, raw in enumerate(loaded):
        yield f"{one.path}, row {number + 1}", number, raw


def _column(raw: Row, named: str | None, known: Iterable[str], what: str) -> Any:
    names = [named] if named else list(known)
    for name in names:
        value = _find(raw, name)
        if value is not None and value != "" and value != []:
            return value
    found = ", ".join(map(str, raw)) or "none"
    raise ValueError(f"no {what} in {' or '.join(names)} (columns here: {found})")


def _find(raw: Row, name: str) -> Any:
    """A column, or a field inside one by dots; None where there is none."""
    if name in raw:
        return raw[name]
    value: Any = raw
    for part in name.split("."):
        if isinstance(value, str) and value.lstrip().startswith("{"):  # nested columns of a CSV
            try:
                value = json.loads(value)
            except json.JSONDecodeError:
                return None
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def _question(value: Any) -> str:
    if isinstance(value, list):  # chat messages
        asked = [m["content"] for m in value if isinstance(m, Mapping) and m.get("role") == "user" and m.get("content")]
        value = asked[-1] if asked else None
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"the question must be text, got {_brief(value)}")
    return value.strip()


def _answer(value: Any) -> str:
    if isinstance(value, list):
        if not value:
            raise ValueError("the answer is an empty list")
        return ", ".join(_answer(one) for one in value)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value != value:
        raise ValueError(f"the answer must be text or a number, got {_brief(value)}")
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    if "####" in text:
        text = text.rsplit("####", 1)[1]
    elif "\\boxed" in text or "\\fbox" in text:
        text = extract(text, AnswerPolicy(unboxed=False, several_boxes="last")).answer or ""
    if not text.strip():
        raise ValueError("the answer is empty")
    return text.strip()


def _mixed(parts: Sequence[list[Row]], weights: Sequence[float | None]) -> list[Row]:
    """Rows of all parts, as many in all as there are, in the shares of the weights; a part that is too short for its
    share comes round again.
    """
    if all(weight is None for weight in weights):
        return [row for part in parts for row in part]
    shares = [float(len(part)) if weight is None else weight for part, weight in zip(parts, weights, strict=True)]
    shares = [share if part else 0.0 for part, share in zip(parts, shares, strict=True)]
    total = sum(map(len, parts))
    wanted = [total * share / sum(shares) for share in shares]
    counts = [int(number) for number in wanted]
    by_rest = sorted(range(len(parts)), key=lambda index: counts[index] - wanted[index])
    for index in by_rest[: total - sum(counts)]:
        counts[index] += 1
    return [part[number % len(part)] for part, count in zip(parts, counts, strict=True) for number in range(count)]


def _same(question: str) -> str:
    """Questions that differ in spaces, case or Unicode forms only are the same."""
    return re.sub(r"\s+", " ", unicodedata.normalize("NFKC", question)).strip().casefold()


def _brief(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) < 80 else shown[:77] + "..."
