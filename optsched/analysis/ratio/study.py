"""Competitive ratios of policies over many instances."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from optsched.analysis.compare import best_of_policies
from optsched.analysis.optima import Optima
from optsched.analysis.ratio.exact import optimum
from optsched.analysis.ratio.interrupts import interrupts_noted
from optsched.bounds import BoundTask, lower_bound, usable
from optsched.optimize.consistency import is_met, reconcile
from optsched.optimize.exact import choose, choose_if_able
from optsched.optimize.formulations.base import Task
from optsched.optimize.strategies import outside_reason
from optsched.policies import Named, Scheduler, labelled, make_policy
from optsched.policies.run import run_within
from optsched.problem.budget import Budget
from optsched.problem.columns import check_choice
from optsched.problem.errors import InputError, OptschedError, UsageError
from optsched.problem.instance import Instance
from optsched.problem.markup import latex, table
from optsched.problem.objective import TOTAL_LATENCY, Objective, parse_objective
from optsched.problem.progress import LiveLine
from optsched.problem.version import __version__
from optsched.workloads.problem import Problem, as_problem

if TYPE_CHECKING:
    from pandas import DataFrame

Reference = Literal["optimum", "bound", "h-sf", "best-known"]
REFERENCES: tuple[Reference, ...] = get_args(Reference)
_RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """The ratio of one policy on one instance: its value of the objective over the reference.

    Where more is better it is the reference over the value, so that no ratio is below 1 either way.

    Parameters
    ----------
    policy : str
    instance : int
        Position of the instance in the study, from 0.
    name : str
    value : float or None
        The objective in the instance's time unit, as the mean over seeds. None if the policy
        failed.
    low, high : float or None
        The ratio lies in [low, high]. The two are equal if the reference is known exactly, and
        ``high`` is None without a bound.
    error : str or None
        Why there is no latency or no ratio. There is no ratio for a schedule outside the model of
        the reference (`optsched.optimize.strategies.outside_reason`), such as one of several
        workers.
    rule : str or None
        The constraint that the policy's schedule breaks, as `ViolationError` calls it.
    bound, best_known : float or None
        The reference lies between these two, which are equal if it is known exactly.
    """

    policy: str
    instance: int
    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    error: str | None = None
    rule: str | None = None
    bound: float | None = None
    best_known: float | None = None

    def between(self, goal: Objective, bound: float | None, best_known: float | None) -> Ratio:
        """Return the ratio to a reference that lies between two values.

        Parameters
        ----------
        goal : Objective
        bound, best_known : float or None
        """
        assert self.value is not None
        low = 1.0 if best_known is None else goal.quotient(self.value, best_known)
        high = None if not bound else goal.quotient(self.value, bound)
        return replace(self, low=low, high=high, bound=bound, best_known=best_known)

    @property
    def exact(self) -> bool:
        """Whether the ratio is known exactly."""
        return self.low is not None and self.low == self.high


@dataclass(frozen=True)
class Mean:
    """The mean ratio of a policy over instances, which lies in [low, high].

    Parameters
    ----------
    low, high : float
        Means of the ratios' lower and upper ends. ``high`` is infinite if a bound is missing.
    interval : tuple of float
        Confidence interval of the mean over instances. Its lower limit is that of ``low``, and its
        upper limit that of ``high``.
    count, failed : int
        Number of instances with a ratio, and of those without.
    exact : bool
        Whether every ratio is known exactly.
    """

    low: float
    high: float
    interval: tuple[float, float]
    count: int
    failed: int
    exact: bool

    def __repr__(self) -> str:
        middle = f"{self.low:.4f}" if self.exact else f"{self.low:.4f} to {self.high:.4f}"
        bottom, top = self.interval
        return f"<Mean {middle} ({bottom:.4f} to {top:.4f}) of {self.count}>"


@dataclass(frozen=True)
class Paired:
    """Two policies on the same instances, compared by the quotient of their values.

    Parameters
    ----------
    first, second : str
    quotient : float
        Geometric mean over instances of first / second. No optimum is needed.
    interval : tuple of float
        Confidence interval of the quotient.
    wins, ties, losses : int
        Number of instances on which the first policy is better, equal and worse.
    objective : str
    """

    first: str
    second: str
    quotient: float
    interval: tuple[float, float]
    wins: int
    ties: int
    losses: int
    objective: str = TOTAL_LATENCY.name

    def __str__(self) -> str:
        low, high = self.interval
        between = f" ({low:.4f} to {high:.4f})" if low < high else ""
        return (
            f"{self.first} has {self.quotient:.4f} times the {self.objective} of {self.second}"
            f"{between}: better on {self.wins}, equal on {self.ties}, worse on {self.losses}"
        )


@dataclass(frozen=True, eq=False)
class Study:
    """The ratios of policies over instances, as `ratios` returns them.

    Parameters
    ----------
    policies : tuple of str
    reference : str
        The reference of the ratios.
    rows : tuple of Ratio
        The ratios by instance, and for each instance in the order of the policies.
    confidence : float
        Confidence of the intervals, such as 0.95.
    seed : int
        Seed of the policies' runs, and of the resampling for the intervals.
    unfinished : int
        Number of instances without rows, because the work was stopped before they had run.
    uncertified : tuple of str
        The instances without a certificate of the optimum, if these were asked for, and which
        method solved each.
    objective : Objective
    """

    policies: tuple[str, ...]
    reference: str
    rows: tuple[Ratio, ...]
    confidence: float
    seed: int
    unfinished: int = 0
    uncertified: tuple[str, ...] = ()
    objective: Objective = TOTAL_LATENCY

    def of(self, policy: str) -> list[Ratio]:
        """Return a policy's ratios, one per instance.

        Parameters
        ----------
        policy : str
            One of ``policies``.
        """
        check_choice(policy, "policy", self.policies)
        return [row for row in self.rows if row.policy == policy]

    def mean(self, policy: str) -> Mean:
        """Return a policy's mean ratio with its confidence interval, by bootstrap over instances.

        Parameters
        ----------
        policy : str
            One of ``policies``.
        """
        rows, good = self.of(policy), self._good(policy)
        low = np.array([row.low for row in good], dtype=np.float64)
        high = np.array([np.inf if row.high is None else row.high for row in good])
        interval = (self._interval(low)[0], self._interval(high)[1])
        failed, exact = len(rows) - len(good), all(row.exact for row in good)
        return Mean(float(low.mean()), float(high.mean()), interval, len(good), failed, exact)

    def worst(self, policy: str) -> Ratio:
        """Return the policy's row with the largest certain ratio, which is its lower end.

        The largest ratio of all is at least its ``low``, and at most the largest ``high``.

        Parameters
        ----------
        policy : str
            One of ``policies``.
        """
        return max(self._good(policy), key=lambda row: row.low or 0.0)

    def paired(self, first: str, second: str) -> Paired:
        """Compare two policies on the instances that both finished.

        Parameters
        ----------
        first, second : str
            Two of ``policies``.

        Returns
        -------
        Paired
        """
        both = [
            (a.value, b.value)
            for a, b in zip(self.of(first), self.of(second), strict=True)
            if a.value and b.value
        ]
        if not both:
            raise InputError(
                f"policies {first!r} and {second!r}: found no instance that both finished; "
                "expected at least one"
            )

        one, two = np.array(both, dtype=np.float64).T
        logs = np.log(one / two)
        bottom, top = np.exp(self._interval(logs)).tolist()
        quotient = float(np.exp(logs.mean()))
        less, ties, more = (int(found.sum()) for found in (one < two, one == two, one > two))
        wins, losses = (more, less) if self.objective.maximized else (less, more)
        ends, name = (bottom, top), str(self.objective)
        return Paired(first, second, quotient, ends, wins, ties, losses, name)

    def pairs(self) -> list[Paired]:
        """Return the first policy beside each other one with which it finished an instance."""
        first, found = self.policies[0], []
        for other in self.policies[1:]:
            with suppress(InputError):
                found.append(self.paired(first, other))

        return found

    def labelled(self, labels: Sequence[str]) -> Study:
        """Return the study with other names of its policies, in their order.

        Parameters
        ----------
        labels : sequence of str
        """
        if len(set(labels)) != len(self.policies) or len(labels) != len(self.policies):
            raise InputError(
                f"labels: found {', '.join(labels)}; expected {len(self.policies)} that differ"
            )

        names = dict(zip(self.policies, labels, strict=True))
        rows = tuple(replace(row, policy=names[row.policy]) for row in self.rows)
        return replace(self, policies=tuple(labels), rows=rows)

    def __repr__(self) -> str:
        return f"<Study of {len(self.rows)} ratios to {self.reference}>"

    def _repr_html_(self) -> str:
        found = self.summary()
        return table(repr(self), list(map(str, found)), found.to_numpy().tolist())

    def to_frame(self) -> DataFrame:
        """Return the ratios, a row for each instance and policy; values are under the metric."""
        from pandas import DataFrame

        rows = DataFrame([vars(row) for row in self.rows])
        return rows.rename(columns={"value": self.objective.name})

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of ``ratios --json``."""
        columns = self.to_frame().astype(object)
        return {
            "format": "optsched-ratios",
            "version": 1,
            "optsched": __version__,
            "objective_name": str(self.objective),
            "reference": self.reference,
            "unfinished": self.unfinished,
            "uncertified": self.uncertified,
            "summary": self.summary().to_dict("records"),
            "paired": [vars(pair) for pair in self.pairs()],
            "ratios": columns.where(columns.notna(), None).to_dict("list"),
        }

    def summary(self) -> DataFrame:
        """Return a row of texts for each policy, as in a paper's table.

        Columns are the mean ratio, its confidence interval, the largest ratio (an interval where an
        optimum is not proved), the instance of it, and the number of instances. A dash stands for
        an interval over one instance, and for the ratios of a policy that has none.
        """
        from pandas import DataFrame

        def between(low: float, high: float) -> str:
            return f"{low:.4f}" if low == high else f"{low:.4f} to {high:.4f}"

        rows: list[tuple[str, ...]] = []
        for policy in self.policies:
            try:
                mean, worst, good = self.mean(policy), self.worst(policy), self._good(policy)
            except InputError:
                failed = f"0 ({len(self.of(policy))} failed)"
                rows.append((policy, "-", "-", "-", "-", failed))
                continue

            top = max(math.inf if row.high is None else row.high for row in good)
            count = f"{mean.count} ({mean.failed} failed)" if mean.failed else str(mean.count)
            ends = (mean.low, mean.high), mean.interval, (worst.low or 0.0, top)
            where = worst.name or f"instance {worst.instance}"
            mid, width, largest = (between(*pair) for pair in ends)
            rows.append((policy, mid, "-" if mean.count == 1 else width, largest, where, count))

        interval, mean_words = f"{self.confidence:.0%} interval", f"mean ratio to {self.reference}"
        columns = ["policy", mean_words, interval, "worst", "on", "instances"]
        return DataFrame(rows, columns=columns)

    def to_latex(self) -> str:
        """Return `summary` as a LaTeX table with numbers in mathematics, which needs jinja2."""
        return latex(self.summary(), "lrrrlr")

    def errors(self) -> list[str]:
        """Return why policies have no ratio on some instances, or these no proof or certificate.

        It is a line for each policy, with the first instance, one for proofs and one for
        certificates.
        """
        found = []
        for policy in self.policies:
            rows = self.of(policy)
            failed = [row for row in rows if row.error is not None]
            for row in failed[:1]:
                why = str(row.error).removeprefix(f"policy {policy!r}: ")
                share = f"{len(failed)} of {len(rows)} instances, the first {row.name}"
                found.append(f"{policy}: failed on {share}: {why}")

        left_open = {
            row.instance: row for row in self.rows if row.low is not None and not row.exact
        }
        if left_open and self.reference == "optimum":
            count = len({row.instance for row in self.rows})
            first = next(iter(left_open.values())).name
            found.append(f"optimum: not proved on {len(left_open)} of {count}, the first {first}")
        if self.uncertified:
            share = f"{len(self.uncertified)} instances, the first {self.uncertified[0]}"
            found.append(f"certificates of the optimum: none for {share}")

        return found

    def to_markdown(self) -> str:
        """Return `summary` as a Markdown table."""
        found = self.summary()
        rows = [list(found.columns), ["---"] * len(found.columns), *found.to_numpy().tolist()]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        lines += ["", *self.errors()] if self.errors() else []
        if self.unfinished:
            lines += ["", f"stopped early: {self.unfinished} instances have not run"]

        return "\n".join(lines)

    def _good(self, policy: str) -> list[Ratio]:
        """Return a policy's rows that have a ratio. If there is none, an error is raised."""
        rows = self.of(policy)
        good = [row for row in rows if row.low is not None]
        if not good:
            raise InputError(f"policy {policy!r}: found no ratio on any instance: {rows[0].error}")

        return good

    def _interval(self, values: NDArray[np.float64]) -> tuple[float, float]:
        """Return the confidence interval of a mean, by the means of resampled instances."""
        if not np.isfinite(values).all():
            return math.inf, math.inf

        rng = np.random.default_rng(self.seed)
        means = values[rng.integers(0, len(values), size=(_RESAMPLES, len(values)))].mean(axis=1)
        tail = (1 - self.confidence) / 2
        bottom, top = np.quantile(means, [tail, 1 - tail]).tolist()

        return bottom, top


