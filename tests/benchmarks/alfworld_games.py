"""What ALFWorld costs here, beside ALFWorld's own `AlfredTWEnv` on as many processes; and whether workers stay small.

    python tests/benchmarks/alfworld_games.py --data FOLDER     # the table, on real games; without, on embedded ones
    python tests/benchmarks/alfworld_games.py --endure 600      # 64 episodes at once, a worker killed every 20 s

Both play the same games by the same seeded commands, taking turns game by game, and every text and every list of
commands must be equal. Times are medians with the 95th percentile in brackets; memory is proportional set size, read
from outside.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from fr_lightning.envs.alfworld_data import Game, Games
from fr_lightning.envs.alfworld_env import ALFWorldEnv
from fr_lightning.envs.alfworld_layouts import Layout
from fr_lightning.envs.alfworld_workers import Workers, WorkerSettings

Transcript = list[tuple[str, tuple[str, ...], bool]]


def summary(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f} ms ({statistics.quantiles(seconds, n=20)[-1] * 1e3:.1f})"


def choose(commands: list[tuple[str, ...]], dice: list[random.Random]) -> list[str]:
    return [die.choice(listed) for listed, die in zip(commands, dice, strict=True)]


class Stock:
    """`AlfredTWEnv` as its authors run it: one process for each of a batch of games, in lockstep."""

    def __init__(self, folder: str, batch: int, steps: int):
        from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv  # pyright: ignore[reportMissingImports]

        config = {
            "env": {
                "goal_desc_human_anns_prob": 0.0,
                "task_types": [1, 2, 3, 4, 5, 6],
                "domain_randomization": False,
                "expert_type": "handcoded",
            },
            "general": {"training_method": "dqn"},
            "rl": {"training": {"max_nb_steps_per_episode": steps}},
            "dataset": {"eval_id_data_path": f"{folder}/valid_seen", "num_eval_games": -1},
        }
        self.env = AlfredTWEnv(config, train_eval="eval_in_distribution").init_env(batch_size=batch)

    def play(
        self, dice: list[random.Random], steps: int, times: dict[str, list[float]]
    ) -> tuple[list[str], list[Transcript]]:
        """Its next games, by its own order: their files and what they said."""
        began = time.perf_counter()
        texts, infos = self.env.reset()
        times["reset"].append(time.perf_counter() - began)
        files = list(infos["extra.gamefile"])
        transcripts = [[entry] for entry in self._entries(texts, infos)]
        for _ in range(steps):
            commands = choose([transcript[-1][1] for transcript in transcripts], dice)
            began = time.perf_counter()
            texts, _, _, infos = self.env.step(commands)
            times["step"].append(time.perf_counter() - began)
            for transcript, entry in zip(transcripts, self._entries(texts, infos), strict=True):
                transcript.append(entry)
        return files, transcripts

    @staticmethod
    def _entries(texts: Any, infos: Any) -> Transcript:
        return [
            (text, tuple(listed), bool(won))
            for text, listed, won in zip(texts, infos["admissible_commands"], infos["won"], strict=True)
        ]


def ours(
    workers: Workers, games: list[Game], dice: list[random.Random], steps: int, times: dict[str, list[float]]
) -> list[Transcript]:
    """The same games, each in a thread of its own."""

    def play(game: Game, die: random.Random) -> Transcript:
        session = workers.session(game.id, game.source)
        began = time.perf_counter()
        state = session.start()
        times["reset"].append(time.perf_counter() - began)
        transcript = [(state.observation, state.commands, state.won)]
        for _ in range(steps):
            command = die.choice(state.commands)
            began = time.perf_counter()
            state = session.step(command)
            times["step"].append(time.perf_counter() - began)
            transcript.append((state.observation, state.commands, state.won))
        session.close()
        return transcript

    with ThreadPoolExecutor(len(games)) as threads:
        return list(threads.map(play, games, dice))


def compare(data: str | None, processes: int, rounds: int, steps: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        found = Games.find(data or export(Path(scratch)))
        by_file = {game.source["file"]: game for game in found.split("valid_seen")}
        stock = Stock(found.origin, processes, steps + 1)
        workers = Workers(WorkerSettings(processes=processes))
        for game in Games.find("embedded").split("train")[:processes]:  # starts the processes, as stock's are by now
            workers.session(game.id, game.source).start()
        workers_times: dict[str, list[float]] = {"reset": [], "step": []}
        stock_times: dict[str, list[float]] = {"reset": [], "step": []}
        spent = {"stock": 0.0, "ours": 0.0}
        children: list[psutil.Process] = []
        for number in range(rounds):
            seeds = [f"{number}/{place}" for place in range(processes)]
            began = time.perf_counter()
            files, theirs = stock.play([random.Random(seed) for seed in seeds], steps, stock_times)
            spent["stock"] += time.perf_counter() - began
            children = children or [
                child for child in psutil.Process().children(recursive=True) if child.pid not in workers.pids
            ]
            began = time.perf_counter()
            batch = [by_file[file] for file in files]
            mine = ours(workers, batch, [random.Random(seed) for seed in seeds], steps, workers_times)
            spent["ours"] += time.perf_counter() - began
            assert list(map(until_won, theirs)) == list(map(until_won, mine)), "the transcripts differ"
        played = rounds * processes * steps
        in_use = [psutil.Process(pid) for pid in workers.pids]
        rows = [
            ("steps per second, resets left out", rate(processes, stock_times), rate(processes, workers_times)),
            ("steps per second, resets included", f"{played / spent['stock']:.0f}", f"{played / spent['ours']:.0f}"),
            ("reset", summary(stock_times["reset"]), summary(workers_times["reset"])),
            ("step", summary(stock_times["step"]), summary(workers_times["step"])),
            ("memory per process", memory(children), memory(in_use)),
        ]
        workers.close()
        stock.env.close()
    print(
        f"{rounds * processes} games of {found.origin}, {steps} steps each, {processes} processes; equal transcripts\n"
    )
    print("| | AlfredTWEnv | fr_lightning |\n| --- | --- | --- |")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def until_won(transcript: Transcript) -> Transcript:
    """Stock goes on saying the same once a game is won."""
    won = [place for place, entry in enumerate(transcript) if entry[2]]
    return transcript[: won[0] + 1 if won else None]


def rate(processes: int, times: dict[str, list[float]]) -> str:
    """Of all processes together, each busy all the time."""
    return f"{processes / statistics.mean(times['step']):.0f}"


def memory(processes: list[psutil.Process]) -> str:
    sizes = [process.memory_full_info().pss / (1 << 20) for process in processes]
    return f"{statistics.mean(sizes):.0f} MiB" if sizes else "–"


def export(folder: Path) -> str:
    """The embedded validation games as files of ALFWorld's own form."""
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH  # pyright: ignore[reportMissingImports]

    domain = Path(ALFRED_PDDL_PATH).read_text(encoding="utf-8")
    grammar = Path(ALFRED_TWL2_PATH).read_text(encoding="utf-8")
    for game in Games.find("embedded").split("valid_seen"):
        layout = Layout.of(game.source["layout"])
        place = folder / "json_2.1.1" / game.id
        place.mkdir(parents=True)
        data = {
            "pddl_domain": domain,
            "grammar": grammar.replace("UNKNOWN GOAL", layout.goal),
            "pddl_problem": layout.problem(),
            "solvable": True,
            "walkthrough": layout.walkthrough(),
        }
        (place / "game.tw-pddl").write_text(json.dumps(data), encoding="utf-8")
        (place / "traj_data.json").write_text(json.dumps({"task_type": game.task_type}), encoding="utf-8")
    return str(folder)


