"""Fields of a trace as numbers, durations and points in time, read exactly."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import UTC, datetime, timedelta
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
    r"(\d{4}-\d\d-\d\d)[ T]((?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d)(?:\.(\d{1,9}))?"
    r"(?: ?(Z|UTC|[+-]\d\d(?::?\d\d)?))?",
    re.ASCII,
)  # the day, the second, its fraction and the time zone
_ORIGIN = datetime(1970, 1, 1, tzinfo=UTC)
_YEARS = ("1900", "2190")  # differences of times between them fit into 64-bit nanoseconds


Mask = NDArray[np.bool_]


@dataclass(eq=False)
class Fields:
    """Consecutive rows of a file, with the fields that a reader wants as ``columns`` of texts.

    Rows with a value that was asked for and cannot be read are ``unreadable``. The value then
    reads as 0, and the findings of the source are told. ``line`` has the line of the file that each
    row comes from, from 1, and ``names`` the name in the file of each field. ``missing`` has errors
    by field and row, for values that are not there. They count once the value is asked for, so that
    a failed request may lack them. ``raw`` has values as they stand in the file.
    """

    source: Source
    lines: InitVar[Sequence[int]]
    names: Mapping[str, str]
    texts: InitVar[Mapping[str, Sequence[str]]]
    missing: Mapping[tuple[str, int], InputError] = field(default_factory=dict)
    raw: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __post_init__(self, lines: Sequence[int], texts: Mapping[str, Sequence[str]]) -> None:
        self.line = np.asarray(lines, dtype=np.int64)
        self.unreadable = np.zeros(len(self.line), dtype=bool)
        self.columns = {
            name: np.array([text.strip() for text in column], dtype=object)
            for name, column in texts.items()
        }

    def whole_numbers(self, field: str, skip: Mask | None = None) -> NDArray[np.int64]:
        """Return a field as integers, 0 where `skip` says that a request need not have one."""
        expected = f"an integer of at most {MAX_TOKENS}"
        return self._column(field, skip, exact_whole, lambda _: expected)

    def nanoseconds(self, field: str, unit: str, skip: Mask | None = None) -> NDArray[np.int64]:
        """Return a field of times in nanoseconds, with halves rounded up."""

        def expected(text: str) -> str:
            return _expected_time(text, field, unit)

        return self._column(field, skip, lambda text: exact_ns(text, unit), expected)

    def seconds(self, field: str, unit: str, skip: Mask | None = None) -> NDArray[np.float64]:
        """Return a field of durations in seconds."""
        return np.asarray(self.nanoseconds(field, unit, skip) / 1e9, dtype=np.float64)

    def points(self, field: str, unit: str, skip: Mask | None = None) -> NDArray[np.int64]:
        """Return a field of points in time in nanoseconds, as numbers or as dates."""
        if unit == "datetime":
            return self.timestamps(field, skip)

        return self.nanoseconds(field, unit, skip)

    def timestamps(self, field: str, skip: Mask | None = None) -> NDArray[np.int64]:
        """Return a field of dates and times in nanoseconds since 1970."""
        return self._column(field, skip, exact_stamp, _expected_stamp)

    def _column(
        self,
        field: str,
        skip: Mask | None,
        read: Callable[[str], int | None],
        expected: Callable[[str], str],
    ) -> NDArray[np.int64]:
        """Return a field as integers, 0 in the rows to skip and where it cannot be read.

        ``read`` returns the number of a text, or None; ``expected`` says then what it should be.
        """
        texts = self.columns[field]
        wanted = range(len(texts)) if skip is None else np.flatnonzero(~skip).tolist()
        numbers = list(map(read, texts if skip is None else texts[wanted]))

        for k, number in enumerate(numbers if None in numbers else ()):
            if number is None:
                self.refuse(field, wanted[k], expected(texts[wanted[k]]))

        value = np.zeros(len(texts), dtype=np.int64)
        value[wanted] = [number or 0 for number in numbers]
        return value

    def odd(self, words: str, rows: Mask, *, harmless: bool = False) -> None:
        """Tell the findings that some rows are odd, if there are any."""
        if rows.any():
            line, count = int(self.line[np.argmax(rows)]), int(rows.sum())
            self.source.findings.odd(words, line, count, harmless=harmless)

    def refuse(self, field: str, row: int, expected: str, found: object = None) -> None:
        """Tell the findings that a row cannot be read: what was found and what was expected."""
        if self.unreadable[row]:  # it counts once
            return

        shown = repr(self.columns[field][row] if found is None else found)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        words = f"{self.names[field]}: found {shown}; expected {expected}"
        self.source.findings.skip(int(self.line[row]), self.missing.get((field, row), words))
        self.unreadable[row] = True


def _expected_time(text: str, field: str, unit: str) -> str:
    """Return what is expected where a text is no time, and which option reads it."""
    if _NUMBER.fullmatch(text):  # a number is refused only if it is 2^62 ns or more
        return "at most 146 years; is the unit another one (unit, --unit)?"

    expected = "a number of " + {"s": "seconds"}.get(unit, unit)
    if exact_stamp(text) is None:
        return expected
    if field in DURATIONS:
        point = DURATIONS[field]
        return f"{expected}; a column of points in time is named by {point} (--column {point}=NAME)"

    return expected + "; the unit 'datetime' reads dates and times"


def _expected_stamp(text: str) -> str:
    """Return what is expected where a text is no date, and which unit reads it."""
    hint = "; the units s, ms, us and ns read numbers" if _NUMBER.fullmatch(text) else ""
    return "a date and time like 2023-11-16 18:15:46.6805900" + hint


def exact_whole(text: str) -> int | None:
    """Return a text as an integer of at most `MAX_TOKENS`, None if it is none."""
    if len(text) < 10 and text.isascii() and text.isdigit():  # nearly all are plain like this
        return int(text)
    if _NUMBER.fullmatch(text) is None:
        return None

    exact = Decimal(text)  # 1e3 and 5.0 are integers, too
    return int(exact) if exact == exact.to_integral_value() and abs(exact) <= MAX_TOKENS else None


def exact_ns(text: str, unit: str) -> int | None:
    """Return the nanoseconds of a text that is a number of some unit, with halves rounded up."""
    # Nearly all are plain digits, with a point or without one. Up to 9 digits stay below 2^62 ns in
    # every unit, and `_NUMBER` takes as long a fraction.
    whole, _, fraction = text.partition(".")
    digits = whole + fraction
    is_plain = digits.isascii() and digits.isdigit()
    if is_plain and 0 < len(whole) < 10 and len(fraction) < 61:
        places = PLACES[unit]  # one digit more decides which way to round
        return (int(whole + fraction[: places + 1].ljust(places + 1, "0")) + 5) // 10

    # A unit behind the number, as in ``12 ms``, counts before that of the column.
    if (match := _WITH_UNIT.fullmatch(text)) is not None:
        text, unit = match[1], UNIT_WORDS.get(match[2].casefold(), "")
    if not unit or _NUMBER.fullmatch(text) is None:
        return None

    # Below 2^62 ns, differences of two times fit into 64 bits.
    exact = Decimal(text).scaleb(PLACES[unit])
    return int(exact.quantize(Decimal(1), ROUND_HALF_UP)) if abs(exact) < 2**62 else None


def exact_stamp(text: str) -> int | None:
    """Return the nanoseconds since 1970 of a text that is a date and time, UTC without a zone.

    It is None for other texts, and for years in which differences might exceed 64 bits.
    """
    match = _STAMP.fullmatch(text)
    # The day begins with the year in four digits, so texts compare as years do.
    if match is None or not _YEARS[0] <= match[1] < _YEARS[1]:
        return None

    day, time, fraction, zone = match.groups(default="")
    zone = "Z" if zone in ("", "UTC") else zone
    try:
        second = (datetime.fromisoformat(f"{day}T{time}{zone}") - _ORIGIN) // timedelta(seconds=1)
    except ValueError:  # a day that does not exist
        return None

    return second * 10**9 + int(fraction.ljust(9, "0"))
