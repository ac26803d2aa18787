"""Traces: what times, statuses and words mean, where the name of a field does not say it."""

from __future__ import annotations

import json

import pytest
from command_line import invoke, one_line_error
from trace_files import put, read, refused

from optsched.workloads.traces import read_trace_report
from optsched.workloads.traces.base import words as count_words
from optsched.workloads.traces.plausible import unit_in_name

NAMES = {"arrival": "ts", "prompt_tokens": "in", "output_tokens": "out"}


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def mooncake(*times, **more):
    """Return lines of Mooncake's trace, of which only the times differ."""
    return lines(*({"timestamp": t, "input_length": 6, "output_length": 5, **more} for t in times))


def table(header, *rows):
    return "\n".join([header, *rows]) + "\n"


def warned(words, format, file, **options):
    """Expect one warning with these words, which strict refuses, and return the report."""
    refused(words, format, file, strict=True, **options)
    report = read_trace_report(format, file, **options)[1]
    assert sum(words in note for note in report.notes) == 1, report.notes
    return report


# Units


def test_fractions_of_a_millisecond_are_none_of_mooncake_s_times(tmp_path):
    file = put(tmp_path, mooncake(0, 20.5, 60), "m.jsonl")
    words = (
        "line 2: timestamp: found 20.5; expected whole ms, as this format has them; unit (--unit"
    )
    refused(words, "mooncake", file)
    refused(words, "mooncake", file, unit={"latency": "s"})  # which says nothing of arrivals
    assert read("mooncake", file, unit="s")[0] == [0, 20.5, 60]
    assert read("mooncake", file, unit="ms")[0] == [0, 0.0205, 0.06]
    assert read("mooncake", file, rate=float("inf"))[0] == [0, 0, 0]  # then times do not matter


def test_bailian_s_fields_name_their_own_format(tmp_path):
    file = put(tmp_path, mooncake(0, 60, chat_id=1, parent_chat_id=-1, turn=1), "b.jsonl")
    words = "line 1: found the field chat_id of Qwen-Bailian's traces, whose times are seconds: the"
    assert "(--unit)" in refused(words, "mooncake", file)
    assert read("bailian", file)[0] == read("mooncake", file, unit="s")[0] == [0, 60]


def test_a_trace_that_ends_within_milliseconds_is_odd(tmp_path):
    file = put(tmp_path, mooncake(0, 20, 60), "m.jsonl")
    warned(
        "all 3 requests arrive within 0.06 s, if times are in ms; the option unit", "mooncake", file
    )
    assert read("mooncake", file, unit="ms")[3].notes == ()  # it is said


def test_a_trace_of_one_request_a_day_is_odd(tmp_path):
    file = put(tmp_path, mooncake(0, 86_400_000), "b.jsonl")
    warned("requests arrive 8.64e+07 s apart on average, if times are in s", "bailian", file)


@pytest.mark.parametrize(
    ("times", "unit"), [((1771000000, 1771000060), "s"), ((1771000000000, 1771000060000), "ms")]
)
def test_times_since_1970_show_their_unit(tmp_path, times, unit):
    """Two requests of 2026, a minute apart."""
    text = table("ts,in,out", *(f"{t},6,5" for t in times))
    if unit == "s":
        words = "arrivals like 1771000000 are read in ms, and look like times since 1970 in s"
        refused(words, "mooncake", put(tmp_path, mooncake(*times)))
    else:
        words = "line 2: ts: found '1771000000000'; expected at most 146 years; is the unit another"
        refused(words, "csv", put(tmp_path, text), columns=NAMES)
    assert read("csv", put(tmp_path, text), columns=NAMES, unit=unit)[0] == [0, 60]


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("send_time_us", "us"),
        ("latency (ms)", "ms"),
        ("startTimeUnixNano", "ns"),
        ("e2e.s", "s"),
        ("durationMs", "ms"),
        ("wait_seconds", "s"),
        ("ts", None),
        ("timestamps", None),
        ("latency", None),
        ("items", None),
        ("bus", None),
        ("request_ns", "ns"),
    ],
)
def test_a_name_may_end_in_a_unit(name, unit):
    assert unit_in_name(name) == unit


