"""Importers keep the prefixes that a trace's requests share."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from random import Random

import numpy as np
import pytest
from command_line import run
from test_prefixes import common, random_sequences, shares

from optsched.files.read_write import read_instance
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.problem.prefixes import tree_of
from optsched.workloads.traces import TraceWarning, read_trace
from optsched.workloads.traces.base import Block
from optsched.workloads.traces.prefixes import OUTPUTS, prefix_columns

# Blocks of 512: the first two share one, the third goes on behind the second, the last is partial.
MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 9000, "input_length": 1300, "output_length": 700, "hash_ids": [0, 3, 4]},
    {"timestamp": 20000, "input_length": 2600, "output_length": 4, "hash_ids": [0, 3, 9, 8, 7, 5]},
    {"timestamp": 31000, "input_length": 500, "output_length": 4, "hash_ids": [0]},
]


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def turn(talk: str, at: float, prompt: int, output: int, took: float) -> dict:
    """An entry of vLLM's multi-turn benchmark."""
    return {
        "ttft_ms": took / 2, "tpot_ms": 1.0, "latency_ms": took, "start_time_ms": at,
        "input_num_turns": 1, "input_num_tokens": prompt, "output_num_tokens": output,
        "output_num_chunks": 1, "output_num_first_chunk_tokens": 1, "approx_cached_percent": 0.0,
        "conversation_id": talk, "client_id": 0,
    }  # fmt: skip


TURNS = [
    turn("a", 7000.5, 100, 10, 130), turn("b", 7010.5, 64, 20, 250),
    turn("a", 7230.5, 125, 5, 60), turn("a", 7400.5, 140, 1, 20), turn("b", 7260.5, 90, 6, 90),
]  # fmt: skip
"""They end in this order, as the benchmark writes them."""


def says(*texts: str) -> dict:
    """A conversation of ShareGPT, in which people and a model take turns."""
    return {
        "conversations": [
            {"from": ("human", "gpt")[k % 2], "value": text} for k, text in enumerate(texts)
        ]
    }


TALKS = [
    says("be brief please what is KV", "keys and values", "why", "speed", "thanks"),
    says("be brief please who are you", "a model", "", "ah", "so", ""),
    says("be brief please what", "is KV"),
]
"""The first begins as the second, 3 words, and as all of the third. The second has an empty
question, behind which the prompt is not empty, and ends with an empty answer."""


def number(text: str) -> list[int]:
    """Return ids of words."""
    return [int.from_bytes(word.encode(), "big") for word in text.split()]


@pytest.mark.parametrize("tokenizer", [None, number])
def test_turns_of_texts_share_what_their_tokens_say(tmp_path, tokenizer):
    file = tmp_path / "talks.json"
    file.write_text(json.dumps(TALKS))
    with pytest.warns(TraceWarning, match=r"dropped 1 of 3 rows \(1 with zero"):
        found = read_trace("sharegpt", file, sessions=True, tokenizer=tokenizer)
    # Words with all that was said before: 6, 6 + 3 + 1, 6, 6 + 2 + 0, and 4.
    prompts = [6, 10, 6, 8, 4]
    assert found.prompt_tokens.tolist() == prompts
    assert found.output_tokens.tolist() == [3, 1, 2, 1, 2]
    assert found.after == ((), (0,), (), (2,), ())
    assert found.delay.tolist() == [0] * 5
    # Prompts and answers: the third conversation is the first one's question, word for word.
    words = [
        " ".join(one["value"] for one in TALKS[talk]["conversations"][:turns]).split()
        for talk, turns in ((0, 2), (0, 4), (1, 2), (1, 4), (2, 2))
    ]
    pairs = [(i, k) for i in range(5) for k in range(i)]
    assert [shares(found, i, k) for i, k in pairs] == [common(words[i], words[k]) for i, k in pairs]
    opened = read_trace("sharegpt", file, rate=1.0, prefixes=True, tokenizer=number)
    assert opened.prompt_tokens.tolist() == [6, 6, 4]
    assert opened.prefix_tokens.tolist() == [0, 3, 6]
    assert read_trace("sharegpt", file, rate=1.0, tokenizer=number).prefixes is None


