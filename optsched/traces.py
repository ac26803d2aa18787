"""Traces of real serving systems as instances.

A format is one function here that reads rows into a `Rows`; what follows (the window of rows,
arrivals relative to the first, rounds, the KV capacity) is the same for all.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from optsched.columns import MAX_TOKENS
from optsched.errors import InputError
from optsched.instance import Instance, KvAccounting

DEFAULT_KV_CAPACITY = 100_000
"""KV tokens of an instance in seconds, where none are given: Llama-2-7B on one A100 (003)."""

_CHUNK_ROWS = 65_536


class TraceWarning(UserWarning):
    """Something in a trace was left out."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a trace's window that are requests.

    Parameters
    ----------
    time_ns : ndarray of int64, shape (n,)
        Arrival of each request in nanoseconds, from any origin.
    prompt_tokens, output_tokens : ndarray of int64, shape (n,)
    line : ndarray of int64, shape (n,)
        Line of the file that each request is from, counted from 1.
    read : int
        Rows of the window, dropped ones included.
    dropped : int
        Rows without a positive number of prompt and output tokens.
    first_dropped_line : int, optional
    """

    time_ns: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    line: NDArray[np.int64]
    read: int
    dropped: int
    first_dropped_line: int | None


@dataclass(frozen=True)
class TraceReport:
    """What became of the rows of a trace.

    Parameters
    ----------
    read : int
        Rows read: at most ``limit``, after ``offset``.
    dropped : int
        Rows left out for want of a positive number of tokens.
    first_dropped_line : int, optional
        Line of the first of them.
    sorted : bool
        Whether time never goes backwards.
    """

    read: int
    dropped: int
    first_dropped_line: int | None
    sorted: bool


Reader = Callable[[Path, int, int | None], Rows]
"""Reads rows ``offset`` .. ``offset + limit`` of a file."""

_FORMATS: dict[str, tuple[str, Reader]] = {}


def trace_formats() -> dict[str, str]:
    """Return every format by name, with a line on each."""
    return {name: summary for name, (summary, _) in _FORMATS.items()}


def read_trace(
    format: str,
    path: str | Path,
    *,
    offset: int = 0,
    limit: int | None = None,
    kv_capacity: int | None = None,
    kv_accounting: KvAccounting | None = None,
    rate_scale: float = 1.0,
    round_seconds: float | None = None,
    strict: bool = False,
    name: str | None = None,
) -> Instance:
    """Return the instance of a trace, or of a window of its rows.

    Rows stay in the file's order. Arrivals count from the earliest request of the window, which
    is the first row unless time goes backwards. Rows with zero or negative tokens are dropped,
    with a `TraceWarning` that counts them; `read_trace_report` returns the count.

    Parameters
    ----------
    format : str
        One of `trace_formats`.
    path : str or Path
        The file; ``.gz`` is read too.
    offset, limit : int
        Rows to skip, and rows to read after them (None: all). Both count rows of the file, also
        those that are dropped, so that windows side by side never share a request.
    kv_capacity : int, optional
        In tokens. None: `DEFAULT_KV_CAPACITY` in seconds; in rounds it must be given.
    kv_accounting : {"generated", "cached"}, optional
        None: cached in seconds, generated in rounds.
    rate_scale : float
        Requests come this many times as fast.
    round_seconds : float, optional
        Length of a round: arrivals become the rounds in which they fall, floor(t / length),
        computed exactly. None: an instance in seconds.
    strict : bool
        Refuse a file with a row that would be dropped.
    name : str, optional
        Name of the instance; None: that of the file.

    Raises
    ------
    InputError
        A malformed row, with line, field and value; no request in the window; one that does not
        fit into the KV capacity; or an option without meaning.
    """
    instance, report = read_trace_report(
        format,
        path,
        offset=offset,
        limit=limit,
        kv_capacity=kv_capacity,
        kv_accounting=kv_accounting,
        rate_scale=rate_scale,
        round_seconds=round_seconds,
        strict=strict,
        name=name,
    )
    if report.dropped:
        warnings.warn(
            f"{path}: dropped {report.dropped} of {report.read} rows for zero or negative tokens, "
            f"the first in line {report.first_dropped_line}",
            TraceWarning,
            stacklevel=2,
        )
    return instance


def read_trace_report(
    format: str,
    path: str | Path,
    *,
    offset: int = 0,
    limit: int | None = None,
    kv_capacity: int | None = None,
    kv_accounting: KvAccounting | None = None,
    rate_scale: float = 1.0,
    round_seconds: float | None = None,
    strict: bool = False,
    name: str | None = None,
) -> tuple[Instance, TraceReport]:
    """Return what `read_trace` does, and a report on the rows instead of a warning."""
    if format not in _FORMATS:
        raise InputError(f"trace format: {format!r} is unknown; known are {', '.join(_FORMATS)}")
    _whole_option(offset, "offset", 0)
    if limit is not None:
        _whole_option(limit, "limit", 1)
    scale = _positive(rate_scale, "rate_scale")
    if kv_capacity is None:
        if round_seconds is not None:
            raise InputError("kv_capacity: missing; an instance in rounds needs one, in tokens")
        kv_capacity = DEFAULT_KV_CAPACITY
    _whole_option(kv_capacity, "kv_capacity", 1)
    file = Path(path)
    rows = _FORMATS[format][1](file, offset, limit)
    if strict and rows.dropped:
        raise InputError(
            f"{file}: line {rows.first_dropped_line}: zero or negative tokens; "
            "at least 1 prompt and 1 output token is right"
        )
    if not len(rows.line):
        raise InputError(
            f"{file}: no requests: {rows.read} rows"
            + (f" after the first {offset}" if offset else "")
            + (f", {rows.dropped} of them without tokens" if rows.dropped else "")
            + "; rows with at least 1 prompt and 1 output token are right"
        )
    since = rows.time_ns - rows.time_ns.min()
    arrival: NDArray[Any]
    if round_seconds is None:
        arrival = since / 1e9 / float(scale)
    else:
        arrival = _rounds(since, scale * _positive(round_seconds, "round_seconds"))
    instance = _instance(
        file,
        rows,
        arrival=arrival,
        kv_capacity=kv_capacity,
        time_unit="second" if round_seconds is None else "round",
        kv_accounting=kv_accounting or ("cached" if round_seconds is None else "generated"),
        name=file.name.removesuffix(".gz").rpartition(".")[0] if name is None else name,
    )
    in_order = bool((np.diff(rows.time_ns) >= 0).all())
    return instance, TraceReport(rows.read, rows.dropped, rows.first_dropped_line, in_order)


def _instance(file: Path, rows: Rows, **fields: Any) -> Instance:
    try:
        return Instance(
            prompt_tokens=rows.prompt_tokens, output_tokens=rows.output_tokens, **fields
        )
    except InputError as error:
        found = re.search(r"request (\d+)", str(error))
        line = f" (line {rows.line[int(found[1])]})" if found else ""
        hint = "; a larger kv_capacity is right" if "kv_capacity" in str(error) else ""
        raise InputError(f"{file}: {error}{line}{hint}") from None


def _rounds(since_ns: NDArray[np.int64], length_s: Fraction) -> NDArray[np.int64]:
    """Return floor(time / length), exactly: 0.3 s is round 3 of 0.1 s, not 2."""
    step = length_s * 10**9
    if int(since_ns.max()) * step.denominator < 2**63 and step.numerator < 2**63:
        return since_ns * step.denominator // step.numerator
    exact = [int(t) * step.denominator // step.numerator for t in since_ns]
    return np.array(exact, dtype=object)


def _positive(value: float, name: str) -> Fraction:
    """Return a positive number as the decimal that it prints as."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise InputError(f"{name}: {value!r} is not a number")
    if not 0 < value < float("inf"):
        raise InputError(f"{name}: {value!r}; a finite number above 0 is right")
    return Fraction(str(value))


