"""JSON objects, read one by one from JSON lines or from one long list, in little memory."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import IO, Any, NoReturn

from optsched.problem.errors import InputError
from optsched.workloads.traces.base import Window
from optsched.workloads.traces.delimited import open_bytes, without_mark
from optsched.workloads.traces.fields import Fields

_READ_BYTES = 1 << 20
_MAX_CHARS = 1 << 28
_MAX_FIELD = 200  # no field takes a longer text
_SPACE = re.compile(r"[ \t\r\n]*")


def objects_in_blocks(
    path: Path, window: Window, rows: int = 16_384
) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    """Yield the objects in a window of a file, in lists.

    Parameters
    ----------
    path : Path
    window : Window
    rows : int
        Maximum number of objects in a list.

    Yields
    ------
    list of (int, dict)
        The line in which each object begins, and the object.

    Raises
    ------
    InputError
        See `json_objects`.
    """
    stream = json_objects(path)
    while not window.done:
        block = list(islice(stream, min(rows, window.left)))
        if not block:
            return
        inside = block[window.take(len(block))]
        if inside:
            yield inside


def json_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield every object of a file of JSON lines or of a JSON list.

    Parameters
    ----------
    path : Path

    Yields
    ------
    line : int
        The line in which the object begins.
    data : dict
        The object. Numbers with a fraction are `decimal.Decimal`, as exact as they are written.

    Raises
    ------
    InputError
        The text is not JSON, an entry is not an object, or the file is cut short. The error names
        the line.
    """
    with open_bytes(path) as stream:
        text = _Text(path, stream)
        in_list = text.peek() == "["
        if in_list:
            text.go(text.at + 1)
        while (char := text.peek()) and not (in_list and char == "]"):
            line, value = text.line, text.value()
            if not isinstance(value, dict):
                raise InputError(
                    f"{path}: line {line}: found {str(value)[:40]!r}; expected an object with "
                    "named fields"
                )
            yield line, value
            if in_list and text.peek() == ",":
                text.go(text.at + 1)
            elif in_list and text.peek() not in ("", "]"):
                text.fail(text.at, "expected a comma between objects")
        if in_list and not char:
            text.fail(text.at, "the file is cut short: the list never ends")


class _Text:
    """A stream of UTF-8 text that is decoded only as far as needed."""

    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        self.path, self.line, self.at, self.buffer = path, 1, 0, ""
        self._stream, self._ended = stream, False
        self._bytes = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder(parse_float=Decimal, parse_constant=self._no_constant)
        self._more(without_mark(path, stream.read(_READ_BYTES)))

    def _more(self, read: bytes) -> None:
        self._ended = not read
        try:
            fresh = self._bytes.decode(read, final=self._ended)
        except UnicodeDecodeError as error:
            line = self._line_at(len(self.buffer)) + read.count(b"\n", 0, error.start)
            raise InputError(
                f"{self.path}: line {line}: expected UTF-8 text; found {error.reason}"
            ) from None
        self.buffer, self.at = self.buffer[self.at :] + fresh, 0

    def _line_at(self, position: int) -> int:
        return self.line + self.buffer.count("\n", self.at, position)

    def go(self, to: int) -> None:
        self.line, self.at = self._line_at(to), to

    def peek(self) -> str:
        """Return the next character that is not a space, or an empty text at the end."""
        while True:
            self.go(_SPACE.match(self.buffer, self.at).end())  # type: ignore[union-attr]
            if self.at < len(self.buffer) or self._ended:
                return self.buffer[self.at : self.at + 1]
            self._more(self._stream.read(_READ_BYTES))

    def value(self) -> Any:
        while True:
            try:
                value, end = self._json.raw_decode(self.buffer, self.at)
            except json.JSONDecodeError as error:
                # An error near the end of the text read so far may only mean that it is cut there.
                cut = error.msg.startswith("Unterminated") or error.pos >= len(self.buffer) - 8
                held = len(self.buffer) - self.at
                if cut and not self._ended and held < _MAX_CHARS:
                    self._more(self._stream.read(max(_READ_BYTES, held)))
                    continue
                words = error.msg[0].lower() + error.msg[1:]
                self.fail(error.pos, "the file is cut short" if cut and self._ended else words)
            except RecursionError:
                self.fail(self.at, "nested too deeply")
            except (ValueError, ArithmeticError):
                self.fail(self.at, "found a number of too many digits")
            self.go(end)
            return value

    def fail(self, position: int, words: str) -> NoReturn:
        raise InputError(
            f"{self.path}: line {self._line_at(position)}: not JSON: {words}"
        ) from None

    def _no_constant(self, word: str) -> NoReturn:
        self.fail(self.at, f"found {word}; expected a finite number or null")


def read_objects(
    path: Path,
    window: Window,
    wanted: Mapping[str, Sequence[str]],
    optional: Sequence[str] = (),
) -> Iterator[Fields]:
    """Yield the objects in a window of a file as rows.

    Parameters
    ----------
    path : Path
    window : Window
    wanted : mapping of str to sequence of str
        Names that each field may have; see `member`.
    optional : sequence of str
        Fields that an object may lack. They then read as null.

    Yields
    ------
    Fields

    Raises
    ------
    InputError
        See `json_objects` and `member`.
    """
    names = {field: found[0] for field, found in wanted.items()}
    for rows in objects_in_blocks(path, window):
        columns = {
            field: [
                _as_text(member(path, line, row, *found, optional=field in optional))
                for line, row in rows
            ]
            for field, found in wanted.items()
        }
        yield Fields.from_texts(path, [line for line, _ in rows], names, columns)


def member(path: Path, line: int, row: dict[str, Any], *names: str, optional: bool = False) -> Any:
    """Return the value of the first of some names that an object has.

    Parameters
    ----------
    path : Path
        The file, for errors.
    line : int
        The line of the object, for errors.
    row : dict
        The object.
    *names : str
        A point leads into an object, as in ``usage.prompt_tokens``, unless the name as a whole is
        there. Everything inside null is null.
    optional : bool
        Whether null stands for what is missing.

    Returns
    -------
    object

    Raises
    ------
    InputError
        The object has none of the names.
    """
    ends = []
    for name in names:
        value: Any = row
        for part in [name] if name in row else name.split("."):
            if not isinstance(value, dict) or part not in value:
                break
            value = value[part]
        else:
            return value
        if value is None:
            return None
        ends.append(value)
    if optional:
        return None
    found = ", ".join(ends[0]) if isinstance(ends[0], dict) else _as_text(ends[0])
    raise InputError(
        f"{path}: line {line}: expected the field {names[0]}; found {found[:200] or 'nothing'}"
    )


def _as_text(value: Any) -> str:
    """Return a value as text for `Fields`. What is no number and no text suits no field."""
    if isinstance(value, (dict, list)):
        return "{...}" if isinstance(value, dict) else "[...]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = str(value)
    return text if len(text) <= _MAX_FIELD else text[:_MAX_FIELD] + "..."