def test_turns_share_the_conversation_where_only_numbers_of_tokens_are_known(tmp_path):
    file = tmp_path / "talks.json"
    file.write_text(json.dumps(TALKS[:1]))
    found = read_trace(
        "sharegpt", file, sessions=True, tokenizer=lambda text: 2 * len(text.split())
    )
    # Two tokens a word: prompts of 6 and 10 words, and 6 + 3 before the second turn's own.
    assert found.prompt_tokens.tolist() == [12, 20]
    assert found.prefix_tokens.tolist() == [0, 18]  # 2 x (6 + 3)
    with pytest.raises(InputError, match="found no ids of blocks or tokens"):
        read_trace("sharegpt", file, rate=1.0, prefixes=True, tokenizer=len)


@pytest.mark.parametrize("options", [{}, {"rate": 2.0}])
def test_a_turn_begins_with_the_conversation_before_it(tmp_path, options):
    file = tmp_path / "turns.json"
    file.write_text(json.dumps(TURNS))
    if options:
        instance = read_trace("vllm-multi-turn", file, **options)
        order = [0, 1, 2, 3, 4]
    else:
        with pytest.warns(TraceWarning, match="backwards"):
            instance, order = read_trace("vllm-multi-turn", file), [0, 1, 2, 4, 3]
        # By start: 7,000.5, 7,010.5, 7,230.5, 7,260.5 and 7,400.5 ms.
        assert instance.arrival.round(9).tolist() == [0, 0.01, 0.23, 0.26, 0.4]
    parent = [-1, -1, 0, 2, 1]  # as the file has them
    place = {row: k for k, row in enumerate(order)}
    assert instance.prefix_parent.tolist() == [place.get(parent[row], -1) for row in order]
    # Prompt and output of the turn before: 100 + 10 and 125 + 5 of a, and 64 + 20 of b.
    assert instance.prefix_tokens.tolist() == [[0, 0, 110, 130, 84][row] for row in order]
    assert instance.after is None
    assert instance.prefix_block_tokens == 1


def test_turns_are_released_by_the_turn_before_them(tmp_path):
    file = tmp_path / "turns.json"
    file.write_text(json.dumps([*TURNS[:4], turn("b", 7500.5, 90, 0, 1)]))
    with pytest.warns(TraceWarning, match="dropped 1 of 5"):
        instance = read_trace("vllm-multi-turn", file, sessions=True, think_scale=2.0)
    assert instance.after == ((), (), (0,), (2,))
    # The first turn of a ends at 7,130.5 ms, and the second at 7,290.5 ms: pauses of 100 and 110
    # ms, twice as long here.
    assert instance.delay.round(9).tolist() == [0, 0, 0.2, 0.22]
    assert instance.prefix_parent.tolist() == [-1, -1, 0, 2]


def test_a_turn_whose_last_one_was_not_drawn_begins_with_the_one_before(tmp_path):
    file = tmp_path / "turns.json"
    file.write_text(json.dumps(TURNS[:4]))
    drawn = [read_trace("vllm-multi-turn", file, sample=3, seed=s, rate=1.0) for s in range(9)]
    found = {tuple(one.prompt_tokens.tolist()): one.prefix_tokens.tolist() for one in drawn}
    # The third turn of a, after the first, 100 + 10 tokens; the second, 125, is not drawn.
    assert found[100, 64, 140] == [0, 0, 110]


def test_turns_of_no_conversation_are_refused(tmp_path):
    row = {name: value for name, value in TURNS[0].items() if name != "conversation_id"}
    file = tmp_path / "turns.json"
    file.write_text(json.dumps([row]))
    with pytest.raises(InputError, match=r"line 1.*conversation_id"):
        read_trace("vllm-multi-turn", file)


