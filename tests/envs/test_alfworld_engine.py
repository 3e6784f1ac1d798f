"""The speed-ups change nothing but the time, and every real game of the sample plays."""

import concurrent.futures

import pytest
from alfworld_games import needs_engine, unpack_sample, wander

from fr_lightning.envs import alfworld_speedups
from fr_lightning.envs.alfworld_data import Games
from fr_lightning.envs.alfworld_workers import Workers, WorkerSettings

pytestmark = needs_engine
REAL = 3
"""Real games compared with stock; the benchmark compares more."""


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    return Games.find(unpack_sample(tmp_path_factory.mktemp("alfworld")))


def walks(games, **settings):
    workers = Workers(WorkerSettings(processes=2, **settings))
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = list(
            threads.map(
                lambda numbered: wander(workers.session(numbered[1].id, numbered[1].source), numbered[0], 15),
                enumerate(games),
            )
        )
    workers.close()
    return found


def test_speed_ups_are_on_here():
    assert alfworld_speedups.obstacle() is None


def test_transcripts_of_embedded_games_are_stocks():
    games = Games.find("embedded").split("valid_unseen")[::12]
    assert len({game.task_type for game in games}) == 6
    assert walks(games, speedups=True) == walks(games, speedups=False)


def test_transcripts_of_real_games_are_stocks(sample):
    games = sample.split("valid_seen")[20 :: 140 // REAL]
    assert walks(games, speedups=True) == walks(games, speedups=False)


def test_translations_kept_on_disk_are_the_same(tmp_path):
    games = Games.find("embedded").split("valid_seen")[:4]
    plain = walks(games)
    assert walks(games, cache=str(tmp_path)) == plain
    kept = sorted(file.name for file in tmp_path.iterdir())
    assert len(kept) == 4
    assert walks(games, cache=str(tmp_path)) == plain
    (tmp_path / kept[0]).write_bytes(b"half a file")
    assert walks(games, cache=str(tmp_path)) == plain


@pytest.mark.slow
def test_all_real_games_load_and_their_walkthroughs_win(sample):
    games = sample.split("valid_seen")
    assert len(games) == 140
    workers = Workers(WorkerSettings(processes=2))

    def follow(game):
        session = workers.session(game.id, game.source)
        state = session.start()
        assert "Your task is to: " in state.observation
        assert "look" in state.commands
        won = [session.step(command).won for command in session.walkthrough or ()]
        session.close()
        return won

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        followed = list(threads.map(follow, games))
    with_way = [won for won in followed if won]
    assert len(with_way) == 135
    assert all(won == [False] * (len(won) - 1) + [True] for won in with_way)
    workers.close()