def ratios(
    policies: Named,
    problems: Iterable[Problem | Instance | str | Path],
    reference: Reference = "optimum",
    *,
    objective: str | Objective | None = None,
    seeds: int = 1,
    seed: int = 0,
    time_limit_s: float = 10.0,
    confidence: float = 0.95,
    progress: bool | Callable[[int, int], None] = True,
    stop: threading.Event | None = None,
    store: str | Path | None = None,
    first: int = 0,
) -> Study:
    """Measure an objective of policies against a reference, on every instance.

    Parameters
    ----------
    policies : str, Runner or Policy, or an iterable or a mapping of them
        Policy specifications, or objects. The keys of a mapping are what the study calls them, else
        the specification or the object's ``name``.
    problems : iterable of Problem
        The instances, with their machines, on which every policy runs. Or instances in rounds,
        their files or their names.
    reference : {"optimum", "bound", "h-sf", "best-known"}
        The value that the objective is divided by, or that is divided by it where more is better.

        - ``"optimum"`` is what `optsched.solve` proves. If it is not proved within the limit, the
          ratio lies between policy / best known and policy / bound. A ratio below 1 to what is
          proved is an error.
        - ``"bound"`` is the largest of `optsched.bounds`. The ratio to the optimum then lies
          between 1 (``low``) and ``high``.
        - ``"h-sf"`` is MC-SF with the true lengths (Chen, Ye and Zhou 2025).
        - ``"best-known"`` is the best value of all policies, including those measured. Nothing
          trusts what the instance says of itself in ``known``.
    objective : str or Objective, optional
        One metric. Default: that of the problems, which have one in common.
    seeds : int
        Number of runs of each policy, whose mean value counts.
    seed : int
        Run r on instance k has the seed ``[seed, k, r]`` of `optsched.run`: no two runs share
        their coins. The resampling has it, too.
    time_limit_s : float
        Seconds for each optimum, and for each run of a policy.
    confidence : float
        Confidence of the intervals for means over instances, between 0 and 1.
    progress : bool or callable
        Whether to show a line on standard error, if that is a terminal. Or a function that is
        called with the numbers of finished and of all instances.
    stop : threading.Event, optional
        When it is set, no further instance counts, and the finished ones are kept. Ctrl-C has the
        same effect once an instance has finished.
    store : str or Path, optional
        A folder where optima are kept, with the reference ``"optimum"``: instances, schedules and
        certificates, which ``optsched verify FOLDER`` checks. What a study, `compare` or
        `worst_case` has left there is not solved again. Instances without a certificate are the
        study's ``uncertified``.
    first : int
        Number of the first instance, where these are a part of a study, so that all have the coins
        that they have in the whole.

    Returns
    -------
    Study
        A policy that loops, raises, exceeds the time limit or names an unknown request has a row
        with the error, and all other rows are kept. If the work was stopped, it has the instances
        that had finished.

    Raises
    ------
    UsageError
        Nothing bounds the objective on one of the instances, so that there is no such reference.
    SolverError
        If a policy's value is below a proved bound: one of the two is wrong.
    """
    specs = labelled(policies)
    cases = [_about(as_problem(one), objective) for one in problems]
    if not cases or not specs:
        raise InputError(
            f"problems, policies: found {len(cases)}, {len(specs)}; expected at least one of each"
        )

    check_reference(reference, store)
    if seeds < 1 or not 0 < confidence < 1 or not time_limit_s > 0:
        raise InputError(
            f"seeds, confidence, time_limit_s: found {seeds}, {confidence}, {time_limit_s}; "
            "expected >= 1, between 0 and 1, and > 0"
        )

    for spec in specs.values():
        make_policy(spec)
    goal = cases[0].goal
    for k, case in enumerate(cases):
        if case.goal != goal:
            raise UsageError(
                f"objective: found {case.goal} in instance {k} and {goal} before; expected one"
            )
        if reference == "optimum" and choose_if_able(Task.of(case)) is None:
            choose(case)  # says what is lacking
        if reference == "bound" and not usable(BoundTask.of(case), required=True):
            raise UsageError(
                f"reference: found bound, and no bound on {goal} in {case.instance.time_unit}s is "
                "known; expected optimum, h-sf or best-known"
            )

    kept = None if store is None else Optima(Path(store))
    plan = _Plan(specs, reference, seeds, seed, time_limit_s, kept)
    found = _measure(plan, cases, first, progress, stop)
    every = tuple(row for rows in found for row in rows)
    unfinished, without = len(cases) - len(found), tuple(plan.uncertified)
    return Study(tuple(specs), reference, every, confidence, seed, unfinished, without, goal)


