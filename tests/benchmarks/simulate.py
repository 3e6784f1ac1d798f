"""What a run would do with so many ranks: throughput, lag and idle time, by simulating its episodes one by one.

    python -m tests.benchmarks.simulate --ranks 1 2 --env-mean 1 --env-sigma 1 --batch 32 --seats 64
    python -m tests.benchmarks.simulate --ranks 8 64 1024 --per-rank 8 --seats 64 --max-lag 4
    python -m tests.benchmarks.simulate --check --ranks 1 2 --batch 16 --seats 32 --env-mean 4 --updates 20

`--check` makes real runs of so many processes on this machine (`tests.benchmarks.real_run`) and prints what they took
beside what is predicted for parts of the speed measured in them: what is put to the test is how episodes, queues and
updates play together, not how fast a part is.

Every rank has seats, an engine and the completion queue of real runs (`CompletionQueue`, admission by lag included);
all ranks make their updates together. An episode has turns of log-normal numbers of tokens, between which its
environment takes a log-normal time. An engine gives every conversation the same rate: as fast as one alone can go, or
its share of what the engine can do. An update takes the tokens of the busiest rank (after trajectories were
exchanged) through the learner, a ring all-reduce, and the publication of the weights; while it does, episodes go on.

Left out: prefills, memory, what the operating system does, faults.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from fr_lightning.packing import balanced_parts
from fr_lightning.parallel import UNEVEN
from fr_lightning.rollout.queue import CompletionQueue, LagLimit
from fr_lightning.trajectory import Timing


@dataclass(frozen=True)
class Workload:
    """Of one episode; times in seconds."""

    turns: int
    tokens_median: float
    tokens_sigma: float
    env_mean: float
    env_sigma: float

    def tokens(self, chance: random.Random) -> int:
        """Of one turn."""
        return max(1, round(chance.lognormvariate(math.log(self.tokens_median), self.tokens_sigma)))

    def env_seconds(self, chance: random.Random) -> float:
        """Of a whole episode, a half, third, … of which follows each turn."""
        return chance.lognormvariate(math.log(self.env_mean) - self.env_sigma**2 / 2, self.env_sigma)


@dataclass(frozen=True)
class Machine:
    """Of one rank; rates per second."""

    engine_tokens: float
    conversation_tokens: float
    learner_tokens: float
    learner_jitter: float
    network_bytes: float
    hop_seconds: float
    publish_bytes: float
    weights_bytes: float

    def exchange_seconds(self, ranks: int) -> float:
        """Ring all-reduce of the gradient."""
        if ranks == 1:
            return 0.0
        return 2 * self.weights_bytes * (ranks - 1) / ranks / self.network_bytes + 2 * (ranks - 1) * self.hop_seconds


@dataclass
class Played:
    """What the queue needs to know of a trajectory."""

    rollout_id: str
    oldest_version: int
    num_policy_tokens: int
    timing: Timing = Timing()  # noqa: RUF009 (frozen)


@dataclass
class Episode:
    id: str
    version: int
    turns_left: int
    nap: float
    tokens: int = 0


@dataclass
class Rank:
    """Seats, queue and an engine that shares itself among conversations.

    `served` is how many tokens a conversation that was there all along would have been given: a turn ends when it
    has grown by the turn's tokens.
    """

    queue: CompletionQueue
    free_seats: int
    generating: list[tuple[float, int, Episode]] = field(default_factory=list)
    served: float = 0.0
    since: float = 0.0
    busy_tokens: float = 0.0
    epoch: int = 0
    batch: list[Played] | None = None
    started: itertools.count = field(default_factory=itertools.count)


class Simulation:
    def __init__(
        self, ranks: int, share: int, seats: int, lag: LagLimit, workload: Workload, machine: Machine, *,
        overlap: bool = True, seed: int = 0,
    ):  # fmt: skip
        self.work, self.machine, self.share, self.overlap = workload, machine, share, overlap
        self.chance = random.Random(seed)
        self.ranks = [Rank(CompletionQueue(share, lag, seats + share), seats) for _ in range(ranks)]
        self.events: list[tuple[float, int, str, int, object]] = []
        self.order = itertools.count()
        self.version = 0
        self.learning = False
        self.now = 0.0
        self.idle_since = 0.0
        self.idle: list[float] = []
        self.steps: list[float] = []
        self.lags: list[float] = []
        self.tokens = 0

    def run(self, updates: int, warm_up: int) -> dict[str, float]:
        for number in range(len(self.ranks)):
            self._start_episodes(number)
        while len(self.steps) < updates + warm_up:
            self.now, _, kind, number, what = heapq.heappop(self.events)
            if kind == "turn":
                self._turn_ends(number, what)
            elif kind == "env":
                self._environment_answers(number, what)
            else:
                self._update_ends()
        steps = [b - a for a, b in itertools.pairwise(self.steps)][-updates:]
        seconds = sum(steps)
        return {
            "seconds": seconds / updates,
            "idle": sum(self.idle[-updates:]) / seconds,
            "lag": statistics.mean(self.lags[-updates:]),
            "engine": sum(rank.busy_tokens for rank in self.ranks)
            / (len(self.ranks) * self.machine.engine_tokens * self.now),
            "tokens": self.tokens / self.now,
        }

    # -- episodes ----------------------------------------------------------------------------------------------------

    def _start_episodes(self, number: int) -> None:
        rank = self.ranks[number]
        while rank.free_seats and rank.queue.has_space:
            if not self.overlap and len(rank.queue._all) >= self.share:
                return  # in `sync` mode a batch is played, and then none until it is learnt from
            rank.free_seats -= 1
            episode = Episode(
                f"{number}/{next(rank.started)}", self.version, self.work.turns, self.work.env_seconds(self.chance)
            )
            rank.queue.start(episode.id, self.version)
            self._generate(number, episode)

    def _rate(self, rank: Rank) -> float:
        if not rank.generating:
            return 0.0
        return min(self.machine.conversation_tokens, self.machine.engine_tokens / len(rank.generating))

    def _advance(self, rank: Rank) -> None:
        gained = (self.now - rank.since) * self._rate(rank)
        rank.served, rank.since = rank.served + gained, self.now
        rank.busy_tokens += gained * len(rank.generating)

    def _generate(self, number: int, episode: Episode) -> None:
        rank = self.ranks[number]
        self._advance(rank)
        tokens = self.work.tokens(self.chance)
        episode.tokens += tokens
        heapq.heappush(rank.generating, (rank.served + tokens, next(self.order), episode))
        self._next_turn_end(number)

    def _next_turn_end(self, number: int) -> None:
        rank = self.ranks[number]
        rank.epoch += 1  # what was foreseen before no longer holds
        if rank.generating:
            left = max(0.0, rank.generating[0][0] - rank.served)
            self._at(left / self._rate(rank), "turn", number, rank.epoch)

    def _turn_ends(self, number: int, epoch: object) -> None:
        rank = self.ranks[number]
        if epoch != rank.epoch:
            return
        self._advance(rank)
        _, _, episode = heapq.heappop(rank.generating)
        self._at(episode.nap / self.work.turns, "env", number, episode)
        self._next_turn_end(number)

    def _environment_answers(self, number: int, episode: object) -> None:
        assert isinstance(episode, Episode)
        episode.turns_left -= 1
        if episode.turns_left:
            self._generate(number, episode)
            return
        rank = self.ranks[number]
        rank.free_seats += 1
        rank.queue.complete(Played(episode.id, episode.version, episode.tokens))  # pyright: ignore[reportArgumentType]
        self._start_episodes(number)
        self._learn_if_ready(number)

    # -- updates -----------------------------------------------------------------------------------------------------

    def _learn_if_ready(self, number: int) -> None:
        rank = self.ranks[number]
        if self.learning or rank.batch is not None:
            return
        rank.batch = rank.queue._choose(self.version)  # pyright: ignore[reportAttributeAccessIssue]
        if rank.batch is None or any(other.batch is None for other in self.ranks):
            return
        self.learning = True
        self.idle.append(self.now - self.idle_since)
        batches = [other.batch or [] for other in self.ranks]
        lengths = [[one.num_policy_tokens for one in batch] for batch in batches]
        every = [length for of_rank in lengths for length in of_rank]
        tokens = [sum(of_rank) for of_rank in lengths]
        if max(tokens) > UNEVEN * sum(every) / len(tokens):
            tokens = [sum(every[row] for row in part) for part in balanced_parts(every, len(tokens))]
        self.tokens += sum(every)
        self.lags.append(statistics.mean(self.version - one.oldest_version for batch in batches for one in batch))
        jitter = (self.chance.lognormvariate(0.0, self.machine.learner_jitter) for _ in tokens)
        compute = max(count / self.machine.learner_tokens * slow for count, slow in zip(tokens, jitter, strict=True))
        publish = self.machine.weights_bytes / self.machine.publish_bytes
        self._at(compute + self.machine.exchange_seconds(len(self.ranks)) + publish, "update", -1, None)

    def _update_ends(self) -> None:
        self.version += 1
        self.learning = False
        self.steps.append(self.now)
        self.idle_since = self.now
        for rank in self.ranks:
            rank.batch = None
            rank.queue.published()
        for number in range(len(self.ranks)):
            self._start_episodes(number)
        for number in range(len(self.ranks)):
            self._learn_if_ready(number)

    def _at(self, seconds: float, kind: str, number: int, what: object) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), kind, number, what))


def real_run(args: argparse.Namespace, ranks: int, batch: int) -> dict[str, float]:
    """What `tests.benchmarks.real_run` measured, in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "measured.json"
        launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "-m"] if ranks > 1 else []
        settings = {
            "ranks": ranks, "batch": batch, "seats": args.seats, "mode": args.mode, "env-mean": args.env_mean,
            "env-sigma": args.env_sigma, "updates": args.updates, "warm-up": args.warm_up, "output": output,
        }  # fmt: skip
        settings |= {} if args.max_lag is None else {"max-lag": args.max_lag}
        options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        command = [sys.executable, "-m", *launcher, "tests.benchmarks.real_run", *options]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise SystemExit(done.stderr[-4000:])
        return json.loads(output.read_text())


