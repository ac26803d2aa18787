"""Traces: every format beside Azure's, what it reads, and what it refuses."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from trace_files import put, read, refused, skipped
from typer.testing import CliRunner

from optsched.cli import app
from optsched.problem.errors import InputError
from optsched.workloads.traces import read_trace_report, trace_formats
from optsched.workloads.traces.base import Source, Window
from optsched.workloads.traces.delimited import read_delimited
from optsched.workloads.traces.json_objects import read_objects

BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,0,1087,API log
118.5,GPT-4,417,276,693,"API log, batched"
"""
MOONCAKE = """{"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": [0]}
{"timestamp": 3052, "input_length": 7, "output_length": 4, "hash_ids": []}
{"output_length": 3, "timestamp": 3053, "input_length": 8}
"""
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n5.8926549999999995,396,109\n"
# A talk that begins with a question, one that begins with an answer, one behind a system's words.
CHAT = [
    {"id": "a", "conversations": [
        {"from": "human", "value": "How are you today?"}, {"from": "gpt", "value": "Well, thanks."},
        {"from": "human", "value": "And now?"}, {"from": "gpt", "value": "Still well."},
    ]},
    {"id": "b", "conversations": [{"from": "gpt", "value": "An answer to nothing"}]},
    {"id": "c", "conversations": [
        {"from": "system", "value": None}, {"from": "human", "value": "Is it\nso?"},
        {"from": "gpt", "value": "Yes"},
    ]},
]  # fmt: skip
LMSYS = [
    {"conversation": [{"role": r, "content": c} for r, c in turns]}
    for turns in (
        [("user", "one two three"), ("assistant", "four")],
        [("user", "one"), ("assistant", "2 3 4")],
    )
]  # fmt: skip


def test_burstgpt_drops_failed_requests_and_counts_them(tmp_path):
    *columns, report = read("burstgpt", put(tmp_path, BURSTGPT))
    # 118.5 - 5 = 113.5 s; the comma inside quotes ends no field. The second row, of 1,087 and 0
    # tokens, failed.
    assert columns == [[0.0, 113.5], [472, 417], [18, 276]]
    assert (report.read, report.dropped, report.failed, report.first_dropped_line) == (3, 1, 1, 3)
    assert report.notes == (
        "dropped 1 of 3 rows (1 failed), the first in line 3",
        "the column Model has several values ('ChatGPT', 'GPT-4'), which are all read alike",
    )
    refused(
        "line 3: found a failed request; expected 1 or more prompt and",
        "burstgpt",
        tmp_path / "trace.csv",
        strict=True,
    )


def test_burstgpt_with_sessions_and_elapsed_times_is_read_by_its_header(tmp_path):
    text = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
        "Log Type\n0,,3.2,GPT-4,10,2,12,API log\n1,7,0.1,GPT-4,11,3,14,Conversation log\n"
    )
    assert read("burstgpt", put(tmp_path, text))[:3] == ([0.0, 1.0], [10, 11], [2, 3])


def test_mooncake_times_are_milliseconds(tmp_path):
    """`MOONCAKE` has requests at 0, 3,052 and 3,053 of 6, 7, 8 prompt and 5, 4, 3 output tokens."""
    *columns, report = read("mooncake", put(tmp_path, MOONCAKE, "m.jsonl"))
    assert columns == [[0.0, 3.052, 3.053], [6, 7, 8], [5, 4, 3]]
    assert report.notes == ()
    window = read("mooncake", tmp_path / "m.jsonl", offset=1, limit=1)
    assert window[:3] == ([0.0], [7], [4])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            '"input_length": 7',
            '"input": 7',
            "line 2: expected the field input_length; found timest",
        ),
        (
            '"input_length": 7',
            '"input_length": "7 or so"',
            "line 2: input_length: found '7 or so'; expected an",
        ),
        (
            '"input_length": 7',
            '"input_length": null',
            "line 2: input_length: found 'null'; expected an integer",
        ),
        (
            '"input_length": 7',
            '"input_length": true',
            "line 2: input_length: found 'true'; expected an",
        ),
        (
            '"input_length": 7',
            '"input_length": 7.5',
            "line 2: input_length: found '7.5'; expected an",
        ),
        (
            '"input_length": 7',
            '"input_length": 1e99',
            "line 2: input_length: found '1E+99'; expected an",
        ),
        (
            '"timestamp": 3052,',
            '"timestamp": NaN,',
            "line 2: timestamp: found 'NaN'; expected a number of ms",
        ),
        (
            '{"timestamp": 3052,',
            '[1, 2]\n{"timestamp": 3052,',
            "line 2: found '[1, 2]'; expected an object with named fields",
        ),
        (', "input_length": 8}\n', ', "inp', "line 3: not JSON: the file is cut short"),
        (', "input_length": 8}\n', "", "line 3: not JSON: the file is cut short"),
        ("3053", "1e" + "9" * 30, "line 3: not JSON: found a number of too many digits"),
        ("3053", "9" * 5000, "line 3: not JSON: found a number of too many digits"),
        ('": 3052,', '" 3052,', "line 2: not JSON: expecting ':' delimiter"),
    ],
)
def test_a_malformed_object_is_skipped_and_named_with_its_line(tmp_path, old, new, words):
    report = skipped(words, "mooncake", put(tmp_path, MOONCAKE.replace(old, new), "m.jsonl"))
    assert report.dropped == 1


