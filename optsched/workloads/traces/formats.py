"""Traces whose fields are named columns: delimited text, JSON and Parquet.

A format is a `Layout`: a table of names, units and marks in ``layouts.toml``. Those with more to
say have a function.

As all readers, they get a `Source` and yield `Block`s (`optsched.workloads.traces.base`). Its
`findings` are told of rows that cannot be read (``skip``), and of what is odd (``odd``): that is a
warning, or an error where it is ``sure`` to be wrong.
"""

import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.problem.errors import InputError
from optsched.workloads.traces import status
from optsched.workloads.traces.base import Block, Source, objects, trace_format
from optsched.workloads.traces.cached import cached_names
from optsched.workloads.traces.delimited import find_columns, open_bytes, plain_name, read_delimited
from optsched.workloads.traces.exact import (
    DURATIONS,
    PLACES,
    TIMES,
    UNIT_WORDS,
    Fields,
    Mask,
    exact_whole,
)
from optsched.workloads.traces.json_objects import read_objects
from optsched.workloads.traces.nested import (
    ID_NAMES,
    PARENT_NAMES,
    REFERENCES,
    Repeats,
)
from optsched.workloads.traces.parquet import is_parquet, parquet_columns, parquet_rows
from optsched.workloads.traces.plausible import shown_unit, unit_in_name

FIELDS = ("arrival", "prompt_tokens", "output_tokens", *TIMES[1:], "weight", "status")
"""Fields of a request for which a user can name a column."""


@dataclass(frozen=True)
class Layout:
    """What the columns of a format are called, and what they mean.

    ``layouts.toml`` says what each field is. Here, ``units`` has the unit of all other fields by an
    empty name, and ``json`` is None for a file to look at. With ``open`` the user names the
    columns, of which those in ``plus`` are added: the first to ``prompt_tokens`` is there under
    ``prompt_tokens + 1``.
    """

    names: Mapping[str, tuple[str, ...]]
    needs: Collection[str] = ("arrival",)
    status: Sequence[str] = ()
    success: Collection[str] = ()
    silent: bool = False
    one: Sequence[str] = ()
    units: Mapping[str, str] = field(default_factory=dict)
    json: bool | None = True
    inside: str = ""
    runs: str = ""
    guess: bool = False
    whole: bool = False
    foreign: Mapping[str, str] = field(default_factory=dict)
    marks: Sequence[str] = ()
    ids: Sequence[str] = ()
    follows: Sequence[str] = ()
    session: Sequence[str] = ()
    grows: bool = False
    open: bool = False
    plus: Mapping[str, str] = field(default_factory=dict)

    def unit(self, source: Source, name: str) -> str:
        """Return the unit of a field: the user's, or what the file shows, or this format's."""
        own = source.findings.units.get(name) or self.units.get(name)
        return source.unit(name, own or self.units.get("", "s"))


