"""Request rates: the rate of full load, an instance at a given rate, and a policy's peak rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optsched import Problem
from optsched.costs.batch import alone_ms
from optsched.costs.cost import BatchCost, CostModel
from optsched.costs.load import cost_for
from optsched.judge.evaluate import evaluate
from optsched.policies import Scheduler
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.workloads.predict import Predictor

MAX_DOUBLINGS = 30
"""Max number of times that a rate is doubled or halved.

With it, arrivals stay in the range that an instance allows.
"""


def alone_latency(
    instance: Instance, cost_model: CostModel | str | Path | None = None
) -> NDArray[np.float64]:
    """Return each request's latency on an idle machine, shape (n,), in the instance's time unit.

    One batch prefills the whole prompt, and output_tokens - 1 further batches decode.

    Parameters
    ----------
    instance : Instance
    cost_model : CostModel, str or path, optional
        The cost model, its name or its file. An instance in seconds needs one, an instance in
        rounds takes none.

    Returns
    -------
    ndarray of float64, shape (n,)

    Raises
    ------
    InputError, UsageError
        The cost model cannot be read, or does not fit the instance.
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

    Choi et al. 2025 define it so (section 6.2). A batch of four requests takes hardly longer than
    a batch of one. The rate is therefore about what one worker can serve.

    Parameters
    ----------
    instance : Instance
    batch_size : int
        Max number of requests in a batch, >= 1.
    cost_model : CostModel, str or path, optional
        As in `alone_latency`.

    Returns
    -------
    float
        Requests per second, or per round.

    Raises
    ------
    InputError, UsageError
        The batch size is below 1, or the cost model does not fit the instance.
    """
    if batch_size < 1:
        raise InputError(f"batch_size: found {batch_size!r}; expected an integer >= 1")

    return batch_size / float(alone_latency(instance, cost_model).mean())


def at_rate(instance: Instance, rate: float) -> Instance:
    """Return an instance in seconds with its arrivals stretched to a rate.

    The rate of an instance is its number of requests over its last arrival.

    Parameters
    ----------
    instance : Instance
        An instance in seconds whose last arrival is after 0.
    rate : float
        Requests per second, > 0.

    Returns
    -------
    Instance
        A copy in which all arrivals are multiplied by one number.

    Raises
    ------
    InputError
        The instance is in rounds, all its requests arrive at 0, or the rate is not positive.
    """
    if instance.in_rounds:
        raise InputError(
            "time_unit: found 'round'; expected 'second', since only such arrivals can be stretched"
        )

    if not 0 < rate < float("inf"):
        raise InputError(f"rate: found {rate!r}; expected a number of requests per second > 0")

    last = float(instance.release_times.max())
    if last == 0:
        raise InputError("requests.arrival: found only 0; expected arrivals over time for a rate")

    return replace(instance, arrival=instance.release_times * (instance.n / (rate * last)))


@dataclass(frozen=True, eq=False)
class PeakRate:
    """The largest request rate that keeps the mean queuing delay within a limit.

    Parameters
    ----------
    rate : float
        The largest rate tried that keeps within the limit, in requests per second.
    above : float
        The smallest rate tried that does not.
    delay : ndarray of float64, shape (instances,)
        Mean queuing delay of each instance at ``rate``, in seconds.
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
        As for `optsched.run`. ``"isrtf:workers=10"``, for example, has ten workers.
    instances : Instance or sequence of Instance
        Instances in seconds. Each is stretched to every rate tried (`at_rate`), so that the same
        requests come in the same pattern. The instances' mean delays are averaged.
    cost_model : BatchCost, str or path
        The cost model, its name or its file.
    max_delay_s : float
        Limit in seconds of the mean queuing delay, which is the time from arrival to first batch.
        The paper has 0.5 s.
    tolerance : float
        The search ends once ``above`` is at most ``1 + tolerance`` times ``rate``.
    predictor, seed
        As for `optsched.run`.

    Returns
    -------
    PeakRate

    Raises
    ------
    InputError
        There is no instance, all requests of one arrive at 0, the limit or the tolerance is not
        positive, or no rate brings the delay above or below the limit.
    LoopError, PolicyError, UsageError
        The policy cannot be run (see `optsched.run`).

    Notes
    -----
    The delay grows with the rate. There are small exceptions, since decisions change with the
    rate. With finitely many requests the delay stays finite even beyond the rate that the system
    can serve in the long run. With few requests per worker the peak is therefore overestimated.
    """
    cases = [instances] if isinstance(instances, Instance) else list(instances)
    if not cases:
        raise InputError("instances: found an empty list; expected at least one instance")
    for name, value in (("max_delay_s", max_delay_s), ("tolerance", tolerance)):
        if not 0 < value < float("inf"):
            raise InputError(f"{name}: found {value!r}; expected a number > 0")

    def delays(rate: float) -> NDArray[np.float64]:
        found = []
        for case in cases:
            moved = at_rate(case, rate)
            schedule = simulate(Problem(moved, cost_model), policy, seed=seed, predictor=predictor)
            found.append(float(evaluate(Problem(moved, cost_model), schedule).queuing_delay.mean()))

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
        way, more = ("below", "more requests") if good else ("above", "a larger limit")
        raise InputError(
            f"max_delay_s: found {max_delay_s:g}, and the mean queuing delay stays {way} it "
            f"({delay.mean():.3g} s at {rate:.3g} requests/s); expected {more}"
        )

    while above > below[0] * (1 + tolerance):
        rate = float(np.sqrt(below[0] * above))
        delay = delays(rate)
        if delay.mean() <= max_delay_s:
            below = (rate, delay)
        else:
            above = rate

    return PeakRate(below[0], above, below[1])