@pytest.mark.parametrize(
    ("options", "parent", "shared"),
    [
        ({}, [-1, 0, 1, -1], [0, 512, 1024, 0]),
        # 1,300 and 700 of the second, of which the third's prompt may repeat all.
        ({"outputs": "granted"}, [-1, 0, 1, -1], [0, 512, 2000, 0]),
        # Up to the end of the block in which they differ, less one token, or of the shorter prompt:
        # 2 x 512 - 1, the 1,300 of the second, and the 500 of the last.
        ({"slack": True}, [-1, 0, 1, 2], [0, 1023, 1300, 500]),
        ({"prefixes": False}, None, None),
    ],
)
def test_mooncake_keeps_whole_blocks(tmp_path, options, parent, shared):
    file = write(tmp_path / "m.jsonl", MOONCAKE)
    instance = read_trace("mooncake", file, kv_capacity=5000, **{"prefixes": True, **options})
    if parent is None:
        assert instance.prefixes is None
        return

    assert instance.prefix_parent.tolist() == parent
    assert instance.prefix_tokens.tolist() == shared
    assert instance.prefix_block_tokens == 512


@pytest.mark.parametrize("wrong", [None, 17, "0 3 4", {"0": 1}])
def test_ids_that_are_no_list_are_refused_where_prefixes_are_asked_for(tmp_path, wrong):
    rows = [MOONCAKE[0], {**MOONCAKE[1], "hash_ids": wrong}]
    file = write(tmp_path / "m.jsonl", rows)
    found = re.escape(f"m.jsonl: line 2: ids: found {wrong!r}; expected a list")
    with pytest.raises(InputError, match=found):
        read_trace("mooncake", file, kv_capacity=5000, prefixes=True)
    assert read_trace("mooncake", file, kv_capacity=5000).n == 2


def test_an_id_behind_two_others_is_odd_and_not_shared(tmp_path):
    # Block 3 stands behind block 0, and then behind block 6.
    rows = [MOONCAKE[1], {**MOONCAKE[1], "timestamp": 9001, "hash_ids": [6, 3, 4]}]
    file = write(tmp_path / "m.jsonl", rows)
    with pytest.warns(TraceWarning, match=r"1.*line 2"):
        instance = read_trace("mooncake", file, kv_capacity=5000, prefixes=True)
    assert instance.prefix_tokens.tolist() == [0, 0]


def test_bailian_grants_the_output_of_the_request_that_is_named(tmp_path):
    shape = {"timestamp": 0.0, "output_length": 20, "type": "text", "turn": 1}
    first = {**shape, "chat_id": 7, "parent_chat_id": -1, "input_length": 32, "hash_ids": [1, 2]}
    twin = {**first, "chat_id": 8, "timestamp": 1.0}
    after = {"chat_id": 9, "parent_chat_id": 7, "input_length": 70, "hash_ids": [1, 2, 3, 4, 5]}
    other = {**after, "chat_id": 10, "parent_chat_id": 5}
    rows = [first, twin, {**shape, **after, "timestamp": 2.0}, {**shape, **other, "timestamp": 3.0}]
    file = write(tmp_path / "b.jsonl", rows)
    instance = read_trace("bailian", file, prefixes=True, kv_capacity=5000, outputs="granted")
    assert instance.prefix_parent.tolist() == [-1, 0, 0, 2]
    # The twin shares two blocks of 16. The third goes on from the first, 32 + 20. The last names an
    # unknown one: four whole blocks of its 70 tokens.
    assert instance.prefix_tokens.tolist() == [0, 32, 52, 64]


def test_llmservingsim_shares_tokens_and_outputs(tmp_path):
    first = {"input_tok_ids": [5, 6, 7], "output_tok_ids": [8, 9]}
    after = {"input_tok_ids": [5, 6, 7, 8, 1], "output_tok_ids": [2]}
    rows = [
        {"arrival_time_ns": k * 10**9, "input_toks": len(one["input_tok_ids"]),
         "output_toks": len(one["output_tok_ids"]), **one}
        for k, one in enumerate((first, after, {**first, "input_tok_ids": [5, 6, 4]}))
    ]  # fmt: skip
    file = write(tmp_path / "l.jsonl", rows)
    instance = read_trace("llmservingsim-workload", file, kv_block_tokens=2, prefixes=True)
    # The third shares 5, 6 with both before it, and its parent is the later of these.
    assert instance.prefix_parent.tolist() == [-1, 0, 1]
    # 5, 6, 7 and the output 8 of the first, and then 5, 6.
    assert instance.prefix_tokens.tolist() == [0, 4, 2]
    assert instance.prefix_block_tokens == 2


