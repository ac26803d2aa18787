"""What a formulation is: a task in, methods that solve it, an answer out."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from optsched.bounds.base import ANY_INSTANCE, features_of_problem
from optsched.optimize.solvers.base import SolveOptions, Status
from optsched.problem.errors import InfeasibleError, UsageError
from optsched.problem.instance import Instance, TimeUnit
from optsched.problem.schedule import Schedule
from optsched.problem.scope import Scope
from optsched.workloads.problem import Problem

LIMITS = frozenset({"max_batch_tokens", "max_prefill_tokens", "max_running", "hybrid_batching_off"})
"""Limits and switches of an instance, with the names of `demands`."""


@dataclass(frozen=True, eq=False)
class Task(Problem):
    """What is to be solved: a problem, with options of formulations.

    Parameters
    ----------
    instance, fleet, objective, slo_ttft, slo_tpot, slo_gap, slo_latency
        As of `Problem`.
    extras : mapping of str to object
        Options that only some formulations have, by name (for example ``eviction_free``).
    """

    _: KW_ONLY
    extras: Mapping[str, Any] = field(default_factory=dict)

    def scope(self, without: frozenset[str] = frozenset()) -> Scope:
        """Return the schedules that are asked about, or those of them that do without something.

        Parameters
        ----------
        without : frozenset of str
            Of `optsched.problem.scope.KINDS`.
        """
        pools = self.pools.words if self.pools else ""
        return Scope(self.workers, without, pools, self.instance.granted)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the objectives' metrics."""
        return tuple(objective.name for objective in self.objective)


class Readable(NamedTuple):
    """A task's program in PuLP, to which rows may be added.

    `variables` have names and places as keys, such as ``("x", 3, 7)``. `schedule` returns what
    their values mean, and `value` what a number of the objective means. `integral` says whether
    that is whole, and `notes` what a file of the program begins with. `length` is that of its time
    axis, in rounds or batches.
    """

    problem: Any
    variables: Mapping[tuple[str | int, ...], Any]
    schedule: Callable[[], Schedule]
    value: Callable[[float], float]
    integral: bool
    length: int
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Answer:
    """What a method found.

    Parameters
    ----------
    status : Status
    schedule : Schedule, optional
        The incumbent.
    objective, bound : float, optional
        The method's own values of the first objective, in the instance's time unit. None means
        unknown. `optsched.solve` checks them.
    native_status : str
        The status in the solver's own words.
    solve_s : float
        Wall-clock seconds to solve the model, once it was built.
    certificate : object, optional
    tree : dict, optional
        In seconds: the tree of a certificate of the bound (`optsched.bounds.base.Proof`).
    """

    status: Status
    schedule: Schedule | None = None
    objective: float | None = None
    bound: float | None = None
    native_status: str = ""
    solve_s: float = 0.0
    certificate: Any = None
    tree: dict[str, Any] | None = None


@dataclass(frozen=True)
class Method:
    """One way to solve a formulation.

    Parameters
    ----------
    summary : str
    run : callable
        ``run(task, options) -> Answer``. It imports its solver only when it is called.
    objectives : tuple of str
        The metrics that it can optimize (`optsched.problem.metrics.TABLE`).
    switches : frozenset of str
        The formulation's `Formulation.switches` that it honours.
    lexicographic : bool
        Whether it can optimize several objectives in order.
    extras : frozenset of str
        The names of `Task.extras` that it reads.
    solvers : tuple of str
        The packages that solve it, whose versions are in results.
    features : frozenset of str
        What an instance and its cost model may have (`optsched.bounds.features_of`) for its
        answers and bounds to hold. A feature that is added later, such as a term of the cost
        model, is refused until it is modelled.
    """

    summary: str
    run: Callable[[Task, SolveOptions], Answer]
    objectives: tuple[str, ...]
    switches: frozenset[str] = frozenset()
    lexicographic: bool = False
    extras: frozenset[str] = frozenset()
    solvers: tuple[str, ...] = ()
    features: frozenset[str] = ANY_INSTANCE


