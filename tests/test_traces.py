"""Traces: the Azure formats, windows, rounds, and malformed rows."""

from __future__ import annotations

import os
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from trace_files import HEADER, NEW, OLD, put, refused, skipped

from optsched.problem.errors import InputError
from optsched.workloads.traces import (
    TraceReport,
    TraceWarning,
    read_trace,
    read_trace_report,
    trace_formats,
)


@pytest.mark.parametrize("text", [OLD, NEW, "\ufeff" + OLD, OLD.replace("\r\n2", "\r\n\r\n2")])
def test_azure_files_of_both_years_are_read(tmp_path, text):
    """Files of two years, one behind a byte order mark, and one with empty lines."""
    instance = read_trace("azure", put(tmp_path, text))
    # 18:15:59.75, 18:16:00, 18:16:01.25 and 18:16:02.75. Without a capacity it is 100,000 tokens.
    assert instance.arrival.tolist() == [0.0, 0.25, 1.5, 3.0]
    assert instance.prompt_tokens.tolist() == [10, 20, 30, 40]
    assert instance.output_tokens.tolist() == [2, 3, 4, 5]
    assert (instance.time_unit, instance.kv_accounting) == ("second", "cached")
    assert (instance.kv_capacity, instance.name) == (100_000, "trace")


def test_columns_are_found_by_their_header(tmp_path):
    text = "GeneratedTokens,x,TIMESTAMP,ContextTokens\n2,a,2024-05-10 00:00:00+00:00,7\n"
    instance = read_trace("azure", put(tmp_path, text))
    assert (instance.prompt_tokens.tolist(), instance.output_tokens.tolist()) == ([7], [2])


def test_fractions_count_to_the_nanosecond_and_zones_are_subtracted(tmp_path):
    rows = ["2024-05-10 00:00:00.0000001Z,1,1", "2024-05-10 02:00:01.0000004+02:00,1,1"]
    instance = read_trace("azure", put(tmp_path, "\n".join([HEADER, *rows])))
    # 100 ns and, 1 s later in the same zone, 400 ns.
    assert instance.arrival.tolist() == [0.0, 1.0000003]


@pytest.mark.parametrize(
    ("offset", "limit", "arrival"),
    [(0, 2, [0, 0.25]), (1, 2, [0, 1.25]), (3, None, [0]), (2, 99, [0, 1.5])],
)
def test_a_window_counts_from_its_first_request(tmp_path, offset, limit, arrival):
    instance = read_trace("azure", put(tmp_path, OLD), offset=offset, limit=limit)
    # Arrivals of all four are 0, 0.25, 1.5 and 3.
    assert instance.arrival.tolist() == arrival


def test_windows_side_by_side_cover_the_file_once(tmp_path):
    """`OLD` has prompts of 10, 20, 30 and 40 tokens. The second has no output here: it is
    dropped."""
    text = OLD.replace(",20,3", ",20,0")
    windows = []
    for offset in (0, 2):
        instance, report = read_trace_report("azure", put(tmp_path, text), offset=offset, limit=2)
        windows.append((instance.prompt_tokens.tolist(), report.read, report.dropped))
    assert windows == [([10], 2, 1), ([30, 40], 2, 0)]


def test_rows_without_tokens_are_dropped_and_counted(tmp_path):
    file = put(tmp_path, OLD.replace(",10,2", ",10,0").replace(",30,4", ",-1,4"))
    with pytest.warns(TraceWarning, match=r"dropped 2 of 4.*2.*line 2"):
        instance = read_trace("azure", file)
    assert instance.prompt_tokens.tolist() == [20, 40]
    assert instance.arrival.tolist() == [0.0, 2.75]  # 16:00 to 16:02.75, the rows kept
    report = read_trace_report("azure", file)[1]
    assert (report.read, report.dropped, report.failed, report.first_dropped_line) == (4, 2, 0, 2)
    with pytest.raises(
        InputError,
        match=r"line 2.*10.*0.*tokens.*tokens.*1",
    ):
        read_trace("azure", file, strict=True)


def test_rate_scale_brings_requests_faster(tmp_path):
    instance = read_trace("azure", put(tmp_path, OLD), rate_scale=2)
    assert instance.arrival.tolist() == [0.0, 0.125, 0.75, 1.5]  # halves of 0, 0.25, 1.5 and 3