def test_a_file_without_objects_is_refused(tmp_path):
    words = "no requests in 0 rows; expected rows with 1 or more prompt"
    refused(words, "mooncake", put(tmp_path, "\n \n"))


# Columns, and the fields in which each may stand.
NESTED = {"n": ("usage.prompt", "prompt"), "k": ("usage.answer",), "status": ("status",)}


def rows_of(tmp_path, text, optional=("k",)):
    """Return what is read of lines of JSON by `NESTED`."""
    (rows,) = read_objects(Source(put(tmp_path, text), Window(0, None)), NESTED, optional)
    return rows


def test_a_point_leads_into_an_object_and_everything_in_null_is_null(tmp_path):
    """Of `NESTED`: n is usage.prompt or else prompt, k is usage.answer, which may be missing."""
    # Inside; under its whole name; under another name; in null; with an answer that is missing.
    rows = rows_of(
        tmp_path,
        """{"usage": {"prompt": 7, "answer": "3"}, "status": "ok"}
        {"usage.prompt": 8, "usage": {"answer": 4.0}, "status": 200}
        {"prompt": 9, "usage": {"answer": 5}, "status": [1]}
        {"usage": null, "status": "\\ud800"}
        {"usage": {"prompt": 10}, "status": false}""",
    )
    assert rows.columns["n"].tolist() == ["7", "8", "9", "null", "10"]
    assert rows.columns["k"].tolist() == ["3", "4.0", "5", "null", "null"]
    assert rows.columns["status"].tolist() == ["ok", "200", "[...]", "\ud800", "false"]
    lost = rows.columns["k"] == "null"
    assert rows.whole_numbers("k", lost).tolist() == [3, 4, 5, 0, 0]
    assert rows.seconds("k", "ms", lost).tolist() == [0.003, 0.004, 0.005, 0, 0]
    with pytest.raises(InputError, match=r"line 4.*usage\.answer.*'null'"):
        rows.whole_numbers("k")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"status": 1, "use": {}}', "the field usage.prompt; found status, use"),
        ('{"status": 1, "usage": {"in": 7, "out": 3}}', "the field usage.prompt; found in, out"),
        ('{"status": 1, "usage": {}}', "the field usage.prompt; found nothing"),
        ('{"status": 1, "usage": 12}', "the field usage.prompt; found 12"),
    ],
)
def test_a_field_that_is_missing_inside_an_object_is_named(tmp_path, row, words):
    rows = rows_of(tmp_path, row)  # a failed request may lack it, so it counts once it is read
    with pytest.raises(InputError, match=f"line 1: expected {words}$"):
        rows.whole_numbers("n")


def test_a_number_too_long_to_be_one_is_not_cut_into_one(tmp_path):
    text = '{"usage": {"prompt": 5.' + "0" * 300 + '1, "answer": 1}, "status": 1}'
    with pytest.raises(InputError, match=r"usage\.prompt.*5\.000"):
        rows_of(tmp_path, text).whole_numbers("n")


def test_rows_of_a_csv_file_can_be_skipped(tmp_path):
    """The first row lacks an output. What is masked counts 0 and is not read."""
    path = put(tmp_path, "in;out\n7;\n8;3\n")
    (rows,) = read_delimited(Source(path, Window(0, None)), {"output_tokens": ("out",)})
    assert rows.whole_numbers("output_tokens", np.array([True, False])).tolist() == [0, 3]
    (rows,) = read_delimited(Source(path, Window(0, None)), {"prompt_tokens": ("in",)})
    assert rows.whole_numbers("prompt_tokens", np.array([True, False])).tolist() == [0, 8]