@dataclass(frozen=True)
class Formulation:
    """A mathematical model and its methods.

    Parameters
    ----------
    name : str
    summary : str
    time_unit : {"round", "second"}
        The time unit of the instances that it models.
    methods : mapping of str to Method
        Its methods by name. Other files of the package may add methods
        (`optsched.optimize.formulations`).
    choose : callable
        ``choose(task) -> str`` returns the method that ``auto`` stands for.
    switches : frozenset of str
        The limits and switches of an instance that matter to it, with the names of `demands`.
    leaves_out : callable
        ``leaves_out(task)`` returns the kinds of schedules (`optsched.problem.scope.KINDS`) that
        the judge accepts and its optimum does not count. Bounds of its methods do not hold for
        them.
    readable : callable, optional
        ``readable(task, length)`` returns the program in PuLP, over so many rounds or batches, or
        as many as suffice. None if there is no such program.
    """

    name: str
    summary: str
    time_unit: TimeUnit
    methods: Mapping[str, Method]
    choose: Callable[[Task], str]
    switches: frozenset[str] = frozenset()
    leaves_out: Callable[[Task], frozenset[str]] = lambda task: frozenset()
    readable: Callable[[Task, int | None], Readable] | None = None


def check_prompts(instance: Instance, ending: str) -> None:
    """Refuse a limit on batches that is below a prompt, which is processed in one batch.

    ``ending``: how the error ends, with what was expected.
    """
    if (exceeded := instance.limits.exceeded(instance.prompt_tokens)) is not None:
        name, limit, i = exceeded
        raise InfeasibleError(
            f"limits.{name}: found {limit} below request {i}'s prompt_tokens "
            f"{instance.prompt_tokens[i]}{ending}"
        )


def demands(instance: Instance) -> frozenset[str]:
    """Return the limits and switches that an instance asks for, which a method has to honour.

    Every model covers an instance without limits and chunks whose requests arrive together.
    """
    wanted = set(instance.limits.as_dict())
    if instance.hybrid_batching is False:
        wanted.add("hybrid_batching_off")
    if instance.chunked_prefill is True:
        wanted.add("chunked_prefill")
    if instance.arrivals_differ:
        wanted.add("arrivals")

    return frozenset(wanted)


def automatic(formulation: Formulation, task: Task) -> str:
    """Return the method that ``auto`` stands for: the formulation's choice by size.

    If that cannot do the task, it is the first method by name that can. Where none can, no choice
    is made by sizes that the instance may not have, and `check_method` says what is lacking.
    """
    lacks = {name: len(lacks_of(formulation, name, task)) for name in sorted(formulation.methods)}
    first = min(lacks, key=lacks.__getitem__)
    if lacks[first]:
        return first

    # The choice by size may be a method that lacks something.
    chosen = formulation.choose(task)
    return first if lacks[chosen] else chosen


def check_method(formulation: Formulation, name: str, task: Task) -> Method:
    """Return a method by name if it can do the task."""
    methods = formulation.methods
    if name not in methods:
        raise UsageError(
            f"method: found {name!r}; expected, for formulation {formulation.name}, one of "
            + ", ".join(sorted(methods))
        )

    lacks = lacks_of(formulation, name, task)
    # The error names a method that can do the task, or else what this one has.
    if lacks:
        able = [m for m in sorted(methods) if not lacks_of(formulation, m, task)]
        advice = f"expected {able[0]}" if able else f"no method of {formulation.name} can"
        if not able and not set(task.names) <= set(methods[name].objectives):
            objectives = ", ".join(sorted(methods[name].objectives))
            advice += f" do all of it; {name} has {objectives}"

        raise UsageError(f"method: found {name}, which cannot do {', '.join(lacks)}; {advice}")

    return methods[name]


def lacks_of(formulation: Formulation, name: str, task: Task) -> list[str]:
    """Return what a task has that a method of the formulation cannot do.

    Limits and switches that do not matter to the formulation are left out, and so are extras that
    are off.
    """
    method = formulation.methods[name]
    lacks = [f"objective {goal!r}" for goal in task.names if goal not in method.objectives]
    if len(task.objective) > 1 and not method.lexicographic:
        lacks.append("several objectives")

    wanted = demands(task.instance) & formulation.switches
    lacks += sorted(wanted - method.switches)
    needed = features_of_problem(task)
    lacks += sorted(needed - method.features)
    extras = {key for key, value in task.extras.items() if value not in (None, False)}

    return lacks + sorted(extras - method.extras)
