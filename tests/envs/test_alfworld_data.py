"""Which games there are: the official filters, an index that is kept, and messages for what is missing."""

import json

import pytest

from fr_lightning.envs import alfworld_data
from fr_lightning.envs.alfworld_data import SPLITS, TASK_TYPES, GameDataError, Games


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FR_LIGHTNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    alfworld_data._folder.cache_clear()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "games"


def write(folder, name, task_type="pick_and_place_simple", split="valid_seen", **game):
    place = folder / "json_2.1.1" / split / name / "trial_1"
    place.mkdir(parents=True)
    (place / "traj_data.json").write_text(json.dumps({"task_type": task_type}))
    content = {"grammar": "", "pddl_domain": "", "pddl_problem": "", "solvable": True, **game}
    (place / "game.tw-pddl").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return place / "game.tw-pddl"


def found(folder, **settings):
    alfworld_data._folder.cache_clear()
    return Games.find(str(folder), **settings)


def test_the_embedded_games_are_enough_of_every_type():
    games = Games.find()
    assert games is Games.find("embedded")
    assert games.counts()["train"] >= 500
    for split in SPLITS:
        listed = games.split(split)
        assert len(listed) >= 60
        assert {game.task_type for game in listed} == set(TASK_TYPES)
        assert {game.size for game in listed} == {"easy", "medium", "hard"}
    pairs = {split: {_pair(game) for game in games.split(split)} for split in SPLITS}
    assert not (pairs["train"] | pairs["valid_seen"]) & pairs["valid_unseen"]


def _pair(game):
    return game.source["layout"]["target"], game.source["layout"]["destination"]


def test_the_official_filters_leave_out_by_reason(folder):
    write(folder, "good-1")
    write(folder, "pick_and_place_with_movable_recep-2", "pick_and_place_with_movable_recep")
    write(folder, "AppleSliced-3")
    write(folder, "other-4", "fold_the_laundry")
    write(folder, "unsolvable-5", solvable=False)
    write(folder, "unknown-6", solvable=None)
    write(folder, "bad-7").write_text("{")
    write(folder, "gone-8").unlink()
    write(folder, "list-9").write_text("[]")
    games = found(folder)
    assert [game.id for game in games.split("valid_seen")] == ["valid_seen/good-1/trial_1"]
    assert games.left_out["valid_seen"] == {
        "with movable receptacles or sliced objects": 2,
        "of another task type": 1,
        "marked unsolvable": 1,
        "not marked solvable or unsolvable": 1,
        "with a game.tw-pddl that cannot be read": 1,
        "without a game.tw-pddl": 1,
        "with a game.tw-pddl that is no game": 1,
    }
    with pytest.raises(GameDataError, match=r"no playable game of split 'train'.*set `data`"):
        games.split("train")


def test_the_index_is_kept_and_only_changed_games_are_read_again(folder, monkeypatch):
    write(folder, "good-1")
    changing = write(folder, "good-2")
    assert len(found(folder)) == 2
    judged = []
    judge = alfworld_data._judge
    monkeypatch.setattr(alfworld_data, "_judge", lambda place, name: judged.append(name) or judge(place, name))
    assert len(found(folder)) == 2
    assert judged == []
    changing.write_text(changing.read_text().replace("true", "false"))
    assert len(found(folder)) == 1
    assert judged == ["valid_seen/good-2/trial_1"]


def test_a_broken_index_is_made_anew(folder, tmp_path):
    write(folder, "good-1")
    assert len(found(folder)) == 1
    (index,) = (tmp_path / "cache" / "alfworld").iterdir()
    for rubbish in ("", "[]", '{"format": 0}', '{"format": 1}'):
        index.write_text(rubbish)
        assert len(found(folder)) == 1


def test_old_grammar_is_counted_and_patched_or_left_out(folder):
    write(folder, "old-1", grammar='action PutObject {\n template :: "put {o} in/on {r}";\n}')
    write(folder, "new-2", grammar='action PutObject {\n template :: "move {o} to {r}";\n}')
    games = found(folder)
    assert (len(games), games.old_grammar) == (2, 1)
    assert games["valid_seen/old-1/trial_1"].source["old_grammar"] == "patch"
    games = found(folder, old_grammar="refuse")
    assert len(games) == 1
    assert list(games.left_out["valid_seen"]) == ["of the old grammar (`put X in/on Y`), and old_grammar is refuse"]


def test_types_and_sizes_select(folder):
    embedded = Games.find("embedded")
    chosen = embedded.split("valid_seen", task_types=["look_at_obj_in_light"], sizes=["easy"])
    assert {(game.task_type, game.size) for game in chosen} == {("look_at_obj_in_light", "easy")}
    with pytest.raises(GameDataError, match="task_types: no cook; there are pick_and_place_simple"):
        embedded.split("train", task_types=["cook"])
    with pytest.raises(GameDataError, match="sizes: no huge; there are easy, medium, hard"):
        embedded.split("train", sizes=["huge"])
    write(folder, "real-1")
    assert len(found(folder).split("valid_seen", sizes=["easy"])) == 1  # real games have no size


def test_what_is_missing_is_named_with_the_setting_to_change(tmp_path, monkeypatch):
    with pytest.raises(GameDataError, match=r"data is '.*nowhere', and there is no such folder: set it to"):
        Games.find(str(tmp_path / "nowhere"))
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(GameDataError, match=r"ALFWORLD_DATA is .* no such folder"):
        Games.find()
    with pytest.raises(GameDataError, match=r"holds neither json_2\.1\.1 nor any of train, valid_seen"):
        Games.find(str(tmp_path))
    with pytest.raises(GameDataError, match="there is no game 'train/x' in the embedded set"):
        Games.find("embedded")["train/x"]


def test_the_environment_variable_points_at_the_games(folder, monkeypatch):
    write(folder, "good-1", split="train")
    monkeypatch.setenv("ALFWORLD_DATA", str(folder))
    assert Games.find().counts() == {"train": 1, "valid_seen": 0, "valid_unseen": 0}
    assert Games.find(str(folder / "json_2.1.1")).counts()["train"] == 1
    assert Games.find("embedded").counts()["train"] > 1
