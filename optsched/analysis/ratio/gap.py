"""Split a policy's distance from the optimum by its causes, request by request."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optsched.analysis.ratio.exact import optimum
from optsched.costs.cost import UnitCost
from optsched.judge.evaluate import evaluate
from optsched.optimize.search.placement import earliest, put
from optsched.policies import Scheduler, label_of, make_policy, runner_of
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import Progress
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance
from optsched.problem.kernel import njit
from optsched.problem.progress import LiveLine
from optsched.problem.schedule import from_starts


@dataclass(frozen=True, eq=False)
class Gap:
    """A policy's distance from the best schedule, in rounds of latency, split by its causes.

    ``predictions + foresight + order == total`` holds for every request. A part may be negative,
    since a greedy policy that knows more may do worse.

    Parameters
    ----------
    instance : Instance
        The instance in rounds.
    policy : str
        The policy's specification, or the name of its class.
    tel : float
        Total latency of the policy, as the mean over seeds, in rounds.
    best : float
        Total latency of the best schedule found.
    bound : float or None
        Lower bound of the optimum.
    predictions : ndarray of float64, shape (n,)
        Latency of each request under the policy, minus that under the policy with true output
        lengths.
    foresight : ndarray of float64, shape (n,)
        Latency under the policy with true lengths, minus that in its order when all arrivals are
        known. In the latter all requests are placed in the policy's order, including those that
        arrive later. Each starts at its earliest feasible time at which no request ahead of it is
        waiting. A request that arrives later and goes first thus finds its KV kept free. This part
        is 0 if all requests arrive together.
    order : ndarray of float64, shape (n,)
        Latency in the policy's order with all arrivals known, minus that in the best schedule. It
        is due to the order, and to when the policy admits requests in it.
    """

    instance: Instance
    policy: str
    tel: float
    best: float
    bound: float | None
    predictions: NDArray[np.float64]
    foresight: NDArray[np.float64]
    order: NDArray[np.float64]

    @property
    def total(self) -> NDArray[np.float64]:
        """The latency of each request minus that in the best schedule, in rounds, shape (n,)."""
        return self.predictions + self.foresight + self.order

    @property
    def proved(self) -> bool:
        """Whether the best schedule is proved optimal."""
        return self.bound == self.best

    def parts(self) -> dict[str, float]:
        """Return the three parts by name, each summed over requests, in rounds."""
        return {
            name: float(getattr(self, name).sum()) for name in ("predictions", "foresight", "order")
        }

    def table(self, most: int = 10) -> str:
        """Return the requests that lose most as a Markdown table.

        Parameters
        ----------
        most : int
            Max number of requests in the table.
        """
        lines = ["| request | lost rounds | predictions | foresight | order |", "|" + "---|" * 5]
        total = self.total
        for i in np.argsort(-total, kind="stable")[:most].tolist():
            parts = (total[i], self.predictions[i], self.foresight[i], self.order[i])
            lines.append(f"| {i} | " + " | ".join(f"{v:g}" for v in parts) + " |")

        return "\n".join(lines)


def gap_breakdown(
    instance: Instance,
    policy: str | Scheduler,
    *,
    seeds: int = 1,
    seed: int = 0,
    time_limit_s: float = 30.0,
    progress: bool | Callable[[Progress], None] = True,
    stop: threading.Event | None = None,
) -> Gap:
    """Split the difference between a policy's total latency and the optimum by its causes.

    Parameters
    ----------
    instance : Instance
        An instance in rounds, without limits on batches.
    policy : str, Rules, Windows or Policy
    seeds, seed : int
        Number of runs of a random policy, and their seed: run r has ``[seed, 0, r]``.
    time_limit_s : float
        Seconds for the optimum. If it is not proved, ``best`` is the best schedule found.
    progress : bool or callable
        Whether to show a line on standard error, if that is a terminal. Or a function that is
        called with the `Progress` of the search for the optimum.
    stop : threading.Event, optional
        When it is set, the search for the optimum ends as at the time limit. Ctrl-C ends it too.

    Returns
    -------
    Gap
    """
    if not instance.in_rounds:
        raise UsageError(
            "gap_breakdown: found an instance in seconds; expected one in rounds. In seconds "
            "`optsched.why(..., against=best)` has the parts, and a comparison the losses"
        )

    if instance.limits.as_dict() or instance.hybrid_batching is False:
        raise UsageError("gap_breakdown: found limits on batches; expected an instance without")
    if instance.kv_block_tokens > 1:
        raise UsageError(
            f"gap_breakdown: found kv_block_tokens {instance.kv_block_tokens}; expected 1"
        )

    truth = instance.without_predictions()
    made, info = make_policy(policy)
    bare = policy if info.predictor is None else made
    real = _mean_latency(instance, policy, seed, seeds)
    knowing = _mean_latency(truth, bare, seed, seeds)
    line = np.argsort(_order(truth, bare, seed), kind="stable")
    arrival, output = instance.release_times.astype(np.int64), instance.output_tokens
    base = instance.prompt_tokens + (instance.kv_offset - 1)
    use = np.zeros(int(arrival.max() + output.sum()) + 2, np.int64)
    starts = _foreseen(line, arrival, output, base, instance.kv_capacity, use)
    foreseen = (starts + output - arrival).astype(np.float64)
    if arrival.min() == arrival.max():
        foreseen = knowing

    with LiveLine(wanted=progress is True) as shown:
        result = optimum(
            truth,
            time_limit_s=time_limit_s,
            seed=seed,
            warm_start=from_starts(starts, truth),
            progress=progress if callable(progress) else shown.solving,
            stop=stop,
        )

    assert result.evaluation is not None
    best = np.asarray(result.evaluation.latency, dtype=np.float64)
    parts = (real - knowing, knowing - foreseen, foreseen - best)
    return Gap(
        instance, label_of(policy), float(real.sum()), float(best.sum()), result.bound, *parts
    )


@njit
def _foreseen(line, arrival, output, base, capacity, use):  # type: ignore[no-untyped-def]
    """Return the starts that MC-SF's rule gives in this order when all arrivals are known."""
    n = line.shape[0]
    starts = np.empty(n, dtype=np.int64)
    top = 0

    for a in range(n):
        i = line[a]
        k = arrival[i]
        while True:
            k = earliest(use, capacity, base[i], output[i], k, max(top, k))
            later = k
            for b in range(a):
                j = line[b]
                if arrival[j] <= k < starts[j]:  # j is ahead of i and waits
                    later = max(later, starts[j])

            if later == k:
                break

            k = later

        starts[i] = k
        put(use, base[i], output[i], k, 1)
        top = max(top, k + output[i])

    return starts


def _mean_latency(
    instance: Instance, policy: str | Scheduler, seed: int, seeds: int
) -> NDArray[np.float64]:
    every = ([seed, 0, run] for run in range(seeds))
    found = [evaluate(instance, simulate(instance, policy, seed=one)) for one in every]
    if any(one.workers > 1 for one in found):
        raise UsageError("gap_breakdown: found a policy on several workers; expected one worker")

    return np.asarray(np.mean([one.latency for one in found], axis=0), dtype=np.float64)


def _order(instance: Instance, policy: str | Scheduler, seed: int) -> NDArray[np.int64]:
    """Return each request's place in the policy's order of waiting requests.

    For a policy object or a random order, it is the order of the last starts in a run.
    """
    made = make_policy(policy)[0]
    rank = runner_of(made).waiting_rank(instance, UnitCost())
    if rank is not None:
        return rank

    judged = evaluate(instance, simulate(instance, policy, seed=seed))
    last = judged.finish - instance.output_tokens
    rank = np.empty(instance.n, dtype=np.int64)
    rank[np.lexsort((np.arange(instance.n), last))] = np.arange(instance.n)

    return rank
