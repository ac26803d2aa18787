"""Requests that stand in a file more than once: rows sent again, and sums."""

import numpy as np

from optsched.workloads.traces.base import Findings
from optsched.workloads.traces.exact import Fields, Mask

ID_NAMES = ["id", "request_id", "req_id", "span_id", "observation_id", "x_request_id", "custom_id"]
"""Names of columns that name a request."""

PARENT_NAMES = ["parent_id", "parent_span_id", "parent_observation_id", "parent_run_id"]
"""Names of columns with the name of what a request is inside of."""

REFERENCES = "references"
"""Jaeger's list of what a span is inside of."""


class Repeats:
    """The names of requests and of what they are inside of, where only a warning can be given.

    `names`: those of requests, by field. `parents`: the field and the first line that name each.
    """

    def __init__(self) -> None:
        self.names: dict[str, set[str]] = {}
        self.parents: dict[str, tuple[str, int]] = {}

    def look(self, rows: Fields, kept: Mask) -> None:
        """Tell the findings of names that come again, and keep those of what rows are inside of.

        `kept`: the rows that count as requests.
        """
        for field in rows.columns.keys() & {f"? {name}" for name in ID_NAMES}:
            seen, again = self.names.setdefault(field, set()), np.zeros(len(rows.line), dtype=bool)
            for k in np.flatnonzero(kept).tolist():
                name = rows.columns[field][k]
                again[k] = name in seen
                seen.update({name} - {"", "null"})  # those without a name repeat no other

            rows.odd(
                f"values of {rows.names[field]} come again: a request that was tried or sent again "
                "counts each time",
                again,
            )

        for field in rows.columns.keys() & {f"? {name}" for name in (*PARENT_NAMES, REFERENCES)}:
            for k in np.flatnonzero(kept).tolist():
                name = rows.columns[field][k]
                self.parents.setdefault(name, (rows.names[field], int(rows.line[k])))

    def finish(self, findings: Findings) -> None:
        """Tell the findings of requests inside one another, once all rows were looked at."""
        # A list, such as Jaeger's references, reads as "[...]", and has entries where it is shown.
        names = set[str]().union(*self.names.values(), ["[...]"])
        places = [self.parents[name] for name in self.parents.keys() & names]
        if places:
            field, line = min(places, key=lambda place: place[1])
            findings.odd(
                f"the field {field} says that requests are inside others, which may be sums of "
                "them: both count",
                line,
                len(places),
            )