class _Table:
    """The rows of a file whose columns a layout names, and what its other columns say.

    Columns are read as fields: those of the layout by their names, and others by a word before
    theirs. ``status X`` says whether a request was served, ``one X`` should have one value, and
    ``? X`` is one that the layout does not name and that may mean something.

    Methods take the file block by block. `have` are the fields of a block, without those that the
    file lacks. `skip` marks rows that will be left out, of which no further field has to be read.

    `values`: different values of columns that should have one, by name. `failures`: the warning
    about each column of statuses. `calls`: how many were read. `sessions`: number of each session,
    by name. `last`: name and end of the last call of each session, by number. What each field of
    `layout` is stands at the top of ``layouts.toml``.
    """

    def __init__(self, source: Source, layout: Layout) -> None:
        self.source, self.layout = source, layout
        self.values: dict[str, set[str]] = {}
        self.failures: dict[str, str] = {}
        self.calls = 0
        self.sessions: dict[str, int] = {}
        self.last: dict[int, tuple[tuple[int, int], int]] = {}
        self.repeats = Repeats()

    def blocks(self) -> Iterator[Block]:
        """Yield the rows of the window."""
        absent: set[str] | None = None
        for rows in self._rows():
            have = rows.columns.keys() - (absent or ())
            if absent is None:  # what the whole first block lacks the file lacks
                absent = {name for name in filter(self._may_lack, have) if _empty(rows, name).all()}
                have -= absent
                self._check(rows, have)
                self._tell_fields(rows, have)

            yield self._block(rows, have)

        self.repeats.finish(self.source.findings)
        for name, values in self.values.items():
            if len(values) > 1:
                shown = ", ".join(sorted(map(repr, values)))
                self.source.findings.odd(
                    f"the column {name} has several values ({shown:.80}), which are all read alike",
                    harmless=self.layout.names.keys().isdisjoint(("latency", "finished_at")),
                )

    def _tell_fields(self, rows: Fields, have: Set[str]) -> None:
        """Tell the findings which fields the file has. One without arrivals needs marks.

        `Findings.marked` stays None for a file with arrivals in a format without marks.
        """
        findings, marks = self.source.findings, self.layout.marks
        raw = {name for name, column in rows.raw.items() if any(v is not None for v in column)}
        named = raw.union(have, (name.removeprefix("status ") for name in have))
        findings.fields = len(have & self.layout.names.keys())
        if marks or "arrival" not in have:
            findings.marked = bool(marks) and named.issuperset(marks)

    def _may_lack(self, name: str) -> bool:
        """Return whether a field may be missing: not tokens and what the layout needs."""
        needs = ("prompt_tokens", "output_tokens", "session", "elapsed", *self.layout.needs)
        return name not in needs

    def _rows(self) -> Iterator[Fields]:
        """Yield the rows of the window with the fields that matter, whatever kind of file it is.

        If the layout's `json` is None, the file shows whether it is JSON. Ids, and whom a request
        follows, are read from JSON alone, and as they stand there (`raw`).
        """
        source, layout = self.source, self.layout
        wanted = self._wanted()
        optional = set(filter(self._may_lack, wanted))

        if is_parquet(source.path):
            yield from _parquet(source, wanted, optional)
        elif layout.json or (layout.json is None and is_json(source)):
            raw = (*layout.ids, *layout.follows)
            yield from read_objects(source, wanted, optional, layout.inside, layout.runs, raw)
        else:
            yield from read_delimited(source, wanted, optional)

    def _wanted(self) -> dict[str, tuple[str, ...]]:
        """Return the names that each field may have in the file, the best first."""
        source, layout = self.source, self.layout
        wanted = dict(layout.names)
        linked = source.closed or layout.grows  # times and sessions link calls
        if source.drawn and not linked:  # drawn arrivals replace all times
            wanted = {name: names for name, names in wanted.items() if name not in TIMES}
        if linked:
            pairs = zip(("session", "elapsed"), layout.session, strict=False)
            wanted |= {name: (column,) for name, column in pairs}

        wanted |= {f"status {name}": (name,) for name in layout.status}
        wanted |= {f"one {name}": (name,) for name in layout.one}
        named = {plain_name(name) for names in wanted.values() for name in names}
        wanted |= {name: (column,) for name, column in layout.plus.items()}
        if "prompt_tokens + 1" not in layout.plus:  # else the user knows what to add
            wanted |= cached_names(layout.names["prompt_tokens"])

        # Usual names of statuses, ids, units and clients, which are looked at unasked.
        others = (*status.NAMES, *status.IDENTITY_NAMES, *status.UNIT_NAMES, *layout.foreign)
        others += (*ID_NAMES, *PARENT_NAMES, REFERENCES, *status.CLIENT_NAMES)
        return wanted | {f"? {name}": (name,) for name in others if plain_name(name) not in named}

    def _check(self, rows: Fields, have: Set[str]) -> None:
        """Refuse a file whose names or marks say another format or unit than is meant."""
        source, layout = self.source, self.layout
        findings, first = source.findings, int(rows.line[0])
        # `foreign`: columns that another format has, and words that name it.
        for name, words in layout.foreign.items():
            if f"? {name}" in have and "arrival" in have and not source.says_unit("arrival"):
                raise findings.at(first, f"found the field {name} of {words}")

        for name, column in layout.plus.items():  # columns that the user adds to tokens
            if name not in have:
                raise findings.at(first, f"expected values in {column}, to be added; found none")

        for point in DURATIONS.values():  # points in time at which a TTFT or a latency ends
            if point in have and "arrival" not in have:
                raise findings.at(first, f"found {point} without arrival, from which times count")

        # The unit that a column's name, or a column for units, says of each time, and which column.
        says = {
            name: (unit_in_name(rows.names[name]), rows.names[name])
            for name in TIMES
            if name in have
        }
        for name in status.UNIT_NAMES:
            values = set(rows.columns[f"? {name}"]) if f"? {name}" in have else set()
            if len(values) == 1 and "arrival" in says:
                says["arrival"] = (UNIT_WORDS.get(values.pop().casefold()), name)

        if layout.guess:  # names have units (_ms), or values show them
            for name, (unit, _) in says.items():
                shown = unit or shown_unit(rows.columns[name], point=name not in DURATIONS)
                if shown:
                    findings.units[name] = shown

        # The user's unit of fields without one of their own, and whether all names say the same.
        general, alike = source.units.get(""), len({unit for unit, _ in says.values()}) == 1
        for name, (unit, column) in says.items():
            used = layout.unit(source, name)
            # Tell where the name says another unit than is used, unless the user gave this field's.
            # A unit given for all fields may be meant against the name, so that is not `sure`. But
            # ``datetime`` for all gives none to durations, which are read in seconds.
            if unit not in (None, used) and used in PLACES and name not in source.units:
                option = unit if alike and not general else f"{name}={unit}"
                findings.odd(
                    f"the column {column} says {unit}, and {name} is read in {used}; "
                    f"--unit {option} says so",
                    first,
                    sure=general in (None, "datetime"),
                )

    def _block(self, rows: Fields, have: Set[str]) -> Block:
        """Return rows as a block, without those that cannot be read.

        Rows to `skip`, which will be left out, need no other fields.
        """
        source, layout = self.source, self.layout
        failed = self._failed(rows, have)
        skip = failed | rows.unreadable
        prompt = self._tokens(rows, "prompt_tokens", skip)
        output = self._tokens(rows, "output_tokens", skip)
        cached = self._cached(rows, have, skip, prompt)
        if layout.silent:  # a request without output failed
            failed = failed | (output == 0) & ~rows.unreadable

        skip |= (prompt <= 0) | (output <= 0) | rows.unreadable
        self._look(rows, have, skip)
        self.repeats.look(rows, ~skip)

        time, ttft, latency = self._times(rows, have, skip)
        calls = None if "session" not in have or time is None else self._calls(rows, time, skip)
        ids, follows = self._ids(rows)
        # Requests have the name of their session, so each goes on behind the last one of that name.
        if layout.grows and calls is not None:
            follows = np.array([2 * (name[0],) for name, _, _ in calls], dtype=object)

        weight = None
        if "weight" in have:
            absent = _empty(rows, "weight")
            weight = np.where(absent, 1, rows.whole_numbers("weight", skip | absent))

        calls = calls if source.closed else None
        of_text = ids, follows, calls, cached
        block = Block(
            rows.line, prompt, output, time, failed, ttft, latency, *of_text, weight=weight
        )
        return block.pick(~rows.unreadable)

    def _times(self, rows: Fields, have: Set[str], skip: Mask) -> tuple[Any, Any, Any]:
        """Return arrivals in nanoseconds, TTFTs and latencies in seconds; each None if not there.

        A file has a TTFT or latency as a duration, or as the point in time at which it ends.
        """
        source, layout = self.source, self.layout
        time, measured = None, dict[str, Any]()
        if "arrival" in have:
            unit = layout.unit(source, "arrival")
            time = rows.points("arrival", unit, skip)
            # A fraction shows that the unit is another, unless the user says the unit.
            if layout.whole and not source.says_unit("arrival"):
                self._check_whole(rows, time, unit)

        # `point`: the field of the points in time at which such a duration ends.
        for name, point in DURATIONS.items():
            if name in have:
                measured[name] = rows.seconds(name, layout.unit(source, name), skip)
            elif point in have and time is not None:
                points = rows.points(point, layout.unit(source, point), skip)
                measured[name] = np.where(skip, 0, points - time) / 1e9

        return time, measured.get("ttft"), measured.get("latency")

    def _tokens(self, rows: Fields, name: str, skip: Mask) -> NDArray[np.int64]:
        """Return a number of tokens, with the columns that the user adds to it."""
        tokens = rows.whole_numbers(name, skip)
        for more in (key for key in self.layout.plus if key.startswith(name)):
            tokens = tokens + rows.whole_numbers(more, skip | _empty(rows, more))

        return tokens

    def _cached(
        self, rows: Fields, have: Set[str], skip: Mask, prompt: NDArray[np.int64]
    ) -> NDArray[Any] | None:
        """Return the model, the cached tokens and the prompt tokens of each request.

        The model says whether the prompt tokens include the cached ones (`cached.with_cached`).
        """
        names = sorted(name for name in have if name.startswith("cached "))
        if not names:
            return None

        tokens = sum(rows.whole_numbers(name, skip | _empty(rows, name)) for name in names)
        # The model stands in a column that should have one value, or in one with a usual name.
        models = [f"one {name}" for name in self.layout.one] + ["? model", "? model_name"]
        model = next((rows.columns[key] for key in models if key in have), [""] * len(prompt))
        return objects(list(zip(model, np.asarray(tokens).tolist(), prompt.tolist(), strict=True)))

    def _ids(self, rows: Fields) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
        """Return each request's ids, and its name and that of the one that it follows.

        Either is None where the file has none. Ids may be in several fields, of which the first
        must be there. Where a field is no list, it stands in the place of the ids.
        """
        first = rows.raw.get(self.layout.ids[0], ()) if self.layout.ids else ()
        if all(value is None for value in first):
            return None, None

        # The first field has to have a list, and another one where it has anything.
        ids, follows = list[Any](), None
        for values in zip(*(rows.raw[name] for name in self.layout.ids), strict=True):
            wrong = [v for v in (values[0], *filter(None, values)) if not isinstance(v, list)]
            if wrong:  # which `check_ids` shows if prefixes are wanted
                ids.append(wrong[0])
            else:
                ids.append([str(name) for part in values for name in part or ()])

        if self.layout.follows:  # two fields, so that rows are pairs of names
            follows = np.array([rows.raw[name] for name in self.layout.follows], dtype=object).T

        return objects(ids), follows

    def _calls(self, rows: Fields, time: NDArray[np.int64], skip: Mask) -> NDArray[Any]:
        """Return each request's name, that of the last one of its session, and the time between.

        A name is the number of the session, which is that of its first call, and the number of the
        call. The time is nanoseconds from the end of the last one, which took what ``elapsed``
        says.
        """
        took = rows.nanoseconds("elapsed", self.layout.unit(self.source, "latency"), skip)
        calls = list[Any]()
        for k, session in enumerate(rows.columns["session"]):
            if ("session", k) in rows.missing:
                rows.refuse("session", k, "a name")

            self.calls += 1
            nameless = session in ("", "null")  # a session of its own
            number = self.calls if nameless else self.sessions.setdefault(session, self.calls)
            name = number, self.calls
            before, end = self.last.get(number, (None, 0))
            wait = max(int(time[k]) - end, 0)
            calls.append((name, () if before is None else (before,), wait))
            if not (skip[k] or rows.unreadable[k]):  # nobody comes after one that is left out
                self.last[number] = name, int(time[k] + took[k])

        return objects(calls)

    def _failed(self, rows: Fields, have: Set[str]) -> Mask:
        """Return the rows that a status calls failed.

        One that says neither cannot be read where the user names the columns (``open``); else it
        failed.
        """
        failed = np.zeros(len(rows.line), dtype=bool)
        for name in sorted(name for name in have if name.startswith("status ")):
            words = self.source.success.union(self.layout.success)
            bad, unknown = status.failed_rows(rows, name, words)
            failed |= bad if self.layout.open else bad | unknown
            for i in np.flatnonzero(unknown & self.layout.open).tolist():
                rows.refuse(
                    name,
                    i,
                    "a word of success (ok, success, completed, 200, ...) or failure "
                    "(error, failed, timeout, 500, ...); success=WORD (--success WORD) adds one",
                )

        return failed

    def _look(self, rows: Fields, have: Set[str], skip: Mask) -> None:
        """Tell the findings what columns say that the user did not name."""
        # A column of the number of clients counts if it has one value.
        for name in have & {f"? {name}" for name in status.CLIENT_NAMES}:
            values = set(rows.columns[name][~skip])
            if len(values) == 1 and (limit := exact_whole(values.pop())):
                words = f"the column {rows.names[name]} says {limit}"
                self.source.findings.clients = words, limit

        # Columns that should have one value; in the end `blocks` tells of those with several.
        same = {f"? {name}" for name in (*status.IDENTITY_NAMES, *status.UNIT_NAMES)}
        for key in have & same.union(f"one {name}" for name in self.layout.one):
            values = self.values.setdefault(rows.names[key], set())
            if len(values) < 10:  # enough to show
                values.update(rows.columns[key][~skip])

        # Columns of statuses, where the layout has none of its own. A row is told of once.
        for name in () if self.layout.status else status.NAMES:
            if (field := f"? {name}") not in have:
                continue

            column = rows.names[field]
            failed, unknown = status.failed_rows(rows, field, self.source.success)
            bad = (failed | unknown) & ~skip & ~_empty(rows, field)
            if bad.any():
                word = rows.columns[field][np.argmax(bad)]
                words = self.failures.setdefault(
                    name,
                    f"the column {column} does not say success, as with {word!r:.40}: these rows "
                    f"are kept; of csv and jsonl, --column status={column} leaves out what failed",
                )
                rows.odd(words, bad)
                skip = skip | bad

    def _check_whole(self, rows: Fields, time: NDArray[np.int64], unit: str) -> None:
        """Refuse arrivals that are no whole numbers of a unit: they are in another one."""
        broken = (time % 10 ** PLACES[unit] != 0) & ~rows.unreadable
        if broken.any():
            i = int(np.argmax(broken))
            found = f"{rows.names['arrival']}: found {rows.columns['arrival'][i]}"
            raise self.source.findings.at(
                int(rows.line[i]),
                f"{found}; expected whole {unit}, as this format has them; unit (--unit) says the "
                f"unit: --unit s for seconds, --unit {unit} if it is {unit}",
            )