def test_a_unit_in_the_name_is_read_and_must_agree(tmp_path):
    file = put(tmp_path, table("t_ms,in,out,e2e_us", "0,6,5,900000", "500,6,5,800000"))
    columns = {**NAMES, "arrival": "t_ms", "latency": "e2e_us"}
    words = "line 2: the column t_ms says ms, and arrival is read in s; --unit arrival=ms says so"
    refused(words, "csv", file, columns=columns)
    words = "the column e2e_us says us, and latency is read in ms; --unit latency=us says so"
    warned(words, "csv", file, columns=columns, unit="ms")
    report = read("csv", file, columns=columns, unit={"": "ms", "latency": "us"})[3]
    assert report.notes == ()
    assert report.measured.latency.tolist() == [0.9, 0.8]


def test_a_column_of_units_is_read_and_must_agree(tmp_path):
    file = put(tmp_path, table("ts,in,out,unit", "0,6,5,ms", "500,6,5,ms"))
    refused("the column unit says ms, and arrival is read in s", "csv", file, columns=NAMES)
    assert read("csv", file, columns=NAMES, unit="ms")[0] == [0, 0.5]  # 500 ms


def test_a_column_of_units_counts_in_every_format(tmp_path):
    file = put(tmp_path, mooncake(0, 20, 60, time_unit="Seconds"), "m.jsonl")
    refused("the column time_unit says s, and arrival is read in ms", "mooncake", file)
    file = put(tmp_path, table("ts,in,out,unit", "0,6,5,ms", "500,6,5,s"))
    warned("the column unit has several values ('ms', 's')", "csv", file, columns=NAMES)


def test_the_option_that_is_offered_changes_no_other_field(tmp_path):
    file = put(tmp_path, table("ts,in,out,took_ms", "0,6,5,900", "1,6,5,800"))
    words = "the column took_ms says ms, and latency is read in s; --unit latency=ms says so"
    refused(words, "csv", file, columns={**NAMES, "latency": "took_ms"})


@pytest.mark.parametrize(
    ("unit", "seconds"),
    [("sec", 900), ("Milliseconds", 0.9), ("\u00b5s", 9e-4), ("us", 9e-4), ("nanos", 9e-7)],
)
def test_a_unit_has_many_words(tmp_path, unit, seconds):
    for value in ({"value": 900, "unit": unit}, f"900 {unit}"):
        row = {"ts": 0, "in": {"value": 6, "unit": "tokens"}, "out": 1, "latency": value}
        report = read("jsonl", put(tmp_path, lines(row)), columns=NAMES)[3]
        assert report.measured.latency.tolist() == [seconds]
    words = "line 1: latency: found '2 minutes'; expected a number of seconds"
    row["latency"] = {"value": 2, "unit": "minutes"}
    refused(words, "jsonl", put(tmp_path, lines(row)), columns=NAMES)


@pytest.mark.parametrize("ttft", [100, 0.00002])
def test_times_to_the_first_token_have_a_size_too(tmp_path, ttft):
    # Steps of 0.1 s after it show nothing.
    rows = [f"{k},6,5,{ttft},{ttft + 0.4}" for k in range(3)]
    file = put(tmp_path, table("ts,in,out,ttft,latency", *rows))
    warned(f"the first token takes {ttft:.3g} s or more", "csv", file, columns=NAMES)


def test_few_requests_may_be_odd_as_well(tmp_path):
    # 6 requests in 0.2 s, and 3 that are 500 s apart on average.
    file = put(tmp_path, mooncake(0, 40, 80, 120, 160, 200), "m.jsonl")
    warned("all 6 requests arrive within 0.2 s, if times are in ms", "mooncake", file)
    file = put(tmp_path, mooncake(0, 500, 1000), "b.jsonl")
    warned("requests arrive 500 s apart on average, if times are in s", "bailian", file)


def test_a_number_of_tokens_may_be_written_as_a_power(tmp_path):
    text = '{"ts": 0, "in": 1e3, "out": 5.0}\n{"ts": 1, "in": 1.5e0, "out": 5}\n'
    *_, prompt, output, report = read("jsonl", put(tmp_path, text), columns=NAMES)
    assert (prompt, output, report.unreadable) == ([1000], [5], 1)


