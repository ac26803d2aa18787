"""The most requests within their SLOs in rounds: which starts are in time, and who is served late.

docs/formulations.md, "Round model", says why runs have no pauses, why it does not matter whether
late requests are served or dropped (`with_late` adds them), and why gaps between blocks can be cut
out. A request is in time if it starts by its last start in time (`last_on_time`). The models have a
column or a presence for such starts only.
"""

from collections.abc import Mapping

import numpy as np

from optsched.bounds.timeline import Floats, Ints
from optsched.optimize.formulations.rounds.horizon import Machine, RoundData
from optsched.optimize.solvers.base import RawOutcome
from optsched.problem.schedule import Schedule, from_starts


def last_on_time(data: RoundData, limits: Mapping[str, Floats]) -> Ints:
    """Return the last start of each request that is within its SLOs and its block's deadline.

    It is the round before the arrival if there is none.
    """
    # A run has a token in every round, so that its time between tokens is one round.
    has_gaps = data.output > 1
    never_in_time = has_gaps & (np.minimum(limits["slo_tpot"], limits["slo_gap"]) < 1)
    # A request that waits w rounds has its first token after w + 1, and its last after w + output.
    # A limit on latency is one on the first token, too, which is no later than the last.
    max_first = np.floor(np.minimum(limits["slo_ttft"], limits["slo_latency"])) - 1
    max_wait = np.minimum(max_first, np.floor(limits["slo_latency"]) - data.output)
    latest = (data.deadline - data.output - data.arrival).astype(np.float64)
    # A wait of -1 stands for no start in time.
    max_wait = np.where(never_in_time, -1.0, np.clip(np.minimum(max_wait, latest), -1.0, None))

    return data.arrival + max_wait.astype(np.int64)


def with_late(data: RoundData, starts: Ints, last_in_time: Ints) -> tuple[Schedule, int]:
    """Return a schedule that adds those who are left out, and how many are in time in it.

    They are added in their block where they fit, or one by one after all others. Who starts after
    its ``last_in_time`` is one of them.
    """
    on_time = starts <= last_in_time
    # As in `horizon._check_rounds`: 2 more for round 0 and one to spare.
    machine = Machine(data, int(data.deadline.max() + data.output.max()) + 2)
    for i in np.flatnonzero(on_time).tolist():
        machine.add(i, int(starts[i]))

    # Starts in the instance's rounds, whose long gaps between arrivals the model leaves out.
    real_starts = starts + data.shift
    after_all = []
    count = int(on_time.sum())

    for i in np.flatnonzero(~on_time).tolist():
        start = machine.earliest(i, int(data.arrival[i]))
        # Beyond its deadline it could meet the next block, whose time is another.
        if start + data.output[i] > data.deadline[i]:
            after_all.append(i)
            continue

        machine.add(i, start)
        real_starts[i] = start + data.shift[i]
        count += start <= last_in_time[i]

    end = int(max((data.deadline + data.shift).max(), 0))
    for i in after_all:
        real_starts[i] = end
        end += int(data.output[i])

    return from_starts(real_starts, data.instance), int(count)


def as_shares(raw: RawOutcome, n: int) -> tuple[float | None, float | None]:
    """Return a solver's objective and bound as shares of n requests in time.

    The solver minimizes minus their number, so its bound says how many are in time at most. That is
    rounded down to a whole number, but for 1e-6 by which a float may be short of one; 0.0 turns
    -0.0 into 0.
    """
    objective = None if raw.objective is None else max(0, round(-raw.objective)) / n
    bound = None if raw.bound is None else min(n, int(np.floor(1e-6 - raw.bound))) / n + 0.0
    return objective, bound