def check(args: argparse.Namespace) -> None:
    """Real runs beside the simulation of them."""
    print(f"{'ranks':>5} {'':>10} {'s/update':>9} {'learner idle':>13} {'mean lag':>9}")
    for ranks in args.ranks:
        batch = args.per_rank * ranks if args.batch is None else args.batch
        real = real_run(args, ranks, batch)
        workload = Workload(2, real["tokens_of_turn"], 0.0, args.env_mean, args.env_sigma)
        machine = Machine(
            engine_tokens=math.inf, conversation_tokens=real["conversation_tokens"],  # of an engine that is shared
            learner_tokens=real["learner_tokens"], learner_jitter=args.learner_jitter,
            network_bytes=math.inf, hop_seconds=0.0,  # in the learner's time
            publish_bytes=1.0, weights_bytes=real["publish_seconds"],
        )  # fmt: skip
        seeds = range(8)
        overlap = args.mode == "async"
        runs = [
            Simulation(
                ranks, batch // ranks, args.seats, LagLimit(args.max_lag), workload, machine, overlap=overlap, seed=seed
            ).run(args.updates, args.warm_up)
            for seed in seeds
        ]
        predicted = {name: [run[name] for run in runs] for name in ("seconds", "idle", "lag")}
        mean = {name: statistics.mean(values) for name, values in predicted.items()}
        for who, found in (("measured", real), ("predicted", mean)):
            print(
                f"{ranks:>5} {who:>10} {found['seconds']:>9.2f} {found['idle']:>13.0%} {found['lag']:>9.2f}", flush=True
            )
        low, high = min(predicted["seconds"]), max(predicted["seconds"])
        print(f"{'':>5} {'':>10} {low:>4.2f}–{high:.2f} over {len(seeds)} seeds of the simulation", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--batch", type=int, default=None, help="over all ranks; default: --per-rank each")
    parser.add_argument("--per-rank", type=int, default=8, help="trajectories of an update on each rank")
    parser.add_argument("--seats", type=int, default=64, help="episodes in flight on each rank")
    parser.add_argument("--max-lag", type=int, default=None)
    parser.add_argument("--mode", choices=("async", "sync"), default="async")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--tokens-median", type=float, default=200.0, help="of a turn")
    parser.add_argument("--tokens-sigma", type=float, default=0.8)
    parser.add_argument("--env-mean", type=float, default=10.0, help="seconds of an episode")
    parser.add_argument("--env-sigma", type=float, default=1.0)
    parser.add_argument("--engine-tokens", type=float, default=4000.0, help="a second, of a rank's engine")
    parser.add_argument("--conversation-tokens", type=float, default=80.0, help="a second, of one conversation")
    parser.add_argument("--learner-tokens", type=float, default=8000.0, help="a second, of one rank")
    parser.add_argument("--learner-jitter", type=float, default=0.05, help="σ of the log of a rank's learning time")
    parser.add_argument("--network-bytes", type=float, default=25e9)
    parser.add_argument("--hop-seconds", type=float, default=20e-6)
    parser.add_argument("--publish-bytes", type=float, default=5e9)
    parser.add_argument("--weights-bytes", type=float, default=14e9)
    parser.add_argument("--check", action="store_true", help="against real runs of so many processes on this machine")
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=10)
    args = parser.parse_args()
    if args.check:
        check(args)
        return
    workload = Workload(args.turns, args.tokens_median, args.tokens_sigma, args.env_mean, args.env_sigma)
    machine = Machine(
        args.engine_tokens, args.conversation_tokens, args.learner_tokens, args.learner_jitter, args.network_bytes,
        args.hop_seconds, args.publish_bytes, args.weights_bytes,
    )  # fmt: skip
    print(
        f"{'ranks':>5} {'s/update':>9} {'learner idle':>13} {'mean lag':>9} {'engine busy':>12} {'tokens/s/rank':>14}"
    )
    for ranks in args.ranks:
        share = args.per_rank if args.batch is None else args.batch // ranks
        found = Simulation(
            ranks, share, args.seats, LagLimit(args.max_lag), workload, machine, overlap=args.mode == "async"
        ).run(args.updates, args.warm_up)
        print(
            f"{ranks:>5} {found['seconds']:>9.2f} {found['idle']:>13.0%} {found['lag']:>9.2f} {found['engine']:>12.0%} "
            f"{found['tokens'] / ranks:>14.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
