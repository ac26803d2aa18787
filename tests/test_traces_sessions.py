"""Sessions in files: neither line feeds nor the way of replay change what a file says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke, one_line_error, run
from trace_files import put

from optsched.files.read_write import read_instance
from optsched.problem.instance import Instance


def imported(folder: Path, form: str, text: str, *words: object) -> Instance:
    """Return what the command makes of a text, which it must take without a warning."""
    file, out = put(folder, text, "file"), folder / "out.json"
    result = invoke("import", form, file, "--kv-capacity", 10**6, "-o", out, *words)
    assert result.exit_code == 0, result.output
    assert "warning" not in result.output
    return read_instance(out)


def call(t: float, ids: list[int], **more: Any) -> dict[str, Any]:
    """Return a call of whole blocks of 64 tokens that took a second."""
    return {"t": t, "in": 64 * len(ids), "out": 9, "hash_ids": ids, "api_time": 1.0, **more}


def weka(**more: Any) -> list[dict[str, Any]]:
    """Return three sessions of two calls, whose second ones begin with the first's prompts."""
    return [
        {"block_size": 64, "requests": [call(0.0, [1, 2]), call(5.0 + k, [1, 2, 3])], **more}
        for k in range(3)
    ]


# Two turns of a conversation, and three of none.
TURNS = [
    {"conversation_id": name, "start_time_ms": start, "input_num_tokens": 10 + start,
     "output_num_tokens": 5, "ttft_ms": 40.0, "latency_ms": 130.0}
    for name, start in [("a", 1000), (None, 1100), ("", 2000), ("a", 3000), (None, 4000)]
]  # fmt: skip
TALKS = [
    {"conversations": [{"from": who, "value": f"{k} a b"} for who in ("human", "gpt") * 2]}
    for k in range(2)
]
# The ways in which JSON stands in files.
LAYOUTS = {
    "lines": lambda rows: "\n".join(map(json.dumps, rows)),
    "a list on one line": json.dumps,
    "joined": lambda rows: "".join(map(json.dumps, rows)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("form", "rows", "after"),
    [
        ("weka", weka(), [[], [0], [], [2], [], [4]]),
        ("vllm-multi-turn", TURNS, [[], [], [], [0], []]),  # three turns have no conversation
        ("sharegpt", TALKS, [[], [0], [], [2]]),
    ],
)
def test_line_feeds_do_not_say_which_calls_are_one_session(tmp_path, layout, form, rows, after):
    tokenizer = put(tmp_path, "def split(text): return text.split()", "t.py")
    more = ("--tokenizer", f"{tokenizer}:split") if form == "sharegpt" else ()
    text = LAYOUTS[layout](rows)
    found = imported(tmp_path, form, text, "--sessions", *more)
    assert [list(one) for one in found.after] == after
    windowed = imported(tmp_path, form, text, "--sessions", "--offset", 1, *more)
    # A row of vllm-multi-turn is a turn, and of the others a session of two calls.
    assert windowed.n == found.n - (1 if form == "vllm-multi-turn" else 2)


def test_rows_without_a_session_are_alone_also_where_a_session_has_their_line_as_its_name(tmp_path):
    rows = "5,,1,10,5\n9,2,1,20,6\n30,,1,9,3\n40,2,1,5,5\n"
    text = "Timestamp,Session ID,Elapsed time,Request tokens,Response tokens\n" + rows
    found = imported(tmp_path, "burstgpt", text, "--sessions")
    assert found.after == ((), (), (), (1,))


INNER = {"t": 4.0, "requests": [call(0.0, [8]), call(3.0, [8, 9])]}
# A session with a sub-agent that has one of its own.
NESTED = [
    call(0.0, [1]),
    {"t": 30.0, "requests": [call(0.0, [5]), INNER, call(12.0, [5, 6])]},
    {"t": 60.0, "requests": [call(0.0, [7])]},
    call(90.0, [1, 2]),
]
# Of the first sub-agent 30 + 0, the one in it 30 + 4 + (0, 3), 30 + 12, and of the second 60 + 0.
STARTS = [0.0, 30.0, 34.0, 37.0, 42.0, 60.0, 90.0]


@pytest.mark.parametrize(("offset", "unit"), [(0, "s"), (1, "s"), (0, "ms")])
def test_times_of_sub_agents_count_from_their_beginning_in_every_replay(tmp_path, offset, unit):
    def scaled(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        factor = {"s": 1, "ms": 1000}[unit]
        times = ({k: one[k] * factor for k in ("t", "api_time") if k in one} for one in calls)
        inner = (
            {"requests": scaled(one["requests"])} if "requests" in one else {} for one in calls
        )
        return [one | t | i for one, t, i in zip(calls, times, inner, strict=True)]

    rows = [*weka()[:offset], {"requests": scaled(NESTED)}]
    words = ("--offset", offset, "--limit", 1, "--unit", unit)
    found = imported(tmp_path, "weka", json.dumps(rows), *words)
    assert found.arrival.tolist() == STARTS

    closed = imported(tmp_path, "weka", json.dumps(rows), "--sessions", *words)
    start = [0.0]  # served as fast as in the file, calls begin when they did in it
    for before, delay in zip(closed.after[1:], closed.delay[1:], strict=True):
        start.append(max(start[k] + 1.0 for k in before) + delay)
    assert start == STARTS


def test_calls_of_sub_agents_that_seem_to_count_from_the_session_are_odd(tmp_path):
    rows = [{"requests": [call(0.0, [1]), {"t": 30.0, "requests": [call(30.0, [2])]}]}]
    file = put(tmp_path, json.dumps(rows))
    said = run("import", "weka", file, "-o", tmp_path / "o.json", "--kv-capacity", 999)
    assert "none is earlier than that: do they count from that of the session?" in said
    assert read_instance(tmp_path / "o.json").arrival.tolist() == [0, 60]  # 30 + 30


def test_a_file_says_whether_ids_are_those_of_a_session_or_of_all(tmp_path):
    # Blocks of 64: a second call shares two, 128 tokens, with the first of its session. If ids are
    # of all, a first call shares these, too, and a second one three, 192, with one before it.
    one = imported(tmp_path, "weka", json.dumps(weka(hash_id_scope="local")), "--sessions")
    every = imported(tmp_path, "weka", json.dumps(weka(hash_id_scope="global")), "--sessions")
    assert sorted(one.prefix_tokens.tolist()) == [0, 0, 0, 128, 128, 128]
    assert sorted(every.prefix_tokens.tolist()) == [0, 128, 128, 128, 192, 192]


@pytest.mark.parametrize(
    ("form", "row", "blocks"),
    [
        ("weka", {"block_size": 32, "requests": [{**call(0.0, [1, 2]), "in": 64}] * 2}, 32),
        ("mooncake", {"timestamp": 0, "input_length": 32, "output_length": 1, "hash_ids": [1, 2],
                      "block_size": 16}, 16),
        ("bailian", {"timestamp": 0, "input_length": 16, "output_length": 1, "hash_ids": [1, 2],
                     "hash_block_size": 8}, 8),
    ],
)  # fmt: skip
def test_a_file_says_of_how_many_tokens_its_blocks_are(tmp_path, form, row, blocks):
    found = imported(tmp_path, form, json.dumps([row, row]), "--unit", "s")
    assert found.prefix_block_tokens == blocks
    assert max(found.prefix_tokens.tolist()) == 2 * blocks


MOONCAKE = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
BENCHMARK = {"requests": {"successful": [
    {"request_start_time": 5.0, "prompt_tokens": 5, "output_tokens": 9}]}}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "rows", "words", "right"),
    [
        ("weka", weka(hash_id_scope="tenant"), (), "'tenant'; expected 'local' or 'global'"),
        ("mooncake", [{**MOONCAKE, "hash_id_scope": "local"}], (), "expected 'global'"),
        ("mooncake", [{"schema": "agents", "version": 2}, MOONCAKE], (), "version that is read"),
        ("weka", weka(version=2), (), "version: found 2; expected 1"),
        ("weka", weka(time_unit="ms"), (), "expected s; --unit ms reads it"),
        ("weka", weka(), ("--ids-tokens", 16), "block_size: found 64; expected 16"),
        ("weka", [*weka(), *weka(block_size=16)], (), "found 16; expected 64 as before"),
        ("mooncake", [{**MOONCAKE, "block_size": "x"}], (), "expected tokens of a block"),
        ("guidellm", {"metadata": {"version": 3}, "benchmarks": [BENCHMARK]}, (), "found 3"),
    ],
)
def test_what_a_file_says_of_itself_and_cannot_be_read_is_refused(
    tmp_path, form, rows, words, right
):
    file = put(tmp_path, json.dumps(rows))
    error = one_line_error(invoke("import", form, file, "--kv-capacity", 10**6, *words))
    assert right in error
    assert str(file) in error
