"""Micro-batches: every row once, within the budget, few, in a fixed order, equally many on every rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fr_lightning.packing import balanced_parts, micro_batches

lengths_of_rows = st.lists(st.integers(1, 60), max_size=40)
budgets = st.integers(1, 200)


def cost(group, lengths, packed):
    return sum(lengths[row] for row in group) if packed else len(group) * max(lengths[row] for row in group)


def test_padded_groups_by_hand():
    # 9 + 8 padded to 9 make 18 of 20; then 5 × 4 = 20 exactly; then what is left.
    assert micro_batches([5, 9, 5, 8, 4, 5, 2], 20) == [[1, 3], [0, 2, 5, 4], [6]]


def test_packed_groups_by_hand():
    # First fit: 9 + 8, then 7 opens a second group, 3 fits behind 9 + 8 and 2 behind 7.
    assert micro_batches([3, 9, 2, 8, 7], 20, packed=True) == [[1, 3, 0], [4, 2]]


def test_a_row_over_the_budget_goes_alone():
    for packed in (False, True):
        assert micro_batches([3, 50, 3], 10, packed=packed) == [[1], [0, 2]]


@given(lengths_of_rows, budgets, st.booleans())
def test_every_row_once_and_within_the_budget(lengths, max_tokens, packed):
    groups = micro_batches(lengths, max_tokens, packed=packed)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert all(group for group in groups)
    for group in groups:
        assert len(group) == 1 or cost(group, lengths, packed) <= max_tokens


@given(lengths_of_rows, budgets, st.booleans())
def test_longest_first_and_always_the_same(lengths, max_tokens, packed):
    groups = micro_batches(lengths, max_tokens, packed=packed)
    longest = [max(lengths[row] for row in group) for group in groups]
    assert longest == sorted(longest, reverse=True)
    assert groups == micro_batches(tuple(lengths), max_tokens, packed=packed)


def fewest_padded_groups(lengths, max_tokens):
    """By dynamic programming over the rows in order of length: some best grouping is made of runs of that order."""
    ordered = sorted(lengths, reverse=True)
    fewest = [0]
    for stop in range(1, len(ordered) + 1):
        starts = [start for start in range(stop) if stop - start == 1 or ordered[start] * (stop - start) <= max_tokens]
        fewest.append(1 + min(fewest[start] for start in starts))
    return fewest[-1]


@given(lengths_of_rows, budgets)
def test_padded_groups_are_as_few_as_possible(lengths, max_tokens):
    assert len(micro_batches(lengths, max_tokens)) == fewest_padded_groups(lengths, max_tokens)


@given(lengths_of_rows, budgets)
def test_packed_groups_leave_no_two_that_fit_together(lengths, max_tokens):
    groups = micro_batches(lengths, max_tokens, packed=True)
    sizes = sorted(cost(group, lengths, True) for group in groups)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > max_tokens
    assert len(groups) <= len(micro_batches(lengths, max_tokens))


@given(st.lists(lengths_of_rows, min_size=1, max_size=4), budgets, st.booleans())
def test_ranks_get_equally_many_groups(ranks, max_tokens, packed):
    count = max(len(micro_batches(lengths, max_tokens, packed=packed)) for lengths in ranks)
    for lengths in ranks:
        groups = micro_batches(lengths, max_tokens, count, packed=packed)
        assert len(groups) == count
        assert [group for group in groups if group] == micro_batches(lengths, max_tokens, packed=packed)


def test_errors():
    with pytest.raises(ValueError, match="more than count = 1"):
        micro_batches([5, 5], 5, 1)
    with pytest.raises(ValueError, match="≥ 1"):
        micro_batches([3, 0], 5)
    with pytest.raises(ValueError, match="≥ 1"):
        micro_batches([3], 0)


def test_parts_by_hand():
    # 9 | 8, then 7 to the 8, 6 to the 9, 5 to (15 against 15) the first, 4 to the second
    assert balanced_parts([4, 9, 8, 7, 5, 6], 2) == [[1, 4, 5], [0, 2, 3]]


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 6))
def test_every_row_is_in_one_part_and_no_part_has_much_more_than_its_share(lengths, parts):
    found = balanced_parts(lengths, parts)
    assert sorted(row for rows in found for row in rows) == list(range(len(lengths)))
    assert len(found) == parts
    if len(lengths) >= parts:
        assert all(found)
    largest = max(sum(lengths[row] for row in rows) for rows in found)
    assert largest <= sum(lengths) / parts + max(lengths, default=0)
