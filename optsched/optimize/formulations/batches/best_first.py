"""One compiled search of infermax by labels, best first: its arrays, its slices, its plan."""

from typing import Any

import numpy as np

from optsched.optimize.formulations.batches import plans
from optsched.optimize.formulations.batches.problem import COUNTED, Batch
from optsched.optimize.solvers.base import SolveOptions
from optsched.problem.budget import work_time

MAX_BYTES = 4 * 2**30
"""The max memory of the search. At this limit it stops as at a time limit."""
STEPS = 2**14
"""The max steps from batch to batch between two looks at the clock."""
NONE = 2**62
"""More than every level: no value is known."""
# The max rows of a slice.
_SLICE = 200_000


class Search:
    """The compiled search for the requests from `first` on, if the machine is free from `begin` on.

    `searches`: the `labels.SuffixSearches` that it is one of. Levels below ``best`` count. Arrays
    begin with room for 1024 labels, and are made larger as they fill up (`grow`).
    """

    def __init__(self, searches: Any, first: int, begin: int, best: int) -> None:
        self.searches, self.first, self.begin = searches, first, begin
        self.core = core = searches.core
        tables = searches.tables
        n, size = len(tables.arrival), 1 << 10
        # `labels_kernel.Search` explains the fields; -1 is for none. `numbers` has six places of
        # `queue_kernel` and two of `labels_kernel`. A label is in the heap twice at most: since it
        # was added, and again if a slice ended amid its batches.
        self.state = core.Search(
            rows=np.zeros((size, n), searches.code_type),
            acts=np.zeros((size, n), np.uint8),
            more=np.zeros(size, np.int32),
            since=np.full(size, -1, np.int64),
            time=np.zeros(size, np.int64),
            done=np.zeros(size, np.int64),
            low=np.zeros(size, np.int64),
            parent=np.full(size, -1, np.int32),
            link=np.full(size, -1, np.int32),
            flag=np.zeros(size, np.uint8),
            heap=np.zeros((2 * size, 3), np.int64),
            table=np.full(4 * size, -1, np.int32),
            numbers=np.zeros(8, np.int64),
        )
        self.tables = tables, core.new_scratch(n, self.state.rows)
        # The root: the requests before the first one count as finished, whose code is 2 o.
        root = self.state.rows[0]
        root[:first] = 2 * tables.output[:first]
        self.state.time[0] = begin
        self.floor = int(core.bound_rest(root, begin, NONE, tables, core.new_sorts(n)))
        self.state.low[0] = self.state.heap[0, 0] = self.floor
        core.enter(self.state.rows, np.zeros(1, np.int32), self.state.table)
        # One row, and one entry of the heap: the bound, a tie of 0, and label 0. No goal, no dive.
        where = [core.ROWS, core.ENTRIES, core.BEST, core.GOAL, core.DIVE, core.MAX_TRIED]
        self.state.numbers[where] = 1, 1, best, -1, -1, STEPS

    @property
    def best(self) -> int:
        """The incumbent's cost, or the least cost that is not searched for."""
        return int(self.state.numbers[self.core.BEST])

    @property
    def goal(self) -> int:
        """The row of the best schedule found, or -1."""
        return int(self.state.numbers[self.core.GOAL])

    @property
    def expanded(self) -> int:
        """Number of rows expanded."""
        return int(self.state.numbers[self.core.EXPANDED])

    @property
    def bound(self) -> int:
        """A lower bound on every cost below `best`, and on `best`. It is never below the root's."""
        # Every schedule goes on from an open row, of which the heap has the lowest first.
        is_open = self.state.numbers[self.core.ENTRIES]
        lowest = int(self.state.heap[0, 0]) if is_open else self.best
        return min(max(self.floor, lowest), self.best)

    def grow(self) -> bool:
        """Make arrays twice as large. Return whether there is memory for them."""
        old, numbers = self.state, self.state.numbers
        if 3 * sum(column.nbytes for column in old) > MAX_BYTES:  # the old and the new ones
            return False

        def double(column: Any) -> Any:
            """Return a column with as many zeros behind it."""
            return np.concatenate([column, np.zeros_like(column)])

        self.state = old._replace(
            **{name: double(getattr(old, name)) for name in self.core.COLUMNS},
            heap=double(old.heap),
            table=np.full(2 * len(old.table), -1, np.int32),
            numbers=numbers,
        )
        self.core.enter(self.state.rows, old.table, self.state.table)
        return True

    def plan(self) -> plans.Plan:
        """Return the batches of the best schedule, along the labels that lead to the goal.

        Requests stand at places p, at which equal ones change places: `request_at` says who is
        where. ``row[p]`` is 2 k + held, as in the search, and a request that has produced all of
        its tokens holds nothing. Behind the goal come the best batches of those who have not begun
        (`SuffixSearches.rests`).
        """
        core, state, prob = self.core, self.state, self.searches.prob
        # Label 0 is the root.
        path = [self.goal]
        while path[-1] != 0:
            path.append(int(state.parent[path[-1]]))

        path.reverse()
        request_at = list(self.searches.order)
        kind = self.searches.tables.kind.tolist()
        row, batches = state.rows[0].tolist(), []
        for label in path[1:]:
            entries, evicted = [], []
            for p, act in enumerate(state.acts[label].tolist()):
                i, produced = request_at[p], row[p] >> 1
                if act in (core.EVICT, core.REFILL):
                    evicted.append(i)
                    row[p] = 2 * produced
                if act in (core.DECODE, core.PREFILL, core.REFILL):
                    entries.append((i, 1 if act == core.DECODE else prob.prompt[i] + produced))
                    row[p] = 2 * (produced + 1) + (produced + 1 < prob.output[i])

            batches.append(Batch(tuple(entries), tuple(evicted)))
            # Equal requests change places as in the search, whose sort is stable, too.
            places = sorted(range(len(row)), key=lambda p: (kind[p], -row[p]))
            request_at, row = [request_at[p] for p in places], [row[p] for p in places]
            # Batches that only decode all were followed at once, and have no labels of their own.
            for _ in range(int(state.more[label])):
                held = [p for p, code in enumerate(row) if code & 1]
                batches.append(Batch(tuple((request_at[p], 1) for p in held)))
                # A token more, and with the last one the KV is free.
                for p in held:
                    row[p] += 2 - (row[p] // 2 + 1 == prob.output[request_at[p]])

        # Whoever was never begun is late in any case, and comes last.
        if self.searches.name == COUNTED:
            unbegun = (request_at[p] for p, code in enumerate(row) if code == 0)
            return batches + self.searches.serve_one_by_one(unbegun)

        return batches + self.searches.rests[core.first_untouched(np.array(row))]

    def run(self, options: SolveOptions, end: float, max_expanded: int | None = None) -> str:
        """Search until the work time ``end`` or another limit. Return why the search ended.

        Between two slices of ``limit`` rows it looks at the limits and reports progress. Gaps are
        those of the search for all requests, whichever part this is. With ``max_expanded`` it ends
        after so many rows, too.
        """
        limit = 1
        try:
            while True:
                best, bound = self.searches.best, self.searches.bound
                if options.stop is not None and options.stop.is_set():
                    return "interrupted"
                if work_time() >= end:
                    return "time limit"
                if options.mip_rel_gap and best - bound <= options.mip_rel_gap * best:
                    return "gap reached"
                if max_expanded is not None and self.expanded >= max_expanded:
                    return "long enough"

                slice_begin = work_time()
                ended = self.core.expand(limit, self.state, self.tables)
                took_s = work_time() - slice_begin
                # Slices take some 0.05 s, so that a stop is soon heard.
                limit = min(max(1, limit * 2 if took_s < 0.05 else limit // 2), _SLICE)
                if ended == self.core.SOLVED:
                    return "solved"
                if ended == self.core.GROW and not self.grow():
                    return "memory limit"

                self.searches.report(self)
        except KeyboardInterrupt:
            return "interrupted"
