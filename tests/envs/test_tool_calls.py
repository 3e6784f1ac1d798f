"""Calls as models write them, well and badly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fr_lightning.envs.tool_calls import Call, ToolCalls

HERMES, MARKDOWN, TAGS = ToolCalls("hermes"), ToolCalls("markdown"), ToolCalls("tags")


hermes = HERMES.write


@given(st.text())
def test_what_is_written_is_read_back(code):
    plain = not any(mark in code for mark in ("tool_call>", "python>", "</think>", "`", "\r"))
    for calls in (HERMES, MARKDOWN, TAGS) if plain else ():
        written = code + "\n" if calls is MARKDOWN else code  # a fence stands on a line of its own
        assert calls.find(f"So:\n{calls.write(code)}") == [Call(written)]


@given(st.lists(st.text(), max_size=3))
def test_hermes_calls_come_back_as_written_and_in_order(codes):
    codes = [code for code in codes if "tool_call>" not in code and "</think>" not in code]
    assert HERMES.find("Let me see.\n" + "\n".join(map(hermes, codes))) == [Call(code) for code in codes]


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("```python\nprint(1)\n```", ["print(1)\n"]),
        ("First\n```python\na = 1\n```\nthen\n```py\nprint(a)\n```\ndone", ["a = 1\n", "print(a)\n"]),
        ("```python\nprint(1)", ["print(1)"]),  # the model stopped before the fence
        ("```\nprint(1)\n```", []),
        ("```javascript\n1\n```", []),
        ("I would write ```python``` here", []),
        ("```python\r\nprint(1)\r\n```", ["print(1)\r\n"]),
    ],
)
def test_markdown_blocks(text, codes):
    assert MARKDOWN.find(text) == [Call(code) for code in codes]


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("<python>print(1)</python>", ["print(1)"]),
        ("<python>a</python> and <python>\nb\n</python>", ["a", "\nb\n"]),
        ("<python>print(1)", ["print(1)"]),
        ("<python>a<python>b</python>", ["a", "b"]),
        ("python", []),
    ],
)
def test_tags(text, codes):
    assert TAGS.find(text) == [Call(code) for code in codes]


@pytest.mark.parametrize("calls", [HERMES, MARKDOWN, TAGS])
def test_nothing_in_the_thinking_is_a_call(calls):
    text = "\n" + calls.write("1")
    assert calls.find(f"<think>{text}</think> 42") == []
    assert len(calls.find(f"<think>{text}</think>{text}")) == 1


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ('{"name": "python", "arguments": {"code": "1"}', "not valid JSON"),
        ("print(1)", "not valid JSON"),
        ("", "not valid JSON"),
        ("[]", "needs a name and arguments"),
        ('{"name": "python"}', "needs a name and arguments"),
        ('{"name": "python", "arguments": "print(1)"}', "not valid JSON"),
        ('{"name": "bash", "arguments": {"code": "ls"}}', "there is no tool 'bash'"),
        ('{"name": "python", "arguments": {"source": "1"}}', "`code` must be a string"),
        ('{"name": "python", "arguments": {"code": 1}}', "`code` must be a string"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_call_that_cannot_be_read_is_told_how_to_write_one(body, complaint):
    (call,) = HERMES.find(f"<tool_call>{body}</tool_call>")
    assert complaint in call.problem
    assert '{"name": "python", "arguments": {"code": "print(1 + 1)"}}' in call.problem
    assert call.code == ""


def test_what_models_get_almost_right_is_understood():
    assert HERMES.find('<tool_call>{"name": "python", "arguments": {"code": "a = 1\nprint(a)"}}') == [
        Call("a = 1\nprint(a)")
    ]
    assert HERMES.find('<tool_call>{"name": "python", "arguments": "{\\"code\\": \\"1\\"}"}</tool_call>') == [Call("1")]


def test_outputs_are_shown_in_the_format_and_numbered_when_several():
    assert HERMES.show(["2\n"]) == "2"
    assert HERMES.show(["2\n", "3\n"]) == "[1] 2\n[2] 3"
    assert MARKDOWN.show(["2\n"]) == "```output\n2\n```"
    assert TAGS.show(["2\n"]) == "<output>\n2\n</output>"


def test_the_model_is_told_by_schema_or_by_words_and_never_by_both():
    for calls in (HERMES, MARKDOWN, TAGS):
        assert (calls.schema is None) != (calls.instructions is None)
    assert HERMES.role == "tool"
    assert MARKDOWN.role == TAGS.role == "user"
    with pytest.raises(ValueError, match="hermes"):
        ToolCalls("json")


@given(st.text(alphabet='<>/`pythonl_ca{}"\\n\n:[]1', max_size=200))
def test_nothing_a_model_writes_raises(text):
    for calls in (HERMES, MARKDOWN, TAGS):
        for call in calls.find(text):
            assert isinstance(call, Call)