def _about(problem: Problem, objective: str | Objective | None) -> Problem:
    """Return a problem with one objective: its own if none is given."""
    return problem.about(parse_objective(objective or problem.objective))


def check_reference(reference: str, store: object) -> None:
    """Check that a reference is one, and has optima if they are to be kept.

    Parameters
    ----------
    reference : str
    store : object
        Where optima are kept, or None.
    """
    check_choice(reference, "reference", REFERENCES)
    if store and reference != "optimum":
        raise UsageError(f"store: found reference {reference}; expected optimum, which it keeps")


def _measure(
    plan: _Plan,
    cases: Sequence[Problem],
    first: int,
    progress: bool | Callable[[int, int], None],
    stop: threading.Event | None,
) -> list[list[Ratio]]:
    """Return the rows of the first instances, as far as these finished."""
    found: list[list[Ratio]] = []
    with interrupts_noted() as interrupted, LiveLine(wanted=progress is True) as line:
        line.show_count(0, len(cases), "instances")
        try:
            for k, case in enumerate(cases, first):
                rows = plan.rows(k, case)
                if interrupted.is_set():
                    raise KeyboardInterrupt  # a solver took it for its own, and these are cut short

                found.append(rows)
                line.show_count(len(found), len(cases), "instances")
                if callable(progress):
                    progress(len(found), len(cases))
                if stop is not None and stop.is_set():
                    break
        except KeyboardInterrupt:
            if not found:
                raise

    return found


