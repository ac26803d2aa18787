"""Delimited text, read in blocks of a megabyte and parsed by numpy.

Numpy cannot parse a block with quotes, blank lines, rows of another length or numbers in another
notation. Such a block goes through the csv module, which also finds the place of an error.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import warnings
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from optsched.problem.errors import InputError
from optsched.workloads.traces.base import Source
from optsched.workloads.traces.fields import Fields

BLOCK_BYTES = 1 << 20
_MAX_QUOTED_BYTES = 1 << 26
WHOLE = ("prompt_tokens", "output_tokens")
"""Fields that hold whole numbers. The other fields are times."""

_TEXT = "S40"
_CODES = (
    (b"\xff\xfe\x00\x00", "UTF-32"), (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"),
)  # fmt: skip
_BLANK = re.compile(rb"\n[ \t]*\n")


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed, and turn its read errors into input errors.

    Parameters
    ----------
    path : Path

    Yields
    ------
    binary stream

    Raises
    ------
    InputError
        The file does not exist or cannot be read.
    """
    try:
        with open(path, "rb") as raw:
            if raw.peek(2)[:2] == b"\x1f\x8b":  # peeking leaves the bytes of a pipe in place
                with gzip.open(raw, "rb") as stream:
                    yield cast("IO[bytes]", stream)
            else:
                yield raw
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: found a directory; expected a file") from None
    except EOFError:
        raise InputError(f"{path}: cannot be read: the gzip file is cut short") from None
    except (OSError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def without_mark(path: Path, head: bytes) -> bytes:
    """Return the first bytes of a UTF-8 text without its byte-order mark.

    Parameters
    ----------
    path : Path
        The file, for errors.
    head : bytes
        Its first bytes.

    Returns
    -------
    bytes

    Raises
    ------
    InputError
        The text is UTF-16 or UTF-32, or has zero bytes.
    """
    for mark, name in _CODES:
        if head.startswith(mark):
            raise InputError(
                f"{path}: found {name} text; expected UTF-8 (iconv -f {name} -t UTF-8)"
            )
    if b"\0" in head[:4096]:
        raise InputError(f"{path}: found zero bytes; expected UTF-8 text (UTF-16 without a mark?)")
    return head.removeprefix(b"\xef\xbb\xbf")


def find_columns(
    path: Path,
    found: Sequence[str],
    wanted: Mapping[str, Sequence[str]],
    optional: Collection[str] = (),
) -> dict[str, int]:
    """Return the index of each field's column, ignoring case, spaces, hyphens and underscores.

    Parameters
    ----------
    path : Path
        The file, for errors.
    found : sequence of str
        Names of the columns in the file.
    wanted : mapping of str to sequence of str
        Names that the column of each field may have, of which the first that is there counts. An
        exact match takes precedence.
    optional : collection of str
        Fields that may be missing.

    Returns
    -------
    dict of str to int
        Index of the column of each field that was found.

    Raises
    ------
    InputError
        A column is missing or ambiguous. The error lists the columns of the file.
    """

    def plain(name: str) -> str:
        return re.sub(r"[\s_\-]+", "", name).casefold()

    have = ", ".join(map(repr, found))
    have = have if len(have) <= 200 else have[:200] + "..."
    where: dict[str, int] = {}
    for field, names in wanted.items():
        for name in names:
            exact = [k for k, had in enumerate(found) if had == name]
            fits = exact or [k for k, had in enumerate(found) if plain(had) == plain(name)]
            if len(fits) > 1:
                raise InputError(
                    f"{path}: line 1: {name}: found {len(fits)} columns of this name in {have}; "
                    "expected one"
                )
            if fits:
                where[field] = fits[0]
                break
        else:
            if field in optional:
                continue
            raise InputError(
                f"{path}: line 1: expected a column {' or '.join(map(repr, names))}; found "
                + (have or "an empty first line")
            )
    return where


def read_delimited(
    source: Source, wanted: Mapping[str, Sequence[str]], optional: Collection[str] = ()
) -> Iterator[Fields]:
    """Yield the rows in a window of a file with a header, without blank lines.

    Fields are separated by commas, semicolons or tabs, whichever the header has most of.

    Parameters
    ----------
    source : Source
        A row of the window with another number of fields is told to its findings.
    wanted, optional
        See `find_columns`.

    Yields
    ------
    Fields

    Raises
    ------
    InputError
        A column is missing, or the text is not UTF-8 or is JSON.
    """
    path, window = source.path, source.window
    with open_bytes(path) as stream:
        head = without_mark(path, stream.readline(_MAX_QUOTED_BYTES))
        head, end, rest = head.partition(b"\r")  # lines may end in a carriage return alone
        if end and rest in (b"", b"\n"):
            rest = b""
        text = _utf8(path, head, 1).strip("\n")
        if text.lstrip()[:1] in ("{", "["):
            raise InputError(
                f"{path}: line 1: found JSON; expected CSV or Parquet (the format jsonl reads "
                "JSON with named fields)"
            )
        delimiter = max(",;\t", key=text.count)
        try:
            header = [name.strip() for name in next(csv.reader([text], delimiter=delimiter), [])]
        except csv.Error as error:
            raise InputError(f"{path}: line 1: not CSV ({error})") from None
        where = find_columns(path, header, wanted, optional)
        layout = _Layout(source, header, where, delimiter)
        at = 2
        while not window.done:
            block, cut = _whole_lines(path, stream, rest, at)
            if not block:
                return
            fields = layout.fields(block, at, cut)
            if fields is not None:
                yield fields
            at += block.count(b"\n")
            rest = b""


def _whole_lines(path: Path, stream: IO[bytes], rest: bytes, at: int) -> tuple[bytes, bool]:
    """Return the next whole lines, and whether the last one had no newline of its own."""
    parts = [rest, stream.read(BLOCK_BYTES)]
    if parts[1] and not parts[1].endswith(b"\n"):
        parts.append(stream.readline())
    quotes = sum(part.count(b'"') for part in parts)
    size = sum(map(len, parts))
    while quotes % 2:  # the newline stands inside a quoted field
        parts.append(stream.readline())
        quotes += parts[-1].count(b'"')
        size += len(parts[-1])
        if size > _MAX_QUOTED_BYTES:
            raise InputError(f"{path}: after line {at - 1}: not CSV: a quote is never closed")
        if not parts[-1]:
            break
    block = b"".join(parts)
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if not block or block.endswith(b"\n"):
        return block, False
    return block + b"\n", True


def _utf8(path: Path, text: bytes, line: int) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: line {line + text.count(10, 0, error.start)}: found the byte "
            f"0x{text[error.start]:02x} ({error.reason}); expected UTF-8 text (iconv -f LATIN1 -t "
            "UTF-8, if it is Latin-1)"
        ) from None