def test_a_value_with_its_own_unit_counts_in_it(tmp_path):
    rows = [
        {"ts": 0, "in": 6, "out": 5, "latency": {"value": 900, "unit": "ms"}},
        {"ts": 1, "in": 6, "out": 5, "latency": "0.8s"},
    ]
    report = read("jsonl", put(tmp_path, lines(*rows)), columns=NAMES)[3]
    assert report.measured.latency.tolist() == [0.9, 0.8]


def test_latencies_in_another_unit_than_arrivals_are_odd(tmp_path):
    # 900 "s" for 5 tokens are 180 s a token.
    file = put(tmp_path, table("ts,in,out,latency", "0,6,5,900", "1,6,5,900", "500,6,5,900"))
    warned("an output token takes 180 s in the median", "csv", file, columns=NAMES)
    report = read("csv", file, columns=NAMES, unit={"latency": "ms"})[3]
    assert report.notes == ()
    assert report.measured.latency.tolist() == [0.9] * 3
    # After the first token, (900 - 100) / 4 = 200 s a token are no queueing.
    file = put(tmp_path, table("ts,in,out,ttft,latency", "0,6,5,100,900", "1,6,5,100,900"))
    refused("an output token takes 200 s in the median", "csv", file, columns=NAMES)
    warned("an output token takes 200 s", "csv", file, columns=NAMES, unit="s")  # it is said
    assert read("csv", file, columns=NAMES, unit={"latency": "ms", "ttft": "ms"})[3].notes == ()


# Points in time

BLIS = table(
    "input_tokens,output_tokens,send_time_us,first_chunk_time_us,last_chunk_time_us,status",
    "500,40,1771000000000100,1771000000100100,1771000000500100,ok",
    "700,30,1771000000250100,1771000000400100,1771000000700100,ok",
    "900,0,1771000000300100,0,0,error",
    "800,12,1771000000400100,1771000000600100,1771000000900100,timeout",
)
BLIS_NAMES = {
    "arrival": "send_time_us",
    "prompt_tokens": "input_tokens",
    "output_tokens": "output_tokens",
}


def test_points_in_time_are_no_durations(tmp_path):
    file = put(tmp_path, BLIS)
    wrong = {**BLIS_NAMES, "ttft": "first_chunk_time_us", "latency": "last_chunk_time_us"}
    words = "line 2: ttft: found a ttft of 1771000000 s; expected more than 0 and at most a day; a"
    assert "--column first_token_at=NAME" in refused(words, "csv", file, columns=wrong, unit="us")


def test_points_in_time_become_durations_from_the_arrival(tmp_path):
    right = {
        **BLIS_NAMES,
        "first_token_at": "first_chunk_time_us",
        "finished_at": "last_chunk_time_us",
        "status": "status",
    }
    file = put(tmp_path, BLIS)
    # 500,100 - 100 us = 0.5 s and 700,100 - 250,100 us = 0.45 s.
    for format, options in (("csv", {"columns": right, "unit": "us"}), ("blis", {})):
        report = read(format, file, **options)[3]
        assert report.measured.latency.tolist() == [0.5, 0.45]
        assert report.measured.ttft.tolist() == [0.1, 0.15]
        assert report.notes == ("dropped 2 of 4 rows (2 failed), the first in line 4",)


def test_dates_may_be_points_in_time(tmp_path):
    day = "2026-06-01T10:00:0"
    text = table("ts,in,out,end", f"{day}0.1Z,6,5,{day}3.2Z", f"{day}1.1Z,6,5,{day}2.2Z")
    file = put(tmp_path, text)
    words = (
        "expected a number of seconds; a column of points in time is named by finished_at (--col"
    )
    refused(words, "csv", file, columns={**NAMES, "latency": "end"}, unit="datetime")
    report = read("csv", file, columns={**NAMES, "finished_at": "end"}, unit="datetime")[3]
    assert report.measured.latency.tolist() == [3.1, 1.1]
    words = "line 2: found finished_at without arrival, from which times count"
    columns = {**NAMES, "finished_at": "end"}
    del columns["arrival"]
    refused(words, "csv", file, columns=columns, unit="datetime")


