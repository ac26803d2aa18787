"""What every trace format shares: the window of rows, blocks of rows, and the registry."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.problem.registry import Registry


@dataclass(frozen=True, eq=False)
class Block:
    """Consecutive rows of a trace, as they stand in the file.

    Parameters
    ----------
    line : ndarray of int64, shape (n,)
        Line of the file that each row is from, counted from 1.
    prompt_tokens, output_tokens : ndarray of int64, shape (n,)
        Possibly zero or negative: whoever collects blocks drops such rows and counts them.
    time_ns : ndarray of int64, shape (n,), optional
        Arrivals in nanoseconds, from any origin; None: the format carries none.
    failed : ndarray of bool, shape (n,), optional
        Requests that the trace marks as failed.
    ttft_s, latency_s : ndarray of float64, shape (n,), optional
        Measured times to the first and the last token in seconds.
    """

    line: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    time_ns: NDArray[np.int64] | None = None
    failed: NDArray[np.bool_] | None = None
    ttft_s: NDArray[np.float64] | None = None
    latency_s: NDArray[np.float64] | None = None

    def pick(self, index: NDArray[Any]) -> Block:
        """Return some of the rows, by a mask or by their numbers."""
        columns: dict[str, Any] = {
            key: None if column is None else column[index] for key, column in vars(self).items()
        }
        return Block(**columns)

    @staticmethod
    def join(parts: Sequence[Block]) -> Block:
        """Return the rows of several blocks of one trace, one after the other."""
        columns: dict[str, Any] = {
            key: None if first is None else np.concatenate([vars(part)[key] for part in parts])
            for key, first in vars(parts[0]).items()
        }
        return Block(**columns)


class Window:
    """The rows ``offset`` .. ``offset + limit`` of a file, told as its rows go by.

    Parameters
    ----------
    offset, limit : int
        Rows to skip, and rows to take after them (None: all).
    """

    def __init__(self, offset: int, limit: int | None) -> None:
        self.offset = offset
        self.end = sys.maxsize if limit is None else offset + limit
        self.seen = self.taken = 0

    @property
    def left(self) -> int:
        """Rows until the end of the window, those to be skipped included."""
        return max(self.end - self.seen, 0)

    @property
    def done(self) -> bool:
        """Whether every row of the window has gone by."""
        return not self.left

    def take(self, rows: int) -> slice:
        """Return which of the next ``rows`` rows are inside."""
        begin = min(max(self.offset - self.seen, 0), rows)
        end = max(begin, min(self.left, rows))
        self.seen += rows
        self.taken += end - begin
        return slice(begin, end)


@dataclass(frozen=True, eq=False)
class Source:
    """What a format's reader is given.

    Parameters
    ----------
    path : Path
    window : Window
        The reader passes every row by it, and reads no further once it is done.
    columns : mapping
        Names of columns by the fields they are for, where a user gave some.
    unit : str
        Unit of times: a key of `optsched.workloads.traces.fields.PLACES`, or ``"datetime"``.
    count : callable
        Number of tokens of a text.
    """

    path: Path
    window: Window
    columns: Mapping[str, str] = field(default_factory=dict)
    unit: str = "s"
    count: Callable[[str], int] = lambda text: len(text.split())


Reader = Callable[[Source], Iterator[Block]]


@dataclass(frozen=True)
class TraceFormat:
    """A registered format.

    Parameters
    ----------
    name, summary : str
    read : Reader
    options : tuple of str
        Options of `optsched.read_trace` that only some formats take, and this one does.
    """

    name: str
    summary: str
    read: Reader
    options: tuple[str, ...] = ()


FORMATS: Registry[TraceFormat] = Registry("trace format", "optsched.workloads.traces")


def trace_format(
    name: str, summary: str, *, options: tuple[str, ...] = ()
) -> Callable[[Reader], Reader]:
    """Register the decorated function as the reader of trace format ``name``."""

    def register(read: Reader) -> Reader:
        FORMATS.add(name, TraceFormat(name, summary, read, options))
        return read

    return register
