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
        found = list[tuple[int, dict[str, Any]]]()
        for line, value in block:
            if isinstance(value, dict):
                check_declared(source, line, value)
                found.append((line, value))
            else:
                source.findings.skip(line, value)

        if found:
            yield found


def pick_run(
    source: Source, runs: str = "", floats: Callable[[str], Any] = Decimal
) -> tuple[int, dict[str, Any]]:
    """Return the object of the run that the user picked, with its line.

    Each object of the file is a run, or has a list of runs at the path ``runs``.
    """
    path, found, broken = source.path, [], None
    for line, entry in _objects(source, json_objects(path, floats), runs):
        if isinstance(entry, dict):
            check_declared(source, line, entry)
            found.append((line, entry))
        else:
            broken = broken or entry

    wanted = 1 if source.run is None and len(found) < 2 else source.run
    if not found:
        raise broken or InputError(f"{path}: found no runs; expected a JSON object of a run")
    if broken:
        source.findings.odd(str(broken).removeprefix(f"{path}: ") + "; it is no run")
    if wanted is None:
        raise InputError(
            f"{path}: found {len(found)} runs; expected one; run=N (--run N) picks it, from 1 to "
            f"{len(found)}, or -1 for the last; requests are another format"
        )

    if not 1 <= abs(wanted) <= len(found):
        raise InputError(f"{path}: run: found {wanted}; expected a run of the {len(found)}")

    picked = found[wanted - 1 if wanted > 0 else wanted]
    source.findings.clients = strategy_clients(picked[1])
    return picked


def _entries(value: Any, path: Sequence[str]) -> Iterator[Any]:
    """Yield the entries of lists at a path; ``*`` stands for each list of an object.

    Entries get the name of that list as their field ``*``. What has no such path is an entry.
    """
    if isinstance(value, list):
        for one in value:
            yield from _entries(one, path)
    elif not path or not isinstance(value, dict) or path[0] not in (*value, "*"):
        yield value
    elif path[0] == "*":
        for name, group in value.items():
            if isinstance(group, list):
                yield from ({**one, "*": name} if isinstance(one, dict) else one for one in group)
    else:
        yield from _entries(value[path[0]], path[1:])


def _objects(
    source: Source, stream: Iterator[tuple[int, Any]], inside: str
) -> Iterator[tuple[int, dict[str, Any] | InputError]]:
    """Yield the objects at a path inside values, or what is wrong with each."""
    for line, value in stream:
        if inside and isinstance(value, dict):  # a document, which may say more of itself
            about = value.get("metadata")
            check_declared(source, line, {**value, **(about if isinstance(about, dict) else {})})

        for entry in _entries(value, inside.split(".")) if inside else [value]:
            if not isinstance(entry, (dict, InputError)):
                found = f"found {str(entry)[:40]!r}; expected an object with named fields"
                entry = source.findings.at(line, found)

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
        text.go(text.at + in_list)
        while (char := text.peek()) and not (in_list and char == "]"):
            line = text.line
            try:
                value = text.value()
                yield line, value
                after = text.peek() if in_list else ""
                text.go(text.at + (after == ","))
                if after not in (",", "", "]"):
                    text.fail(text.at, "expected a comma between objects")
                if not in_list and not isinstance(value, dict):
                    text.next_line("\n")
            except UnreadableError as error:
                yield line, error
                if in_list:
                    return

                text.next_line("\n{" if char == "{" else "\n")

        if in_list and not char:
            words = "not JSON: the file is cut short: the list never ends"
            yield text.line, InputError(f"{path}: line {text.line}: {words}")