def test_latencies_that_follow_the_arrivals_are_odd(tmp_path):
    """0.9, 10.8 and 20.7 are ends of requests that come at 0, 10 and 20."""
    rows = ("0,6,5,0.9", "10,6,5,10.8", "20,6,5,20.7")
    file = put(tmp_path, table("ts,in,out,end", *rows))
    words = (
        "latencies grow with the arrivals as points in time do; a point in time is named by fini"
    )
    warned(words, "csv", file, columns={**NAMES, "latency": "end"})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("2,6,5,0.9,0.5", "line 3: ttft: found 0.9 s; expected at most its latency 0.5"),
        ("2,6,5,0.1,-0.5", "line 3: latency: found a latency that ends 0.5 s before the arrival"),
        ("2,6,5,0,0", "line 3: latency: found a latency of 0 s; expected more than 0"),
        (
            "2,6,5,0.1,86401",
            "line 3: latency: found a latency of 86401 s; expected more than 0 and",
        ),
    ],
)
def test_impossible_times_of_a_row_are_skipped_and_of_most_rows_refused(tmp_path, row, words):
    good = "1,6,5,0.1,0.5"
    file = put(tmp_path, table("ts,in,out,ttft,latency", good, row, good))
    report = warned(words, "csv", file, columns=NAMES)
    assert (report.read, report.unreadable, report.first_dropped_line) == (3, 1, 3)
    file = put(tmp_path, table("ts,in,out,ttft,latency", good, row, row))
    refused(words, "csv", file, columns=NAMES)


# Inter-token times

RUN = {
    "input_lens": [10, 20],
    "output_lens": [3, 2],
    "start_times": [0.0, 1.0],
    "ttfts": [0.5, 0.6],
    "itls": [[0.1, 0.1], [0.1]],
}


@pytest.mark.parametrize(
    ("itls", "latency", "words"),
    [
        ([[0.1, 0.1], [0.1]], [0.7, 0.7], None),
        # The first entry is the time to the first token: 0.5 + 0.1 + 0.1 and 0.6 + 0.1.
        ([[0.5, 0.1, 0.1], [0.6, 0.1]], [0.7, 0.7], "begin with the time to the first token"),
        ([[0.1, 0.1, 0.1], [0.1, 0.1]], [0.8, 0.8], "as many inter-token times (itls) as output"),
    ],
)
def test_inter_token_times_may_hold_the_first_token(tmp_path, itls, latency, words):
    file = put(tmp_path, json.dumps({**RUN, "itls": itls}), "b.json")
    report = warned(words, "vllm", file) if words else read("vllm", file)[3]
    assert report.measured.latency.tolist() == pytest.approx(latency)


# Statuses


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("status", "ok", "timeout"),
        ("status", "Success", "FAILURE"),
        ("state", "200", "503"),
        ("success", "true", "False"),
        ("success", "1", "0"),
        ("error", "", "out of memory"),
        ("error", "null", "{...}"),
        ("is_error", "false", "true"),
        ("error_code", "0", "17"),
        ("failed", "0", "1"),
        ("succeeded", "True", "no"),
        ("http_status", "204", "429"),
        ("response_status", "200", "500"),
        ("level", "DEFAULT", "ERROR"),
        ("status", "FINISHED_STOPPED", "FINISHED_ABORTED"),
        ("status", "complete", "TimeoutError"),
    ],
)
def test_failed_requests_are_left_out_and_counted(tmp_path, name, good, bad):
    file = put(tmp_path, table(f"ts,in,out,{name}", f"0,6,5,{good}", f"1,7,5,{bad}"))
    report = read("csv", file, columns={**NAMES, "status": name})[3]
    assert (report.dropped, report.failed, report.first_dropped_line) == (1, 1, 3)
    warned(f"the column {name} does not say success, as with '{bad}'", "csv", file, columns=NAMES)
    file = put(tmp_path, table(f"ts,in,out,{name}", f"0,6,5,{good}", f"1,7,5,{good}"))
    assert read("csv", file, columns=NAMES)[3].notes == ()


