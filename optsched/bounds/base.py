"""The types of bounds: a function from a task and a budget to a proof, and its features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.checker.fields import LESS_ROOM, LIMITS, SESSION_FIELDS, further_fields
from optsched.bounds.checker.prefixes import Charge
from optsched.costs.cost import BatchCost, CostModel
from optsched.problem.budget import Budget
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance
from optsched.problem.registry import Registry
from optsched.problem.schedule import Schedule
from optsched.workloads.problem import Problem

Completions: TypeAlias = Callable[[Instance, BatchCost], NDArray[np.float64] | None]


@dataclass(frozen=True, eq=False)
class BoundTask(Problem):
    """A question for a bound: what the first objective of a problem cannot be better than.

    Parameters
    ----------
    instance, fleet, objective, slo_ttft, slo_tpot, slo_gap, slo_latency
        As of `Problem`.
    known : Schedule, optional
        A schedule of the instance, for bounds that can start from one.
    seed : int
    completions : callable, optional
        ``completions(instance, cost_model)`` returns when requests end in a schedule that is
        quickly made, in seconds from the first arrival, or None if there is none. Prices start from
        it. Without one, requests are taken to be alone.
    charged : list of Charge, optional
        What requests pay of shared prefills (`optsched.bounds.relaxations`). The instance is then
        without prefixes, and requests arrive when they are released.
    within_s : int
        Seconds after a block's first user within which others pay as well.
    """

    _: KW_ONLY
    known: Schedule | None = None
    seed: int = 0
    completions: Completions | None = None
    charged: Sequence[Charge] | None = None
    within_s: int = 0

    @property
    def features(self) -> frozenset[str]:
        """The features that a proof must allow for, see `features_of`."""
        found = features_of_problem(self)

        return found if self.charged is None else found | CHARGES

    def part(self, who: NDArray[np.int64]) -> BoundTask:
        """Return the task about some of the requests, in the order given.

        Parameters
        ----------
        who : ndarray of int64
        """
        charged = None if self.charged is None else [self.charged[i] for i in who.tolist()]
        return replace(self, instance=self.instance.subset(who), known=None, charged=charged)

    @property
    def batch_cost(self) -> BatchCost:
        """The cost model of an instance in seconds."""
        assert isinstance(self.cost_model, BatchCost)  # that of a problem in seconds
        if self.cost_model.table is not None:
            raise UsageError("bound: found a tabulated cost model; expected one of its minorants")

        return self.cost_model


@dataclass(frozen=True, eq=False)
class Proof:
    """The result of a bound's function.

    Parameters
    ----------
    value : int or float
        No schedule has a smaller value. It is in the unit of the objective.
    certificate : dict, optional
        A certificate of the value (`optsched.bounds.certificate`).
    schedule : Schedule, optional
    tree : dict, optional
        The tree of a certificate in seconds, from which `optsched.bounds.certificate.certify`
        makes the certificate if it is wanted.
    cost_model : UnitCost or BatchCost, optional
        The cost model for which the tree is proved: the task's own, or one of its minorants.
    """

    value: float
    certificate: dict[str, Any] | None = None
    schedule: Schedule | None = None
    tree: dict[str, Any] | None = None
    cost_model: CostModel | None = None


def only_by_name(task: BoundTask) -> bool:
    """Return False: ``auto`` need not run a bound that `pieces` has as a part."""
    return False


def of_table(task: BoundTask) -> bool:
    """Return whether charges by class say more than a linear model: under a table."""
    return bool(MINORANTS & task.features)


@dataclass(frozen=True)
class Bound:
    """A lower bound that holds for every schedule of an instance.

    Parameters
    ----------
    name : str
    summary : str
    time_unit : {"round", "second"}
        The time unit of the instances that it is proved for.
    objectives : tuple of str
        The metrics that it bounds from below (`optsched.problem.metrics.TABLE`).
    function : callable
        ``function(task, budget) -> Proof``. The mathematical proof stands in its docstring, in that
        of its module, or in docs/formulations.md.
    features : frozenset of str
        The features that an instance may have for the proof to hold, as `features_of` names them.
        They are listed one by one: a feature that is added to instances or cost models later is
        refused until somebody has extended the proof.
    searches : bool
        Whether it goes on until the budget is used up.
    certifies : bool
        Whether its proof carries a certificate, where the checker knows the objective
        (`optsched.bounds.certificate.CERTIFIED`).
    leaves_out : frozenset of str
        Kinds of schedules that it does not hold for (`optsched.problem.scope.KINDS`). Empty: it
        holds for every schedule that the judge accepts on the task's workers.
    suits : callable
        ``suits(task) -> bool``: whether the method ``auto`` should spend time on it.
    weight : float
        Its part of the time under the method ``auto``, beside those of others that search.
    needs : frozenset of str
        The features without which it says nothing.
    """

    name: str
    summary: str
    time_unit: str
    objectives: tuple[str, ...]
    function: Callable[[BoundTask, Budget], Proof]
    features: frozenset[str]
    searches: bool = False
    certifies: bool = False
    leaves_out: frozenset[str] = frozenset()
    suits: Callable[[BoundTask], bool] = lambda task: True
    weight: float = 1.0
    needs: frozenset[str] = frozenset()

    def lacks(self, task: BoundTask) -> list[str]:
        """Return the sorted names of the features of a task that the bound is not proved for.

        Parameters
        ----------
        task : BoundTask
        """
        return sorted(task.features - self.features)

    def applies(self, task: BoundTask) -> bool:
        """Return whether the bound is one for the task's objective and the instance's time unit.

        Parameters
        ----------
        task : BoundTask
        """
        same_unit = self.time_unit == task.instance.time_unit
        return same_unit and task.goal.name in self.objectives and self.needs <= task.features


ANY_INSTANCE = LIMITS | {"arrivals", "evictions", "kv_cached", "kv_generated"}
ANY_INSTANCE |= {"chunked_prefill", "hybrid_batching_off"}
"""Features that only rule schedules out, or that every proof of this package allows for."""

WHOLE_BLOCKS = LESS_ROOM
"""The feature of KV in blocks (`Instance.kv_block_tokens`), which only takes room away. A bound
that uses no schedule of its own allows for it. A method that finds schedules must count blocks."""

IN_ROUNDS = ANY_INSTANCE | WHOLE_BLOCKS
"""Features that bounds in rounds are proved for."""

WORKERS = frozenset({"workers"})
"""The feature of several workers."""

MINORANTS = frozenset({"cost.table"})
"""The feature of a tabulated cost model. No bound needs these two: `optsched.bounds.relaxations`
asks without them, workers in seconds excepted."""

CHARGES = frozenset({"charges"})
"""The feature of work that is paid once (`BoundTask.charged`). A bound that is proved for it gets
an instance whose requests share KV (`PREFIX_FIELDS`) so. Others, which count whole prompts, are
wrong for schedules that claim KV (`optsched.problem.prefixes`)."""

POOLS = frozenset({"pools"})
"""The feature of machines with roles, between which KV moves (`Problem.pools`)."""

OTHER_MACHINES = frozenset({"other_machines"})
"""The feature of several machines that are unequal, or have another KV capacity or other limits
than the instance; of pools, of machines that are unequal in a stage. No bound is proved for it."""

AFTER = frozenset({"after"})
"""The feature of requests that are released when others end (`optsched.problem.sessions`)."""


def features_of_problem(problem: Problem) -> frozenset[str]:
    """Return the features of a problem's instance (`features_of`) and of its machines.

    Parameters
    ----------
    problem : Problem
    """
    instance, pools = problem.instance, problem.pools
    # Machines of pools have their own cost models, capacities and limits.
    if pools is not None:
        found = POOLS.union(*(features_of(instance, one.cost) for one in pools.machines))
        same = all(
            len({(m.kv_capacity, m.limits, m.cost.sha256) for m in stage}) == 1
            for stage in pools.stages[:2]
        )
        return found if same else found | OTHER_MACHINES

    # The bounds take capacity and limits from the instance, so all machines must have these.
    found, kinds = features_of(instance, problem.cost_model, problem.workers), problem.machines
    own = instance.kv_capacity, instance.limits
    same = len(kinds) == 1 and (kinds[0].kv_capacity, kinds[0].limits) == own
    return found if same else found | OTHER_MACHINES


def features_of(
    instance: Instance, cost_model: CostModel | None = None, workers: int = 1
) -> frozenset[str]:
    """Return the features of an instance and its cost model that a proof must allow for.

    Parameters
    ----------
    instance : Instance
    cost_model : UnitCost or BatchCost, optional
    workers : int

    Returns
    -------
    frozenset of str
        ``workers`` if there are several, ``arrivals`` if requests arrive at different times,
        ``evictions`` always, since no instance forbids them, ``after`` if requests are released
        when others end, ``chunked_prefill`` if prefills may be split, ``hybrid_batching_off``, and
        ``kv_generated`` or ``kv_cached``. Then the names of the limits that are set, and
        ``cost.NAME`` for every coefficient of the cost model that is not 0. A tabulated one has
        ``cost.table`` and the coefficients of its minorants. A later version of `Instance` may have
        further fields; each that differs from its default is a feature of its name.
    """
    found = {"evictions", f"kv_{instance.kv_accounting}", *further_fields(instance)}
    if found & SESSION_FIELDS:
        found = (found - SESSION_FIELDS) | AFTER
    if workers > 1:
        found |= WORKERS
    if instance.arrivals_differ:
        found.add("arrivals")
    # By default prefills may be split in seconds only.
    if instance.chunked_prefill or (instance.chunked_prefill is None and not instance.in_rounds):
        found.add("chunked_prefill")
    if instance.hybrid_batching is False:
        found.add("hybrid_batching_off")
    if isinstance(cost_model, BatchCost) and not instance.in_rounds:
        for one in cost_model.minorants:
            found |= {f"cost.{name}" for name in one.coefficients if one[name] != 0}
        if cost_model.table is not None:
            found |= MINORANTS

    return frozenset(found)


REGISTRY: Registry[Bound] = Registry(
    "bound", "optsched.bounds", Bound, error=UsageError, plugins="optsched.bounds"
)
"""Every bound. A `Bound` at the top level of a module of this package is found by itself. A package
above this one adds its own with ``REGISTRY.add``."""