def endure(data: str | None, seconds: float, episodes: int, processes: int, every: float) -> None:
    """Episodes by the expert, one after the other in each of many seats, while workers are killed."""
    settings = WorkerSettings(processes=processes)
    first = ALFWorldEnv(data=data, workers=settings)
    tasks = first.tasks("validation")
    deadline = time.monotonic() + seconds
    numbers = iter(range(10**9))
    lock = threading.Lock()
    counts = {"begun": 0, "won": 0, "lost": 0, "failed": 0, "steps": 0, "killed": 0}

    def count(**amounts: int) -> None:
        with lock:
            for name, amount in amounts.items():
                counts[name] += amount

    def seat() -> None:
        env = ALFWorldEnv(data=data, workers=settings)
        while time.monotonic() < deadline:
            with lock:
                number = next(numbers)
            count(begun=1)
            try:
                env.reset(seed=number, options={"task": tasks[number % len(tasks)], "split": "validation"})
                ended = won = False
                while not ended:
                    _, _, won, cut, _ = env.step(env.expert_action(0.7))
                    ended = won or cut
                    count(steps=1)
                count(won=int(won), lost=int(not won))
            except Exception as error:
                print(f"episode {number}: {type(error).__name__}: {error}")
                count(failed=1)
        env.close()

    workers: Workers = first._workers
    seats = [threading.Thread(target=seat) for _ in range(episodes)]
    for thread in seats:
        thread.start()
    me, chance, measured = psutil.Process(), random.Random(0), 0.0
    next_kill = time.monotonic() + every
    report: list[str] = []
    while any(thread.is_alive() for thread in seats):
        time.sleep(0.5)
        now = time.monotonic()
        if now > next_kill and now < deadline and (pids := workers.pids):
            os.kill(chance.choice(pids), 9)
            count(killed=1)
            next_kill += every
        if now - measured > seconds / 10:
            measured = now
            children = me.children(recursive=True)
            report.append(
                f"{seconds - (deadline - now):5.0f} s  {counts}  children {len(children)}  descriptors {me.num_fds()}  "
                f"threads {me.num_threads()}  memory here {me.memory_full_info().uss >> 20} MiB, "
                f"workers {sum(_uss(child) for child in children) >> 20} MiB  "
                f"temporary files {len(os.listdir(tempfile.gettempdir()))}"
            )
            print(report[-1], flush=True)
    first.close()
    ended = counts["won"] + counts["lost"] + counts["failed"]
    print(f"begun {counts['begun']}, ended {ended}, replayed games {workers.replayed}: {counts}")
    assert counts["begun"] == ended
    time.sleep(1.0)
    print(f"children left: {len(me.children(recursive=True))}")


def _uss(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().uss
    except psutil.Error:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=None, help="folder of real games; default: the embedded ones")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10, help="games per process")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--endure", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--kill-every", type=float, default=20.0, metavar="SECONDS")
    chosen = parser.parse_args()
    run: Callable[[], None]
    if chosen.endure:
        run = lambda: endure(chosen.data, chosen.endure, chosen.episodes, chosen.processes, chosen.kill_every)  # noqa: E731
    else:
        run = lambda: compare(chosen.data, chosen.processes, chosen.rounds, chosen.steps)  # noqa: E731
    run()


if __name__ == "__main__":
    main()