def test_a_status_of_an_unknown_word_is_not_guessed(tmp_path):
    file = put(tmp_path, table("ts,in,out,status", "0,6,5,ok", "1,7,5,late"))
    columns = {**NAMES, "status": "status"}
    words = "line 3: status: found 'late'; expected a word of success (ok, success, completed, 200,"
    assert warned(words, "csv", file, columns=columns).unreadable == 1
    assert read("csv", file, columns=columns, success=["late"])[1] == [6, 7]


def test_a_failed_request_may_lack_what_others_have(tmp_path):
    rows = [{"ts": 0, "in": 6, "out": 5}, {"ts": 1, "error": "boom"}, {"ts": 2, "in": 7, "out": 5}]
    file = put(tmp_path, lines(*rows))
    *_, prompt, _, report = read("jsonl", file, columns={**NAMES, "status": "error"})
    assert (prompt, report.failed, report.unreadable) == ([6, 7], 1, 0)
    words = "line 2: expected the field in; found ts, error"
    warned(words, "jsonl", file, columns=NAMES)


def test_statuses_and_servers_are_looked_for_in_every_format(tmp_path):
    rows = ("2024-05-10 00:00:00,6,5,200,a", "2024-05-10 00:00:01,7,5,500,b")
    file = put(tmp_path, table("TIMESTAMP,ContextTokens,GeneratedTokens,Status Code,Host", *rows))
    warned("the column Status Code does not say success, as with '500'", "azure", file)
    notes = read("azure", file)[3].notes
    assert "the column Host has several values ('a', 'b'), which are all read alike" in notes
    file = put(tmp_path, lines({"ts": 0, "in": 6, "out": 5, "statusCode": 503}))
    warned(
        "the column statusCode does not say success, as with '503'", "jsonl", file, columns=NAMES
    )


def test_several_models_are_several_servers(tmp_path):
    file = put(tmp_path, table("ts,in,out,model", "0,6,5,a", "1,7,5,b"))
    warned("the column model has several values ('a', 'b')", "csv", file, columns=NAMES)


# Words


def test_scripts_without_spaces_are_counted_by_characters():
    """Chinese and Japanese by characters (5 of the third text's, then 2), others by words."""
    assert len(count_words("How are you?")) == 3
    assert len(count_words("你好世界")) == 4
    assert len(count_words("KV キャッシュ とは")) == 1 + 5 + 2
    assert len(count_words("привет мир")) == 2


def test_a_word_of_thousands_of_characters_is_odd(tmp_path):
    chat = [
        {"conversations": [{"from": "human", "value": "x" * 5000}, {"from": "gpt", "value": "y"}]}
    ]
    file = put(tmp_path, json.dumps(chat), "c.json")
    warned("texts have words of more than 1000 characters", "sharegpt", file, rate=1.0)
    assert len(read("sharegpt", file, rate=1.0, tokenizer=len)[3].notes) == 0
    chat[0]["conversations"][0]["value"] = "键值缓存" * 1000
    *_, prompt, _, report = read("sharegpt", put(tmp_path, json.dumps(chat), "c.json"), rate=1.0)
    assert prompt == [4000]  # 4 x 1,000 characters
    assert len(report.notes) == 1  # that tokens are words


# Runs


@pytest.mark.parametrize(
    "text",
    [lines(RUN, {**RUN, "start_times": [5, 7]}), json.dumps([RUN, {**RUN, "start_times": [5, 7]}])],
)
def test_one_of_several_runs_is_picked(tmp_path, text):
    """`RUN` has requests at 0 and 1 s, and the second run at 5 and 7."""
    file = put(tmp_path, text, "runs.json")
    words = "found 2 runs; expected one; run=N (--run N) picks it, from 1 to 2, or -1 for the last"
    refused(words, "vllm", file)
    for run, arrival in ((1, [0, 1]), (2, [0, 2]), (-1, [0, 2]), (-2, [0, 1])):
        assert read("vllm", file, run=run)[0] == arrival
    refused("run: found 3; expected a run of the 2", "vllm", file, run=3)
    refused("run: found 0; expected an integer, but 0", "vllm", file, run=0)
    assert read("sglang", put(tmp_path, lines(RUN), "one.jsonl"))[0] == [0, 1]


