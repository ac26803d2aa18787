"""The window of rows, the blocks of rows and the registry that all trace formats share."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from optsched.problem.errors import InputError
from optsched.problem.registry import Registry

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Block:
    """Consecutive rows of a trace, in the order of the file.

    ``line`` is the line of the file that a row comes from, from 1. Rows without tokens are dropped
    and counted later. Arrivals are nanoseconds since any origin, and ``ttft_s`` and
    ``latency_s`` measured times to the first and the last token in seconds; None if the file has
    none. ``failed`` are requests that the trace marks as such. ``ids`` has a list for each request,
    the ids of its blocks or tokens, and ``follows`` its name and that of the one that it follows.
    ``calls`` has three things of each: its name, a tuple of the names of those that must end before
    it, and the nanoseconds between. A name is the session's and that of the call in it. ``cached``
    has the model of each, cached tokens beside its prompt, and the prompt without them. ``gaps``
    has a list of the seconds between each one's tokens. ``weight``: how much each counts.
    """

    line: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    time_ns: NDArray[np.int64] | None = None
    failed: NDArray[np.bool_] | None = None
    ttft_s: NDArray[np.float64] | None = None
    latency_s: NDArray[np.float64] | None = None
    ids: NDArray[Any] | None = None
    follows: NDArray[Any] | None = None
    calls: NDArray[Any] | None = None
    cached: NDArray[Any] | None = None
    gaps: NDArray[Any] | None = None
    weight: NDArray[np.int64] | None = None

    def pick(self, index: NDArray[np.bool_] | NDArray[np.int64]) -> Block:
        """Return some of the rows, by a mask or by indices."""
        columns: dict[str, Any] = {
            key: None if column is None else column[index] for key, column in vars(self).items()
        }
        return replace(self, **columns)

    @staticmethod
    def join(parts: Sequence[Block]) -> Block:
        """Return the rows of several blocks of one trace, one after the other."""
        columns = dict[str, Any]()
        for key in vars(parts[0]):
            # A column that one part lacks is unknown of the whole trace.
            of_parts = [vars(part)[key] for part in parts]
            absent = any(column is None for column in of_parts)
            columns[key] = None if absent else np.concatenate(of_parts)

        return replace(parts[0], **columns)


def objects(values: Sequence[Any]) -> NDArray[Any]:
    """Return values as a column, also where each is a list, which numpy would spread."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


class Window:
    """The rows to read, which counts the rows of the file as a reader passes them."""

    def __init__(self, offset: int, limit: int | None) -> None:
        self.offset = offset
        self.end = sys.maxsize if limit is None else offset + limit
        self.seen = self.taken = 0

    @property
    def left(self) -> int:
        """Number of rows up to the end of the window, including those to skip."""
        return max(self.end - self.seen, 0)

    @property
    def done(self) -> bool:
        """Whether the reader has passed every row of the window."""
        return not self.left

    def take(self, rows: int) -> slice:
        """Count the next rows of the file, and return which of them are in the window."""
        # Of these rows, those before the window come first, and those behind it last.
        begin = min(max(self.offset - self.seen, 0), rows)
        end = max(begin, min(self.left, rows))
        self.seen += rows
        self.taken += end - begin

        return slice(begin, end)

    def blocks(self, rows: Iterator[T], size: int) -> Iterator[list[T]]:
        """Yield those of a file's rows that are in the window, in lists of at most a size."""
        while not self.done and (block := list(islice(rows, min(size, self.left)))):
            yield block[self.take(len(block))]