def test_rounds_are_floors_and_exact(tmp_path):
    instance = read_trace("azure", put(tmp_path, OLD), round_seconds=0.5, kv_capacity=50)
    # 0, 0.25, 1.5 and 3 s in rounds of half a second.
    assert instance.arrival.tolist() == [0, 0, 3, 6]
    assert (instance.time_unit, instance.kv_accounting) == ("round", "generated")
    # 0.3 s is round 3 of 0.1 s, although 0.3 / 0.1 is 2.9999999999999996 in floating point.
    rows = [f"2024-05-10 00:00:00.{tenth}00,1,1" for tenth in range(10)]
    file = put(tmp_path, "\n".join([HEADER, *rows]), "tenths.csv")
    assert 0.3 // 0.1 == 2.0
    tenths = read_trace("azure", file, round_seconds=0.1, kv_capacity=9)
    assert tenths.arrival.tolist() == list(range(10))
    # At twice the rate a round of 0.1 s holds 0.2 s of the trace.
    double = read_trace("azure", file, round_seconds=0.1, kv_capacity=9, rate_scale=2)
    assert double.arrival.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    odd = read_trace("azure", file, round_seconds=0.1, kv_capacity=9, rate_scale=1 / 3)
    assert odd.arrival.tolist() == [3 * k for k in range(10)]


def test_time_going_backwards_is_sorted_and_reported(tmp_path):
    rows = OLD.split("\r\n")
    # Times 3.0, 1.5, 0.25, 0 s: three rows are earlier than the one above them, first in line 3.
    file = put(tmp_path, "\n".join([HEADER, *rows[:0:-1]]))
    instance, report = read_trace_report("azure", file)
    assert instance.arrival.tolist() == [0.0, 0.25, 1.5, 3.0]
    assert instance.prompt_tokens.tolist() == [10, 20, 30, 40]
    assert (report.backwards, report.first_backwards_line) == (3, 3)
    with pytest.warns(TraceWarning, match=r"3.*line 3"):
        read_trace("azure", file)
    with pytest.raises(InputError, match="line 3"):
        read_trace("azure", file, strict=True)


def test_requests_of_one_time_keep_the_file_s_order(tmp_path):
    times = ["00:00:02", "00:00:01", "00:00:02", "00:00:01"]
    rows = [f"2024-05-10 {time},{k + 1},1" for k, time in enumerate(times)]
    instance, _ = read_trace_report("azure", put(tmp_path, "\n".join([HEADER, *rows])))
    # Prompts are numbers of rows: 2 and 4 come at 1 s, 1 and 3 at 2 s.
    assert instance.prompt_tokens.tolist() == [2, 4, 1, 3]


def test_a_request_beyond_the_kv_capacity_names_its_line(tmp_path):
    with pytest.raises(InputError) as caught:
        read_trace("azure", put(tmp_path, OLD), kv_capacity=40)
    # 40 prompt tokens + 5 output - 1 = 44.
    words = r"kv_capacity: request 3: found \d+; expected at least 44, .*\(line 5\); a larger"
    assert re.search(words, str(caught.value))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (",20,3", ",20", "line 3: found 2 fields in '2023-11-16 18:16:00.0000000,20'; expected 3"),
        (",20,3", ",20,3,4", "line 3: found 4 fields in '2023-11-16"),
        (",20,3", ",x,3", "line 3: ContextTokens: found 'x'; expected an integer"),
        (",20,3", ",20,", "line 3: GeneratedTokens: found ''; expected an integer"),
        (",20,3", ",20,3.5", "line 3: GeneratedTokens: found '3.5'; expected an integer"),
        (",20,3", ",1_0,3", "line 3: ContextTokens: found '1_0'; expected an integer"),
        (",20,3", ",nan,3", "line 3: ContextTokens: found 'nan'; expected an integer"),
        (",20,3", ",99999999999,3", "line 3: ContextTokens: found '99999999999'"),
        (",20,3", f",{'9' * 30},3", "line 3: ContextTokens: found"),
        (
            "2023-11-16 18:16:00.0",
            "yesterday",
            "line 3: TIMESTAMP: found 'yesterday000000'; expected a",
        ),
        (
            "2023-11-16 18:16:00.0",
            "2023-02-30 18:16:00.0",
            "line 3: TIMESTAMP: found '2023-02-30 18:16:00.0000000';",
        ),
        (
            "2023-11-16 18:16:00.0",
            "2999-11-16 18:16:00.0",
            "line 3: TIMESTAMP: found '2999-11-16 18:16:00.0000000';",
        ),
        ("2023-11-16 18:16:00.0000000", "NaT", "line 3: TIMESTAMP: found 'NaT'; expected a date"),
    ],
)
def test_a_malformed_row_is_skipped_and_named_with_line_field_and_value(tmp_path, old, new, words):
    report = skipped(words, "azure", put(tmp_path, OLD.replace(old, new)))
    assert (report.read, report.dropped, report.first_dropped_line) == (4, 1, 3)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "GeneratedTokens",
            "Generated",
            "line 1: expected a column 'GeneratedTokens'; found 'TIMESTAMP', 'ContextTokens'",
        ),
        (OLD, "", "line 1: expected a column 'TIMESTAMP'; found an empty first line"),
        (OLD, HEADER, "no requests in 0 rows; expected rows with 1 or more prompt"),
    ],
)
def test_a_file_without_its_columns_or_rows_is_refused(tmp_path, old, new, words):
    file = put(tmp_path, OLD.replace(old, new))
    assert refused(words, "azure", file).startswith(f"{file}: ")


