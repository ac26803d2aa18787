"""What it takes to run a scheduler: what it is run for, and how it says what it does.

Compiled loops (`optsched.policies.engine`) stand on this file and know no scheduler above it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from optsched.costs.batch import alone_ms
from optsched.costs.cost import BatchCost, CostModel, UnitCost
from optsched.problem.errors import LoopError
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule

Order = Literal["arrival", "prompt", "output", "total", "volume", "work", "random"]


@dataclass(frozen=True, eq=False)
class Job:
    """What a scheduler is run for.

    Parameters
    ----------
    instance : Instance
        As the scheduler is told it: with what is predicted.
    problem : Instance
        The same requests as the schedule's reader knows them.
    cost : CostModel
    seed : int
        For decisions at random.
    name : str
        What errors call the scheduler.
    """

    instance: Instance
    problem: Instance
    cost: CostModel
    seed: int = 0
    name: str = "policy"


class Runner:
    """A scheduler that knows how it is run: `Rules`, `Windows`, `Trail`, or an `Online` object.

    Attributes
    ----------
    hybrid, chunked : bool
        Whether it makes batches that hold both phases, and splits prefills, where it may.
    """

    hybrid: ClassVar[bool] = False
    chunked: ClassVar[bool] = False

    def run(self, job: Job) -> Schedule:
        """Run to the end.

        Raises
        ------
        LoopError
            It would go on for ever, or cannot go on.
        """
        raise NotImplementedError

    def warm_up(self) -> None:
        """Load what it runs on, so that no clock sees compiled code being made or loaded."""
        one = Instance(np.array([0]), np.array([1]), np.array([1]), kv_capacity=2)
        with suppress(LoopError):  # a policy that admits nothing here is loaded all the same
            self.run(Job(one, one, UnitCost()))

    def uses_lengths(self, instance: Instance) -> bool | None:
        """Whether it uses (predicted) output lengths on an instance; None: it cannot say."""
        return None

    def allows(self, instance: Instance) -> str | None:
        """Return why an instance rules it out, or None if it may run there."""
        return None

    def waiting_rank(self, instance: Instance, cost: CostModel) -> NDArray[np.int64] | None:
        """Return each request's fixed place among those that wait, or None if there is none."""
        return None

    def switched_off(self, instance: Instance) -> tuple[str, ...]:
        """Return, in words, which of its features an instance switches off."""
        notes = []
        if self.hybrid and instance.hybrid_batching is False:
            notes.append("hybrid batching is off by the instance")
        if self.chunked and instance.chunked_prefill is False:
            notes.append("chunked prefill is off by the instance")
        return tuple(notes)


def endless(job: Job, request: int, batch: int, now: float, reason: str) -> LoopError:
    """Return the error of a scheduler that would go on for ever, or cannot go on."""
    problem = job.problem
    where = f"batch {batch} at {now + problem.first_arrival:.6g} {problem.time_unit}s"
    about = f", request {request}" if request >= 0 else ""
    return LoopError(f"policy {job.name!r}: endless loop at {where}{about}: {reason}")


def too_long(instance: Instance) -> str | None:
    """Return which request's prompt does not fit into a batch unless it is split, or None."""
    for name in ("max_batch_tokens", "max_prefill_tokens"):
        limit = getattr(instance.limits, name)
        if limit is not None and (instance.prompt_tokens > limit).any():
            i = int((instance.prompt_tokens > limit).argmax())
            return (
                f"request {i}: prompt_tokens {instance.prompt_tokens[i]} exceeds {name} {limit}, "
                "and the policy splits no prefill"
            )
    return None


def own_work(
    prompt: NDArray[np.int64], output: NDArray[np.int64], cost: CostModel
) -> NDArray[np.float64]:
    """Return what each request adds to the time of its batches, shape (n,).

    In seconds, its share of everything but the fixed costs of a batch: a whole prefill, then
    o - 1 decode steps that read the KV cached before them. In rounds, where batches take no
    less time for holding less, its KV volume s o + o (o + 1) / 2 in token-rounds.
    """
    s, o = prompt.astype(np.float64), output.astype(np.float64)
    if not isinstance(cost, BatchCost):
        return s * o + o * (o + 1) / 2
    return np.asarray(cost.layers * alone_ms(cost.array, s, o, fixed=False) / 1000.0)


def waiting_rank(
    order: Order, instance: Instance, predicted: NDArray[np.int64], cost: CostModel
) -> NDArray[np.int64]:
    """Return the place of each request in an order of waiting requests, shape (n,).

    Ties break by (arrival, index), here and nowhere else.
    """
    prompt = instance.prompt_tokens
    key = {
        "arrival": lambda: np.zeros(instance.n),
        "random": lambda: np.zeros(instance.n),
        "prompt": lambda: prompt,
        "output": lambda: predicted,
        "total": lambda: prompt + predicted,
        "volume": lambda: prompt * predicted + predicted * (predicted + 1) // 2,
        "work": lambda: own_work(prompt, predicted, cost),
    }[order]()
    order_of = np.lexsort((np.arange(instance.n), instance.arrival, key))
    rank = np.empty(instance.n, dtype=np.int64)
    rank[order_of] = np.arange(instance.n)
    return rank
