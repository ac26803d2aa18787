"""A second thread, which looks for schedules while the first one builds graphs.

Once the first thread has a graph near a proof, the second one enumerates the schedules of that
graph (`optsched.optimize.ramp.finish`).

Import this module lazily: it loads numba.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from optsched.optimize.ramp.finish import LABELS_PER_S, finish, samples
from optsched.optimize.ramp.graph import Interrupted
from optsched.optimize.ramp.relaxation import Relaxation
from optsched.optimize.search.orders import Annealing, anneal
from optsched.problem.budget import work_time

HELPED = 10
"""The divisor of the first thread's orders if a second thread looks for schedules too."""
# The seconds of annealing at a time.
_ORDERS_S = 9.0
# The number of parts of the labels that are followed to find a schedule.
_SAMPLES = 3
# Seconds from one look at the time and the flags to the next.
_POLL_S = 0.02


def look(annealing: Annealing, deadline: float, stop: NDArray[np.int8]) -> None:
    """Look for better schedules by annealing for some seconds.

    The number of orders is not limited, so time or `stop` ends it.
    """
    part = min(deadline, work_time() + _ORDERS_S)
    anneal(annealing, sys.maxsize, part, stop)


class Helper:
    """Works from entering a ``with`` block to leaving it.

    `main` is the annealing of the first thread, whose best schedule is taken over now and then.
    Its own ``annealing`` and the bound of the ``relaxation`` that it enumerates may be read at any
    time. `deadline` is a time of `work_time`, `stop` a flag that another thread sets. ``halt``
    becomes 1 when the first thread has to end too: for one of these, or since bound and schedule
    meet. `tell` is given the bound and the min total latency now and then, in rounds. An ``error``
    that ended the work is raised when the block is left.
    """

    def __init__(
        self,
        main: Annealing,
        deadline: float,
        stop: NDArray[np.int8],
        tell: Callable[[int, int], None],
    ) -> None:
        self.annealing = Annealing(main.jobs, main.rng.spawn(1)[0], main.starts)
        self.relaxation: Relaxation | None = None
        self.halt = np.zeros(1, dtype=np.int8)
        self.error: Exception | None = None
        self._main, self._deadline, self._stop, self._tell = main, deadline, stop, tell
        self._posted: Relaxation | None = None  # what is to be enumerated next
        self._left = threading.Event()  # that the block was left
        self._next = np.zeros(1, dtype=np.int8)  # a flag: end what is done now, there is more
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._run, self._watch)
        ]

    def post(self, relaxation: Relaxation) -> None:
        """Enumerate the schedules of a graph from now on."""
        self._posted = relaxation.fork()
        self._posted.improved = None
        self._next[0] = 1

    def _over(self) -> bool:
        """Whether the enumeration should end."""
        return bool(self.halt[0] or self._next[0] or self._left.is_set())

    def _watch(self) -> None:
        """Set the flags until the block is left."""
        while not self._left.wait(_POLL_S):
            r = self.relaxation
            # A better schedule of either thread makes the proof shorter.
            if r is not None:
                r.offer(min(self._main.value, self.annealing.value))

            # Its target may be lower than the known value: then a closed one proves too little.
            proved = r is not None and r.closed and r.upper >= self.annealing.value
            if self._stop[0] or work_time() >= self._deadline or proved:
                self.halt[0] = 1

    def _run(self) -> None:
        """Look for schedules, and enumerate each graph that is posted, until the block is left."""
        try:
            while not (self._left.is_set() or self.halt[0]):
                self.annealing.offer(self._main.starts)
                posted, self._posted = self._posted, None
                # Until the first graph, and after each one, the time goes to schedules.
                if posted is None:
                    look(self.annealing, self._deadline, self._next)
                else:
                    self._next[0] = 0
                    self._enumerate(posted)

                self._report()
        except Interrupted:  # the first thread has to end too, or has left the block
            pass
        except Exception as error:
            self.error = error

    def _report(self) -> None:
        """Report the bound and the best schedule."""
        r = self.relaxation
        if r is not None:
            # Schedules that the enumeration met go to annealing, whose best one is reported.
            while r.schedules:
                self.annealing.offer(r.schedules.pop())

        self._tell(0 if r is None else r.bound, self.annealing.value)

    def _enumerate(self, r: Relaxation) -> None:
        """Look for a schedule in a graph, then prove target after target."""
        # Its kernels end when the first thread has to.
        before, r.stop = self.relaxation, self.halt
        # What was proved with the same clock holds for the new graph, too.
        if before is not None and before.bound > r.bound and before.clock == r.clock:
            r.bound, r.levels = before.bound, before.levels

        r.offer(self.annealing.value)
        self.relaxation = r
        # The first item of `samples` says only that tables are ready.
        for starts in islice(samples(r, self._over), 1 + _SAMPLES):
            if starts is not None:
                self.annealing.offer(starts)
                r.offer(self.annealing.value)

        self._report()
        r.prune()
        finish(r, LABELS_PER_S * (self._deadline - work_time()), self._over)

    def __enter__(self) -> Helper:
        for thread in self._threads:
            thread.start()

        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._left.set()
        # Multipliers that are being improved look at this flag only, and nobody waits for them.
        self._next[0] = self.halt[0] = 1
        for thread in self._threads:
            thread.join()
        if self.error is not None and error is None:
            raise self.error