def _empty(rows: Fields, name: str) -> Mask:
    """Return the rows without a value in a field."""
    column = rows.columns[name]
    return np.asarray((column == "") | (column == "null"), dtype=bool)


def is_json(source: Source) -> bool:
    """Return whether a file begins as JSON does. A pipe cannot be looked at."""
    if not source.path.is_file():
        return False
    with open_bytes(source.path) as stream:
        return stream.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[")


def _parquet(
    source: Source, wanted: Mapping[str, Sequence[str]], optional: Collection[str]
) -> Iterator[Fields]:
    """Yield the rows in the window of a Parquet file, as `read_delimited` does of CSV."""
    header = parquet_columns(source.path)
    index = find_columns(source.path, header, wanted, optional)
    names = {field: header[k] for field, k in index.items()}

    for first, batch in parquet_rows(source.path, source.window, sorted(set(names.values()))):
        # Numbers are turned into texts, so that they pass the same checks as in a CSV file.
        texts = {field: _texts(batch.column(column)) for field, column in names.items()}
        lines = range(first, first + batch.num_rows)
        yield Fields(source, lines, names, texts)


def _texts(column: Any) -> list[str]:
    """Return the values of a column as texts, empty ones for null."""
    import pyarrow as pa

    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.string())  # with all digits

    return ["" if value is None else str(value) for value in column.to_pylist()]