@dataclass(frozen=True)
class _Plan:
    """The options that say what is measured on every instance; see `ratios`."""

    specs: Mapping[str, str | Scheduler]
    reference: Reference
    seeds: int
    seed: int
    time_limit_s: float
    store: Optima | None
    uncertified: list[str] = field(default_factory=list)

    def rows(self, number: int, problem: Problem) -> list[Ratio]:
        """Measure all policies on one instance."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a cost model's range, in each run
            found = [self._measured(number, problem, spec) for spec in self.specs.items()]
            values = [row.value for row in found if row.value is not None and row.error is None]
            below, above = self._reference(number, problem, values)

        rows = []
        for row in found:
            if row.value is not None and row.error is None:
                if self.reference in ("optimum", "bound"):
                    self._check(problem, row, below)

                row = row.between(problem.goal, below, above)

            rows.append(row)

        return rows

    def _check(self, problem: Problem, row: Ratio, bound: float | None) -> None:
        """Refuse a ratio below 1 to what is proved."""
        times = problem.goal.quotient(row.value, bound) if bound and row.value else None
        ratio = "" if times is None else f", a ratio of {times:.4f}, below 1"
        known, proved = (row.value, f"{row.policy}{ratio}"), f"{self.reference} of {row.name}"
        reconcile(problem.instance, problem.goal, known, (bound, proved))

    def _measured(self, number: int, problem: Problem, named: tuple[str, str | Scheduler]) -> Ratio:
        """Return a row without a ratio: the mean value, or the reason if it is missing."""
        row = Ratio(named[0], number, problem.instance.name, None)
        try:
            value, outside = self._value(number, problem, named[1], self.seeds)
        except (InputError, UsageError):
            raise
        except OptschedError as failure:
            return replace(row, error=str(failure), rule=getattr(failure, "rule", None))

        if outside is None or self.reference == "h-sf":
            return replace(row, value=value)

        return replace(row, value=value, error=f"no ratio: {outside}")

    def _value(
        self, number: int, problem: Problem, spec: str | Scheduler, seeds: int
    ) -> tuple[float | None, str | None]:
        """Return the mean of the objective, and why a schedule has none or is outside the model."""
        every = ([self.seed, number, run] for run in range(seeds))
        limit_s = self.time_limit_s
        judged = [run_within(problem, spec, Budget(limit_s), one).evaluation for one in every]
        values = [problem.goal.of(one) for one in judged]
        if None in values:
            return None, f"its schedule has no {problem.goal}"

        mean = math.fsum(v for v in values if v is not None) / seeds
        return mean, next(filter(None, (outside_reason(one, problem) for one in judged)), None)

    def _reference(
        self, number: int, problem: Problem, values: list[float]
    ) -> tuple[float | None, float | None]:
        """Return two values between which the reference lies. A missing one is None.

        `values` are the policies', which are values of schedules, too.
        """
        if self.reference == "h-sf":
            known = problem.on(problem.instance.without_predictions())
            value, _ = self._value(number, known, "h-sf", 1)
            return value, value

        if self.reference == "bound":
            return lower_bound(problem)[0], None

        if self.reference == "best-known":
            best = best_of_policies(problem, seed=self.seed)
            found = _best(problem, *values, None if best is None else best.value)
            return found, found

        result = optimum(problem, self.store, time_limit_s=self.time_limit_s, seed=self.seed)
        proved = result.certified
        if self.store is not None and (proved is None or not is_met(result.value, proved)):
            self.uncertified.append(f"{problem.instance.name}: solved by {result.method}")

        if is_met(result.value, result.bound):
            return result.value, result.value  # up to the rounding of floats

        return result.bound, _best(problem, *values, result.value)


def _best(problem: Problem, *values: float | None) -> float | None:
    known = (value for value in values if value is not None)
    return min(known, key=problem.goal.signed, default=None)
