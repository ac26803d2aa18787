"""What is asked: the requests, the machines and the objective, in one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from optsched.costs.cost import CostModel
from optsched.costs.fleet import Fleet, Hardware, fleet_of
from optsched.costs.machine import Machine
from optsched.files.read_write import as_instance
from optsched.problem.instance import Instance
from optsched.problem.limits import with_slos
from optsched.problem.objective import (
    TOTAL_LATENCY,
    Objective,
    parse_objectives,
    service_limits,
)
from optsched.problem.service import SLOS

Objectives = str | Objective | Sequence[str | Objective]
"""What a `Problem` takes for its objective."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Requests, the machines that they run on, and what is to be as small, or as large, as can be.

    Parameters
    ----------
    instance : Instance, str or path
        The requests: an instance, its file, or the name of a shipped one.
    fleet : Fleet, Machine, sequence of Machine, BatchCost, str or path, optional
        The machines. A cost model, or the name or file of one, is that of a single machine, which
        has the instance's KV capacity and limits. An instance in seconds needs one; one in rounds
        refuses it.
    objective : str, Objective or sequence of these
        Metrics, the most important first. A string may hold several, separated by commas.
    slo_ttft, slo_tpot, slo_gap, slo_latency : float, optional
        Service level objectives of every request, in the instance's time unit: the max TTFT, TPOT,
        gap between two output tokens, and latency of a request that is served well. Each that is
        given replaces the instance's column of its name. Policies see them.

    Attributes
    ----------
    hardware : Fleet
        The fleet, with the instance's KV capacity and limits where machines have none.

    Raises
    ------
    InputError, UsageError
        A file or a name is wrong, the machines do not fit the instance, or an SLO is no time > 0.

    Notes
    -----
    A single machine's KV capacity and limits become the instance's. Parameters of an objective, as
    in ``slo_attainment:slo_ttft=1``, become columns like the SLOs, and SLOs parameters of those
    objectives that have them.

    Examples
    --------
    >>> from optsched import Problem
    >>> Problem("tiny").about("makespan").goal.name
    'makespan'
    """

    instance: Instance
    fleet: Fleet = None  # type: ignore[assignment]  # `__post_init__` makes one
    objective: tuple[Objective, ...] = (TOTAL_LATENCY,)
    _: KW_ONLY
    slo_ttft: InitVar[float | None] = None
    slo_tpot: InitVar[float | None] = None
    slo_gap: InitVar[float | None] = None
    slo_latency: InitVar[float | None] = None
    hardware: Fleet = field(init=False)

    if TYPE_CHECKING:  # what is taken is more than what is kept

        def __init__(
            self,
            instance: Instance | str | Path,
            fleet: Hardware = None,
            objective: Objectives = TOTAL_LATENCY,
            *,
            slo_ttft: float | None = None,
            slo_tpot: float | None = None,
            slo_gap: float | None = None,
            slo_latency: float | None = None,
        ) -> None: ...

    def __post_init__(self, *slos: float | None) -> None:
        put = object.__setattr__.__get__(self)  # the fields of a frozen object are set this way
        put("fleet", fleet_of(self.fleet))
        # SLOs become parameters of the objectives that have them, and parameters become columns.
        limits = {name: limit for name, limit in zip(SLOS, slos, strict=True) if limit is not None}
        goals = tuple(goal.within(limits) for goal in parse_objectives(self.objective))
        put("objective", goals)
        instance = self._on_machine(as_instance(self.instance))
        put("instance", with_slos(instance, limits | service_limits(goals)))
        for goal in goals:  # the instance has all its columns now
            goal.check(self.instance)

        put("hardware", self.fleet.on(self.instance))

    def _on_machine(self, instance: Instance) -> Instance:
        """Return the instance with the KV capacity and limits of a single machine."""
        if len(self.fleet) > 1:
            return instance

        machine = self.fleet.machines[0]
        capacity = machine.kv_capacity or instance.kv_capacity
        limits = machine.limits_on(instance)
        if (capacity, limits) == (instance.kv_capacity, instance.limits):
            return instance

        # What is known of the optimum holds for the capacity and limits that it had.
        return replace(instance, kv_capacity=capacity, limits=limits, known=None)

    def __repr__(self) -> str:
        goals, fleet = ",".join(map(str, self.objective)), self.fleet.words
        return f"<Problem {self.instance.name!r}: {goals} of {self.instance.n} requests on {fleet}>"

    @classmethod
    def of(cls, problem: Problem, **more: Any) -> Self:
        """Return a problem with fields of a subclass, such as what is known of it.

        Parameters
        ----------
        problem : Problem
        **more
        """
        return cls(problem.instance, problem.fleet, problem.objective, **more)

    def about(self, objective: Objectives) -> Self:
        """Return the same problem with another objective.

        Parameters
        ----------
        objective : str, Objective or sequence of these
        """
        return replace(self, objective=parse_objectives(objective))

    def on(self, instance: Instance | str | Path) -> Self:
        """Return the same problem, machines and objective, of another instance.

        Parameters
        ----------
        instance : Instance, str or path
        """
        return replace(self, instance=as_instance(instance))

    @property
    def machines(self) -> tuple[Machine, ...]:
        """The machine of each worker; of equal ones, without moves of KV, one that all are like."""
        every = tuple(self.hardware.machines)
        return every[:1] if self.hardware.equal else every

    @property
    def workers(self) -> int:
        """The number of machines."""
        return len(self.fleet)

    @property
    def pools(self) -> Fleet | None:
        """The hardware, if the KV of requests may move between its machines."""
        return None if self.fleet.link is None else self.hardware

    @property
    def cost_model(self) -> CostModel:
        """The cost model of the first machine."""
        return self.hardware.machines[0].cost

    @property
    def goal(self) -> Objective:
        """The first objective."""
        return self.objective[0]


def as_problem(given: Problem | Instance | str | Path) -> Problem:
    """Return the problem that a public function was given, or that of an instance in rounds.

    Parameters
    ----------
    given : Problem, Instance, str or path
    """
    return given if isinstance(given, Problem) else Problem(given)
