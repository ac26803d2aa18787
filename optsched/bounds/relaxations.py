"""Relaxations by feature: what a bound is asked about a task with features it is not proved for.

`relax` leaves out one feature after another. A feature without a row here is refused by name.

*Several workers*, in rounds, become one machine with the room of all: N times the KV capacity and
the limits, and batches that hold both phases. What the workers process in a round is one batch of
it, so every schedule on them is one on it, with the same times.

*A tabulated cost model* becomes each of its minorants, see `optsched.costs.table`.

*A prefix cache*, for bounds that do not allow for it themselves. Let H be the prompt tokens that
requests may find in it, of all prompts together, so that no schedule has to hold or process them.
Take any schedule with the cache, on one worker in seconds under a linear cost model. Let every
request process what it found in its first batch, and let there be room for H more tokens, in whole
blocks, and no maximum of tokens per batch. The batches are then those of a schedule without the
cache. Each token found adds at most ``token + prefill_token`` and, with a prompt of s tokens, ``2 s
prefill_square`` to one batch. So no token comes later by more than the sum D of that over H tokens
with the longest prompt, and a bound on the total latency of this schedule, less D for each request,
is one for the first. Terms with KV cached before only become smaller. What a cache still holds of a
preempted request is not free: a schedule that evicts must recompute the whole input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from optsched.bounds.base import MINORANTS, PREFIX_CACHE, WORKERS, BoundTask, Proof
from optsched.costs.cost import BatchCost
from optsched.problem.instance import Limits
from optsched.problem.objective import TOTAL_LATENCY


@dataclass(frozen=True)
class Relaxation:
    """How a feature is left out.

    `without` returns the tasks that have it no longer, each of which bounds the one given; none
    where that is not proved. `value` makes a bound of the task given from one of those. `certifies`
    says whether the checker takes their certificates for the instance given, so that certificates
    and schedules are kept.
    """

    features: frozenset[str]
    without: Callable[[BoundTask], list[BoundTask]]
    certifies: bool
    value: Callable[[BoundTask, float], float] = lambda task, value: value


@dataclass(frozen=True, eq=False)
class Question:
    """A task that is left when features are left out, and which relaxation was of which task."""

    task: BoundTask
    steps: tuple[tuple[Relaxation, BoundTask], ...] = ()

    def answer(self, proof: Proof) -> Proof:
        """Return what a proof for the task that is left says about the one at first."""
        for row, task in reversed(self.steps):
            value = row.value(task, proof.value)
            proof = replace(proof, value=value) if row.certifies else Proof(value)

        return proof


def relax(task: BoundTask, proved: frozenset[str]) -> list[Question]:
    """Return the questions that are left of a task for a bound that is proved for some features.

    They may have features that it is not proved for, which no relaxation leaves out.
    """
    for row in RELAXATIONS:
        if row.features & task.features - proved and (simpler := row.without(task)):
            return [
                Question(left.task, ((row, task), *left.steps))
                for one in simpler
                for left in relax(one, proved)
            ]

    return [Question(task)]


def _on_one(task: BoundTask) -> list[BoundTask]:
    instance, times = task.instance, task.workers
    if not instance.in_rounds:
        return []

    limits = {name: times * value for name, value in instance.limits.as_dict().items()}
    capacity = times * instance.kv_capacity
    merged = replace(
        instance, kv_capacity=capacity, limits=Limits(**limits), hybrid_batching=None, known=None
    )
    return [replace(task, instance=merged, workers=1, known=None)]


def _minorants(task: BoundTask) -> list[BoundTask]:
    cost = task.cost_model
    assert isinstance(cost, BatchCost)
    return [replace(task, cost_model=one) for one in cost.minorants]


def _all_held(task: BoundTask) -> list[BoundTask]:
    instance, block = task.instance, task.instance.kv_block_tokens
    if instance.in_rounds or task.workers > 1 or task.objective != TOTAL_LATENCY:
        return []

    capacity = instance.kv_capacity + -(-task.found_tokens // block) * block
    limits = replace(instance.limits, max_batch_tokens=None, max_prefill_tokens=None)
    roomier = replace(instance, kv_capacity=capacity, limits=limits, known=None)
    return [replace(task, instance=roomier, known=None, found_tokens=0)]


def _less_their_time(task: BoundTask, value: float) -> float:
    cost, longest = task.batch_cost, int(task.instance.prompt_tokens.max())
    each = cost["token"] + cost["prefill_token"] + 2 * longest * cost["prefill_square"]
    return value - task.instance.n * (cost.layers * each * task.found_tokens / 1000)


RELAXATIONS = (
    Relaxation(WORKERS, _on_one, certifies=False),
    Relaxation(MINORANTS, _minorants, certifies=True),
    Relaxation(PREFIX_CACHE, _all_held, certifies=False, value=_less_their_time),
)
"""In the order in which they are tried. A certificate under a minorant names it."""
