"""Blocks: the busy periods of an instance in rounds, and the time axis without their gaps.

Requests are sorted by arrival. A new block begins where a request arrives at or after
A = (latest arrival in the block) + (sum of the block's outputs): run one after another, the
earlier requests have ended by then. The gaps between blocks are cut out of the time axis, so that
it is no longer than the arrivals' spread inside blocks and the sum of all outputs.

Some best schedule has finished each block before the next begins. An optimal schedule of the
block alone has no idle round between the block's latest arrival and its end (what starts later
could start a round earlier), so it has ended by A, and the best schedules of the blocks, side by
side, are a schedule of all of them; no schedule serves a block better than its own best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optsched.problem.instance import Instance

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of an instance, from 0 in order of time.

    Parameters
    ----------
    of : ndarray of int64, shape (n,)
        Each request's block.
    begin, real, end : ndarray of int64, shape (blocks,)
        First round of each block with the gaps cut out, the same in the instance's time, and the
        round with gaps cut out by which it can have ended.
    """

    of: Ints
    begin: Ints
    real: Ints
    end: Ints

    @property
    def shift(self) -> Ints:
        """What to add to a start with gaps cut out for one of the instance, shape (n,)."""
        return (self.real - self.begin)[self.of]


def blocks_of(instance: Instance) -> Blocks:
    """Return the blocks of an instance in rounds."""
    arrival, output = instance.arrival.tolist(), instance.output_tokens.tolist()
    of = np.empty(instance.n, dtype=np.int64)
    begin: list[int] = []
    real: list[int] = []
    end: list[int] = []
    latest = outputs = 0
    for i in np.argsort(instance.arrival, kind="stable").tolist():
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
