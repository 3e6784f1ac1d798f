"""Exactly once, on paper: what is drawn is open, trained, or closed by name, across a checkpoint too."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fr_lightning.rollout.ledger import Ledger, ResumeRefused, TaskSource

ROWS = [{"id": name, "question": name} for name in "abcdefg"]


def test_every_epoch_holds_every_row_once_in_its_own_order():
    source = TaskSource(ROWS, seed=1)
    epochs = [[source.task(epoch * 7 + n).id for n in range(7)] for epoch in range(3)]
    assert all(sorted(epoch) == [f"train/{name}" for name in "abcdefg"] for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert epochs == [[TaskSource(ROWS, seed=1).task(epoch * 7 + n).id for n in range(7)] for epoch in range(3)]


def test_groups_share_task_and_seed():
    source = TaskSource(None, seed=0, rollouts_per_task=2)
    tasks = [source.task(n) for n in range(4)]
    assert [task.group for task in tasks] == [0, 0, 1, 1]
    assert tasks[0].seed == tasks[1].seed != tasks[2].seed


def test_rollouts_of_one_task_roll_their_own_dice():
    ledger = Ledger(TaskSource(None, seed=0, rollouts_per_task=2))
    assert ledger.draw().seed != ledger.draw().seed


def test_closing_twice_is_refused():
    ledger = Ledger(TaskSource(None, seed=0))
    rollout = ledger.draw()
    ledger.close(rollout.id, "trained")
    with pytest.raises(KeyError, match="exactly once"):
        ledger.close(rollout.id, "trained")
    assert ledger.counts == {"trained": 1, "open": 0}


def test_ranks_share_the_draws_out():
    source = TaskSource(None, seed=0)
    drawn = [[Ledger(source, rank=rank, world_size=3).draw().draw] for rank in range(3)]
    assert drawn == [[0], [1], [2]]
    ledger = Ledger(source, rank=1, world_size=3)
    assert [ledger.draw().draw for _ in range(3)] == [1, 4, 7]


@settings(max_examples=50, deadline=None)
@given(
    actions=st.lists(st.sampled_from(["draw", "trained", "env_error", "save", "crash"]), max_size=60),
    seed=st.integers(0, 99),
)
def test_counts_add_up_and_nothing_is_skipped_or_doubled(actions, seed):
    ledger = Ledger(TaskSource(None, seed=seed))
    state = ledger.state_dict()
    closed: Counter[int] = Counter()
    saved = closed.copy()
    for action in actions:
        rollouts = sorted(ledger._open.items())
        if action == "draw":
            ledger.draw()
        elif action == "save":
            state, saved = ledger.state_dict(), closed.copy()
        elif action == "crash":
            ledger, closed = Ledger(TaskSource(None, seed=seed)), saved.copy()
            ledger.load_state_dict(state)
        elif rollouts:
            ledger.close(rollouts[0][0], action)
            closed[rollouts[0][1]] += 1
    while ledger.counts["open"]:  # play out what is left
        rollout = ledger.draw() if not ledger._open else None
        for name, draw in list(ledger._open.items()) or ([(rollout.id, rollout.draw)] if rollout else []):
            ledger.close(name, "trained")
            closed[draw] += 1
    assert closed == Counter(range(ledger.drawn))


def test_a_checkpoint_of_another_run_is_refused_by_name():
    rows = [{"id": number, "question": f"{number}?"} for number in range(500)]
    source = TaskSource(rows, seed=1)
    state = Ledger(source).state_dict()
    Ledger(TaskSource([dict(row) for row in rows], seed=1)).load_state_dict(state)
    others = {
        "data.seed 1, this run has 2": replace(source, seed=2),
        "data.rollouts_per_task 1, this run has 4": replace(source, rollouts_per_task=4),
        r"training rows 500 \(\w+\), this run has 499 \(": replace(source, rows=rows[1:]),
        r"training rows 500 \((\w+)\), this run has 500 \((?!\1)": replace(source, rows=[{**r, "x": 1} for r in rows]),
        r"training rows 500 \(\w+\), this run has made from seeds": replace(source, rows=None),
    }
    for says, other in others.items():
        with pytest.raises(ResumeRefused, match=says):
            Ledger(other).load_state_dict(state)
    with pytest.raises(ResumeRefused, match="ranks"):
        Ledger(source, world_size=2).load_state_dict(state)


def test_completed_rollouts_are_open_and_not_drawn_again():
    ledger = Ledger(TaskSource(None, seed=0))
    for _ in range(3):
        ledger.draw()
    again = Ledger(TaskSource(None, seed=0))
    again.load_state_dict(ledger.state_dict(), completed={"rollout-1"})
    assert [again.draw().id for _ in range(3)] == ["rollout-0", "rollout-2", "rollout-3"]
    again.close("rollout-1", "trained")
    assert again.counts == {"trained": 1, "open": 3}
