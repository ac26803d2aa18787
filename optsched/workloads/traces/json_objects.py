"""JSON objects, read one by one from JSON lines or from one long list, in little memory."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, NoReturn

from optsched.problem.errors import InputError
from optsched.workloads.traces.base import Source
from optsched.workloads.traces.declared import check_declared, strategy_clients
from optsched.workloads.traces.delimited import check_utf8, open_text, plain_name
from optsched.workloads.traces.exact import Fields

_READ_CHARS = 1 << 18
_MAX_FIELD = 200  # no field takes a longer text
_SPACE = re.compile(r"[ \t\r\n]*")


class UnreadableError(InputError):
    """One row cannot be read; others may."""


def objects_in_blocks(
    source: Source,
    rows: int = 16_384,
    inside: str = "",
    runs: str = "",
) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    """Yield the objects in the window, each with its line, in lists of at most ``rows``.

    ``inside`` is the path to objects in lists inside an object, and ``runs`` the path to those of
    which the user picks one. What cannot be read as an object is told to the findings.
    """
    stream = iter([pick_run(source, runs)]) if runs else json_objects(source.path)
    for block in source.window.blocks(_objects(source, stream, inside), rows):
        objects = list[tuple[int, dict[str, Any]]]()
        for line, value in block:
            if isinstance(value, dict):
                check_declared(source, line, value)
                objects.append((line, value))
            else:
                source.findings.skip(line, value)

        if objects:
            yield objects


def pick_run(
    source: Source, runs: str = "", floats: Callable[[str], Any] = Decimal
) -> tuple[int, dict[str, Any]]:
    """Return the object of the run that the user picked, with its line.

    Each object of the file is a run, or has a list of runs at the path ``runs``. ``floats`` makes a
    value of the text of a number with a fraction.
    """
    path = source.path
    picked = list[tuple[int, dict[str, Any]]]()
    broken: InputError | None = None  # the first entry that is no object
    for line, entry in _objects(source, json_objects(path, floats), runs):
        if isinstance(entry, dict):
            check_declared(source, line, entry)
            picked.append((line, entry))
        else:
            broken = broken or entry

    count = len(picked)
    if not picked:
        raise broken or InputError(f"{path}: found no runs; expected a JSON object of a run")
    if broken:
        source.findings.odd(str(broken).removeprefix(f"{path}: ") + "; it is no run")

    wanted = source.run
    if wanted is None and count > 1:
        raise InputError(
            f"{path}: found {count} runs; expected one; run=N (--run N) picks it, from 1 to "
            f"{count}, or -1 for the last; requests are another format"
        )

    number = 1 if wanted is None else wanted
    if not 1 <= abs(number) <= count:
        raise InputError(f"{path}: run: found {number}; expected a run of the {count}")

    line, run = picked[number - 1 if number > 0 else number]
    source.findings.clients = strategy_clients(run)
    return line, run


def _entries(value: Any, path: Sequence[str]) -> Iterator[Any]:
    """Yield the entries of lists at a path; ``*`` stands for each list of an object.

    Entries get the name of that list as their field ``*``. What has no such path is an entry.
    """
    if isinstance(value, list):
        for entry in value:
            yield from _entries(entry, path)
    elif not path or not isinstance(value, dict) or path[0] not in (*value, "*"):
        yield value
    elif path[0] == "*":
        for name, group in value.items():
            for entry in group if isinstance(group, list) else ():
                yield {**entry, "*": name} if isinstance(entry, dict) else entry
    else:
        yield from _entries(value[path[0]], path[1:])


def _objects(
    source: Source, stream: Iterator[tuple[int, Any]], inside: str
) -> Iterator[tuple[int, dict[str, Any] | InputError]]:
    """Yield the objects at a path inside values, or what is wrong with each, with their lines.

    `stream`: the values of the file, each with its line. `inside`: the path, with points between
    its parts; without one the values are the objects.
    """
    for line, value in stream:
        if inside and isinstance(value, dict):  # a document, which may say more of itself
            metadata = value.get("metadata")
            check_declared(source, line, value | (metadata if isinstance(metadata, dict) else {}))

        for entry in _entries(value, inside.split(".")) if inside else [value]:
            if not isinstance(entry, (dict, InputError)):
                words = f"found {str(entry)[:40]!r}; expected an object with named fields"
                entry = source.findings.at(line, words)

            yield line, entry


def json_objects(path: Path, floats: Callable[[str], Any] = Decimal) -> Iterator[tuple[int, Any]]:
    """Yield every value of a file of JSON lines or of a JSON list, and the line it begins in.

    What is not JSON is yielded as an `InputError`. In lines reading goes on in the next one. What
    stands behind it in a list is not read. `floats` makes a value of the text of a number with a
    fraction; the default is exact.
    """
    with open_text(path, "\n") as stream:
        text = _Text(path, stream, floats)
        in_list = text.peek() == "["
        text.go(text.at + in_list)  # behind the bracket, if there is one
        while (char := text.peek()) and not (in_list and char == "]"):
            line = text.line
            try:
                value = text.value()
                yield line, value
                after = text.peek() if in_list else ""
                text.go(text.at + (after == ","))
                if after not in (",", "", "]"):
                    text.fail(text.at, "expected a comma between objects")
                if not in_list and not isinstance(value, dict):  # the rest of its line is no row
                    text.next_line("\n")
            except UnreadableError as error:
                yield line, error
                if in_list:  # nothing says where the next entry begins
                    return

                # An object may be spread over lines, so the next line with one is looked for.
                text.next_line("\n{" if char == "{" else "\n")

        if in_list and not char:
            words = "not JSON: the file is cut short: the list never ends"
            yield text.line, InputError(f"{path}: line {text.line}: {words}")


class _Text:
    """A stream of text that is read only as far as needed, in whole lines.

    `text` is what is held of it, `at` the place in it up to which it was read, and `line` the line
    of the file at this place.
    """

    def __init__(self, path: Path, stream: IO[str], floats: Callable[[str], Any]) -> None:
        self.path, self.stream, self.text, self.line, self.at = path, stream, "", 1, 0
        # NaN and infinities stay words, which no field takes.
        self.decode = json.JSONDecoder(parse_float=floats, parse_constant=str).raw_decode

    def more(self) -> bool:
        """Read on, as much as is held or more, and return whether there was anything.

        A long value is decoded anew after each reading. Since what is held doubles, that takes
        about twice as long as decoding it once.
        """
        fresh = self.stream.read(max(_READ_CHARS, len(self.text) - self.at))
        fresh += self.stream.readline()
        if fresh:
            check_utf8(self.path, fresh, self.line_at(len(self.text)))
            self.text, self.at = self.text[self.at :] + fresh, 0

        return bool(fresh)

    def line_at(self, position: int) -> int:
        """Return the line of the file at a later place in the text."""
        return self.line + self.text.count("\n", self.at, position)

    def go(self, to: int) -> None:
        """Go on to a later place in the text."""
        self.line, self.at = self.line_at(to), to

    def peek(self) -> str:
        """Return the next character that is not a space, or an empty text at the end."""
        while True:
            self.go(_SPACE.match(self.text, self.at).end())  # type: ignore[union-attr]
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]

    def value(self) -> Any:
        """Return the JSON value that begins here, and go behind it."""
        while True:
            try:
                value, end = self.decode(self.text, self.at)
            except json.JSONDecodeError as error:
                # An error near the end of the text read so far may only mean that it is cut there:
                # a word such as "false" or a number of a few digits.
                is_cut = error.msg.startswith("Unterminated") or error.pos >= len(self.text) - 8
                if is_cut and self.more():
                    continue

                words = "the file is cut short" if is_cut else error.msg[0].lower() + error.msg[1:]
                if self.line == 1 and error.pos == self.at == 0 and not is_cut:
                    words = "expected JSON lines or a list (the format csv reads CSV and Parquet)"

                self.fail(error.pos, words)
            except RecursionError:
                self.fail(self.at, "nested too deeply")
            except (ValueError, ArithmeticError):
                self.fail(self.at, "found a number of too many digits")

            self.go(end)
            return value

    def fail(self, position: int, words: str) -> NoReturn:
        """Raise an error about a place in the text."""
        raise UnreadableError(
            f"{self.path}: line {self.line_at(position)}: not JSON: {words}"
        ) from None

    def next_line(self, mark: str) -> None:
        """Go to the next line that begins as the mark says, or to the end."""
        while (place := self.text.find(mark, self.at)) < 0:
            # The last character stays, since a mark of two may be cut behind its first.
            self.go(max(self.at, len(self.text) - 1))
            if not self.more():
                return self.go(len(self.text))

        self.go(place + 1)


def read_objects(
    source: Source,
    wanted: Mapping[str, Sequence[str]],
    optional: Collection[str] = (),
    inside: str = "",
    runs: str = "",
    raw: Collection[str] = (),
) -> Iterator[Fields]:
    """Yield the objects in the window of a file as rows, with the `raw` values of some names.

    Fields that are `optional` read as null where they lack. Of those with a question mark a block
    has only the ones that stand in it. `wanted` has the names that each field may have, and
    `inside` and `runs` are those of `objects_in_blocks`.
    """
    # `names`: what the file calls each field, for errors. `known`: fields that are looked for by
    # their names. `other`: those with a question mark, which have one name, by that.
    names = {field: possible[0] for field, possible in wanted.items()}
    other = {plain_name(name): field for field, name in names.items() if field.startswith("? ")}
    known = {field: names for field, names in wanted.items() if not field.startswith("? ")}

    for rows in objects_in_blocks(source, inside=inside, runs=runs):
        columns: dict[str, list[str]] = {field: [] for field in known}
        missing: dict[tuple[str, int], InputError] = {}
        # Errors name a field as the first object of the block does.
        for field, possible in known.items():
            there = (name for name in possible if _inside(rows[0][1], name) not in _ABSENT)
            names[field] = next(there, names[field])

        for k, (line, row) in enumerate(rows):
            for field, possible in known.items():
                try:
                    value = member(source.path, line, row, *possible, optional=field in optional)
                except UnreadableError as error:
                    missing[field, k], value = error, ""

                columns[field].append(as_text(value))

            for name, value in row.items():
                if value is not None and (field := other.get(plain_name(name), "")):
                    columns.setdefault(field, ["null"] * len(rows))[k] = as_text(value)
                    names[field] = name

        raw_values = {name: [row.get(name) for _, row in rows] for name in raw}
        yield Fields(source, [line for line, _ in rows], names, columns, missing, raw_values)


_MISSING = object()
_ABSENT = (None, _MISSING)
# Units of values that are no times.
_COUNTED = ("", "count", "token", "tokens")


def member(path: Path, line: int, row: dict[str, Any], *names: str, optional: bool = False) -> Any:
    """Return the value of the first of some names that an object has.

    A point in a name leads into an object, as in ``usage.prompt_tokens``, unless the name as a
    whole is there, and a number into a list. A list of keys and values is read as an object.
    Everything inside null is null. If none has a value, it is None where one is null, or the field
    `optional`.
    """
    for name in names:
        value = _inside(row, name)
        if value is not None and value is not _MISSING:
            return value

        optional = optional or value is None  # a null says that there is none

    if optional:
        return None

    # The error shows what is there where the path ends.
    end: Any = row
    for part in names[0].split("."):
        if (deeper := _inside(end, part)) is _MISSING:
            break

        end = deeper

    found = ", ".join(end) if isinstance(end, dict) else as_text(end)
    raise UnreadableError(
        f"{path}: line {line}: expected the field {names[0]}; found {found[:200] or 'nothing'}"
    )


def _inside(value: Any, name: str) -> Any:
    """Return what stands at a dotted name inside a value, or `_MISSING`. In null all is null.

    A number is a place in a list. For other names a list is read as keys and values.
    """
    if value is None:
        return None
    if isinstance(value, list):
        head, _, tail = name.partition(".")
        if head.lstrip("-").isdigit():
            entry = value[int(head)] if -len(value) <= int(head) < len(value) else _MISSING
            return _inside(entry, tail) if tail else entry

        value = _object_of_pairs(value)

    if not isinstance(value, dict):
        return _MISSING
    if name in value or "." not in name:
        return value.get(name, _MISSING)

    # The shortest part before a point that is the name of something here.
    for k, char in enumerate(name):
        if char == "." and name[:k] in value:
            return _inside(value[name[:k]], name[k + 1 :])

    return _MISSING


def _object_of_pairs(pairs: list[Any]) -> dict[str, Any]:
    """Return the object of a list of keys and values, as OpenTelemetry writes attributes.

    A value may be an object that has it under the name of its type: ``{"intValue": 5}``.
    """
    values = dict[str, Any]()
    for pair in pairs:
        if isinstance(pair, dict) and isinstance(pair.get("key"), str):
            value = pair.get("value")
            if isinstance(value, dict):
                value = next(iter(value.values()), None)

            values[pair["key"]] = value

    return values


def as_text(value: Any) -> str:
    """Return a value as text for `Fields`. What is no number and no text suits no field.

    An object of a value and a unit is the text of both; units that only count are left out.
    """
    if isinstance(value, dict) and "value" in value and "unit" in value:
        unit = str(value["unit"])
        return as_text(value["value"]) + (f" {unit}" if unit not in _COUNTED else "")
    if isinstance(value, (dict, list)) and value:
        return "{...}" if isinstance(value, dict) else "[...]"
    if value is None:
        return "null"

    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= _MAX_FIELD else text[:_MAX_FIELD] + "..."
