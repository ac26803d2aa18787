"""Relaxations by feature: what a bound is asked about a task with features it is not proved for.

`relax` leaves out one feature after another. A feature without a row here is refused by name.

*Several workers*, in rounds, become one machine with the room of all: N times the KV capacity and
the limits, and batches that hold both phases. What the workers process in a round is one batch of
it, so every schedule on them is one on it, with the same times.

*A tabulated cost model* becomes each of its minorants, see `optsched.costs.table`. Pools, whose
machines may have several, have each choice of minorants.

*Drafts* become outputs of as many tokens as the steps that the recorded acceptance takes at least,
or as many as there are if every step is granted all of its drafts (`optsched.bounds.checker.drafts`
has the proof). Tables are left out first.

*Windows of attention* become more room, for all of the KV (`optsched.bounds.checker.windows` has
the proof).

*Shared prefixes*, for bounds that are proved for charges (`optsched.bounds.checker.prefixes`).
Requests arrive when they are released, so what their releases are earlier is subtracted. Of some
numbers of seconds within which users share what they pay, that with the largest bound from work
alone is taken, as many as there is time for; where times count from arrivals one by one, as in
SLOs, it is 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from optsched.bounds.base import CHARGES, MINORANTS, WORKERS, BoundTask, Proof
from optsched.bounds.batch import work_makespan, work_tel, work_ttft
from optsched.bounds.certificate import make_certificate
from optsched.bounds.checker.drafts import covers, without_drafts
from optsched.bounds.checker.fields import DRAFT_FIELDS, PREFIX_FIELDS, WINDOW_FIELDS
from optsched.bounds.checker.prefixes import Charge, Shared
from optsched.bounds.checker.requests import ticks_since
from optsched.bounds.checker.windows import room_without, without_window
from optsched.bounds.leaves import TICKS_PER_SECOND
from optsched.costs.fleet import fleet_of
from optsched.problem.budget import Budget
from optsched.problem.instance import Instance, Limits
from optsched.problem.objective import TOTAL_LATENCY

_SAFETY = 1e-9
# Numbers of seconds that are tried, the first always.
_WITHIN_S = (0, 10, 100, 1, 300, 1000)
# With more requests only as many are tried as the time allows. With so many all take some 0.5 s.
_FEW = 5_000
_FROM_WORK = {"tel": work_tel, "mean_ttft": work_ttft, "makespan": work_makespan}


@dataclass(frozen=True)
class Relaxation:
    """How a feature is left out.

    `without` returns the tasks that have it no longer, each of which bounds the one given; none
    where that is not proved. The best are chosen as long as a budget allows. `answer` makes a proof
    for the task given from one for one of those. It is for bounds that are proved for the features
    `into` of those tasks.
    """

    features: frozenset[str]
    without: Callable[[BoundTask, Budget], list[BoundTask]]
    answer: Callable[[BoundTask, BoundTask, Proof], Proof]
    into: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Question:
    """A task that is left when features are left out, and which relaxation was of which task."""

    task: BoundTask
    steps: tuple[tuple[Relaxation, BoundTask, BoundTask], ...] = ()

    def answer(self, proof: Proof) -> Proof:
        """Return what a proof for the task that is left says about the one at first."""
        for row, task, simpler in reversed(self.steps):
            proof = row.answer(task, simpler, proof)

        return proof


NO_TIME = Budget(0)
"""The budget of those who ask only which features are left."""


def relax(task: BoundTask, proved: frozenset[str], budget: Budget = NO_TIME) -> list[Question]:
    """Return the questions that are left of a task for a bound that is proved for some features.

    They may have features that it is not proved for, which no relaxation leaves out.
    """
    for row in RELAXATIONS:
        unproved = row.features & task.features - proved
        # What a relaxation brings in, such as charges, the bound must be proved for, too.
        if not unproved or not row.into <= proved:
            continue

        # The first relaxation that applies is made, and what it gives is relaxed in turn.
        if simpler_tasks := row.without(task, budget):
            questions = []
            for simpler in simpler_tasks:
                for left in relax(simpler, proved, budget):
                    questions.append(Question(left.task, ((row, task, simpler), *left.steps)))

            return questions

    return [Question(task)]


def _on_one_worker(task: BoundTask, _: Budget) -> list[BoundTask]:
    """Return the task on one worker with the capacity and the limits of all (module's text)."""
    instance, workers = task.instance, task.workers
    # In seconds what workers do at one time is not one batch.
    if not instance.in_rounds:
        return []

    limits = {name: workers * value for name, value in instance.limits.as_dict().items()}
    capacity = workers * instance.kv_capacity
    # One worker may prefill while another decodes, so a batch of all may mix. An optimum, and a
    # schedule, that are known are of the workers, and say nothing of this task.
    merged = replace(
        instance, kv_capacity=capacity, limits=Limits(**limits), hybrid_batching=None, known=None
    )
    return [replace(task, instance=merged, fleet=fleet_of(None), known=None)]


@lru_cache(16)
def _minorants(task: BoundTask, _: Budget) -> list[BoundTask]:
    """Return the task under each linear minorant of its cost model."""
    return [replace(task, fleet=fleet) for fleet in task.fleet.minorants]


@lru_cache(2)
def _shared(instance: Instance) -> Callable[[int], list[Charge]]:
    """Return what requests pay as a function of the seconds, made once for each of them."""
    ticks = ticks_since(instance.release_times.tolist(), TICKS_PER_SECOND)
    shared = Shared(instance, ticks)
    return cache(lambda seconds: shared.charges(seconds * TICKS_PER_SECOND))


@lru_cache(16)
def _charged(task: BoundTask, budget: Budget) -> list[BoundTask]:
    """Return the task of requests that share nothing and pay charges instead (module's text)."""
    instance, work = task.instance, _FROM_WORK.get(task.goal.name)
    # It is proved in seconds. Bounds of sessions charge prefixes themselves.
    if instance.in_rounds or instance.sessions is not None:
        return []

    def within(seconds: int) -> BoundTask:
        """Return the task if users pay who come within so many seconds of the first one."""
        charged = _shared(instance)(seconds)
        # Each is released at the arrival of the request that its charge names.
        free = replace(
            instance,
            arrival=instance.release_times[[charge.release for charge in charged]],
            prefix_parent=None,
            prefix_tokens=None,
            prefix_block_tokens=None,
            known=None,
        )
        return replace(task, instance=free, known=None, charged=charged, within_s=seconds)

    first, *others = _WITHIN_S
    best = within(first)
    # To choose takes a bound from work alone, and time: who asks for features only has none.
    if work is None or budget is NO_TIME:
        return [best]

    highest = None
    for seconds in others:
        if budget.over and instance.n > _FEW:
            break

        # The first one's value is computed once there is another to compare it with.
        if highest is None:
            highest = _since_arrival(task, best, work(best, NO_TIME)).value

        other = within(seconds)
        value = _since_arrival(task, other, work(other, NO_TIME)).value
        if value > highest:
            best, highest = other, value

    return [best]


def _since_arrival(task: BoundTask, simpler: BoundTask, proof: Proof) -> Proof:
    """Return the proof for requests that arrive later: by as much latencies are shorter.

    A sum is by all that releases are earlier, a mean by its share, and a makespan by nothing. The
    tree states the seconds, from which the checker computes the charges.
    """
    early = float((task.instance.release_times - simpler.instance.release_times).sum())
    if task.goal.name == "makespan":
        early = 0.0
    elif task.goal != TOTAL_LATENCY:
        early /= task.instance.n

    within = simpler.within_s * TICKS_PER_SECOND
    tree = proof.tree and {"within": within, "tree": proof.tree}
    return replace(proof, value=proof.value - early * (1 + _SAFETY), tree=tree)


@lru_cache(16)
def _undrafted(task: BoundTask, _: Budget) -> list[BoundTask]:
    """Return the task with steps of one token each, where that is proved (module's text)."""
    instance = task.instance
    if task.pools or MINORANTS & task.features or not covers(instance, task.goal.name):
        return []

    return [replace(task, instance=without_drafts(instance), known=None)]


@lru_cache(16)
def _with_room(task: BoundTask, _: Budget) -> list[BoundTask]:
    """Return the task without a window, on machines whose KV makes up for it (module's text)."""
    instance = task.instance
    # Drafts are left out before. If they are still there they could not be, and the proof is about
    # requests without them, on no pools.
    if task.pools or DRAFT_FIELDS & task.features:
        return []

    machines = [
        replace(one, kv_capacity=room_without(instance, one.capacity))
        for one in task.hardware.machines
    ]
    fleet = replace(task.fleet, machines=machines)
    return [replace(task, instance=without_window(instance), fleet=fleet, known=None)]


def _about(task: BoundTask, simpler: BoundTask, proof: Proof) -> Proof:
    """Return the proof with a certificate of the task's instance, as it is.

    From its drafts or its window the checker knows what the tree is about.
    """
    certificate = proof.certificate
    if certificate is not None:
        about = {name: certificate[name] for name in ("value", "denominator", "objective")}
        certificate = make_certificate(task.instance, certificate["tree"], **about)

    return Proof(proof.value, certificate, tree=proof.tree)


RELAXATIONS = (
    Relaxation(WORKERS, _on_one_worker, lambda task, simpler, proof: Proof(proof.value)),
    Relaxation(MINORANTS, _minorants, lambda task, simpler, proof: proof),
    Relaxation(DRAFT_FIELDS, _undrafted, _about),
    Relaxation(WINDOW_FIELDS, _with_room, _about),
    Relaxation(PREFIX_FIELDS, _charged, _since_arrival, CHARGES),
)
"""In the order in which they are tried. A certificate under a minorant names it."""
