"""Logs: every request counts once, and with all tokens of its prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke, one_line_error, run
from test_traces_layouts import lines
from trace_files import put

from optsched.files.read_write import read_instance

# What all requests here have in common.
AT = {"at": 1.5, "out": 5}
# Logs that may have one request twice: by its id, or as a sum around its parts.
REPEATED = {
    "ids": [{**AT, "request_id": "a", "in": 9}, {**AT, "request_id": "a", "in": 9}],
    "Langfuse": [{**AT, "id": "a", "in": 9},
                 {**AT, "id": "b", "parentObservationId": "a", "in": 9}],
    "Jaeger": [{**AT, "in": 9, "references": []},
               {**AT, "in": 9, "references": [{"refType": "CHILD_OF", "spanID": "a"}]}],
    "LangSmith": [{**AT, "id": "b", "parent_run_id": "a", "in": 9}, {**AT, "id": "a", "in": 9}],
}  # fmt: skip
COLUMNS = ("--column", "arrival=at", "--column", "output_tokens=out")


@pytest.mark.parametrize("kind", REPEATED)
def test_other_logs_warn_where_a_request_may_count_twice(tmp_path: Path, kind: str) -> None:
    """`REPEATED` has a request twice by its id, or as a sum around its parts."""
    file, out = put(tmp_path, lines(*REPEATED[kind])), ("-o", tmp_path / "o.json")
    words = ("import", "jsonl", file, *COLUMNS, "--column", "prompt_tokens=in", *out)
    said = "come again" if kind == "ids" else "inside others, which may be sums"
    assert said in run(*words)
    assert said in one_line_error(invoke(*words, "--strict"))


@pytest.mark.parametrize("form", ["litellm", "servegen", "csv"])
def test_a_retry_under_the_same_id_is_said_and_a_failed_one_is_not(tmp_path, form):
    day = "2026-06-01T10:00:0"
    times = {"litellm": [f"{day}1Z", f"{day}4Z"]}.get(form, ["1", "4"])
    names = {
        "litellm": "request_id,startTime,prompt_tokens,completion_tokens,status",
        "servegen": "request_id,timestamp,input_tokens,output_tokens,x",
        "csv": "request_id,arrival,prompt_tokens,output_tokens,x",
    }[form]
    rows = [f"a,{times[0]},10,5,success", f"a,{times[1]},10,5,success"]
    said = run("import", form, put(tmp_path, "\n".join([names, *rows])), "-o", tmp_path / "o.json")
    assert "values of request_id come again" in said
    rows[0] = f"a,{times[0]},10,0,failure"
    said = run("import", form, put(tmp_path, "\n".join([names, *rows])), "-o", tmp_path / "o.json")
    assert "come again" not in said


def cached(read: int, written: int, prompt: int, kind: str) -> Any:
    """Return a request of a log, with cached tokens in the words of some instrument."""
    if kind == "Langfuse":
        counts = {"input": prompt, "input_cached_tokens": read, "input_cache_creation": written}
        return {**AT, "at": 1.5 + read, "usage_details": counts}
    counts = {"input_tokens": prompt, "output_tokens": 5, "cache_read_input_tokens": read,
              "cache_creation_input_tokens": written}  # fmt: skip
    if kind == "a batch":
        body = {"created": read, "usage": counts}
        return {"custom_id": str(read + prompt), "response": {"status_code": 200, "body": body}}
    return {**AT, "at": 1.5 + read, "usage": counts}


# By instrument: the format, and where it has the prompt's tokens.
WORDS = {
    "Langfuse": ("jsonl", *COLUMNS, "--column", "prompt_tokens=usage_details.input"),
    "Anthropic": ("jsonl", *COLUMNS, "--column", "prompt_tokens=usage.input_tokens"),
    "a batch": ("openai-batch",),
}


@pytest.mark.parametrize("kind", WORDS)
def test_cached_input_tokens_that_are_not_among_the_prompt_s_are_added(tmp_path, kind):
    """Rows are tokens read from a cache, written to it, and of the prompt as the log has it."""

    def given(*rows: tuple[int, int, int]) -> tuple[str, list[int]]:
        found = [cached(*row, kind) for row in rows]
        form, *words = WORDS[kind]
        out = tmp_path / "o.json"
        file = put(tmp_path, lines(*found))
        said = run("import", form, file, *words, "-o", out, "--unit", "s")
        return said, read_instance(out).prompt_tokens.tolist()

    # 3 + 6,174 and 3 + 5,758 + 500 are proved; the third row is by the same instrument.
    said, prompts = given((0, 6174, 3), (5758, 500, 3), (6000, 0, 7000))
    assert prompts == [6177, 6261, 13000]
    assert "cached input tokens are more than the prompt's, so they are added" in said
    said, prompts = given((100, 0, 500), (300, 50, 600))
    assert prompts == [500, 600]
    assert "cannot be told whether cached input tokens are among the prompt's" in said
    said, prompts = given((0, 0, 500), (0, 0, 600))
    assert (prompts, "cached input" in said) == ([500, 600], False)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (
            "jsonl",
            lines({**AT, "u": {"a": 3, "b": 40, "c": 500}}, {**AT, "u": {"a": 7, "b": None}}),
        ),
        ("jsonl", json.dumps([{**AT, "u": {"a": 3, "b": 540}}, {**AT, "u": {"a": 7, "c": 0}}])),
        ("csv", "at,out,u.a,u.b,u.c\n1,5,3,40,500\n2,5,7,,0\n"),
    ],
)
def test_columns_are_added_where_the_user_says_so(tmp_path, form, text):
    words = ("import", form, put(tmp_path, text), *COLUMNS, "-o", tmp_path / "o.json", "--column")
    said = run(*words, "prompt_tokens=u.a+u.b+u.c")
    # 3 + 40 + 500, and 7
    assert read_instance(tmp_path / "o.json").prompt_tokens.tolist() == [543, 7]
    assert "cached input" not in said
    assert "expected values in u.x" in one_line_error(invoke(*words, "prompt_tokens=u.a+u.x"))