@dataclass(frozen=True)
class _Layout:
    """The columns of a file, the index of each wanted one, and the delimiter."""

    source: Source
    header: Sequence[str]
    where: Mapping[str, int]
    delimiter: str

    def fields(self, block: bytes, at: int, cut: bool) -> Fields | None:
        """Return the rows of a block that lie in the window, or None if none does.

        The block begins in line ``at``. ``cut`` says whether its last line had no newline.
        """
        window, lines = self.source.window, block.count(b"\n")
        simple = b'"' not in block and b"\0" not in block and not _BLANK.search(b"\n" + block)
        if simple and window.seen + lines <= window.offset:
            window.take(lines)
            return None
        if simple and window.left < lines:  # errors after the window are not looked for
            block, lines = b"\n".join([*block.split(b"\n", window.left)[:-1], b""]), window.left
        table = self._parsed(block) if simple else None
        if table is None:
            return self._row_by_row(block, at, cut)
        inside = window.take(lines)
        columns = {field: table[str(k)][inside] for field, k in self.where.items()}
        return Fields(self.source, np.arange(at, at + lines)[inside], self._names, columns)

    @property
    def _names(self) -> dict[str, str]:
        return {field: self.header[k] for field, k in self.where.items()}

    def _parsed(self, block: bytes) -> NDArray[Any] | None:
        """Return the columns as numpy reads them, or None if it cannot."""
        kinds = {k: "i8" if field in WHOLE else _TEXT for field, k in self.where.items()}
        kinds |= {k: _TEXT for field, k in self.where.items() if field not in WHOLE}
        dtype = np.dtype([(str(k), kinds.get(k, "U1")) for k in range(len(self.header))])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # numpy warns of a fraction read as an integer
                table = np.loadtxt(
                    io.BytesIO(block), dtype, comments=None, delimiter=self.delimiter, ndmin=1,
                    encoding="utf-8",
                )  # fmt: skip
        except (ValueError, Warning):
            return None
        if len(table) != block.count(b"\n"):
            return None
        for text in (table[str(k)] for k, kind in kinds.items() if kind == _TEXT):
            if np.char.str_len(text).max() == text.itemsize:
                return None  # it may have been cut
            if not block.isascii() and (np.ascontiguousarray(text).view(np.uint8) > 127).any():
                return None  # numpy encodes it as Latin-1
        return table

    def _row_by_row(self, block: bytes, at: int, cut: bool) -> Fields | None:
        source = self.source
        found = [row for row in self._rows(block, at) if row[1] is None or any(row[1])]
        inside = found[source.window.take(len(found))]
        whole: list[tuple[int, list[str]]] = []
        for line, row in inside:
            if row is None:
                words = (
                    f"{source.path}: line {line}: not CSV: a quote is out of place or never ends"
                )
                source.findings.skip(line, InputError(words))
                continue
            text = self.delimiter.join(row)
            if not text.isascii():
                _utf8(source.path, text.encode("utf-8", "surrogateescape") + b"\n", line)
            if len(row) == len(self.header):
                whole.append((line, row))
            else:
                last = cut and line == found[-1][0]
                good = source.window.taken - 1 if last else None
                source.findings.skip(line, self._bad_width(line, row, text, good))
        if not whole:
            return None
        columns = {field: [row[k] for _, row in whole] for field, k in self.where.items()}
        return Fields.from_texts(source, [line for line, _ in whole], self._names, columns)

    def _rows(self, block: bytes, at: int) -> Iterator[tuple[int, list[str] | None]]:
        """Yield each row with its first line, and None for one whose quotes are wrong.

        A quote that never ends takes all lines behind it, so reading goes on in the next line.
        """
        lines = io.StringIO(block.decode("utf-8", "surrogateescape"), newline="").readlines()
        start = 0
        while start < len(lines):
            reader = csv.reader(lines[start:], delimiter=self.delimiter, strict=True)
            begin = start
            try:
                for row in reader:
                    yield at + begin, row
                    begin = start + reader.line_num
                return
            except csv.Error:
                yield at + begin, None
                start = begin + 1

    def _bad_width(self, line: int, row: Sequence[str], text: str, good: int | None) -> InputError:
        """Return the error for a row with a wrong number of fields.

        If the row is the last one of a file that was cut short, ``good`` is the number of rows
        before it.
        """
        place = f"{self.source.path}: line {line}:"
        width = len(self.header)
        if good is None:
            return InputError(f"{place} found {len(row)} fields in {text!r:.80}; expected {width}")
        rescue = f"limit {good} reads the {good} rows before it" if good else "no row is whole"
        return InputError(
            f"{place} found {len(row)} of {width} fields in {text!r:.80}, since the last line is "
            f"cut short; expected the whole file ({rescue})"
        )
