"""Delimited text with a header, read row by row by the csv module, with the lines of all rows."""

import codecs
import csv
import functools
import gzip
import io
import re
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from optsched.problem.errors import InputError
from optsched.workloads.traces.base import Source
from optsched.workloads.traces.exact import Fields

_BLOCK_ROWS = 16_384
# What files in other encodings and archives begin with. In this order, since a mark of UTF-32
# begins like one of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
    b"PK\x03\x04": "zip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
}


@contextmanager
def open_bytes(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file for reading, decompressed, and turn its read errors into input errors."""
    try:
        with open(path, "rb") as raw:
            if raw.peek(2)[:2] == b"\x1f\x8b":  # peeking leaves the bytes of a pipe in place
                with gzip.open(raw, "rb") as stream:
                    yield cast("io.BufferedReader", stream)
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


@contextmanager
def open_text(path: Path, newline: str | None = None) -> Iterator[io.TextIOWrapper]:
    """Open a file for reading as text, without its byte-order mark; see `check_utf8`."""
    with open_bytes(path) as stream:
        head = stream.peek(4096)[:4096]
        name = next((name for mark, name in _MARKS.items() if head.startswith(mark)), "")
        if name.startswith("UTF"):
            words = f"found {name} text; expected UTF-8 (iconv -f {name} -t UTF-8)"
            raise InputError(f"{path}: {words}")
        if name:
            raise InputError(f"{path}: found a {name} archive; expected text, or text in gzip")
        if b"\0" in head:
            words = "found zero bytes; expected UTF-8 text (UTF-16 without a mark?)"
            raise InputError(f"{path}: {words}")

        # Bytes that are no UTF-8 are kept as they are, so that an error can name their line.
        yield io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline)


@functools.lru_cache(maxsize=4096)
def plain_name(name: str) -> str:
    """Return a column's name without case, spaces, hyphens and underscores."""
    return re.sub(r"[\s_\-]+", "", name).casefold()


def find_columns(
    path: Path,
    header: Sequence[str],
    wanted: Mapping[str, Sequence[str]],
    optional: Collection[str] = (),
) -> dict[str, int]:
    """Return the index of each field's column, ignoring case, spaces, hyphens and underscores.

    `wanted` has the names that each field's column may have. The first that is there counts, an
    exact match before others. A field without a column is refused unless it is `optional`.
    """
    words = ", ".join(map(repr, header))
    words = words if len(words) <= 200 else words[:200] + "..."
    index: dict[str, int] = {}

    for field, names in wanted.items():
        for name in names:
            plain = plain_name(name)
            fits = [k for k, column in enumerate(header) if column == name]
            fits = fits or [k for k, column in enumerate(header) if plain_name(column) == plain]
            if len(fits) > 1:
                raise InputError(
                    f"{path}: line 1: {name}: found {len(fits)} columns of this name in {words}; "
                    "expected one"
                )

            if fits:
                index[field] = fits[0]
                break

        if field not in index and field not in optional:
            raise InputError(
                f"{path}: line 1: expected a column {' or '.join(map(repr, names))}; found "
                + (words or "an empty first line")
            )

    return index


def read_delimited(
    source: Source, wanted: Mapping[str, Sequence[str]], optional: Collection[str] = ()
) -> Iterator[Fields]:
    """Yield the rows in a window of a file with a header, without blank lines.

    Commas, semicolons or tabs separate fields, whichever the header has the largest number of.
    `wanted` and `optional` are those of `find_columns`.
    """
    path = source.path
    with open_text(path) as stream:
        first_line = stream.readline().strip("\n")
        check_utf8(path, first_line, 1)
        if first_line.lstrip()[:1] in ("{", "["):
            raise InputError(
                f"{path}: line 1: found JSON; expected CSV or Parquet (the format jsonl reads "
                "JSON with named fields)"
            )

        delimiter = max(",;\t", key=first_line.count)
        try:
            fields = next(csv.reader([first_line], delimiter=delimiter), [])
        except csv.Error as error:
            raise InputError(f"{path}: line 1: not CSV ({error})") from None

        header = [name.strip() for name in fields]
        index = find_columns(path, header, wanted, optional)
        names = {field: header[k] for field, k in index.items()}

        for block in source.window.blocks(_rows(stream, delimiter), _BLOCK_ROWS):
            whole: list[tuple[int, list[str]]] = []
            for line, row in block:
                if isinstance(row, str):
                    source.findings.skip(line, f"not CSV: {row}")
                    continue

                joined = delimiter.join(row)
                check_utf8(path, joined, line)
                if len(row) == len(header):
                    whole.append((line, row))
                else:
                    words = f"found {len(row)} fields in {joined!r:.80}; expected {len(header)}"
                    source.findings.skip(line, words)

            if whole:
                columns = {field: [row[k] for _, row in whole] for field, k in index.items()}
                yield Fields(source, [line for line, _ in whole], names, columns)


def _rows(lines: Iterator[str], delimiter: str) -> Iterator[tuple[int, list[str] | str]]:
    """Yield each row with its first line, and what is wrong with one that is not CSV.

    A quote that never ends takes all lines behind it, so reading goes on in the next line.
    """
    line = 2  # where the next row begins
    of_row = list[str]()  # the lines that the csv module has read for it
    to_repeat = deque[str]()  # lines to read before the file goes on

    def read() -> Iterator[str]:
        while text := to_repeat.popleft() if to_repeat else next(lines, ""):
            of_row.append(text)
            yield text

    while True:
        try:
            for row in csv.reader(read(), delimiter=delimiter, strict=True):
                if len(row) > 1 or (row and row[0].strip()):  # not a blank line
                    yield line, row

                line += len(of_row)
                of_row.clear()
        except csv.Error as error:
            # The row is lost up to the end of its first line, and a new reader goes on behind it.
            yield line, "a quote never ends" if "end of data" in str(error) else str(error)
            to_repeat.extendleft(reversed(of_row[1:]))
            line += 1
            of_row.clear()
        else:
            return


def check_utf8(path: Path, text: str, line: int) -> None:
    """Refuse a text from `open_text`, which begins in a line, if bytes of it are not UTF-8."""
    if text.isascii():
        return
    try:
        text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        line += error.object.count(b"\n", 0, error.start)
        raise InputError(
            f"{path}: line {line}: found the byte 0x{byte:02x} ({error.reason}); expected UTF-8 "
            "text (iconv -f LATIN1 -t UTF-8, if it is Latin-1)"
        ) from None