def _named(source: Source, json: bool) -> Layout:
    """Return the layout of a file whose columns the user names, or that have a field's name.

    What the user names has to be there (`needs`). `json`: whether the file is read as JSON, where
    the column ``rows`` is the path to the list of requests.
    """
    columns = dict(source.columns)
    inside = columns.pop("rows", "") if json else ""
    known = (*FIELDS, "rows") if json else FIELDS
    unknown = [name for name in columns if name not in known]
    if unknown:
        raise InputError(f"columns: found {unknown[0]!r}; expected fields of {', '.join(known)}")
    for name, point in DURATIONS.items():
        if name in columns and point in columns:
            raise InputError(f"columns: found {name} and {point}; expected one of them")

    plus = dict[str, str]()  # prompt_tokens=A+B adds the column B to A
    for name in ("prompt_tokens", "output_tokens"):
        columns[name], *more = columns.get(name, name).split("+")
        plus |= {f"{name} + {k}": column for k, column in enumerate(more, start=1)}

    status_column = columns.pop("status", None)
    needs = list(columns)
    # A column of errors is empty everywhere if none happened, so it may be missing.
    if status_column and not status.lists_errors(status_column):
        needs.append(f"status {status_column}")

    return Layout(
        names={name: (columns.get(name, name),) for name in FIELDS if name != "status"},
        needs=needs,
        status=() if status_column is None else (status_column,),
        json=json,
        inside=inside,
        open=True,
        plus=plus,
    )