def _whole_option(value: int, name: str, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise InputError(f"{name}: {value!r}; an integer >= {low} is right")


def trace_format(name: str, summary: str) -> Callable[[Reader], Reader]:
    """Register the decorated function as the reader of trace format ``name``."""

    def register(reader: Reader) -> Reader:
        _FORMATS[name] = (summary, reader)
        return reader

    return register


_STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d{1,9})?)(?:Z|[+-]00:?00|([+-])(\d\d):?(\d\d))?",
    re.ASCII,
)
_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@trace_format("azure", "Azure LLM inference traces 2023 and 2024 (CSV)")
def _read_azure(path: Path, offset: int, limit: int | None) -> Rows:
    """Read TIMESTAMP, ContextTokens, GeneratedTokens in chunks, and no further than needed."""
    parts: list[tuple[NDArray[np.int64], ...]] = []
    read = dropped = 0
    first_dropped = None
    with _open_text(path) as stream:
        header = next(csv.reader([stream.readline()]), [])
        columns = [field.strip() for field in header]
        missing = [field for field in _AZURE if field not in columns]
        if missing:
            raise InputError(
                f"{path}: line 1: {missing[0]}: missing in the header {','.join(columns)!r:.80}; "
                f"{','.join(_AZURE)} is right"
            )
        where = [columns.index(field) for field in _AZURE]
        for lines, texts in _chunks(path, stream, offset, limit):
            stamp, prompt, output = _azure_columns(path, lines, texts, where, len(columns))
            good = (prompt > 0) & (output > 0)
            if not good.all():
                first_dropped = first_dropped or int(lines[np.argmin(good)])
                dropped += int((~good).sum())
            read += len(lines)
            parts.append((stamp[good], prompt[good], output[good], lines[good]))
    time_ns, prompts, outputs, kept = (
        np.concatenate([part[k] for part in parts] or [np.zeros(0, dtype=np.int64)])
        for k in range(4)
    )
    return Rows(time_ns, prompts, outputs, kept, read, dropped, first_dropped)


