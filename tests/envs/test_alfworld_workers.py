"""Workers under the real engine: many games on few processes, and processes that are killed, hang or are recycled."""

import os
import signal
import threading
import time

import pytest
from alfworld_games import needs_engine, unpack_sample, wander

from fr_lightning.envs.alfworld_data import Games
from fr_lightning.envs.alfworld_workers import EngineFailed, GameError, Workers, WorkerSettings, shared

pytestmark = needs_engine
STEPS = 12


@pytest.fixture(scope="module")
def games():
    return Games.find("embedded").split("valid_seen")


@pytest.fixture(scope="module")
def alone(games):
    """What games say when each is the only one of its process's life so far."""
    workers = Workers(WorkerSettings(processes=1))
    walks = {game.id: wander(workers.session(game.id, game.source), seed, STEPS) for seed, game in enumerate(games[:8])}
    workers.close()
    return walks


def walk_together(workers, games, during=lambda: None):
    """All games at once, step by step in turn, each by the walk it takes alone."""
    sessions = [workers.session(game.id, game.source) for game in games]
    walks = {game.id: [] for game in games}

    def walk(session, game, seed):
        walks[game.id] = wander(session, seed, STEPS)
        session.close()

    threads = [
        threading.Thread(target=walk, args=(session, game, seed))
        for seed, (session, game) in enumerate(zip(sessions, games, strict=True))
    ]
    for thread in threads:
        thread.start()
    during()
    for thread in threads:
        thread.join(240)
    return walks


def test_many_games_on_one_process_go_on_as_if_each_were_alone(games, alone):
    workers = Workers(WorkerSettings(processes=1))
    assert walk_together(workers, games[:8]) == alone
    assert workers.replayed == 0
    assert len(workers.pids) == 1
    workers.close()


def test_games_let_go_of_are_played_again_and_differ_in_nothing(games, alone):
    workers = Workers(WorkerSettings(processes=1, live_games=2))
    assert walk_together(workers, games[:8]) == alone
    assert workers.replayed > 0
    workers.close()


def test_a_recycled_worker_is_another_process_and_nobody_notices(games, alone):
    workers = Workers(WorkerSettings(processes=1, recycle_after=3))
    first = workers.session(games[0].id, games[0].source)
    first.start()
    pid = workers.pids[0]
    assert walk_together(workers, games[:8]) == alone
    assert workers.pids != [pid]
    assert not alive(pid)
    workers.close()


def test_killed_workers_are_replaced_and_no_game_is_lost(games, alone):
    workers = Workers(WorkerSettings(processes=2))
    killed = []

    def kill():
        for _ in range(4):
            time.sleep(0.7)
            for pid in workers.pids[:1]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    assert walk_together(workers, games[:8], kill) == alone
    assert killed
    workers.close()


def test_a_killed_worker_in_mid_episode_goes_on_where_it_was(games):
    workers = Workers(WorkerSettings(processes=1))
    session = workers.session(games[0].id, games[0].source)
    session.start()
    way = session.walkthrough
    assert way is not None
    for command in way[:-1]:
        session.step(command)
    os.kill(workers.pids[0], signal.SIGKILL)
    assert session.step(way[-1]).won
    assert workers.replayed == 1
    workers.close()


def test_a_worker_that_hangs_is_killed_at_the_deadline_and_the_failure_named(games):
    workers = Workers(WorkerSettings(processes=1, timeout=2.0))
    session = workers.session(games[0].id, games[0].source)
    session.start()
    (pid,) = workers.pids
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(EngineFailed, match=f"game {games[0].id}: worker process did not answer within 2 s"):
        session.step("look")
    assert 1.5 < time.monotonic() - began < 10
    assert not alive(pid)
    assert session.step("look").commands  # on a fresh one
    workers.close()


def test_a_game_without_walkthrough_is_planned(games):
    workers = Workers(WorkerSettings(processes=1))
    session = workers.session(games[0].id, games[0].source)
    session.start()
    plan = session.plan()
    assert plan
    assert [session.step(command).won for command in plan][-1]
    workers.close()


@pytest.mark.parametrize(("receptacles", "destination"), [({"Shelf": 1}, "Safe"), ({"Shelf": 1, "Bed": 1}, "Bed")])
def test_an_unsolvable_game_is_found_out_at_its_start(games, receptacles, destination):
    """There is no safe to put the mug in; mugs do not belong on beds."""
    layout = {**games[0].source["layout"], "objects": [["Mug", ["Shelf", 1]]], "target": "Mug"}
    workers = Workers(WorkerSettings(processes=1))
    with pytest.raises(GameError, match="game mine: its goal can never be reached"):
        workers.session("mine", {"layout": {**layout, "receptacles": receptacles, "destination": destination}}).start()
    workers.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "it is no ALFWorld game"),
        ("[]", "it is no ALFWorld game"),
        ('{"grammar": "x"}', "it is no ALFWorld game"),
        ('{"grammar": "x", "pddl_problem": "(", "pddl_domain": "("}', "the engine cannot load it"),
        (None, "it cannot be read"),
    ],
)
def test_a_malformed_game_is_named_and_the_worker_goes_on(tmp_path, games, text, message):
    file = tmp_path / "game.tw-pddl"
    if text is not None:
        file.write_text(text)
    workers = Workers(WorkerSettings(processes=1))
    pid = None
    with pytest.raises(GameError, match=f"game mine: {message}"):
        workers.session("mine", {"file": str(file)}).start()
    pid = workers.pids
    assert workers.session(games[0].id, games[0].source).start().commands
    assert workers.pids == pid
    workers.close()


def test_workers_are_shared_and_end_with_their_last_holder(games):
    settings = WorkerSettings(processes=1, timeout=61.0)
    one, release_one = shared(settings)
    two, release_two = shared(settings)
    assert one is two
    one.session(games[0].id, games[0].source).start()
    (pid,) = one.pids
    release_one()
    release_one()
    assert alive(pid)
    release_two()
    assert not alive(pid)
    assert not os.path.exists(one._scratch.name)
    with pytest.raises(EngineFailed, match="closed"):
        one.session(games[0].id, games[0].source).start()


def test_old_grammar_is_patched_or_refused(tmp_path, games):
    folder = unpack_sample(tmp_path)
    game = next(game for game in Games.find(folder).split("valid_seen") if game.task_type == "pick_and_place_simple")
    file = game.source["file"]
    with open(file) as opened:
        text = opened.read()
    old = text.replace("move {o} to {r}", "put {o} in/on {r}").replace("move ", "put ")
    with open(file, "w") as opened:
        opened.write(old)
    workers = Workers(WorkerSettings(processes=1))
    with pytest.raises(GameError, match=r"old grammar.*set `old_grammar` to patch"):
        workers.session("old", {"file": file, "old_grammar": "refuse"}).start()
    session = workers.session("old", {"file": file, "old_grammar": "patch"})
    session.start()
    assert session.plan() is not None
    workers.close()


@pytest.mark.parametrize("settings", [{"processes": 0}, {"timeout": 0}, {"recycle_after": 0}, {"live_games": 0}])
def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError, match="must be positive"):
        WorkerSettings(**{"processes": 1, **settings})


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
