"""The requests of one busy period, which the ramp relaxation and the searches work on."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.blocks import blocks_of
from optsched.bounds.checker.parts import max_completed
from optsched.problem.instance import Instance


@dataclass(frozen=True, eq=False)
class Jobs:
    """Requests of one busy period, times counted from its first arrival, in rounds.

    ``first_kv`` is the KV tokens that a request holds in its first round, s or s + 1; it holds one
    more in each later round. ``index`` has the requests' numbers in the instance.
    """

    arrival: NDArray[np.int64]
    first_kv: NDArray[np.int64]
    output: NDArray[np.int64]
    capacity: int
    index: NDArray[np.int64]

    @property
    def n(self) -> int:
        """Number of requests."""
        return len(self.arrival)

    @property
    def rounds(self) -> int:
        """The number of rounds within which every schedule without needless idling ends."""
        return int(self.arrival.max() + self.output.sum()) + 2

    @cached_property
    def peak(self) -> NDArray[np.int64]:
        """KV tokens held in a request's last round, shape (n,)."""
        return self.first_kv + self.output - 1

    @cached_property
    def volume(self) -> NDArray[np.int64]:
        """Token-rounds of each request: its KV summed over its rounds, shape (n,)."""
        return self.output * self.first_kv + self.output * (self.output - 1) // 2

    def total(self, starts: NDArray[np.int64]) -> int:
        """Return the total latency of starts, in rounds."""
        return int((starts + self.output - self.arrival).sum())

    def used(
        self, starts: NDArray[np.int64], rounds: int, members: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Return the KV in use in each round, in tokens."""
        used = np.zeros(rounds, dtype=np.int64)
        for i in range(self.n) if members is None else members:
            k, o = int(starts[i]), int(self.output[i])
            used[k + 1 : k + 1 + o] += self.first_kv[i] + np.arange(o)

        return used

    def feasible(self, starts: NDArray[np.int64]) -> bool:
        """Whether starts respect arrivals and the KV capacity."""
        if (starts < self.arrival).any():
            return False

        rounds = int((starts + self.output).max()) + 1
        return bool(self.used(starts, rounds).max() <= self.capacity)


def periods(instance: Instance) -> list[Jobs]:
    """Divide the requests into busy periods, the blocks of `optsched.bounds.blocks`.

    Their bounds add up, and so do the best schedules if each ends within its `Jobs.rounds`.
    """
    order = np.argsort(instance.release_times, kind="stable")
    block = blocks_of(instance).of[order]
    out = []

    for index in np.split(order, np.flatnonzero(np.diff(block)) + 1):
        arrival = instance.release_times[index].astype(np.int64)
        out.append(
            Jobs(
                arrival=arrival - arrival[0],
                first_kv=instance.prompt_tokens[index] + instance.kv_offset,
                output=instance.output_tokens[index],
                capacity=instance.kv_capacity,
                index=index,
            )
        )

    return out


def needed_clock(jobs: Jobs) -> int:
    """Return the round after which arrivals rule out no completion."""
    return int((jobs.arrival + jobs.output).max()) if jobs.arrival.any() else 0


def max_completed_by(jobs: Jobs, last: int) -> NDArray[np.int64]:
    """Return how many requests can have completed by each round, by arrivals and token-rounds."""
    ready = jobs.arrival + jobs.output
    return max_completed(ready, jobs.volume, np.ones_like(ready), jobs.capacity, last)
