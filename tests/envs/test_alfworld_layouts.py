"""Generated games: repeatable, of the size asked for, unseen where they must be, and won by their walkthroughs."""

import itertools
import random

import pytest
from alfworld_games import needs_engine

from fr_lightning.envs.alfworld_layouts import SIZES, TASK_TYPES, Layout, draw, generate, is_unseen
from fr_lightning.envs.alfworld_workers import Workers, WorkerSettings

pytestmark = needs_engine
KITCHEN = Layout(
    task_type="pick_cool_then_place_in_recep",
    room="kitchen",
    receptacles={"Cabinet": 2, "CounterTop": 1, "Fridge": 1},
    objects=(("Apple", ("Cabinet", 2)), ("Mug", ("CounterTop", 1)), ("Apple", ("CounterTop", 1))),
    target="Mug",
    destination="Cabinet",
    goal="put a cool mug in cabinet",
)


@pytest.fixture(scope="module")
def workers():
    workers = Workers(WorkerSettings(processes=1))
    yield workers
    workers.close()


def test_a_layout_is_told_and_played_as_it_is_drawn(workers):
    session = workers.session("kitchen", {"layout": KITCHEN.row()})
    said = session.start().observation
    assert "you see a cabinet 2, a cabinet 1, a countertop 1, and a fridge 1." in said
    assert said.endswith("Your task is to: put a cool mug in cabinet.")
    assert "a apple 2, and a mug 1" in session.step("go to countertop 1").observation
    session.step("go to cabinet 2")
    assert "you see a apple 1." in session.step("open cabinet 2").observation
    assert KITCHEN.walkthrough() == [
        "go to countertop 1",
        "take mug 1 from countertop 1",
        "go to fridge 1",
        "cool mug 1 with fridge 1",
        "go to cabinet 1",
        "open cabinet 1",
        "move mug 1 to cabinet 1",
    ]
    session.start()
    assert [session.step(command).won for command in KITCHEN.walkthrough()] == [False] * 6 + [True]
    session.close()


def test_an_uncooled_mug_does_not_win(workers):
    session = workers.session("kitchen", {"layout": KITCHEN.row()})
    session.start()
    way = [command for command in KITCHEN.walkthrough() if not command.startswith("cool")]
    assert not any(session.step(command).won for command in way)


@pytest.mark.parametrize("task_type", TASK_TYPES)
@pytest.mark.parametrize("size", SIZES)
def test_every_type_and_size_is_solvable_and_of_its_size(workers, task_type, size):
    (fewest, most), (fewest_objects, most_objects) = SIZES[size]
    for unseen in (False, True):
        layout = draw(random.Random(f"test/{unseen}"), task_type, size, unseen=unseen)
        assert is_unseen(layout.pair) == unseen
        assert fewest <= sum(layout.receptacles.values()) <= most
        assert fewest_objects <= len(layout.objects) <= most_objects + 1  # and a lamp
        assert Layout.of(layout.row()) == layout
        session = workers.session("drawn", {"layout": layout.row()})
        assert not session.start().won
        won = [session.step(command).won for command in layout.walkthrough()]
        assert won == [False] * (len(won) - 1) + [True]
        session.close()


def test_a_seed_gives_the_same_games_and_another_seed_others():
    counts = {"train": 1, "valid_seen": 1, "valid_unseen": 1}
    first, again, other = (list(generate(seed, counts)) for seed in (0, 0, 1))
    assert first == again
    assert [game[0] for game in first] == [game[0] for game in other]
    assert [game[3] for game in first] != [game[3] for game in other]


def test_no_unseen_pair_is_asked_for_in_training():
    pairs = {split: set() for split in ("train", "valid_seen", "valid_unseen")}
    layouts = []
    for _, split, _, layout in generate(3, {"train": 6, "valid_seen": 3, "valid_unseen": 3}):
        pairs[split].add(layout.pair)
        layouts.append(layout)
    assert not (pairs["train"] | pairs["valid_seen"]) & pairs["valid_unseen"]
    assert all(one != other for one, other in itertools.combinations(layouts, 2))
