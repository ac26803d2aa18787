"""Traces: bad files, encodings and headers, fast numbers against exact ones, samples."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import os
import re
from dataclasses import replace
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from trace_files import HEADER, put, read, refused, skipped

from optsched.problem.errors import InputError
from optsched.workloads.traces import delimited, read_trace, read_trace_report
from optsched.workloads.traces.base import Source, Window
from optsched.workloads.traces.exact import PLACES, Fields, exact_ns

ROWS = [f"2023-11-16 18:16:0{k}.0000000,{10 + k},{1 + k}" for k in range(4)]
TEXT = "\n".join([HEADER, *ROWS]) + "\n"


def prompts(file, **options):
    """Return the prompt tokens that are read."""
    return read("azure", file, **options)[1]


def refused_azure(words, file, **options):
    """Expect that a file is refused with these words, behind its name."""
    assert refused(words, "azure", file, **options).startswith(f"{file}: ")


@pytest.mark.parametrize(
    "header",
    [
        "timestamp,contexttokens,generatedtokens",
        "Timestamp, Context Tokens , Generated_Tokens",
        '"TIMESTAMP","ContextTokens","GeneratedTokens"',
        "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens",
    ],
)
def test_headers_may_differ_in_case_spaces_quotes_and_mark(tmp_path, header):
    """`TEXT` has prompts of 10, 11, 12 and 13 tokens."""
    assert prompts(put(tmp_path, TEXT.replace(HEADER, header))) == [10, 11, 12, 13]


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_semicolons_and_tabs_separate_too(tmp_path, delimiter):
    """`TEXT` has prompts of 10, 11, 12 and 13 tokens."""
    assert prompts(put(tmp_path, TEXT.replace(",", delimiter))) == [10, 11, 12, 13]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("final", [True, False])
def test_lines_may_end_in_any_way(tmp_path, end, final):
    """`TEXT` has prompts of 10, 11, 12 and 13 tokens."""
    text = TEXT if final else TEXT.rstrip("\n")
    assert prompts(put(tmp_path, text.replace("\n", end))) == [10, 11, 12, 13]


def test_an_ambiguous_header_is_refused_azure(tmp_path):
    text = TEXT.replace("TIMESTAMP", "time stamp,Timestamp").replace("2023", "x,2023")
    refused_azure(
        "line 1: TIMESTAMP: found 2 columns of this name in 'time stamp',", put(tmp_path, text)
    )


def test_a_last_line_that_is_cut_short_costs_its_row_alone(tmp_path):
    """`TEXT` has prompts of 10 to 13 tokens in lines 2 to 5; of the last one "3,4" are lost."""
    file = put(tmp_path, TEXT[:-4])
    words = "line 5: found 2 fields in '2023-11-16 18:16:03.0000000,1'; expected 3"
    skipped(words, "azure", file)
    assert prompts(file) == prompts(file, limit=3) == [10, 11, 12]
    skipped("line 5: found 2 fields", "azure", file, offset=1)
    assert prompts(file, offset=1, limit=2) == [11, 12]


@pytest.mark.parametrize("code", ["utf-16", "utf-32"])
def test_wide_characters_are_named(tmp_path, code):
    name = code.upper()
    words = f"found {name} text; expected UTF-8 (iconv -f {name} -t UTF-8)"
    refused_azure(words, put(tmp_path, TEXT.encode(code)))


def test_what_is_no_text_is_named(tmp_path):
    refused_azure("found zero bytes; expected UTF-8 text", put(tmp_path, TEXT.encode("utf-16-le")))
    latin = TEXT.replace("12,3", "é12,3").encode("latin-1")
    refused_azure(
        "line 4: found the byte 0xe9 (invalid continuation byte); expected UTF-8",
        put(tmp_path, latin),
    )
    refused_azure("line 1: found the byte 0xe9", put(tmp_path, b"\xe9" + TEXT.encode()))
    refused_azure("expected a column", put(tmp_path, codecs.BOM_UTF8))
    refused_azure("expected a column", put(tmp_path, b""))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.parametrize("packed", [False, True])
def test_a_pipe_is_read_like_a_file(tmp_path, packed):
    pipe = tmp_path / "pipe.csv"
    os.mkfifo(pipe)
    text = "\n".join(["arrival,prompt_tokens,output_tokens", "0,10,1", "1,11,2", ""]).encode()
    content = gzip.compress(text) if packed else text
    writer = Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    instance, _ = read_trace_report("csv", pipe)
    writer.join()
    assert instance.prompt_tokens.tolist() == [10, 11]


def test_gzip_is_told_by_its_bytes(tmp_path):
    """`TEXT` packed and not, under either name; its prompts are 10, 11, 12 and 13."""
    packed = gzip.compress(TEXT.encode())
    assert prompts(put(tmp_path, packed, "trace.csv.gz")) == [10, 11, 12, 13]
    assert read_trace("azure", tmp_path / "trace.csv.gz").name == "trace"
    assert prompts(put(tmp_path, packed, "trace.csv")) == [10, 11, 12, 13]
    assert prompts(put(tmp_path, TEXT, "trace.csv.gz")) == [10, 11, 12, 13]
    refused_azure("the gzip file is cut short", put(tmp_path, packed[:-12]))
    refused_azure("cannot be read", put(tmp_path, packed[:12] + b"xxxx" + packed[16:]))


def test_quotes_change_nothing(tmp_path):
    plain = "\n".join([HEADER + ",note", *(row + ",a" for row in ROWS)])
    quoted = plain.replace(",a", ',"a, ""b""\nc"')
    assert prompts(put(tmp_path, quoted)) == prompts(put(tmp_path, plain)) == [10, 11, 12, 13]
    assert prompts(put(tmp_path, quoted), offset=1, limit=2) == [11, 12]
    # Each row takes two lines: row 2 begins in line 6.
    words = "line 6: ContextTokens: found 'x2'; expected an integer of at"
    skipped(words, "azure", put(tmp_path, quoted.replace(",12,", ",x2,")))
    skipped("line 6: found 3 fields", "azure", put(tmp_path, quoted.replace(",12,", ",")))


def test_a_quote_that_never_ends_costs_its_row_alone(tmp_path):
    """`ROWS` have prompts of 10 to 13 tokens, in lines 2 to 5."""
    rows = [row + ",a" for row in ROWS]
    rows[1] = rows[1].replace(",a", ',"5 inches')
    file = put(tmp_path, "\n".join([HEADER + ",note", *rows]))
    skipped("line 3: not CSV: a quote never ends", "azure", file)
    assert prompts(file) == [10, 12, 13]
    file = put(tmp_path, "\n".join([HEADER + ",note", *rows]).replace('"5 ', '"5" '))
    skipped("line 3: not CSV: ',' expected after '\"'", "azure", file)
    assert prompts(file) == [10, 12, 13]


CELLS = st.tuples(
    st.decimals(0, 10**6, places=6).map(str), st.integers(1, 10**4), st.integers(-1, 10**4),
    st.text(st.characters(codec="utf-8", exclude_characters='",\r\n\0'), max_size=5),
)  # fmt: skip


@given(st.lists(CELLS, min_size=1, max_size=30))
@settings(deadline=None, max_examples=50)
def test_a_quoted_file_is_the_plain_one(tmp_path_factory, rows):
    """Without quotes and with all of them: one instance and report, or one error."""
    folder = tmp_path_factory.getbasetemp()
    header = ("arrival", "prompt_tokens", "output_tokens", "note")
    found = []
    for style in (csv.QUOTE_NONE, csv.QUOTE_ALL):
        text = io.StringIO()
        csv.writer(text, quoting=style, lineterminator="\n").writerows([header, *rows])
        file = put(folder, text.getvalue(), "same.csv")
        try:
            instance, report = read_trace_report("csv", file)
            found.append((instance.sha256, replace(report, measured=None)))
        except InputError as error:  # no row has tokens
            found.append((str(error), None))
    assert found[0] == found[1]


def test_progress_counts_the_rows_read(tmp_path, monkeypatch):
    """Four rows in blocks of two."""
    monkeypatch.setattr(delimited, "_BLOCK_ROWS", 2)
    seen = []
    prompts(put(tmp_path, TEXT), progress=seen.append)
    assert seen == [2, 4]


def test_rows_do_not_depend_on_where_blocks_end(tmp_path, monkeypatch):
    rows = [f"2023-11-16 18:{k // 60:02}:{k % 60:02},{k + 1},{k % 7}" for k in range(300)]
    file = put(tmp_path, "\n".join([HEADER, *rows]))
    whole, report = read_trace_report("azure", file)
    thin, _ = read_trace_report("azure", file, sample=20, seed=3)
    monkeypatch.setattr(delimited, "_BLOCK_ROWS", 3)
    pieces, again = read_trace_report("azure", file)
    assert pieces.sha256 == whole.sha256
    # Every seventh row has no output, from the first on: 43 of 300.
    assert (again.read, again.dropped) == (report.read, report.dropped) == (300, 43)
    assert read_trace_report("azure", file, sample=20, seed=3)[0].sha256 == thin.sha256
    file = put(tmp_path, "\n".join([HEADER, *rows, "x", ROWS[0]]))
    report = read_trace_report("azure", file)[1]
    # Two rows more, of which "x" is dropped, too.
    assert (report.read, report.dropped, report.unreadable) == (302, 44, 1)
    words = "the first unreadable row: line 302: found 1 fields in 'x'; expected 3"
    assert words in report.notes


def test_a_sample_is_a_set_of_rows_in_their_order(tmp_path):
    """`TEXT` has prompts of 10, 11, 12 and 13 tokens."""
    file = put(tmp_path, TEXT)
    for size in (1, 3, 4, 99):
        sample = prompts(file, sample=size)
        assert len(sample) == min(size, 4)
        assert sample == sorted(set(sample))
        assert set(sample) <= {10, 11, 12, 13}
    assert prompts(file, sample=2, seed=5) == prompts(file, sample=2, seed=5)
    assert set(prompts(file, sample=2, offset=1, limit=2)) == {11, 12}


def test_every_row_is_as_likely_in_a_sample(tmp_path):
    # 400 samples of 2 of 4: each row is in 200 on average, standard deviation sqrt(400 / 4) = 10.
    file = put(tmp_path, TEXT)
    counts = dict.fromkeys((10, 11, 12, 13), 0)
    for seed in range(400):
        for prompt in prompts(file, sample=2, seed=seed):
            counts[prompt] += 1
    assert sum(counts.values()) == 800  # 400 x 2
    # 200, give or take five deviations
    assert all(150 <= count <= 250 for count in counts.values())


def test_a_sample_of_many_rows_keeps_no_more_than_it_needs(tmp_path):
    rows = "\n".join(f"2023-11-16 18:00:{k % 60:02},{k + 1},1" for k in range(200_000))
    file = put(tmp_path, HEADER + "\n" + rows)
    instance, report = read_trace_report("azure", file, sample=1000, kv_capacity=10**6)
    assert (instance.n, report.read) == (1000, 200_000)
    # The mean of 1,000 of 1..200,000: 100,000, standard error 57,735 / sqrt(1,000) = 1,826.
    assert abs(instance.prompt_tokens.mean() - 100_000) < 4 * 1826
    assert len(set(instance.prompt_tokens.tolist())) == 1000


def fields(texts):
    """Return a column of texts as a file has it."""
    source = Source(Path("x.csv"), Window(0, None))
    return Fields(source, range(2, 2 + len(texts)), {"field": "Field"}, {"field": texts})


# Numbers as texts: plain, with exponents, and with more digits than a nanosecond has.
NUMBERS = st.one_of(
    st.decimals(-(10**8), 10**8, places=12).map(str),
    st.decimals(-(10**8), 10**8, allow_nan=False, allow_infinity=False)
    .map(str)
    .filter(lambda text: len(text) < 60),  # more digits are refused
    st.integers(-(10**9), 10**9).map(str),
    st.floats(0, 1e9).map(repr),
    st.from_regex(r"[0-9]{1,9}(\.[0-9]{0,14})?", fullmatch=True),
)


@given(st.lists(NUMBERS, min_size=1, max_size=30), st.sampled_from(sorted(PLACES)))
@settings(deadline=None)
def test_times_are_the_exact_decimals_rounded(texts, unit):
    """Against Python's decimals, and against the package's slow reader (`exact_ns`)."""
    found = fields(texts).nanoseconds("field", unit).tolist()
    exact = [
        int((Decimal(text) * 10 ** PLACES[unit]).quantize(Decimal(1), ROUND_HALF_UP))
        for text in texts
    ]
    assert found == exact == [exact_ns(text, unit) for text in texts]


def test_times_at_the_edges():
    texts = [
        "0.0000000005",
        "0.00000000049",
        "3999999999.999999999",
        "4000000000",
        "1e3",
        "+.5",
        "5.",
    ]
    # In turn: half a nanosecond, less than half, just below and at 4 x 10^9 s, 1,000 s, 0.5 s, 5 s.
    # They are read in nanoseconds, half of one rounded up.
    found = fields(texts).nanoseconds("field", "s").tolist()
    assert found == [1, 0, 3999999999999999999, 4 * 10**18, 10**12, 5 * 10**8, 5 * 10**9]


@pytest.mark.parametrize(
    "text", ["", "x", "nan", "inf", "1_0", "1,5", "--1", ".", "1e", "1e9999", "\u0661"]
)
def test_what_is_no_time_is_named(text):
    words = f"x.csv: line 3: Field: found {text!r}; expected a number of seconds"
    with pytest.raises(InputError, match=re.escape(words)):
        fields(["1.5", text]).nanoseconds("field", "s")


def test_a_time_beyond_64_bits_is_out_of_range():
    for text in ("9" * 20, "1e999", "-1e10", "4611686019"):
        words = f"line 2: Field: found {text!r}; expected at most 146 years"
        with pytest.raises(InputError, match=words):
            fields([text]).nanoseconds("field", "s")


@given(
    st.lists(st.integers(-5, 2**31 - 1), min_size=1, max_size=30), st.sampled_from(["", ".0", "."])
)
@settings(deadline=None)
def test_tokens_are_integers(numbers, tail):
    assert fields([f"{k}{tail}" for k in numbers]).whole_numbers("field").tolist() == numbers


def test_huge_tokens_are_out_of_range():
    with pytest.raises(InputError, match=r"line 2.*'2147483648'.*21474"):
        fields(["2147483648"]).whole_numbers("field")
    with pytest.raises(InputError, match=r"line 3: Field: found '9{30}'; expected an integer"):
        fields(["1", "9" * 30]).whole_numbers("field")


# Days, nanoseconds of the day, and forms of the time zone.
STAMPS = st.builds(
    lambda day, ns, form: (day, ns, form),
    st.integers(-25_000, 80_000),  # 1901 to 2189
    st.integers(0, 86_400 * 10**9 - 1),
    st.sampled_from(["", "Z", " UTC", "+00", "+00:00", "-00:00", " +0000", "+05:30", "-11"]),
)


@given(st.lists(STAMPS, min_size=1, max_size=20), st.integers(0, 9))
@settings(deadline=None)
def test_timestamps_are_those_of_the_calendar(stamps, digits):
    """Dates are written from days and nanoseconds that were drawn."""
    texts, right = [], []
    for day, ns, zone in stamps:
        ns -= ns % 10 ** (9 - digits)
        second, fraction = divmod(ns, 10**9)
        date = str(np.datetime64(day, "D"))
        time = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"
        point = "." + f"{fraction:09}"[:digits] if digits else ""
        texts.append(f"{date} {time}{point}{zone}")
        minutes = {"+05:30": 330, "-11": -660}.get(zone, 0)
        right.append(day * 86_400 * 10**9 + ns - minutes * 60 * 10**9)
    assert fields(texts).timestamps("field").tolist() == right


@pytest.mark.parametrize(
    "text",
    [
        "2023-02-29 00:00:00", "2023-13-01 00:00:00", "2023-00-01 00:00:00", "2023-01-00 00:00:00",
        "2023-01-01 24:00:00", "2023-01-01 00:60:00", "2023-01-01 00:00:60", "2023-01-01",
        "2023-01-01 00:00:00.", "2023-01-01 00:00:00.1234567890", "2023-01-01 00:00:00x",
        "2023-01-01 00:00:00514", "2023-01-01 00:00:00..5", "2023-01-01 00:00:00.5Z+00:00",
        "2023-01-01x00:00:00", "2023/01/01 00:00:00", "1500-01-01 00:00:00",
        "1899-12-31 00:00:00", "2190-01-01 00:00:00",
        "2023-01-01 00:00:00+00:0", "", "NaT",
    ],
)  # fmt: skip
def test_what_is_no_timestamp_is_named(text):
    with pytest.raises(
        InputError, match=re.escape(f"line 3: Field: found {text!r}; expected a date and")
    ):
        fields(["2024-02-29 23:59:59", text]).timestamps("field")


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 40), st.none() | st.integers(1, 40))
def test_a_window_takes_the_same_rows_however_they_come(sizes, offset, limit):
    window, taken, at = Window(offset, limit), [], 0
    for size in sizes:
        inside = window.take(size)
        taken += list(range(at, at + size))[inside]
        at += size
    end = None if limit is None else offset + limit
    assert taken == list(range(at))[offset:end]
    assert window.taken == len(taken)
    assert window.done == (limit is not None and at >= offset + limit)
