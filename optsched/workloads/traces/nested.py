"""Requests that stand in a file more than once: spans inside spans, rows sent again, and sums."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from optsched.workloads.traces.base import Findings
from optsched.workloads.traces.exact import Fields, Mask

ID_NAMES = ["id", "request_id", "req_id", "span_id", "observation_id", "x_request_id", "custom_id"]
"""Names of columns that name a request."""

PARENT_NAMES = ["parent_id", "parent_span_id", "parent_observation_id", "parent_run_id"]
"""Names of columns with the name of what a request is inside of."""

REFERENCES = "references"
"""Jaeger's list of what a span is inside of."""

Entries = Iterator[tuple[int, Any]]
OUTER = "* outer"
_WORDS = {
    "outer": "spans hold others that have tokens, and are no requests",
    "again": "spans are in the file again under the same id, and count once",
}


def mark_outer(entries: Entries, names: Sequence[str], is_request: Callable[..., bool]) -> Entries:
    """Yield spans, with a field `OUTER` in those that are no requests of their own.

    That is one inside which another is a request, at any depth, and one whose id has come before.
    What is inside a span may stand anywhere, so all are held. ``names`` are the fields of a span's
    trace, its id and its parent's.
    """
    trace, own, above = names
    held, parent = list(entries), dict[Any, Any]()
    outer, seen = set[Any](), set[Any]()
    place: Any
    for _, span in held:
        if isinstance(span, dict) and span.get(own):
            up = span.get(above)
            parent[span.get(trace), span[own]] = (span.get(trace), up) if up else None

    requests = {
        k: (span.get(trace), span.get(own))
        for k, (line, span) in enumerate(held)
        if isinstance(span, dict) and is_request(line, span)
    }
    for place in requests.values():
        while (place := parent.get(place)) is not None and place not in outer:
            outer.add(place)

    for k, (line, span) in enumerate(held):
        if (place := requests.get(k)) in parent:
            kind = "outer" if place in outer else "again" if place in seen else None
            seen.add(place)
            span = {**span, OUTER: kind}

        yield line, span


def say_outer(rows: Fields) -> Mask:
    """Return the rows that are no requests of their own, and tell the findings."""
    kinds, none = rows.columns.get(OUTER), np.zeros(len(rows.line), dtype=bool)
    for kind, words in _WORDS.items():
        found = none if kinds is None else np.asarray(kinds == kind, dtype=bool)
        rows.odd(words, found, harmless=True)
        none = none | found

    return none


class Repeats:
    """The names of requests and of what they are inside of, where only a warning can be given."""

    def __init__(self) -> None:
        self.own: dict[str, set[str]] = {}
        self.above: dict[str, tuple[str, int]] = {}

    def look(self, rows: Fields, kept: Mask) -> None:
        """Tell the findings of names that come again, and keep those of what rows are inside of."""
        for field in rows.columns.keys() & {f"? {name}" for name in ID_NAMES}:
            seen, again = self.own.setdefault(field, set()), np.zeros(len(rows.line), dtype=bool)
            for k in np.flatnonzero(kept).tolist():
                name = rows.columns[field][k]
                again[k] = name in seen
                seen.update({name} - {"", "null"})

            rows.odd(
                f"values of {rows.names[field]} come again: a request that was tried or sent again "
                "counts each time",
                again,
            )

        for field in rows.columns.keys() & {f"? {name}" for name in (*PARENT_NAMES, REFERENCES)}:
            for k in np.flatnonzero(kept).tolist():
                name = rows.columns[field][k]
                self.above.setdefault(name, (rows.names[field], int(rows.line[k])))

    def finish(self, findings: Findings) -> None:
        """Tell the findings of requests inside one another."""
        names = set[str]().union(*self.own.values(), ["[...]"])
        inside = [self.above[name] for name in self.above.keys() & names]
        if inside:
            field, line = min(inside, key=lambda one: one[1])
            findings.odd(
                f"the field {field} says that requests are inside others, which may be sums of "
                "them: both count",
                line,
                len(inside),
            )
