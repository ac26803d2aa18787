"""Logs: every request counts once, and with all tokens of its prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke, one_line_error, run
from test_traces_layouts import FIRST, lines, span
from trace_files import put

from optsched.files.read_write import read_instance


def traced(own: str, above: str = "", prompt: int = 0, at: float = 0.0, **more: Any) -> Any:
    """Return a span of a second, with tokens if it has a prompt."""
    pairs = {"gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": 9} if prompt else {}
    pairs |= {f"gen_ai.{key.replace('__', '.')}": value for key, value in more.items()}
    values = {
        key: {"stringValue" if isinstance(value, str) else "intValue": value}
        for key, value in pairs.items()
    }
    start = FIRST + round(at * 1e9)
    return span(start, 1.0, values, spanId=own, parentSpanId=above, traceId="t", status={})


def otel(*spans: Any) -> str:
    """Return an export with a line for each span, as a collector writes its batches."""
    return lines(*({"resourceSpans": [{"scopeSpans": [{"spans": [one]}]}]} for one in spans))


NESTED = {
    "the provider's span stands behind the gateway's": (
        [traced("a", prompt=100), traced("b", "a", 101), traced("c", prompt=102, at=3)],
        [101, 102],
    ),
    "and before it, with another one between them": (
        [traced("c", "b", 101), traced("b", "a"), traced("a", prompt=100), traced("d", "", 7, 2)],
        [101, 7],
    ),
    "an agent has the sums of its calls": (
        [traced("a", prompt=300), traced("b", "a", 100, 1), traced("c", "a", 200, 2)],
        [100, 200],
    ),
    "spans are sent twice": (
        [traced("a", prompt=100), traced("b", prompt=50, at=1), traced("a", prompt=100)],
        [100, 50],
    ),
    "nested and sent twice": ([traced("a", prompt=100), traced("b", "a", 90)] * 2, [90]),
    "a call that failed holds nothing": (
        [traced("a", prompt=100), traced("b", "a", 100, operation__name="execute_tool")],
        [100],
    ),
    "what is above is not in the file": ([traced("a", "x", 4), traced("b", "x", 5)], [4, 5]),
}


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.parametrize("one_line", [False, True])
def test_of_spans_inside_one_another_the_innermost_are_requests(
    tmp_path: Path, kind: str, one_line: bool
) -> None:
    spans, prompts = NESTED[kind]
    text = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})
    file = put(tmp_path, text if one_line else otel(*spans))
    said = run("import", "otel", file, "-o", tmp_path / "o.json")
    assert read_instance(tmp_path / "o.json").prompt_tokens.tolist() == prompts
    assert ("count once" in said) == ("twice" in kind)


AT = {"at": 1.5, "out": 5}
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
    if kind.startswith("otel"):
        names = ("usage__cache_read__input_tokens", "usage__cache_creation__input_tokens")
        if kind == "otel, older":
            names = ("usage__cache_read_input_tokens", "usage__cache_creation_input_tokens")
        return traced(
            str(prompt + read), "", prompt, read, **dict(zip(names, (read, written), strict=True))
        )
    if kind == "Langfuse":
        counts = {"input": prompt, "input_cached_tokens": read, "input_cache_creation": written}
        return {**AT, "at": 1.5 + read, "usage_details": counts}
    counts = {"input_tokens": prompt, "output_tokens": 5, "cache_read_input_tokens": read,
              "cache_creation_input_tokens": written}  # fmt: skip
    if kind == "a batch":
        body = {"created": read, "usage": counts}
        return {"custom_id": str(read + prompt), "response": {"status_code": 200, "body": body}}
    return {**AT, "at": 1.5 + read, "usage": counts}


WORDS = {
    "Langfuse": ("jsonl", *COLUMNS, "--column", "prompt_tokens=usage_details.input"),
    "Anthropic": ("jsonl", *COLUMNS, "--column", "prompt_tokens=usage.input_tokens"),
    "a batch": ("openai-batch",),
    "otel": ("otel",),
    "otel, older": ("otel",),
}


@pytest.mark.parametrize("kind", WORDS)
def test_cached_input_tokens_that_are_not_among_the_prompt_s_are_added(tmp_path, kind):
    def given(*rows: tuple[int, int, int]) -> tuple[str, list[int]]:
        found = [cached(*row, kind) for row in rows]
        text = otel(*found) if kind.startswith("otel") else lines(*found)
        form, *words = WORDS[kind]
        out = tmp_path / "o.json"
        said = run("import", form, put(tmp_path, text), *words, "-o", out, "--unit", "s"
                   if not kind.startswith("otel") else "ns")  # fmt: skip
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


def test_the_first_chunk_is_the_first_token(tmp_path):
    one = traced("a", prompt=5, response__time_to_first_chunk=0)
    one["attributes"][-1]["value"] = {"doubleValue": 0.4}
    measured = tmp_path / "m.json"
    run("import", "otel", put(tmp_path, otel(one)), "-o", tmp_path / "o.json",
        "--measured-out", measured)  # fmt: skip
    assert json.loads(measured.read_text())["ttft"] == [0.4]


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
    assert read_instance(tmp_path / "o.json").prompt_tokens.tolist() == [543, 7]
    assert "cached input" not in said
    assert "expected values in u.x" in one_line_error(invoke(*words, "prompt_tokens=u.a+u.x"))