def test_vidur_traces_have_either_name_of_arrivals(tmp_path):
    # 5.8926549999999995 is a float's print of 5.892655 and rounds to it in nanoseconds.
    right = ([0.0, 5.892655], [374, 396], [44, 109])
    assert read("vidur", put(tmp_path, VIDUR))[:3] == right
    infermax = VIDUR.replace("arrived_at", "arrival_time")
    assert read("vidur", put(tmp_path, infermax))[:3] == right


def test_a_trace_without_arrivals_says_so_and_how_to_give_them(tmp_path):
    text = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n" + "9,3,12,3.0\n" * 4
    file = put(tmp_path, text)
    arrival, *_, report = read("vidur", file)
    assert arrival == [0.0] * 4
    assert report.arrivals is False
    assert report.notes[0].startswith("the trace has no arrivals: all requests arrive at 0; rate")
    refused("the trace has no arrivals: all requests arrive at", "vidur", file, strict=True)
    assert read("vidur", file, rate=math.inf, strict=True)[0] == [0.0] * 4


def test_drawn_arrivals_are_poisson_and_depend_on_the_seed_alone(tmp_path):
    file = put(tmp_path, "num_prefill_tokens,num_decode_tokens\n" + "9,3\n" * 10_000)
    arrival = np.array(read("vidur", file, rate=4.0, seed=1)[0])
    gaps = np.diff(arrival)
    assert arrival[0] == 0.0
    # Exponential gaps: mean and standard deviation 1/4 s, within 4 standard errors of 10,000 gaps:
    # 1 / 100 of the mean, and sqrt(2) / 100 of the deviation.
    assert gaps.mean() == pytest.approx(0.25, rel=0.04)
    assert gaps.std() == pytest.approx(0.25, rel=0.06)
    assert arrival.tolist() == read("vidur", file, rate=4.0, seed=1)[0]
    assert arrival.tolist() != read("vidur", file, rate=4.0, seed=2)[0]
    # They replace a trace's own, whatever its order: `VIDUR` has prompts of 374 and 396.
    own = put(tmp_path, VIDUR.replace("0.0,", "9.0,"), "own.csv")
    arrival, prompt, _, report = read("vidur", own, rate=1.0)
    assert arrival[0] == 0.0 < arrival[1]
    assert (prompt, report.notes) == ([374, 396], ())


def chat_files(folder, rows):
    """Yield the same conversations as a list, as lines, compressed, and as Parquet."""
    yield put(folder, json.dumps(rows, indent=1), "list.json")
    yield put(folder, "".join(json.dumps(row) + "\n" for row in rows), "lines.jsonl")
    yield put(folder, gzip.compress(json.dumps(rows).encode()), "list.json.gz")
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    yield folder / "rows.parquet"


def test_sharegpt_takes_the_first_question_and_its_answer_in_words(tmp_path):
    for file in chat_files(tmp_path, CHAT):
        *columns, report = read("sharegpt", file)
        # "How are you today?" 4 words, "Well, thanks." 2; "Is it so?" 3, "Yes" 1.
        assert columns == [[0.0, 0.0], [4, 3], [2, 1]], file.name
        assert (report.read, report.dropped, report.arrivals) == (3, 1, False)
        assert any("tokens are words" in note for note in report.notes)


def test_lmsys_conversations_are_read_the_same_way(tmp_path):
    for file in chat_files(tmp_path, LMSYS):
        assert read("lmsys", file)[1:3] == ([3, 1], [1, 3]), file.name


def test_a_tokenizer_may_be_a_function_or_a_file(tmp_path):
    file = put(tmp_path, json.dumps(CHAT), "chat.json")
    # "How are you today?" has 18 letters, "Well, thanks." 13; "Is it\nso?" 9, "Yes" 3.
    right = ([18, 9], [13, 3])
    *_, prompt, output, report = read("sharegpt", file, tokenizer=len)
    assert (prompt, output) == right
    assert not any("words" in note for note in report.notes)
    code = put(tmp_path, "def letters(text):\n    return list(text)\n", "mine.py")
    assert read("sharegpt", file, tokenizer=f"{code}:letters")[1:3] == right


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "def count(text):\n    return text",
            "found the result 'How are you today?'; expected a list of tokens or",
        ),
        ("def count(text):\n    return True", "found the result 'True'; expected a list of tokens"),
        ("def count(text):\n    1 / 0", "fails on 'How are you today?': ZeroDivisionError"),
        ("count = 3", "defines no class or function 'count'"),
        ("import nothing_of_this_name", "fails to load"),
    ],
)
def test_a_tokenizer_that_does_not_count_is_named(tmp_path, code, words):
    file = put(tmp_path, json.dumps(CHAT), "chat.json")
    mine = put(tmp_path, code, "mine.py")
    refused(words, "sharegpt", file, tokenizer=f"{mine}:count")