def test_a_run_that_is_cut_short_costs_no_other(tmp_path):
    file = put(tmp_path, lines(RUN, RUN)[:-20], "runs.jsonl")
    for options in ({}, {"run": 1}):
        warned("line 2: not JSON: the file is cut short; it is no run", "vllm", file, **options)
        assert read("vllm", file, **options)[0] == [0, 1]


def test_a_run_with_latencies_needs_no_steps(tmp_path):
    """`RUN` without times of tokens, but with whole latencies (e2els)."""
    run = {key: value for key, value in RUN.items() if key not in ("ttfts", "itls")}
    report = read("vllm", put(tmp_path, lines({**run, "e2els": [0.5, 0.75]})))[3]
    assert (report.measured.latency.tolist(), report.measured.ttft) == ([0.5, 0.75], None)
    words = "found no requests in 0 rows"
    refused(words, "vllm", put(tmp_path, lines({key: [] for key in RUN})))


def test_what_keeps_a_run_from_being_compared_is_said(tmp_path, monkeypatch):
    """Without start times latencies belong to no arrivals, unless all come at once."""
    monkeypatch.chdir(tmp_path)
    run = {key: value for key, value in RUN.items() if key != "start_times"}
    put(tmp_path, lines({**run, "request_rate": 4.0}), "timed.jsonl")
    put(tmp_path, lines({**run, "request_rate": "inf"}), "at-once.jsonl")
    command = ("import", "sglang", "-o", "i.json", "--measured-out", "m.json")
    result = invoke(*command, "timed.jsonl")
    assert result.exit_code == 2
    assert "found latencies, but no arrivals (of a benchmark, start_times)" in result.stderr
    assert invoke(*command, "at-once.jsonl").exit_code == 0
    line = one_line_error(invoke(*command, "at-once.jsonl", "--rate", "2"))
    assert "found a trace changed by rate" in line
    put(tmp_path, table("ts,in,out", "0,6,5"))
    named = [word for pair in NAMES.items() for word in ("--column", "=".join(pair))]
    line = one_line_error(invoke("import", "csv", "trace.csv", *named, *command[2:]))
    assert "found no latencies (of csv and jsonl, columns latency or finished_at)" in line


def test_a_reader_of_csv_and_one_of_json_name_each_other(tmp_path):
    file = put(tmp_path, lines({"ts": 0, "in": 6, "out": 5}))
    refused(
        "found JSON; expected CSV or Parquet (the format jsonl reads", "csv", file, columns=NAMES
    )
    file = put(tmp_path, "# a comment\n" + lines({"ts": 0, "in": 6, "out": 5}))
    assert read("jsonl", file, columns=NAMES)[3].unreadable == 1
    file = put(tmp_path, b"PK\3\4" + b"x" * 60)
    refused("found a zip archive; expected text, or text in gzip", "jsonl", file)
    file = put(tmp_path, table("ts,in,out", "0,6,5"))
    refused("not JSON: expected JSON lines or a list (the format csv", "jsonl", file)


def test_fields_of_json_may_lie_anywhere(tmp_path):
    row = {
        "ts": 5,
        "usage": {"in": 6},
        "attributes": [{"key": "gen.out", "value": {"intValue": "5"}}],
        "times": [5.5, 6.0, 7.5],
    }
    columns = {
        "arrival": "ts",
        "prompt_tokens": "usage.in",
        "output_tokens": "attributes.gen.out",
        "first_token_at": "times.0",
        "finished_at": "times.-1",
    }
    for text, more in (
        (lines(row, row), {}),
        (json.dumps({"a": {"b": [row, row]}}), {"rows": "a.b"}),
    ):
        *_, prompt, output, report = read("jsonl", put(tmp_path, text), columns=columns | more)
        assert (prompt, output) == ([6, 6], [5, 5])
        assert report.measured.ttft.tolist() == [0.5, 0.5]  # 5.5 - 5
        assert report.measured.latency.tolist() == [2.5, 2.5]  # 7.5 - 5
    assert read("jsonl", put(tmp_path, lines(row)), columns=columns, rate=1.0)[0] == [0]