@contextmanager
def _open_text(path: Path) -> Iterator[TextIO]:
    """Open a text file, its troubles while it is open turned into input errors."""
    try:
        with (
            (gzip.open if path.suffix == ".gz" else open)(path, "rb") as raw,
            io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as stream,
        ):
            yield stream
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory; a file is right") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text ({error.reason})") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def _chunks(
    path: Path, stream: TextIO, offset: int, limit: int | None
) -> Iterator[tuple[NDArray[np.int64], list[str]]]:
    """Yield the line numbers and texts of the window's rows, blank lines left out.

    Raises
    ------
    InputError
        An offset that leaves no row of a file that has some.
    """
    at, skip, left = 1, offset, limit
    found = False
    while left is None or left > 0:
        size = _CHUNK_ROWS if left is None or skip else min(left, _CHUNK_ROWS)
        texts = list(islice(stream, size))
        if not texts:
            if offset and offset > skip and not found:
                raise InputError(
                    f"{path}: offset {offset} leaves no request: the file has {offset - skip} "
                    f"rows; an offset of at most {offset - skip - 1} is right"
                )
            return
        lines = np.arange(at + 1, at + 1 + len(texts))
        at += len(texts)
        if any(text.isspace() for text in texts):
            full = [i for i, text in enumerate(texts) if not text.isspace()]
            lines, texts = lines[full], [texts[i] for i in full]
        if skip:
            passed = min(skip, len(texts))
            skip -= passed
            lines, texts = lines[passed:], texts[passed:]
        if left is not None:
            lines, texts = lines[:left], texts[:left]
            left -= len(texts)
        if texts:
            found = True
            yield lines, texts


def _azure_columns(
    path: Path, lines: NDArray[np.int64], texts: list[str], where: list[int], width: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return time in nanoseconds, prompt and output tokens of a chunk of rows."""
    try:
        rows = list(csv.reader(texts, strict=True))
    except csv.Error as error:
        raise InputError(f"{path}: near line {lines[0]}: not CSV ({error})") from None
    widths = set(map(len, rows))
    if len(rows) != len(texts) or widths != {width}:
        i = next((i for i, row in enumerate(rows) if len(row) != width), len(rows) - 1)
        raise InputError(
            f"{path}: line {lines[i]}: has {len(rows[i])} fields in {texts[i].strip()!r:.80}; "
            f"{width} is right"
        )
    columns = list(zip(*rows, strict=True))
    stamps = _stamps(path, lines, columns[where[0]])
    prompt, output = (_tokens(path, lines, columns[where[k]], _AZURE[k]) for k in (1, 2))
    return stamps, prompt, output


def _stamps(path: Path, lines: NDArray[np.int64], texts: tuple[str, ...]) -> NDArray[np.int64]:
    zones = np.zeros(len(texts), dtype=np.int64)
    plain = []
    for i, text in enumerate(texts):
        match = _STAMP.fullmatch(text)
        if match is None:
            raise _bad_stamp(path, lines[i], text)
        stamp, sign, hours, minutes = match.groups()
        plain.append(stamp)
        if sign is not None:
            zones[i] = (1 if sign == "+" else -1) * (int(hours) * 60 + int(minutes))
    try:
        stamps = np.array(plain, dtype="datetime64[ns]")
    except ValueError:
        for i, stamp in enumerate(plain):
            try:
                np.datetime64(stamp, "ns")
            except ValueError:
                raise _bad_stamp(path, lines[i], texts[i]) from None
        raise
    # The range of 64-bit nanoseconds is 1678 to 2261; numpy wraps silently beyond it.
    wrapped = stamps.astype("datetime64[Y]").astype(np.int64) + 1970 != np.fromiter(
        (int(stamp[:4]) for stamp in plain), dtype=np.int64, count=len(plain)
    )
    if wrapped.any():
        i = int(np.argmax(wrapped))
        raise _bad_stamp(path, lines[i], texts[i])
    return stamps.astype(np.int64) - zones * 60_000_000_000


def _bad_stamp(path: Path, line: int, text: str) -> InputError:
    return InputError(
        f"{path}: line {line}: TIMESTAMP: {text!r:.80} is not a date and time; "
        "2023-11-16 18:15:46.6805900 is the form"
    )


def _tokens(
    path: Path, lines: NDArray[np.int64], texts: tuple[str, ...], field: str
) -> NDArray[np.int64]:
    digits = "".join(texts)
    plain = digits.isascii() and digits.isdigit() and all(texts) and max(map(len, texts)) < 19
    if not plain:
        for i, text in enumerate(texts):
            if not _INTEGER.fullmatch(text):  # int() alone would take '1_000'
                raise InputError(
                    f"{path}: line {lines[i]}: {field}: {text!r:.80} is not an integer "
                    f"of at most {MAX_TOKENS}"
                )
    tokens = np.fromiter(map(int, texts), dtype=np.int64, count=len(texts))
    if tokens.size and tokens.max() > MAX_TOKENS:
        i = int(np.argmax(tokens > MAX_TOKENS))
        raise InputError(
            f"{path}: line {lines[i]}: {field}: {tokens[i]} is out of range; "
            f"at most {MAX_TOKENS} is right"
        )
    return tokens