def test_ids_of_weka_are_local_to_a_session_and_sub_agents_are_calls_of_it(tmp_path):
    def call(t, size, ids):
        return {"t": t, "type": "n", "in": size, "out": 3, "hash_ids": ids}

    inner = {"type": "subagent", "t": 2.0, "requests": [call(0.5, 130, [1, 2])]}
    rows = [
        {"id": "a", "block_size": 64, "requests": [call(0.0, 140, [1, 2]), inner]},
        {"id": "b", "block_size": 64, "requests": [call(3.0, 140, [1, 2])]},
    ]
    instance = read_trace("weka", write(tmp_path / "w.jsonl", rows), prefixes=True)
    # The sub-agent begins at 2 s and calls 0.5 s later, with two blocks of 64 that a has sent. The
    # ids of b are its own.
    assert instance.arrival.tolist() == [0.0, 2.5, 3.0]
    assert instance.prefix_parent.tolist() == [-1, 0, -1]
    assert instance.prefix_tokens.tolist() == [0, 128, 0]


def test_the_command_line_has_the_options(tmp_path):
    """With slack and granted outputs the second request has 1,023 tokens of the first, the third
    2,000 and the last 500: see `test_mooncake_keeps_whole_blocks`."""
    file, out = write(tmp_path / "m.jsonl", MOONCAKE), tmp_path / "m.json"
    words = (
        "--outputs",
        "granted",
        "--slack",
        "--prefix-block-tokens",
        16,
        "-o",
        out,
    )
    run("import", "mooncake", file, *words)
    instance = read_instance(out)
    assert instance.prefix_block_tokens == 16
    assert instance.prefix_tokens.tolist() == [0, 1023, 2000, 500]
    # Without options whole blocks of 512 are shared: none, one, two and none.
    run("import", "mooncake", file, "-o", out)
    assert read_instance(out).prefix_tokens.tolist() == [0, 512, 1024, 0]
    for words in (("--no-prefixes",), ("--rounds", 1, "--kv-capacity", 9000)):
        run("import", "mooncake", file, *words, "-o", out)
        assert read_instance(out).prefix_parent is None
    run("import", "mooncake", file, "--prefixes", "--outputs", "some", status=2)
    run("import", "mooncake", file, "--slack", "--no-prefixes", status=2)


def test_slack_and_granted_outputs_hide_nothing_of_what_any_two_share():
    """Cut random sequences into blocks: what ids may hide is at least what two prompts share."""
    for seed in range(200):
        rng = Random(seed)
        found = random_sequences(rng, rng.randint(2, 9))
        prompt = [rng.randint(1, len(one)) for one in found]
        begun = [one[:s] for one, s in zip(found, prompt, strict=True)]
        ids = [[one[: k + 3] for k in range(0, len(one) - 2, 3)] for one in begun]
        objects = np.array([None] * len(ids), dtype=object)
        objects[:] = ids
        one = np.array([1] * len(ids))
        kept = Block(one, np.array(prompt), one, ids=objects)
        for outputs in OUTPUTS:
            columns = prefix_columns(kept, 3, outputs, True)
            instance = Instance([0] * len(ids), prompt, one, kv_capacity=99, **columns)
            for i in range(len(ids)):
                for q in range(i):
                    assert shares(instance, i, q) >= common(begun[i], begun[q]), (seed, i, q)


@pytest.mark.skipif("OPTSCHED_DATA" not in os.environ, reason="OPTSCHED_DATA is not set")
def test_the_first_2000_requests_of_mooncake_have_their_known_blocks():
    file = Path(os.environ["OPTSCHED_DATA"]) / "mooncake" / "conversation_trace_head2000.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    whole = [row["hash_ids"][: row["input_length"] // 512] for row in rows]
    assert tree_of(whole, [row["input_length"] for row in rows]).nodes == 36_808
    instance = read_trace("mooncake", file, kv_capacity=250_000, prefixes=True)
    blocks = instance.prompt_tokens // 512
    # By another way, the same 36,808 blocks of 512 tokens.
    assert 512 * int((blocks - instance.prefixes.first).sum()) == 18_845_696
