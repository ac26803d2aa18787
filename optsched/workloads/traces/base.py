"""The window of rows, the blocks of rows and the registry that all trace formats share."""

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
    """Consecutive rows of a trace, in the order of the file.

    Parameters
    ----------
    line : ndarray of int64, shape (n,)
        Line of the file that each row comes from, counted from 1.
    prompt_tokens, output_tokens : ndarray of int64, shape (n,)
        They may be zero or negative; such rows are dropped and counted later.
    time_ns : ndarray of int64, shape (n,), optional
        Arrivals in nanoseconds since any origin; None if the file has none.
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
        """Return some of the rows.

        Parameters
        ----------
        index : ndarray of bool or int
            A mask of shape (n,), or indices of rows.

        Returns
        -------
        Block
        """
        columns: dict[str, Any] = {
            key: None if column is None else column[index] for key, column in vars(self).items()
        }
        return Block(**columns)

    @staticmethod
    def join(parts: Sequence[Block]) -> Block:
        """Return the rows of several blocks of one trace, one after the other.

        Parameters
        ----------
        parts : sequence of Block
            One or more.

        Returns
        -------
        Block
        """
        columns: dict[str, Any] = {
            key: None if first is None else np.concatenate([vars(part)[key] for part in parts])
            for key, first in vars(parts[0]).items()
        }
        return Block(**columns)


class Window:
    """The window of rows to read, which counts the rows of a file as a reader passes them.

    Parameters
    ----------
    offset : int
        Number of rows to skip.
    limit : int or None
        Number of rows to take after them; None: all.
    """

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
        """Count the next rows of the file, and return which of them are in the window.

        Parameters
        ----------
        rows : int
            Number of rows.

        Returns
        -------
        slice
            Of these rows, from 0.
        """
        begin = min(max(self.offset - self.seen, 0), rows)
        end = max(begin, min(self.left, rows))
        self.seen += rows
        self.taken += end - begin
        return slice(begin, end)


@dataclass(frozen=True, eq=False)
class Source:
    """The file and the options that a format's reader gets.

    Parameters
    ----------
    path : Path
        The file.
    window : Window
        The reader counts every row with it, and stops reading once it is done.
    columns : mapping of str to str
        Names of columns by field, as far as the user gave them.
    unit : str
        Unit of times: a key of `optsched.workloads.traces.fields.PLACES`, or ``"datetime"``.
    count : callable
        Function from a text to its number of tokens.
    """

    path: Path
    window: Window
    columns: Mapping[str, str] = field(default_factory=dict)
    unit: str = "s"
    count: Callable[[str], int] = lambda text: len(text.split())


Reader = Callable[[Source], Iterator[Block]]


@dataclass(frozen=True)
class TraceFormat:
    """A registered trace format.

    Parameters
    ----------
    name : str
    summary : str
        One line on the format.
    read : callable
        Function from a `Source` to an iterator of `Block`.
    options : tuple of str
        Those options of `optsched.read_trace` that only some formats take and this one does.
    """

    name: str
    summary: str
    read: Reader
    options: tuple[str, ...] = ()


FORMATS: Registry[TraceFormat] = Registry("trace format", "optsched.workloads.traces")


def trace_format(
    name: str, summary: str, *, options: tuple[str, ...] = ()
) -> Callable[[Reader], Reader]:
    """Return a decorator that registers a function as the reader of a trace format.

    Parameters
    ----------
    name : str
    summary : str
        One line on the format.
    options : tuple of str
        See `TraceFormat`.

    Returns
    -------
    callable
        Decorator of a function from a `Source` to an iterator of `Block`.
    """

    def register(read: Reader) -> Reader:
        FORMATS.add(name, TraceFormat(name, summary, read, options))
        return read

    return register