def test_a_hugging_face_tokenizer_needs_its_package(tmp_path, monkeypatch):
    file = put(tmp_path, json.dumps(CHAT), "chat.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    words = "tokenizer 'gpt2': needs the package tokenizers; install it"
    refused(words, "sharegpt", file, tokenizer="gpt2")


def test_a_tokenizer_file_of_hugging_face_counts(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = {"[UNK]": 0, "How": 1, "are": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    file = put(tmp_path, json.dumps(CHAT), "chat.json")
    # "How are you today ?" and "Well , thanks ." are 5 and 4 pieces; "Is it so ?" 4, "Yes" 1.
    name = str(tmp_path / "tokenizer.json")
    assert read("sharegpt", file, tokenizer=name)[1:3] == ([5, 4], [4, 1])
    put(tmp_path, "{}", "tokenizer.json")
    refused("cannot be loaded", "sharegpt", file, tokenizer=name)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"id": 1}, "line 1: expected the field conversations; found id"),
        ({"conversations": "hello"}, "line 1: found 'hello'; expected a list of turns"),
        ({"conversations": ["hello"]}, "line 1: found the turn 'hello'; expected an object"),
        (
            {"conversations": [{"from": "human", "value": 3}]},
            "turn of 'human': found '3'; expected a text",
        ),
    ],
)
def test_a_malformed_conversation_is_named_with_its_line(tmp_path, row, words):
    refused(words, "sharegpt", put(tmp_path, json.dumps([row]), "chat.json"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '[{"conversations": []} {"conversations": []}]',
            "line 1: not JSON: expected a comma between objects",
        ),
        ('[{"conversations": []},\n{"conversations": []}', "line 2: not JSON: the file is cut sh"),
        ('[{"conversations": []},\n{"conver', "line 2: not JSON: the file is cut short"),
        ("[]", "no requests in 0 rows; expected rows with 1 or more prompt"),
        ('"text"', "line 1: found 'text'; expected an object with named fields"),
    ],
)
def test_a_list_that_is_none_is_refused(tmp_path, text, words):
    refused(words, "sharegpt", put(tmp_path, text, "chat.json"))


def test_long_lists_are_read_in_pieces(tmp_path):
    # 3,000 conversations of 1,000 letters are 3 MB, three pieces. Lines are counted across them,
    # from the bracket, line 1, on.
    turns = [{"from": "human", "value": "a" * 500}, {"from": "gpt", "value": "b " * 250}]
    rows = [{"conversations": turns} for _ in range(3000)]
    file = put(tmp_path, "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]", "long.json")
    arrival, prompt, output, _ = read("sharegpt", file)
    assert (len(arrival), set(prompt), set(output)) == (3000, {1}, {250})
    text = file.read_text().replace("}\n]", "}, 3\n]")
    words = "line 3001: found '3'; expected an object"
    skipped_text(words, put(tmp_path, text, "long.json"))


def skipped_text(words, file):
    """Expect a row of conversations that cannot be read; that tokens are words is no defect."""
    refused(words, "sharegpt", file, strict=True, rate=1.0)
    assert words in " ".join(read_trace_report("sharegpt", file)[1].notes)


NAMED = "when,in,out,first,total\n0.5,10,3,0.1,0.4\n1.0,20,4,0.2,0.5\n"
COLUMNS = {"arrival": "when", "prompt_tokens": "in", "output_tokens": "out"}


def test_columns_of_any_csv_are_named_by_the_user(tmp_path):
    """`NAMED` has the rows 0.5, 10, 3, 0.1, 0.4 and 1.0, 20, 4, 0.2, 0.5: the last two columns,
    first and total, are times."""
    file = put(tmp_path, NAMED)
    *columns, report = read("csv", file, columns=COLUMNS)
    assert columns == [[0.0, 0.5], [10, 20], [3, 4]]
    assert report.measured is None
    all_five = {**COLUMNS, "ttft": "first", "latency": "total"}
    measured = read("csv", file, columns=all_five)[3].measured
    assert measured.ttft.tolist() == [0.1, 0.2]
    assert measured.latency.tolist() == [0.4, 0.5]
    assert read("csv", file, columns=all_five, unit="ms")[0] == [0.0, 0.0005]
    assert read("csv", file, columns=all_five, unit="ms")[3].measured.ttft.tolist() == [1e-4, 2e-4]


