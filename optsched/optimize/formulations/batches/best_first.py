"""What infermax's compiled searches share: slices of work, and where they end."""

from abc import ABC, abstractmethod
from typing import Any

from optsched.optimize.solvers.base import SolveOptions
from optsched.problem.budget import work_time

_SLICE = 200_000


class BestFirst(ABC):
    """A compiled search, best first: its module `core`, its arrays, and a bound from its begin.

    `core` has `expand` and the places of ``state.numbers`` (`queue_kernel`).
    """

    core: Any
    state: Any
    tables: Any
    floor: int

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
        """A lower bound on every cost below `best`, and on `best`."""
        # Every schedule goes on from an open row, of which the heap has the lowest first.
        is_open = self.state.numbers[self.core.ENTRIES]
        lowest = int(self.state.heap[0, 0]) if is_open else self.best
        return min(max(self.floor, lowest), self.best)

    @abstractmethod
    def interval(self) -> tuple[int, int]:
        """Return the incumbent's level, and the bound."""

    @abstractmethod
    def grow(self) -> bool:
        """Make larger arrays. Return whether there is memory for them."""

    @abstractmethod
    def report_progress(self) -> None:
        """Report progress."""

    def run(self, options: SolveOptions, end: float, max_expanded: int | None = None) -> str:
        """Search until the work time ``end`` or another limit. Return why the search ended.

        Between two slices of ``limit`` rows it looks at the limits and reports progress.
        """
        limit = 1
        try:
            while True:
                best, bound = self.interval()
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

                self.report_progress()
        except KeyboardInterrupt:
            return "interrupted"
