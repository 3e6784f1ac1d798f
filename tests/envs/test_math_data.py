"""Sets of problems: every format read alike, every bad row named, nothing of training in validation."""

import csv
import json
import logging

import pyarrow
import pytest
from pyarrow import parquet

from fr_lightning.envs.math_data import ProblemMix, ProblemSet, ProblemSetError

PROBLEMS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(40)]


def fine(answer):
    return None


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def loaded(path, **columns):
    return ProblemMix(train=(ProblemSet(str(path), **columns),), held_out=0.0).rows("train", fine)


def pairs(rows):
    return sorted((row["question"], row["answer"]) for row in rows)


def test_jsonl_json_csv_and_parquet_give_the_same_rows(tmp_path):
    write(tmp_path / "a.jsonl", PROBLEMS)
    (tmp_path / "b.json").write_text(json.dumps(PROBLEMS))
    with (tmp_path / "c.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(PROBLEMS)
    parquet.write_table(pyarrow.Table.from_pylist(PROBLEMS), tmp_path / "d.parquet")
    expected = sorted((row["question"], row["answer"]) for row in PROBLEMS)
    for name in ("a.jsonl", "b.json", "c.csv", "d.parquet"):
        rows = loaded(tmp_path / name)
        assert pairs(rows) == expected
        assert {row["set"] for row in rows} == {name[0]}
        assert len({row["id"] for row in rows}) == 40


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        (  # DAPO
            {"prompt": [{"role": "user", "content": "How many?"}], "reward_model": {"ground_truth": "34"}},
            "How many?",
            "34",
        ),
        ({"problem": "Find x.", "answer": "1", "unique_id": "a/1.json"}, "Find x.", "1"),  # MATH-500
        ({"question": "How far?", "answer": "2*3=<<2*3=6>>6 miles\n#### 1,006"}, "How far?", "1,006"),  # GSM8K
        ({"problem": "Find y.", "solution": "So it is \\boxed{\\frac{3}{4}}."}, "Find y.", "\\frac{3}{4}"),  # MATH
        ({"question": "Find both.", "final_answer": ["3", "5"]}, "Find both.", "3, 5"),  # OlympiadBench
        ({"problem": "Count.", "answer": 204.0, "id": 7}, "Count.", "204"),  # a table that made floats of integers
    ],
)  # fmt: skip
def test_known_layouts_need_no_settings(tmp_path, row, question, answer):
    (only,) = loaded(write(tmp_path / "set.jsonl", [row]))
    assert (only["question"], only["answer"]) == (question, answer)


def test_columns_by_name_reach_into_nested_ones(tmp_path):
    row = {"meta": {"text": "Why?", "key": 3}, "gold": {"value": 42}}
    path = write(tmp_path / "set.jsonl", [row])
    (only,) = loaded(path, question="meta.text", answer="gold.value", id="meta.key", name="mine")
    assert (only["id"], only["question"], only["answer"], only["set"]) == ("mine/3", "Why?", "42", "mine")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"question": "a"', "no JSON"),
        ("[1, 2]", "an object is needed"),
        ('{"question": "a"}', "no answer in answer or .*columns here: question"),
        ('{"question": "", "answer": "1"}', "no question in question or problem or prompt"),
        ('{"question": 3, "answer": "1"}', "the question must be text, got 3"),
        ('{"question": "a", "answer": {"x": 1}}', "the answer must be text or a number"),
        ('{"question": "a", "answer": NaN}', "the answer must be text or a number, got nan"),
        ('{"question": "a", "answer": "so ####  "}', "the answer is empty"),
        ('{"question": "a", "answer": "?!"}', "cannot be graded: it is odd"),
    ],
)
@pytest.mark.parametrize("skip", [False, True])
def test_a_bad_row_is_named_by_file_and_line_or_skipped_and_counted(tmp_path, line, complaint, skip, caplog):
    path = tmp_path / "set.jsonl"
    path.write_text(f"{json.dumps(PROBLEMS[0])}\n\n{line}\n{json.dumps(PROBLEMS[1])}\n")

    def check(answer):
        return "it is odd" if answer == "?!" else None

    mix = ProblemMix((ProblemSet(str(path)),), held_out=0.0, bad_rows="skip" if skip else "refuse")
    if skip:
        with caplog.at_level(logging.WARNING):
            assert pairs(mix.rows("train", check)) == pairs(PROBLEMS[:2])
        assert "1 rows that cannot be used are left out" in caplog.text
    else:
        with pytest.raises(ProblemSetError, match=rf"set\.jsonl, line 3: .*{complaint}.*bad_rows"):
            mix.rows("train", check)


