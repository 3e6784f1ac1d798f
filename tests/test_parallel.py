"""Metrics of several ranks as one."""

import math

from fr_lightning import parallel


def test_names_and_values_that_a_rank_lacks_are_left_to_the_others(monkeypatch):
    ranks = [{"a": 1.0, "lag/max": 2.0, "only": 5.0, "none": math.nan}, {"a": 3.0, "lag/max": 7.0, "none": math.nan}]
    ranks.append({"a": math.nan, "lag/max": 1.0})
    monkeypatch.setattr(parallel, "gather_objects", lambda value: ranks)
    merged = parallel.over_ranks(ranks[0])
    assert {name: merged[name] for name in ("a", "lag/max", "only")} == {"a": 2.0, "lag/max": 7.0, "only": 5.0}
    assert math.isnan(merged["none"])


def test_one_rank_leaves_its_values_as_they_are():
    assert parallel.over_ranks({"a": 1.5, "b/max": -1.0}) == {"a": 1.5, "b/max": -1.0}