def test_columns_of_their_own_name_need_no_option(tmp_path):
    text = "id;arrival;Prompt Tokens;output-tokens;ttft\na;3;10;2;0.1\nb;4;11;3;0.1\n"
    *columns, report = read("csv", put(tmp_path, text))
    assert columns == [[0.0, 1.0], [10, 11], [2, 3]]
    assert report.measured is None  # without a latency there is nothing to compare


def test_dates_are_a_unit_of_named_columns(tmp_path):
    text = NAMED.replace("0.5,", "2024-05-10T00:00:00Z,").replace("1.0,", "2024-05-10 00:01:00,")
    file = put(tmp_path, text)
    assert read("csv", file, columns=COLUMNS, unit="datetime")[0] == [0.0, 60.0]
    refused("expected a number of seconds; the unit 'datetime' reads", "csv", file, columns=COLUMNS)


def test_parquet_meets_the_same_checks(tmp_path):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    file = tmp_path / "trace.parquet"
    frame = pd.DataFrame({"when": [0.5, 1.0], "in": [10, 20], "out": [3, 4]})
    frame.to_parquet(file)
    assert read("csv", file, columns=COLUMNS)[:3] == ([0.0, 0.5], [10, 20], [3, 4])
    assert read("csv", file, columns=COLUMNS, offset=1)[1] == [20]
    frame.assign(**{"in": [10.0, None]}).to_parquet(file)
    skipped("line 2: in: found ''; expected an integer", "csv", file, columns=COLUMNS)
    frame.assign(when=pd.to_datetime(["2024-05-10", None])).to_parquet(file)
    words = "line 2: when: found ''; expected a date and time"
    skipped(words, "csv", file, columns=COLUMNS, unit="datetime")
    frame.assign(when=pd.to_datetime(["2024-05-10", "2024-05-11"])).to_parquet(file)
    assert read("csv", file, columns=COLUMNS, unit="datetime")[0] == [0.0, 86_400.0]
    refused("expected a column 'inn'; found 'when', 'in', 'out'", "csv", file,
            columns={**COLUMNS, "prompt_tokens": "inn"})  # fmt: skip
    file.write_bytes(file.read_bytes()[:-30])
    refused("trace.parquet: expected a Parquet file", "csv", file, columns=COLUMNS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"columns": {"prompt": "in"}},
            "columns: found 'prompt'; expected fields of arrival, prompt_tokens, o",
        ),
        ({"columns": {}}, "expected a column 'prompt_tokens'; found 'when', 'in', 'out'"),
        ({"columns": {**COLUMNS, "latency": "x"}}, "expected a column 'x'; found"),
        (
            {"columns": COLUMNS, "unit": "hours"},
            "unit: found 'hours'; expected one of s, ms, us, ns, datetime",
        ),
        (
            {"columns": COLUMNS, "unit": {"ttfl": "s"}},
            "unit: found 'ttfl'; expected a field of arr",
        ),
        (
            {"columns": COLUMNS, "unit": {"ttft": "datetime"}},
            "unit: found 'datetime'; expected one of s, ms, us, ns",
        ),
        (
            {"columns": {**COLUMNS, "latency": "total", "finished_at": "total"}},
            "columns: found latency and finished_at; expected one of them",
        ),
        (
            {"columns": COLUMNS, "run": 1},
            "--run: found with the format 'csv'; expected only with guidellm, sglang, vllm",
        ),
        (
            {"columns": COLUMNS, "tokenizer": "a.py:b"},
            "--tokenizer: found with the format 'csv'; expected only",
        ),
        ({"columns": COLUMNS, "rate": 0.0}, "rate: found 0.0; expected a finite number above 0"),
        (
            {"columns": COLUMNS, "rate": math.nan},
            "rate: found nan; expected a finite number above 0",
        ),
        ({"columns": COLUMNS, "sample": 0}, "sample: found 0; expected an integer >= 1"),
        ({"columns": COLUMNS, "seed": -1}, "seed: found -1; expected an integer >= 0"),
    ],
)
def test_options_that_a_format_cannot_use_are_refused(tmp_path, options, words):
    refused(words, "csv", put(tmp_path, NAMED), **options)


