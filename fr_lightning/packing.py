"""Which rows of a batch go through the policy together, and on which rank.

Invariant: every row is in exactly one group, and the groups are a function of the lengths alone, so that a resumed or
repeated run computes the same sums. The longest rows come first: a budget that does not fit in memory fails in the
first second, not in the last.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def micro_batches(
    lengths: Sequence[int], max_tokens: int, count: int | None = None, *, packed: bool = False
) -> list[list[int]]:
    """Few groups of row indices, each within the budget.

    Args:
        lengths: tokens of each row, ≥ 1.
        max_tokens: budget of a group: rows × longest row (padded), or the sum of lengths (packed). A row longer than
            the budget goes alone.
        count: how many groups to return, the missing ones empty: ranks that compute together need the same number, so
            give each the largest of theirs.
        packed: rows lie end to end, without padding.

    Returns:
        Groups by falling longest row; within a group, rows by falling length. Of padded groups there are as few as
        possible; packed ones are first-fit decreasing, at most 11/9 of the fewest plus one.

    Raises:
        ValueError: a length or the budget below 1, or more groups than `count`.
    """
    if max_tokens < 1 or any(length < 1 for length in lengths):
        raise ValueError(f"lengths and max_tokens must be ≥ 1, got max_tokens {max_tokens} and lengths {list(lengths)}")
    groups: list[list[int]] = []
    room: list[int] = []  # tokens left in each group
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        # Padded, a row takes as much as its group's longest; and as rows only get shorter, an earlier group stays full.
        takes = [lengths[row] if packed else lengths[group[0]] for group in groups]
        candidates = range(len(groups)) if packed else range(len(groups))[-1:]
        fits = next((group for group in candidates if takes[group] <= room[group]), None)
        if fits is None:
            groups.append([row])
            room.append(max_tokens - lengths[row])
        else:
            groups[fits].append(row)
            room[fits] -= takes[fits]
    if count is None:
        return groups
    if len(groups) > count:
        raise ValueError(f"{len(groups)} groups of at most {max_tokens} tokens are needed, more than count = {count}")
    return groups + [[] for _ in range(count - len(groups))]


def balanced_parts(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Row indices in so many parts of about as many tokens: the longest row left goes to the part with the fewest.

    No part has more tokens than 4/3 of what the best partition's largest has (Graham 1969), and none is empty where
    there are as many rows as parts.
    """
    if parts < 1:
        raise ValueError(f"need at least one part, got {parts}")
    found: list[list[int]] = [[] for _ in range(parts)]
    fewest = [(0, part) for part in range(parts)]
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        tokens, part = heapq.heappop(fewest)
        found[part].append(row)
        heapq.heappush(fewest, (tokens + lengths[row], part))
    return [sorted(rows) for rows in found]
