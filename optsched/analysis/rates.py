"""How much a system is asked for, and how much it can take: full load, and the peak rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optsched.costs.batch import alone_ms
from optsched.costs.cost import BatchCost, CostModel, cost_for
from optsched.judge.evaluate import evaluate
from optsched.policies import Scheduler
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.workloads.predict import Predictor

MAX_DOUBLINGS = 30
"""How often a rate is doubled or halved at most; arrivals then stay within an instance's range."""


def alone_latency(
    instance: Instance, cost_model: CostModel | str | Path | None = None
) -> NDArray[np.float64]:
    """Return each request's latency on an idle machine, shape (n,), in the instance's time unit.

    One batch prefills the whole prompt, and o - 1 batches decode.

    Raises
    ------
    InputError, UsageError
        A cost model that does not fit the instance.
    """
    cost = cost_for(instance, cost_model)
    s, o = instance.prompt_tokens.astype(np.float64), instance.output_tokens.astype(np.float64)
    if not isinstance(cost, BatchCost):
        return o
    return np.asarray(cost.layers * alone_ms(cost.array, s, o, fixed=True) / 1000.0)


def full_rate(
    instance: Instance, batch_size: int, cost_model: CostModel | str | Path | None = None
) -> float:
    """Return the request rate of 1x load: batch size over mean `alone_latency`.

    As Choi et al. 2025 define it (section 6.2). Per second, or per round. A batch of four takes
    hardly longer than a batch of one, so that this is about what one worker can serve.

    Raises
    ------
    InputError, UsageError
        A batch size below 1; a cost model that does not fit the instance.
    """
    if batch_size < 1:
        raise InputError(f"batch_size: {batch_size!r}; an integer >= 1 is right")
    return batch_size / float(alone_latency(instance, cost_model).mean())


def at_rate(instance: Instance, rate: float) -> Instance:
    """Return an instance in seconds with its arrivals stretched to a rate, n / (the last one).

    Raises
    ------
    InputError
        An instance in rounds, one whose requests all arrive at 0, or a rate that is not positive.
    """
    if instance.in_rounds:
        raise InputError("time_unit: 'round'; arrivals can only be stretched in seconds")
    if not 0 < rate < float("inf"):
        raise InputError(f"rate: {rate!r}; a number of requests per second > 0 is right")
    last = float(instance.arrival.max())
    if last == 0:
        raise InputError("requests.arrival: all are 0; a rate needs arrivals over time")
    return replace(instance, arrival=instance.arrival * (instance.n / (rate * last)))


@dataclass(frozen=True, eq=False)
class PeakRate:
    """The largest request rate that keeps the mean queuing delay within a limit.

    Parameters
    ----------
    rate : float
        Largest rate tried that does, requests per second.
    above : float
        Smallest rate tried that does not.
    delay : ndarray of float64, shape (instances,)
        Mean queuing delay of each instance at ``rate``, seconds.
    """

    rate: float
    above: float
    delay: NDArray[np.float64]


def peak_rate(
    policy: str | Scheduler,
    instances: Instance | Sequence[Instance],
    cost_model: CostModel | str | Path,
    *,
    max_delay_s: float = 0.5,
    tolerance: float = 0.01,
    predictor: Predictor | None = None,
    seed: int = 0,
) -> PeakRate:
    """Return a policy's peak throughput, by bisection over the rate (Choi et al. 2025, sec. 6.4).

    Parameters
    ----------
    policy : str, Rules, Windows or Policy
        As for `optsched.simulate`; ``"isrtf:workers=10"`` has ten workers.
    instances : Instance or sequence of Instance
        In seconds; each is stretched to every rate tried (`at_rate`), so that the same requests
        come in the same pattern. Their mean delays are averaged.
    cost_model : BatchCost or str
    max_delay_s : float
        Limit of the mean queuing delay, from arrival to first batch (the paper's: 0.5 s).
    tolerance : float
        Relative width of the interval in which the search ends.
    predictor, seed
        As for `optsched.simulate`.

    Returns
    -------
    PeakRate

    Raises
    ------
    InputError
        No instance, one whose requests all arrive at 0, a limit or tolerance that is not
        positive, or a delay that no rate brings above or below the limit.
    LoopError, PolicyError, UsageError
        As `optsched.simulate`.

    Notes
    -----
    The delay grows with the rate but for small exceptions, since decisions change. Over finitely
    many requests it stays finite beyond what the system can serve in the long run: with few
    requests per worker the peak comes out higher.
    """
    cases = [instances] if isinstance(instances, Instance) else list(instances)
    if not cases:
        raise InputError("instances: the list is empty; at least one is needed")
    for name, value in (("max_delay_s", max_delay_s), ("tolerance", tolerance)):
        if not 0 < value < float("inf"):
            raise InputError(f"{name}: {value!r}; a number > 0 is right")

    def delays(rate: float) -> NDArray[np.float64]:
        found = []
        for case in cases:
            moved = at_rate(case, rate)
            schedule = simulate(moved, policy, cost_model, seed=seed, predictor=predictor)
            found.append(float(evaluate(moved, schedule, cost_model).queuing_delay.mean()))
        return np.array(found)

    rate = full_rate(cases[0], 1, cost_model)
    delay = delays(rate)
    good = bool(delay.mean() <= max_delay_s)
    below, above = (rate, delay), rate
    for _ in range(MAX_DOUBLINGS):
        rate = 2 * rate if good else rate / 2
        delay = delays(rate)
        if (delay.mean() <= max_delay_s) != good:
            below, above = (below, rate) if good else ((rate, delay), above)
            break
        below, above = (rate, delay), rate
    else:
        way, more = ("below", "more requests are") if good else ("above", "a larger limit is")
        raise InputError(
            f"max_delay_s: {max_delay_s:g}: the mean queuing delay stays {way} it "
            f"({delay.mean():.3g} s at {rate:.3g} requests/s); {more} right"
        )
    while above > below[0] * (1 + tolerance):
        rate = float(np.sqrt(below[0] * above))
        delay = delays(rate)
        if delay.mean() <= max_delay_s:
            below = (rate, delay)
        else:
            above = rate
    return PeakRate(below[0], above, below[1])
