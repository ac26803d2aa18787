"""What a formulation is: a task in, methods that solve it, an answer out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optsched.bounds.base import ANY_INSTANCE, features_of
from optsched.costs.cost import CostModel, UnitCost
from optsched.optimize.solvers.base import SolveOptions, Status
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance, TimeUnit
from optsched.problem.objective import Objective, parse_objectives
from optsched.problem.schedule import Schedule


@dataclass(frozen=True, eq=False)
class Task:
    """What is to be solved.

    Parameters
    ----------
    instance : Instance
    cost_model : UnitCost or BatchCost
    objective : tuple of Objective
        The first is the most important (lexicographic); names are read as objectives.
    extras : mapping
        What only some formulations know, by name (for example ``eviction_free``).
    """

    instance: Instance
    cost_model: CostModel = field(default_factory=UnitCost)
    objective: tuple[Objective, ...] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.objective:
            object.__setattr__(self, "objective", parse_objectives(self.objective))

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics of the objectives."""
        return tuple(objective.name for objective in self.objective)


@dataclass(frozen=True, eq=False)
class Answer:
    """What a method found.

    Parameters
    ----------
    status : Status
    schedule : Schedule, optional
        The incumbent.
    objective, bound : float, optional
        The method's own values, None where unknown; `optsched.solve` has them checked.
    native_status : str
        The solver's own word.
    build_s, solve_s : float
        Seconds to build the model, and to solve it.
    certificate : object, optional
        A certificate of the bound.
    versions : mapping of str to str
        Versions of the solvers used.
    """

    status: Status
    schedule: Schedule | None = None
    objective: float | None = None
    bound: float | None = None
    native_status: str = ""
    build_s: float = 0.0
    solve_s: float = 0.0
    certificate: Any = None
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """One way to solve a formulation.

    Parameters
    ----------
    summary : str
        One line for the list of methods.
    run : callable
        ``run(task, options) -> Answer``. It imports its solver when called, not before.
    objectives : tuple of str
        The metrics that it can optimize (`optsched.problem.metrics.TABLE`).
    switches : frozenset of str
        What it can honour among the formulation's `Formulation.switches`.
    lexicographic : bool
        Whether it takes more than one objective.
    extras : frozenset of str
        The names of `Task.extras` that it reads.
    features : frozenset of str
        What an instance may have (`optsched.bounds.features_of`) for its answers and bounds to
        hold. A feature that is added to instances later is refused until it is modelled.
    """

    summary: str
    run: Callable[[Task, SolveOptions], Answer]
    objectives: tuple[str, ...]
    switches: frozenset[str] = frozenset()
    lexicographic: bool = False
    extras: frozenset[str] = frozenset()
    features: frozenset[str] = ANY_INSTANCE


@dataclass(frozen=True)
class Formulation:
    """A mathematical model and its methods.

    Parameters
    ----------
    name, summary : str
    time_unit : {"round", "second"}
        The instances that it is for.
    default_objective : str
        As `optsched.problem.objective.parse_objectives` reads it.
    methods : mapping of str to Method
        Its own; other files of the package may add to them (`optsched.optimize.formulations`).
    choose : callable
        ``choose(task) -> str``: the method that ``auto`` stands for.
    switches : frozenset of str
        Limits and switches of an instance that matter to it, as `demands` names them.
    export : callable, optional
        ``export(task, format, path)`` writes the model as ``"lp"`` or ``"mps"``; None: it cannot.
    """

    name: str
    summary: str
    time_unit: TimeUnit
    default_objective: str
    methods: Mapping[str, Method]
    choose: Callable[[Task], str]
    switches: frozenset[str] = frozenset()
    export: Callable[[Task, str, str | Path], None] | None = None


def demands(instance: Instance) -> frozenset[str]:
    """Return the limits and switches that an instance asks for.

    Names of the limits that are set, ``"hybrid_batching_off"``, ``"chunked_prefill"`` (on) and
    ``"arrivals"`` (not all together); their opposites are what models do anyway.
    """
    wanted = set(instance.limits.as_dict())
    if instance.hybrid_batching is False:
        wanted.add("hybrid_batching_off")
    if instance.chunked_prefill is True:
        wanted.add("chunked_prefill")
    if (instance.arrival != instance.arrival[0]).any():
        wanted.add("arrivals")
    return frozenset(wanted)


def automatic(formulation: Formulation, task: Task) -> str:
    """Return the method that ``auto`` stands for: the formulation's choice, or one that can.

    A formulation chooses by size among the methods for its usual objectives. Where its choice
    cannot do the task, as with an objective that was added later, the first that can is taken.
    """
    chosen = formulation.choose(task)
    methods = formulation.methods
    if not _lacks(formulation, methods[chosen], task):
        return chosen
    able = (name for name in sorted(methods) if not _lacks(formulation, methods[name], task))
    return next(able, chosen)


def check_method(formulation: Formulation, name: str, task: Task) -> Method:
    """Return the method if it can do the task.

    Raises
    ------
    UsageError
        An unknown method, or an objective, a switch or an extra that it cannot do, naming a
        method that can.
    """
    methods = formulation.methods
    if name not in methods:
        raise UsageError(
            f"method: {name!r} is unknown to formulation {formulation.name}; known are "
            + ", ".join(sorted(methods))
        )
    lacks = _lacks(formulation, methods[name], task)
    if lacks:
        able = [m for m in sorted(methods) if not _lacks(formulation, methods[m], task)]
        advice = f"{able[0]} can" if able else f"no method of {formulation.name} can"
        raise UsageError(f"method: {name} cannot do {', '.join(lacks)}; {advice}")
    return methods[name]


def _lacks(formulation: Formulation, method: Method, task: Task) -> list[str]:
    lacks = [f"objective {o!r}" for o in task.names if o not in method.objectives]
    if len(task.objective) > 1 and not method.lexicographic:
        lacks.append("several objectives")
    wanted = demands(task.instance) & formulation.switches
    lacks += sorted(wanted - method.switches)
    lacks += sorted(features_of(task.instance) - method.features)
    given = {key for key, value in task.extras.items() if value not in (None, False)}
    return lacks + sorted(given - method.extras)