def test_a_short_line_of_a_csv_is_named(tmp_path):
    path = tmp_path / "set.csv"
    path.write_text("question,answer\nWhat?,1\nWhy?\n")
    with pytest.raises(ProblemSetError, match=r"set\.csv, line 3: as many fields"):
        loaded(path)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("none.jsonl", None, "there is no file .*none.jsonl"),
        ("empty.jsonl", b"", "no usable row"),
        ("latin.jsonl", b'{"question": "\xe9", "answer": "1"}', "cannot be read"),
        ("object.json", b'{"question": "a"}', "must hold a list"),
        ("broken.json", b"[", "cannot be read"),
        ("broken.parquet", b"PAR1", "cannot be read"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, name, content, complaint):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ProblemSetError, match=complaint):
        loaded(tmp_path / name)


def test_a_set_of_the_hub_that_is_not_there_names_both_ways_to_supply_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    one = ProblemSet("nobody/no-such-dataset", name="aime99", file="data/aime99.jsonl")
    with pytest.raises(ProblemSetError, match=r"(?s)copy of your own.*data/aime99\.jsonl.*hub"):
        ProblemMix((one,)).rows("train", fine)
    (tmp_path / "data").mkdir()
    write(tmp_path / "data/aime99.jsonl", PROBLEMS)
    assert len(ProblemMix((one,), held_out=0.0).rows("train", fine)) == 40


def test_a_question_comes_once_whatever_its_spaces_and_case(tmp_path, caplog):
    rows = [{"question": q, "answer": a} for q, a in [("What is 1?", "1"), (" what  IS 1?", "1"), ("What is 1?", "2")]]
    with caplog.at_level(logging.WARNING):
        (only,) = loaded(write(tmp_path / "set.jsonl", rows))
    assert only["answer"] == "1"
    assert "2 repeated questions" in caplog.text
    assert "line 3: asked before with the answer '1'" in caplog.text


def test_held_out_questions_are_in_no_training_row_and_the_parts_make_the_whole(tmp_path):
    path = write(tmp_path / "set.jsonl", [{"question": f"q{n}", "answer": "1"} for n in range(1000)])
    mix = ProblemMix((ProblemSet(path),), held_out=0.2)
    train, validation = ({row["question"] for row in mix.rows(split, fine)} for split in ("train", "validation"))
    assert not train & validation
    assert len(train) + len(validation) == 1000
    assert 150 < len(validation) < 250
    assert len(ProblemMix((ProblemSet(path),), held_out=0.0).rows("train", fine)) == 1000


def test_what_is_evaluated_is_taken_out_of_training(tmp_path):
    train, exam = write(tmp_path / "train.jsonl", PROBLEMS), write(tmp_path / "exam.jsonl", PROBLEMS[:7])
    mix = ProblemMix((ProblemSet(train),), (ProblemSet(exam),))
    assert pairs(mix.rows("train", fine)) == pairs(PROBLEMS[7:])
    assert pairs(mix.rows("validation", fine)) == pairs(PROBLEMS[:7])


def test_sets_are_mixed_by_weight_and_seeded(tmp_path):
    small = write(tmp_path / "small.jsonl", [{"question": f"s{n}", "answer": "1"} for n in range(10)])
    large = write(tmp_path / "large.jsonl", [{"question": f"l{n}", "answer": "1"} for n in range(90)])
    mix = ProblemMix((ProblemSet(small, weight=3.0), ProblemSet(large, weight=1.0)), held_out=0.0, seed=1)
    rows = mix.rows("train", fine)
    assert [sum(row["set"] == name for row in rows) for name in ("small", "large")] == [75, 25]
    assert {row["question"] for row in rows if row["set"] == "small"} == {f"s{n}" for n in range(10)}
    assert rows == mix.rows("train", fine)
    other = ProblemMix((ProblemSet(small, weight=3.0), ProblemSet(large, weight=1.0)), held_out=0.0, seed=2)
    assert rows != other.rows("train", fine)


def test_the_generated_set_has_enough_to_validate_on():
    mix = ProblemMix()
    train, validation = mix.rows("train", fine), mix.rows("validation", fine)
    assert len(validation) >= 200
    assert not {row["question"] for row in train} & {row["question"] for row in validation}
    assert {row["kind"] for row in validation} == {
        "arithmetic",
        "fractions",
        "linear",
        "modular",
        "counting",
        "geometry",
    }
    assert {row["difficulty"] for row in validation} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: ProblemSet(weight=0.0), "weight must be positive"),
        (lambda: ProblemSet(limit=0), "limit and rows"),
        (lambda: ProblemSet(kinds=()), "have kinds arithmetic"),
        (lambda: ProblemMix(held_out=1.0), "held_out"),
        (lambda: ProblemMix(train=()), "no set of problems"),
        (lambda: ProblemMix((ProblemSet("a.csv"), ProblemSet("b/a.csv"))), "two sets are named 'a'"),
        (lambda: ProblemSet(kinds=("algebra",)), "have kinds arithmetic"),
        (lambda: ProblemSet(difficulties=(0,)), "difficulties 1 to 5"),
    ],
)
def test_wrong_settings_are_refused(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()