def _register(
    name: str, summary: str, doubtful: bool = False, ids_tokens: int = 0, **table: Any
) -> None:
    """Register the format of a table in ``layouts.toml``.

    `doubtful`: whether its files may have another unit than the table says, so that arrivals are
    checked for it.
    """
    unit, json = table.pop("unit", "s"), table.pop("json", True)
    layout = Layout(
        names={field: tuple(text.split(" | ")) for field, text in table.pop("names").items()},
        units={"": unit, **table.pop("units", {})},
        json=None if json == "either" else json,  # None: look at the file
        **table,
    )
    options = ["unit"]
    if layout.runs:
        options.append("run")
    if layout.session:
        options.append("sessions")

    # What a path to a field ends in: a file that is like this format has these words in it.
    words = tuple(tuple(n.rpartition(".")[2] for n in names) for names in layout.names.values())
    fields = {"unit": unit if doubtful else "", "ids_tokens": ids_tokens, "words": words}
    register = trace_format(name, summary, options=tuple(options), **fields)
    register(lambda source: _Table(source, layout).blocks())


for _name, _table in tomllib.loads(Path(__file__).with_name("layouts.toml").read_text()).items():
    _register(_name, **_table)

_options = ("columns", "unit", "success")
trace_format("csv", "Any CSV or Parquet file with named columns", options=_options, unit="s")(
    lambda source: _Table(source, _named(source, json=False)).blocks()
)
trace_format("jsonl", "Any JSON lines or JSON list with named fields", options=_options, unit="s")(
    lambda source: _Table(source, _named(source, json=True)).blocks()
)
