"""Fields of a trace as numbers, durations and timestamps, read a whole column at a time.

Values in an unusual notation are read one by one, which gives the same result more slowly.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.problem.columns import MAX_TOKENS
from optsched.problem.errors import InputError
from optsched.workloads.traces.base import Source

PLACES = {"s": 9, "ms": 6, "us": 3, "ns": 0}
"""Decimal places of a nanosecond in each unit of time."""

DURATIONS = {"ttft": "first_token_at", "latency": "finished_at"}
"""Fields that are durations from the arrival, and those that are the same as points in time."""

TIMES = ("arrival", *DURATIONS, *DURATIONS.values())
"""Fields that have a unit."""

UNIT_WORDS = {
    word: unit
    for unit, words in {
        "s": "s sec secs second seconds",
        "ms": "ms msec milli millis millisecond milliseconds",
        "us": "us usec micro micros microsecond microseconds \u03bcs",
        "ns": "ns nsec nano nanos nanosecond nanoseconds",
    }.items()
    for word in words.split()
}
"""Units by the words for them, in small letters."""

_NUMBER = re.compile(r"[+-]?(\d{1,30}(\.\d{0,60})?|\.\d{1,60})([eE][+-]?\d{1,3})?", re.ASCII)
_WITH_UNIT = re.compile(r"([\d.eE+-]+)\s*([^\W\d_]+)")
_STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?"
    r"(?: ?(?:Z|UTC|([+-])(\d\d)(?::?(\d\d))?))?",
    re.ASCII,
)
_YEARS = ("1900", "2190")  # differences of times between them fit into 64-bit nanoseconds


class Fields:
    """Consecutive rows of a file, with the fields that a reader wants as columns.

    Rows with a value that was asked for and cannot be read are ``unreadable``. The value then
    reads as 0, and the findings of the source are told.

    Parameters
    ----------
    source : Source
        The file.
    line : sequence of int, shape (n,)
        Line of the file that each row comes from, counted from 1.
    names : mapping of str to str
        Name in the file of each field that was found.
    texts : mapping of str to sequence of str, shape (n,)
        Texts of each field that was found. ``columns`` has them in UTF-8.
    missing : mapping of (str, int) to InputError
        Errors by field and row, for values that are not there. They count once the value is asked
        for, so that a failed request may lack them.
    """

    def __init__(
        self,
        source: Source,
        line: Sequence[int],
        names: Mapping[str, str],
        texts: Mapping[str, Sequence[str]],
        missing: Mapping[tuple[str, int], InputError] | None = None,
    ) -> None:
        self.source, self.names, self.missing = source, names, missing or {}
        self.line = np.asarray(line, dtype=np.int64)
        self.unreadable = np.zeros(len(self.line), dtype=bool)
        # Zero bytes are written as \\0, since numpy drops them at the end of a text.
        self.columns = {
            field: np.array(
                [
                    text.strip().replace("\0", r"\0").encode(errors="backslashreplace")
                    for text in column
                ],
                dtype=np.bytes_,
            )
            for field, column in texts.items()
        }

    def whole_numbers(self, field: str, skip: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
        """Return a field as integers.

        `skip` (shape (n,)): rows that are not read and get 0, such as failed requests that have no
        such value.
        """
        column = self._read(field, skip)
        plain = np.char.isdigit(column) & (np.char.str_len(column) <= 18)
        value = np.where(plain, column, b"0").astype(np.int64)
        plain &= value <= MAX_TOKENS
        right = f"an integer of at most {MAX_TOKENS}"

        return self._one_by_one(field, value, ~plain, exact_whole, lambda _: right)

    def nanoseconds(
        self, field: str, unit: str, skip: NDArray[np.bool_] | None = None
    ) -> NDArray[np.int64]:
        """Return a field of times in nanoseconds, with halves rounded up."""
        value, plain = _decimals(self._read(field, skip), PLACES[unit])
        return self._one_by_one(
            field,
            value,
            ~plain,
            lambda text: exact_ns(text, unit),
            lambda text: _right_time(text, field, unit),
        )

    def seconds(
        self, field: str, unit: str, skip: NDArray[np.bool_] | None = None
    ) -> NDArray[np.float64]:
        """Return a field of durations in seconds."""
        return np.asarray(self.nanoseconds(field, unit, skip) / 1e9, dtype=np.float64)

    def points(
        self, field: str, unit: str, skip: NDArray[np.bool_] | None = None
    ) -> NDArray[np.int64]:
        """Return a field of points in time in nanoseconds, as numbers or as dates."""
        if unit == "datetime":
            return self.timestamps(field, skip)

        return self.nanoseconds(field, unit, skip)

    def timestamps(self, field: str, skip: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
        """Return a field of dates and times in nanoseconds since 1970."""
        n = len(self.line)
        asked = np.ones(n, dtype=bool) if skip is None else ~skip
        none = np.zeros(n, dtype=np.int64)
        return self._one_by_one(field, none, asked, exact_stamp, _right_stamp)

    def _one_by_one(
        self,
        field: str,
        value: NDArray[np.int64],
        rows: NDArray[np.bool_],
        read: Callable[[str], int | None],
        right: Callable[[str], str],
    ) -> NDArray[np.int64]:
        """Return values with those of some rows read from their texts, or refused."""
        for i in np.flatnonzero(rows).tolist():
            text = self._text(field, i)
            exact = read(text)
            if exact is None:
                self.refuse(field, i, right(text))

            value[i] = exact or 0

        return value

    def _read(self, field: str, skip: NDArray[np.bool_] | None) -> NDArray[Any]:
        column = self.columns[field]
        return column if skip is None else np.where(skip, b"0", column)

    def _text(self, field: str, row: int) -> str:
        return str(self.columns[field][row].decode()).strip()

    def odd(self, words: str, rows: NDArray[np.bool_], *, harmless: bool = False) -> None:
        """Tell the findings that some rows are odd, if there are any."""
        if rows.any():
            line, count = int(self.line[np.argmax(rows)]), int(rows.sum())
            self.source.findings.odd(words, line, count, harmless=harmless)

    def refuse(self, field: str, row: int, right: str, found: object = None) -> None:
        """Tell the findings that a row cannot be read: what was found and what is right."""
        if self.unreadable[row]:
            return

        line, shown = int(self.line[row]), repr(self._text(field, row) if found is None else found)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        words = f"{self.names[field]}: found {shown}; expected {right}"
        self.source.findings.skip(line, self.missing.get((field, row), words))
        self.unreadable[row] = True


def _right_time(text: str, field: str, unit: str) -> str:
    """Return what is expected where a text is no time, and which option reads it."""
    if _NUMBER.fullmatch(text):
        return "at most 146 years; is the unit another one (unit, --unit)?"

    right = "a number of " + {"s": "seconds"}.get(unit, unit)
    if not _STAMP.fullmatch(text):
        return right
    if field in DURATIONS:
        point = DURATIONS[field]
        return f"{right}; a column of points in time is named by {point} (--column {point}=NAME)"

    return right + "; the unit 'datetime' reads dates and times"


def _right_stamp(text: str) -> str:
    hint = "; the units s, ms, us and ns read numbers" if _NUMBER.fullmatch(text) else ""
    return "a date and time like 2023-11-16 18:15:46.6805900" + hint


def exact_whole(text: str) -> int | None:
    """Return a text as an integer of at most `MAX_TOKENS`, None if it is none."""
    exact = Decimal(text) if _NUMBER.fullmatch(text) else Decimal("NaN")
    return int(exact) if exact == exact.to_integral_value() and abs(exact) <= MAX_TOKENS else None


def exact_ns(text: str, unit: str) -> int | None:
    """Return the nanoseconds of a text that is a number of some unit."""
    if (own := _WITH_UNIT.fullmatch(text)) is not None:
        text, unit = own[1], UNIT_WORDS.get(own[2].casefold(), "")
    if not unit or _NUMBER.fullmatch(text) is None:
        return None

    exact = Decimal(text).scaleb(PLACES[unit])
    return int(exact.quantize(Decimal(1), ROUND_HALF_UP)) if abs(exact) < 2**62 else None


def exact_stamp(text: str) -> int | None:
    """Return the nanoseconds since 1970 of a text that is a date and time."""
    match = _STAMP.fullmatch(text)
    if match is None or not _YEARS[0] <= text[:4] < _YEARS[1]:
        return None

    day, clock, fraction, sign, hours, minutes = match.groups()
    midnight = _midnight(day)
    if midnight is None or clock > "23:59:59" or clock[3] > "5" or clock[6] > "5":
        return None

    seconds = int(clock[:2]) * 3600 + int(clock[3:5]) * 60 + int(clock[6:])
    zone = 0 if sign is None else int(sign + "1") * (int(hours) * 60 + int(minutes or 0))
    return (midnight + seconds - zone * 60) * 10**9 + int((fraction or "").ljust(9, "0"))


@functools.lru_cache(maxsize=1024)
def _midnight(day: str) -> int | None:
    """Return the seconds from 1970 to the beginning of a day, None for one that does not exist."""
    try:
        return (date.fromisoformat(day) - date(1970, 1, 1)).days * 86_400
    except ValueError:
        return None


def _decimals(
    texts: NDArray[np.bytes_], places: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return plain decimal numbers times ``10**places``, and which texts hold one.

    A plain number is made of digits, with at most one point after the first digit. Halves are
    rounded up.
    """
    whole, _, fraction = np.moveaxis(np.char.partition(texts, b"."), -1, 0)
    size = np.char.str_len(whole)
    plain = np.char.isdigit(whole) & (np.char.isdigit(fraction) | (fraction == b""))
    # Values stay below 4e18 nanoseconds, which 64 bits hold.
    plain &= (size < 19 - places) | ((size == 19 - places) & (whole < b"4"))
    value = np.where(plain, whole, b"0").astype(np.int64) * 10**places
    # One digit after the last place decides which way to round.
    digits = np.char.ljust(np.where(plain, fraction, b"0"), places + 1, b"0")

    return value + (digits.astype(f"S{places + 1}").astype(np.int64) + 5) // 10, plain
