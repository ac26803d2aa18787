"""Delimited text in blocks of a few megabytes: rows and fields without a Python loop.

A block that holds quotes goes through the csv module, which gives the same, only slower.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

from optsched.problem.errors import InputError
from optsched.workloads.traces.base import Window

BLOCK_BYTES = 1 << 20
_MOST_QUOTED_BYTES = 1 << 26
_CODES = (
    (b"\xff\xfe\x00\x00", "UTF-32"), (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Fields:
    """Consecutive rows of a file: where the fields that a reader wants lie in a buffer.

    Parameters
    ----------
    path : Path
    data : ndarray of uint8
    line : ndarray of int64, shape (n,)
        Line of the file, counted from 1.
    names : dict of str to str
        Name in the header of each field found.
    start, end : dict of str to ndarray of int64, shape (n,)
        Place of each field found: ``data[start:end]``.
    """

    path: Path
    data: NDArray[np.uint8]
    line: NDArray[np.int64]
    names: Mapping[str, str]
    start: Mapping[str, NDArray[np.int64]]
    end: Mapping[str, NDArray[np.int64]]

    def __contains__(self, field: str) -> bool:
        return field in self.names

    def text(self, field: str, row: int) -> str:
        """Return one field as text, without the spaces around it."""
        part = self.data[self.start[field][row] : self.end[field][row]]
        return part.tobytes().decode("utf-8", "replace").strip()


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, gzip undone, its troubles while it is open turned into input errors."""
    try:
        with open(path, "rb") as raw:
            if raw.peek(2)[:2] == b"\x1f\x8b":  # and a pipe can be read too
                with gzip.open(raw, "rb") as stream:
                    yield cast("IO[bytes]", stream)
            else:
                yield raw
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory; a file is right") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text ({error.reason})") from None
    except EOFError:
        raise InputError(f"{path}: cannot be read: the gzip file is cut short") from None
    except (OSError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def without_mark(path: Path, head: bytes) -> bytes:
    """Return the first bytes of a text without its byte-order mark.

    Raises
    ------
    InputError
        UTF-16 or UTF-32, or zero bytes: no text.
    """
    for mark, name in _CODES:
        if head.startswith(mark):
            raise InputError(f"{path}: is {name} text; UTF-8 is right (iconv -f {name} -t UTF-8)")
    if b"\0" in head[:4096]:
        raise InputError(f"{path}: holds zero bytes and is no UTF-8 text (UTF-16 without a mark?)")
    return head.removeprefix(b"\xef\xbb\xbf")


def plain_name(text: str) -> str:
    """Return a column's name in lower case without spaces, underscores and hyphens."""
    return re.sub(r"[\s_\-]+", "", text).casefold()


def find_columns(
    path: Path,
    found: Sequence[str],
    wanted: Mapping[str, Sequence[str]],
    optional: Sequence[str] = (),
) -> dict[str, int]:
    """Return the index of the column of each field, whatever its case, spaces and underscores.

    Parameters
    ----------
    path : Path
    found : sequence of str
        Names in the file.
    wanted : mapping
        Names that each field may have; an exact match comes first.
    optional : sequence of str
        Fields that may be missing.

    Raises
    ------
    InputError
        A missing or an ambiguous column, with the columns that there are.
    """
    plain = [plain_name(name) for name in found]
    where: dict[str, int] = {}
    for field, names in wanted.items():
        exact = [k for name in names for k, had in enumerate(found) if had == name]
        loose = [k for name in names for k, had in enumerate(plain) if had == plain_name(name)]
        have = ", ".join(repr(name) for name in found)
        have = have if len(have) <= 200 else have[:200] + "..."
        if len(exact or loose) > 1:
            raise InputError(
                f"{path}: line 1: {names[0]}: {len(exact or loose)} columns have this name: {have}"
            )
        if exact or loose:
            where[field] = (exact or loose)[0]
        elif field not in optional:
            right = " or ".join(repr(name) for name in names)
            raise InputError(
                f"{path}: line 1: {right}: no such column; the file has "
                + (have or "an empty first line")
            )
    return where


def read_delimited(
    path: Path,
    window: Window,
    wanted: Mapping[str, Sequence[str]],
    optional: Sequence[str] = (),
) -> Iterator[Fields]:
    """Yield the rows of a window of a file with a header, blank lines left out.

    Comma, semicolon or tab separate, whichever the header has most of.

    Parameters
    ----------
    path, window, wanted, optional
        See `find_columns` and `optsched.workloads.traces.base.Window`.

    Raises
    ------
    InputError
        A missing column; a row of the window with another number of fields; no UTF-8; a quote
        that never ends.
    """
    with open_bytes(path) as stream:
        head = without_mark(path, stream.readline(_MOST_QUOTED_BYTES))
        at = 2
        if b"\r" in head.rstrip(b"\r\n"):  # lines that end in a carriage return alone
            head, _, rest = head.partition(b"\r")
        else:
            rest = b""
        text = _utf8(path, head, 1).strip("\r\n")
        delimiter = max(",;\t", key=text.count)
        try:
            header = [name.strip() for name in next(csv.reader([text], delimiter=delimiter), [])]
        except csv.Error as error:
            raise InputError(f"{path}: line 1: not CSV ({error})") from None
        where = find_columns(path, header, wanted, optional)
        names = {field: header[k] for field, k in where.items()}
        while not window.done:
            block, last = _whole_lines(path, stream, rest, at)
            rest = b""
            if not block:
                return
            lines = block.count(b"\n")
            if b'"' in block:
                fields = _quoted(path, block, at, window, where, names, len(header), delimiter)
            else:
                fields = _plain(path, block, at, window, where, names, len(header), delimiter, last)
            at += lines
            if fields is not None:
                yield fields


def _whole_lines(path: Path, stream: IO[bytes], rest: bytes, at: int) -> tuple[bytes, bool]:
    """Return the next lines, each ended by a newline, and whether the last one was not."""
    parts = [rest, stream.read(BLOCK_BYTES)]
    if parts[1] and not parts[1].endswith(b"\n"):
        parts.append(stream.readline())
    quotes = sum(part.count(b'"') for part in parts)
    size = sum(map(len, parts))
    while quotes % 2:  # the newline stands inside a quoted field
        parts.append(stream.readline())
        quotes += parts[-1].count(b'"')
        size += len(parts[-1])
        if not parts[-1] or size > _MOST_QUOTED_BYTES:
            raise InputError(f"{path}: after line {at - 1}: not CSV: a quote is never closed")
    block = b"".join(parts)
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if not block or block.endswith(b"\n"):
        return block, False
    return block + b"\n", True


def _utf8(path: Path, block: bytes, at: int) -> str:
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError as error:
        line = at + block.count(b"\n", 0, error.start)
        raise InputError(
            f"{path}: line {line}: is not UTF-8 text (byte 0x{block[error.start]:02x}, "
            f"{error.reason}); UTF-8 is right (iconv -f LATIN1 -t UTF-8, if it is Latin-1)"
        ) from None


def _plain(
    path: Path,
    block: bytes,
    at: int,
    window: Window,
    where: Mapping[str, int],
    names: Mapping[str, str],
    width: int,
    delimiter: str,
    last: bool,
) -> Fields | None:
    data = np.frombuffer(block, dtype=np.uint8)
    row_end = np.flatnonzero(data == ord("\n"))
    row_start = np.concatenate(([0], row_end[:-1] + 1))
    line = np.arange(at, at + len(row_end))
    if (blank := _blank(block, row_start, row_end)) is not None:
        row_start, row_end, line = row_start[~blank], row_end[~blank], line[~blank]
    total = len(line)
    inside = window.take(total)
    row_start, row_end, line = row_start[inside], row_end[inside], line[inside]
    if not len(line):
        return None
    if not block.isascii():
        _utf8(path, block[row_start[0] : row_end[-1]], int(line[0]))
    cuts = np.flatnonzero(data[row_start[0] : row_end[-1]] == ord(delimiter)) + row_start[0]
    first = np.searchsorted(cuts, row_start)
    count = np.searchsorted(cuts, row_end) - first
    if (count != width - 1).any():
        i = int(np.argmax(count != width - 1))
        text = block[row_start[i] : row_end[i]].decode("utf-8", "replace")
        final = last and inside.stop == total and i == len(line) - 1
        raise _bad_width(path, int(line[i]), int(count[i]) + 1, width, text, window, final)
    start, end = {}, {}
    for field, k in where.items():
        start[field] = row_start if k == 0 else cuts[first + k - 1] + 1
        end[field] = row_end if k == width - 1 else cuts[first + k]
    return Fields(path, data, line, names, start, end)


def _blank(
    block: bytes, row_start: NDArray[np.int64], row_end: NDArray[np.int64]
) -> NDArray[np.bool_] | None:
    """Return which lines hold nothing but spaces, None if none does."""
    short = np.flatnonzero(row_end - row_start < 4)
    found = [i for i in short.tolist() if not block[row_start[i] : row_end[i]].strip()]
    if not found:
        return None
    blank = np.zeros(len(row_start), dtype=bool)
    blank[found] = True
    return blank


def _bad_width(
    path: Path, line: int, found: int, right: int, text: str, window: Window, final: bool
) -> InputError:
    if not final:
        return InputError(
            f"{path}: line {line}: has {found} fields in {text!r:.80}; {right} is right"
        )
    good = window.taken - 1
    rescue = f"limit {good} reads the {good} rows before it" if good else "no row is whole"
    return InputError(
        f"{path}: line {line}: the last line is cut short: {found} of {right} fields in "
        f"{text!r:.80}; the whole file is right, or {rescue}"
    )


def _quoted(
    path: Path,
    block: bytes,
    at: int,
    window: Window,
    where: Mapping[str, int],
    names: Mapping[str, str],
    width: int,
    delimiter: str,
) -> Fields | None:
    text = _utf8(path, block, at)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[list[str]] = []
    lines: list[int] = []
    before = 0
    try:
        for row in reader:
            if row and (len(row) > 1 or row[0].strip()):
                rows.append(row)
                lines.append(at + before)
            before = reader.line_num
    except csv.Error as error:
        raise InputError(f"{path}: line {at + before}: not CSV ({error})") from None
    inside = window.take(len(rows))
    rows, lines = rows[inside], lines[inside]
    if not rows:
        return None
    for row, line in zip(rows, lines, strict=True):
        if len(row) != width:
            raise _bad_width(path, line, len(row), width, delimiter.join(row), window, False)
    return from_texts(
        path, lines, names, {field: [row[k] for row in rows] for field, k in where.items()}
    )


def from_texts(
    path: Path,
    lines: Sequence[int],
    names: Mapping[str, str],
    columns: Mapping[str, Sequence[str]],
) -> Fields:
    """Return rows whose fields are given as texts."""
    start, end, parts, size = {}, {}, [], 0
    for field, texts in columns.items():
        encoded = [text.encode() for text in texts]
        ends = size + np.cumsum([len(part) for part in encoded])
        start[field] = np.concatenate(([size], ends[:-1])).astype(np.int64)
        end[field] = ends.astype(np.int64)
        parts += encoded
        size = int(ends[-1])
    data = np.frombuffer(b"".join(parts), dtype=np.uint8)
    return Fields(path, data, np.asarray(lines, dtype=np.int64), names, start, end)
