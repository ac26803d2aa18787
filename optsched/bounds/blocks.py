"""Blocks: the busy periods of an instance in rounds, and the time axis without gaps.

Requests are sorted by arrival. A new block begins where a request arrives at or after
A = (latest arrival in the block) + (sum of the block's outputs). The gaps between blocks are cut
out of the time axis. What is left is at most as long as the spread of arrivals inside blocks plus
the sum of all outputs. Every optimal schedule finishes each block before the next begins
(docs/formulations.md, "How far to look"). So the optimal schedules of the blocks, side by side, are
one of all requests.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optsched.problem.instance import Instance

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of an instance, from 0 in order of time.

    ``of`` is the number of each request's block. The others are by block: its first round on the
    axis without gaps, the same round in the instance's time, and the round on the axis without gaps
    by which the block can have ended.
    """

    of: Ints
    begin: Ints
    real: Ints
    end: Ints

    @property
    def shift(self) -> Ints:
        """What to add to a start on the axis without gaps for one of the instance, shape (n,)."""
        return (self.real - self.begin)[self.of]


def blocks_of(instance: Instance) -> Blocks:
    """Return the blocks of an instance in rounds."""
    arrival, output = instance.release_times.tolist(), instance.output_tokens.tolist()
    of = np.empty(instance.n, dtype=np.int64)
    begin: list[int] = []
    real: list[int] = []
    end: list[int] = []
    latest = outputs = 0

    for i in np.argsort(instance.release_times, kind="stable").tolist():
        # All before it can have ended, even one after another: a new block begins, where the one
        # before ends on the axis without gaps.
        if not end or arrival[i] >= latest + outputs:
            begin.append(end[-1] if end else 0)
            real.append(arrival[i])
            end.append(0)
            outputs = 0

        latest = arrival[i]
        outputs += output[i]
        end[-1] = begin[-1] + latest - real[-1] + outputs
        of[i] = len(end) - 1

    return Blocks(of, *(np.array(column, dtype=np.int64) for column in (begin, real, end)))