class Findings:
    """What is wrong or odd in a trace: rows that cannot be read, and what is worth a warning.

    With ``strict`` either is refused at once. ``ids_tokens`` is how many tokens an id stands for,
    if the user or the file says so. ``fields`` is how many of the format's fields the file has, and
    ``marked`` whether it has those that no other format has, if there are such. ``clients`` is how
    many requests at most the file says that its clients had at once, with the words for it.
    ``accepted`` are the shares of decode steps that accepted each draft. ``units`` are those of
    times by field, and ``model`` is the model's name, as the file shows. ``unreadable`` counts rows
    that cannot be read, and ``first`` is the error of the first, which is in ``first_line``.
    """

    def __init__(self, strict: bool, ids_tokens: int | None = None) -> None:
        self.path, self.strict, self.unreadable = Path(), strict, 0
        self.ids_tokens, self.fields = ids_tokens, 0
        self.marked: bool | None = None
        self.units: dict[str, str] = {}
        self.model = ""
        self.clients: tuple[str, int | None] | None = None
        self.accepted: Sequence[float] = ()
        self.first_line = sys.maxsize
        self.first: InputError | None = None
        self._odd: dict[str, tuple[int, int]] = {}  # by words: the first line, the number of rows

    def at(self, line: int, words: str) -> InputError:
        """Return an error that names the file and the line."""
        return InputError(f"{self.path}: line {line}: {words}")

    def skip(self, line: int, words: str | InputError) -> None:
        """Count a row that cannot be read, and keep the error of the first."""
        error = words if isinstance(words, InputError) else self.at(line, words)
        if self.strict:
            raise error

        self.unreadable += 1
        if line < self.first_line:
            self.first_line, self.first = line, error

    def check(self, line: int, words: str) -> None:
        """Refuse a row that is only left out or moved, if strict."""
        if self.strict:
            raise self.at(line, words)

    def odd(
        self, words: str, line: int = 0, rows: int = 0, harmless: bool = False, sure: bool = False
    ) -> None:
        """Count rows that are odd in one way, from a line on; no line means the whole trace.

        What is surely wrong is refused, and with ``strict`` what is not harmless. ``rows`` is how
        many are told of here.
        """
        if sure or (self.strict and not harmless):
            raise self.at(line, words) if line else InputError(f"{self.path}: {words}")

        first, count = self._odd.get(words, (line, 0))
        self._odd[words] = (min(first, line), count + rows)

    def notes(self) -> list[str]:
        """Return what was odd in words, without rows that cannot be read."""
        return [
            f"{words} ({rows} row{'s' * (rows > 1)}, the first in line {line})" if line else words
            for words, (line, rows) in self._odd.items()
        ]


# The scripts that put no spaces between words: Thai, Lao, Burmese, Khmer, kana and Chinese.
_NO_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff"
_NO_SPACES += "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_NO_SPACES}]|[^\s{_NO_SPACES}]+")


def words(text: str) -> list[str]:
    """Return the words of a text; in a script without spaces, as Chinese, its characters."""
    return text.split() if text.isascii() else _WORD.findall(text)  # which is slower


def has_word(text: str, length: int) -> bool:
    """Return whether one of the words that `words` counts is longer than this."""
    return any(len(word) > length for word in _WORD.findall(text))


@dataclass(frozen=True, eq=False)
class Source:
    """The file and the options that a format's reader gets.

    The reader counts every row with ``window``, and stops once it is done. ``columns`` are names by
    field and ``units`` units of times by field, with that of all others by an empty name: both as
    far as the user gave them. ``success`` are the user's words of a status that mean success, and
    ``run`` is the run to read, from 1, or from -1 for the last. If arrivals are ``drawn``, a reader
    need not read any time. In a ``closed`` loop those of calls that follow others are not kept,
    and count as drawn. With ``shared`` texts give the ids of their tokens, where ``tokens`` returns
    those of a text and not None for each. The reader tells ``findings`` what is wrong or odd; the
    default refuses both.
    """

    path: Path
    window: Window
    columns: Mapping[str, str] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    success: frozenset[str] = frozenset()
    run: int | None = None
    drawn: bool = False
    closed: bool = False
    shared: bool = False
    tokens: Callable[[str], Sequence[Any]] = words
    form: TraceFormat | None = None
    findings: Findings = field(default_factory=lambda: Findings(strict=True))

    def __post_init__(self) -> None:
        self.findings.path = self.path

    def unit(self, field: str, default: str) -> str:
        """Return the unit of a field: the user's, or else the format's. Beside dates it is s."""
        unit = self.units.get(field) or self.units.get("") or default
        return "s" if unit == "datetime" and field in ("ttft", "latency") else unit

    def says_unit(self, field: str) -> bool:
        """Return whether the user says the unit of a field."""
        return bool(self.unit(field, ""))


Reader = Callable[[Source], Iterator[Block]]


@dataclass(frozen=True)
class TraceFormat:
    """A registered trace format.

    ``options`` are those options that only some formats take and this one does. ``unit`` is that
    of arrivals if the user gives none, in a format whose files may have another; else empty.
    ``ids_tokens`` is how many tokens an id stands for, in a format with ids of prompts, and
    ``scopes`` are the words by which a file may say where equal ids mean equal tokens. ``words``
    has tuples of which a file of this format has a word each.
    """

    name: str
    summary: str
    read: Reader
    options: tuple[str, ...] = ()
    unit: str = ""
    ids_tokens: int = 0
    scopes: tuple[str, ...] = ("global",)
    words: tuple[tuple[str, ...], ...] = ()


FORMATS: Registry[TraceFormat] = Registry(
    "trace format", "optsched.workloads.traces", plugins="optsched.traces"
)


def trace_format(name: str, summary: str, **options: Any) -> Callable[[Reader], Reader]:
    """Return a decorator that registers a function as the reader of a `TraceFormat`."""

    def register(read: Reader) -> Reader:
        FORMATS.add(name, TraceFormat(name, summary, read, **options))
        return read

    return register
