"""A second thread that looks for schedules of few requests, while the first one builds graphs.

Import this module lazily: it loads numba.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from optsched.optimize.search.neighbourhood import improve
from optsched.optimize.search.orders import Annealing, anneal

MOST_ORDERS = 600_000
"""The number of orders that annealing tries at a time."""
_NEIGHBOURHOODS_S = 1.0
"""The seconds of CP-SAT neighbourhoods after these orders."""


def look(annealing: Annealing, deadline: float, stop: NDArray[np.int8]) -> None:
    """Look for better schedules for some seconds: by annealing, then in neighbourhoods."""
    anneal(annealing, MOST_ORDERS, deadline, stop)
    part = min(deadline, time.perf_counter() + _NEIGHBOURHOODS_S)
    rng = annealing.rng
    annealing.offer(improve(annealing.jobs, annealing.starts, rng=rng, deadline=part, stop=stop))


class Helper:
    """Looks for schedules from entering a ``with`` block to leaving it.

    Parameters
    ----------
    main : Annealing
        The annealing of the first thread. Its best schedule is taken over now and then.
    deadline : float
        A time of `time.perf_counter`.
    stop : ndarray of int8, shape (1,)
        Another thread sets it to 1 to end the search.
    found : callable
        Called from the second thread, now and then, with the min total latency found, in rounds.

    Attributes
    ----------
    annealing : Annealing
        The annealing of the second thread. Its best schedule may be read at any time.
    error : Exception or None
        The error that ended the search. It is raised when the block is left.
    """

    def __init__(
        self,
        main: Annealing,
        deadline: float,
        stop: NDArray[np.int8],
        found: Callable[[int], None],
    ) -> None:
        self.annealing = Annealing(main.jobs, main.rng.spawn(1)[0], main.starts)
        self.error: Exception | None = None
        self._main, self._deadline, self._stop, self._found = main, deadline, stop, found
        self._left = np.zeros(1, dtype=np.int8)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            while not (self._left[0] or self._stop[0]) and time.perf_counter() < self._deadline:
                self.annealing.offer(self._main.starts)
                look(self.annealing, self._deadline, self._left)
                self._found(self.annealing.value)
        except Exception as error:
            self.error = error

    def __enter__(self) -> Helper:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._left[0] = 1
        self._thread.join()
        if self.error is not None and error is None:
            raise self.error