def test_a_file_of_which_no_row_can_be_read_is_refused_with_the_first_error(tmp_path):
    file = put(tmp_path, re.sub(r",(\d)0,", r",\1x,", OLD))
    refused("line 2: ContextTokens: found '1x'; expected an integer", "azure", file)
    # Lines 2 and 4 have no number, line 3 no answer: nothing is left.
    file = put(
        tmp_path, OLD.replace(",10,", ",x,").replace(",20,3", ",20,0").replace("30,4", "y,4")
    )
    refused("line 2: ContextTokens: found 'x'", "azure", file, limit=3)
    assert read_trace_report("azure", file)[1].dropped == 3


def test_lines_are_counted_over_blank_ones_and_offsets(tmp_path):
    file = put(tmp_path, OLD.replace("\r\n2", "\r\n\r\n2").replace(",40,5", ",x,5"))
    skipped("line 9: ContextTokens: found 'x'; expected an integer of at", "azure", file, offset=2)
    assert read_trace("azure", file, limit=3).n == 3  # what is not read does no harm


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offset": -1}, "offset: found -1; expected an integer >= 0"),
        ({"limit": 0}, "limit: found 0; expected an integer >= 1"),
        ({"limit": True}, "limit: found True; expected an integer >= 1"),
        ({"rate_scale": 0}, "rate_scale: found 0; expected a finite number above 0"),
        ({"rate_scale": float("nan")}, "rate_scale: found nan; expected a finite number above 0"),
        ({"rate_scale": "2"}, "rate_scale: found '2'; expected a number"),
        ({"round_seconds": 1.0}, "kv_capacity: found nothing; expected tokens"),
        (
            {"round_seconds": -1.0, "kv_capacity": 99},
            "round_seconds: found -1.0; expected a finite number above 0",
        ),
        ({"kv_capacity": 1.5}, "kv_capacity: found 1.5; expected an integer >= 1"),
        ({"offset": 4}, "offset: found 4; expected at most 3, since the file has 4 rows"),
        ({"offset": 9}, "offset: found 9; expected at most 3, since the file has 4 rows"),
    ],
)
def test_options_without_meaning_are_refused(tmp_path, options, words):
    refused(words, "azure", put(tmp_path, OLD), **options)


def test_unknown_formats_and_unreadable_files_are_named(tmp_path):
    assert "azure" in trace_formats()
    refused("trace format 'nope' is unknown; known are aiperf, api-log", "nope", tmp_path)
    refused("no such file", "azure", tmp_path / "none.csv")
    refused("found a directory; expected a file", "azure", tmp_path)


def test_a_limit_reads_only_what_it_needs(tmp_path):
    row = "2024-05-10 00:00:00.5+00:00,100,10\n"
    file = put(tmp_path, HEADER + "\n" + row * 400_000 + "not a row")
    tracemalloc.start()
    assert read_trace("azure", file, limit=1000).n == 1000  # the last line is not reached
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6  # the file has 14 MB


def test_the_azure_conversations_of_2023():
    folder = os.environ.get("OPTSCHED_DATA")
    if not folder:
        pytest.skip("OPTSCHED_DATA is not set: it names the folder of the public traces")
    file = Path(folder) / "azure" / "AzureLLMInferenceTrace_conv.csv"
    if not file.is_file():
        pytest.skip(f"{file} is not there")
    instance, report = read_trace_report("azure", file)
    assert report == TraceReport(19_366, unmeasured=report.unmeasured)
    # From 18:15:46.6805900 to 19:14:08.4025270; the second row at 18:15:50.9951690. Its rows, long
    # prompts and their mean as awk counts them in the file.
    assert instance.arrival[[0, 1, -1]].tolist() == [0.0, 4.314579, 3501.721937]
    assert (instance.prompt_tokens > 4096).sum() == 402
    assert instance.prompt_tokens.mean() == pytest.approx(1154.697408)
    window = read_trace("azure", file, offset=1000, limit=500)
    assert np.array_equal(window.prompt_tokens, instance.prompt_tokens[1000:1500])