@pytest.mark.parametrize("format", ["azure", "burstgpt", "mooncake", "vidur", "vllm", "lmsys"])
def test_only_named_columns_take_names(tmp_path, format):
    words = f"--column: found with the format {format!r}; expected only with csv, jsonl"
    refused(words, format, tmp_path / "any", columns=COLUMNS)


def test_formats_with_times_take_a_unit(tmp_path):
    words = "--unit: found with the format 'sharegpt'; expected only with aiperf, api-log, azure"
    assert "mooncake" in refused(words, "sharegpt", tmp_path / "any", unit="s")


def test_every_format_has_a_line_and_stands_in_the_list():
    formats = trace_formats()
    shown = CliRunner().invoke(app, ("list", "formats")).stdout
    assert re.findall(r"^[\w-]+", shown, re.MULTILINE)[1:] == list(formats)
    assert all(formats.values())


def test_the_mooncake_conversations():
    """The public file's own 2,000 lines, read here by `json`, are what the importer returns."""
    folder = os.environ.get("OPTSCHED_DATA")
    if not folder:
        pytest.skip("OPTSCHED_DATA is not set: it names the folder of the public traces")
    file = Path(folder) / "mooncake" / "conversation_trace_head2000.jsonl"
    if not file.is_file():
        pytest.skip(f"{file} is not there")
    arrival, prompt, output, report = read("mooncake", file, kv_capacity=200_000)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert (report.read, report.notes) == (2000, ())
    assert prompt == [line["input_length"] for line in lines]
    assert output == [line["output_length"] for line in lines]
    assert arrival == [line["timestamp"] / 1000 for line in lines]


def test_the_command_line_takes_every_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*words, status=0):
        result = CliRunner().invoke(app, ("import", *words))
        assert result.exit_code == status, (words, result.output)
        return json.loads(result.stdout)["requests"] if status == 0 else result.stderr

    # Columns, units, a sample and rates: `NAMED` has requests at 0.5 and 1.0.
    put(tmp_path, NAMED)
    named = ("csv", "trace.csv", "--column", "arrival=when", "--column", "prompt_tokens=in")
    named = (*named, "--column", "output_tokens=out")
    assert run(*named)["arrival"] == [0, 0.5]
    assert run(*named, "--unit", "ms")["arrival"] == [0, 0.0005]
    assert len(run(*named, "--sample", "1", "--seed", "3")["arrival"]) == 1
    assert run(*named, "--rate", "inf")["arrival"] == [0, 0]
    assert run(*named, "--rate", "2", "--seed", "1")["arrival"][1] > 0
    # A tokenizer, and warnings where there is none.
    put(tmp_path, json.dumps(CHAT), "chat.json")
    put(tmp_path, "def letters(text):\n    return len(text)\n", "mine.py")
    letters = run("sharegpt", "chat.json", "--tokenizer", "mine.py:letters")
    # Letters of "How are you today?" and of "Is it so?"; the second talk begins with an answer.
    assert letters["prompt_tokens"] == [18, 9]
    result = CliRunner().invoke(app, ("import", "sharegpt", "chat.json", "-o", "i.json"))
    assert result.stderr.splitlines() == [
        "warning: chat.json: dropped 1 of 3 rows (1 with zero or negative tokens), the first in "
        "line 1",
        "warning: chat.json: the trace has no arrivals: all requests arrive at 0; rate=R (--rate "
        "R) draws Poisson arrivals of R requests a second, or inf says so",
        "warning: chat.json: tokens are words; tokenizer=NAME (--tokenizer NAME) counts a model's",
        "note: no KV capacity is given, so it is 100000 tokens, whatever machine a cost model "
        "describes; --cost-model NAME takes the machine's",
    ]
    # What is refused.
    for words, error in (
        (("--rate", "0"), "rate: found 0.0; expected a finite number above 0"),
        (("--sample", "0"), "sample: found 0; expected an integer >= 1"),
        (("--column", "arrival"), "--column: found 'arrival'; expected key=value"),
        (("--column", "arrival=x", "--column", "arrival=y"), "--column: found 'arrival' twice"),
        (("--unit", "day"), "unit: found 'day'; expected one of s, ms, us, ns, datetime"),
        (("--unit", "s", "--unit", "ms"), "--unit: found 'ms' beside 's'; expected FIELD=UNIT"),
        (("-o", "no/such/folder.json"), "no/such/folder.json: cannot be written"),
    ):
        assert error in run("csv", "trace.csv", *words, status=2)