class _Text:
    """A stream of text that is read only as far as needed, in whole lines."""

    def __init__(self, path: Path, stream: IO[str], floats: Callable[[str], Any]) -> None:
        self.path, self.stream, self.text, self.line, self.at = path, stream, "", 1, 0
        # NaN and infinities stay words, which no field takes.
        self.decode = json.JSONDecoder(parse_float=floats, parse_constant=str).raw_decode

    def more(self) -> bool:
        """Read on, as much as is held or more, and return whether there was anything."""
        fresh = self.stream.read(max(_READ_CHARS, len(self.text) - self.at))
        fresh += self.stream.readline()
        if fresh:
            check_utf8(self.path, fresh, self.line_at(len(self.text)))
            self.text, self.at = self.text[self.at :] + fresh, 0

        return bool(fresh)

    def line_at(self, position: int) -> int:
        return self.line + self.text.count("\n", self.at, position)

    def go(self, to: int) -> None:
        self.line, self.at = self.line_at(to), to

    def peek(self) -> str:
        """Return the next character that is not a space, or an empty text at the end."""
        while True:
            self.go(_SPACE.match(self.text, self.at).end())  # type: ignore[union-attr]
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]

    def value(self) -> Any:
        while True:
            try:
                value, end = self.decode(self.text, self.at)
            except json.JSONDecodeError as error:
                # An error near the end of the text read so far may only mean that it is cut there.
                cut = error.msg.startswith("Unterminated") or error.pos >= len(self.text) - 8
                if cut and self.more():
                    continue

                words = "the file is cut short" if cut else error.msg[0].lower() + error.msg[1:]
                if self.line == 1 and error.pos == self.at == 0 and not cut:
                    words = "expected JSON lines or a list (the format csv reads CSV and Parquet)"

                self.fail(error.pos, words)
            except RecursionError:
                self.fail(self.at, "nested too deeply")
            except (ValueError, ArithmeticError):
                self.fail(self.at, "found a number of too many digits")

            self.go(end)
            return value

    def fail(self, position: int, words: str) -> NoReturn:
        raise UnreadableError(
            f"{self.path}: line {self.line_at(position)}: not JSON: {words}"
        ) from None

    def next_line(self, mark: str) -> None:
        """Go to the next line that begins as the mark says, or to the end."""
        while (found := self.text.find(mark, self.at)) < 0:
            self.go(max(self.at, len(self.text) - 1))
            if not self.more():
                return self.go(len(self.text))

        self.go(found + 1)


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
    has only the ones that stand in it.
    """
    names = {field: found[0] for field, found in wanted.items()}
    other = {plain_name(name): field for field, name in names.items() if field.startswith("? ")}
    known = {field: found for field, found in wanted.items() if not field.startswith("? ")}

    for rows in objects_in_blocks(source, inside=inside, runs=runs):
        columns: dict[str, list[str]] = {field: [] for field in known}
        missing: dict[tuple[str, int], InputError] = {}
        for field, found in known.items():
            there = (one for one in found if _inside(rows[0][1], one) not in (None, _MISSING))
            names[field] = next(there, names[field])

        for k, (line, row) in enumerate(rows):
            for field, found in known.items():
                try:
                    value = member(source.path, line, row, *found, optional=field in optional)
                except UnreadableError as error:
                    missing[field, k], value = error, ""

                columns[field].append(as_text(value))

            for name, value in row.items():
                if value is not None and (field := other.get(plain_name(name), "")):
                    columns.setdefault(field, ["null"] * len(rows))[k] = as_text(value)
                    names[field] = name

        found_raw = {name: [row.get(name) for _, row in rows] for name in raw}
        yield Fields(source, [line for line, _ in rows], names, columns, missing, found_raw)


_MISSING = object()
# Units of values that are no times.
_COUNTED = ("", "count", "token", "tokens")


def member(path: Path, line: int, row: dict[str, Any], *names: str, optional: bool = False) -> Any:
    """Return the value of the first of some names that an object has.

    A point in a name leads into an object, as in ``usage.prompt_tokens``, unless the name as a
    whole is there, and a number into a list. A list of keys and values is read as an object.
    Everything inside null is null.
    """
    for name in names:
        value = _inside(row, name)
        if value is not None and value is not _MISSING:
            return value

        optional = optional or value is None

    if optional:
        return None

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
    """Return what stands at a dotted name inside a value, or `_MISSING`."""
    if value is None:
        return None
    if isinstance(value, list):
        head, _, tail = name.partition(".")
        if head.lstrip("-").isdigit():
            entry = value[int(head)] if -len(value) <= int(head) < len(value) else _MISSING
            return _inside(entry, tail) if tail else entry

        value = {
            pair["key"]: next(iter(pair["value"].values()), None)
            if isinstance(pair.get("value"), dict)
            else pair.get("value")
            for pair in value
            if isinstance(pair, dict) and isinstance(pair.get("key"), str)
        }

    if not isinstance(value, dict):
        return _MISSING
    if name in value or "." not in name:
        return value.get(name, _MISSING)

    for at, char in enumerate(name):
        if char == "." and name[:at] in value:
            return _inside(value[name[:at]], name[at + 1 :])

    return _MISSING


def as_text(value: Any) -> str:
    """Return a value as text for `Fields`. What is no number and no text suits no field."""
    if isinstance(value, dict) and "value" in value and "unit" in value:
        own = str(value["unit"])
        return as_text(value["value"]) + (f" {own}" if own not in _COUNTED else "")
    if isinstance(value, (dict, list)) and value:
        return "{...}" if isinstance(value, dict) else "[...]"
    if value is None:
        return "null"

    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= _MAX_FIELD else text[:_MAX_FIELD] + "..."
