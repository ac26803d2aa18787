"""Measure competitive ratios of policies over many instances."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from optsched.analysis.compare import best_of_policies
from optsched.analysis.optima import Optima
from optsched.analysis.ratio.exact import optimum
from optsched.analysis.ratio.interrupts import interrupts_noted
from optsched.analysis.ratio.study import Ratio, Study
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
from optsched.problem.objective import Objective, parse_objective
from optsched.problem.progress import LiveLine
from optsched.workloads.problem import Problem, as_problem

Reference = Literal["optimum", "bound", "h-sf", "best-known"]
REFERENCES: tuple[Reference, ...] = get_args(Reference)


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
    cases = [_with_objective(as_problem(problem), objective) for problem in problems]
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
        make_policy(spec)  # an unknown policy fails here, before any of them has run
    _check_cases(cases, reference)

    kept = None if store is None else Optima(Path(store))
    plan = _Plan(specs, reference, seeds, seed, time_limit_s, kept)
    measured = _measure(plan, cases, first, progress, stop)
    return Study(
        policies=tuple(specs),
        reference=reference,
        rows=tuple(row for rows in measured for row in rows),
        confidence=confidence,
        seed=seed,
        unfinished=len(cases) - len(measured),
        uncertified=tuple(plan.uncertified),
        objective=cases[0].goal,
    )


def _with_objective(problem: Problem, objective: str | Objective | None) -> Problem:
    """Return a problem with one objective: its own if none is given."""
    return problem.about(parse_objective(objective or problem.objective))


def _check_cases(cases: Sequence[Problem], reference: Reference) -> None:
    """Check that all instances have one objective, and each of them a reference."""
    goal = cases[0].goal
    for k, case in enumerate(cases):
        if case.goal != goal:
            raise UsageError(
                f"objective: found {case.goal} in instance {k} and {goal} before; expected one"
            )
        if reference == "optimum" and choose_if_able(Task.of(case)) is None:
            choose(case)  # raises an error that says what is lacking
        # If bounds apply and none is proved for the instance, `usable` raises an error of its own.
        if reference == "bound" and not usable(BoundTask.of(case), required=True):
            raise UsageError(
                f"reference: found bound, and no bound on {goal} in {case.instance.time_unit}s is "
                "known; expected optimum, h-sf or best-known"
            )


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
    """Return the rows of the instances that finished, until the work was stopped.

    `first`: the number of the first instance, from which seeds count. `progress`: as of `ratios`.
    """
    measured: list[list[Ratio]] = []
    with interrupts_noted() as interrupted, LiveLine(wanted=progress is True) as line:
        line.show_count(0, len(cases), "instances")
        try:
            for k, case in enumerate(cases, first):
                rows = plan.rows(k, case)
                if interrupted.is_set():
                    raise KeyboardInterrupt  # a solver took it for its own, and these are cut short

                measured.append(rows)
                line.show_count(len(measured), len(cases), "instances")
                if callable(progress):
                    progress(len(measured), len(cases))
                if stop is not None and stop.is_set():
                    break
        except KeyboardInterrupt:
            if not measured:
                raise  # there is nothing to return

    return measured


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
        """Measure all policies on one instance. `number`: its place, a part of all seeds."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a cost model's range, in each run
            rows = [self._row(number, problem, *spec) for spec in self.specs.items()]
            values = [row.value for row in rows if row.value is not None and row.error is None]
            bound, best_known = self._reference(number, problem, values)

        with_ratios = []
        for row in rows:
            if row.value is None or row.error is not None:
                with_ratios.append(row)
                continue

            if self.reference in ("optimum", "bound"):
                self._check(problem, row, bound)  # nothing is proved of the other references
            with_ratios.append(row.between(problem.goal, bound, best_known))

        return with_ratios

    def _check(self, problem: Problem, row: Ratio, bound: float | None) -> None:
        """Refuse a ratio below 1 to what is proved."""
        policy = row.policy
        if bound and row.value:
            policy += f", a ratio of {problem.goal.quotient(row.value, bound):.4f}, below 1"
        proved = f"{self.reference} of {row.name}"
        reconcile(problem.instance, problem.goal, (row.value, policy), (bound, proved))

    def _row(self, number: int, problem: Problem, label: str, spec: str | Scheduler) -> Ratio:
        """Return a row without a ratio: the mean value, or the reason if it is missing.

        `number`: as for `rows`. `label`: what the study calls the policy.
        """
        row = Ratio(label, number, problem.instance.name, None)
        try:
            # `outside`: why a schedule has no value, or is outside the model of the reference.
            value, outside = self._value(number, problem, spec, self.seeds)
        except (InputError, UsageError):
            raise  # the question is wrong, and not this policy
        except OptschedError as failure:
            return replace(row, error=str(failure), rule=getattr(failure, "rule", None))

        # H-SF is a schedule, and no bound for whose model a schedule could be outside.
        if outside is None or self.reference == "h-sf":
            return replace(row, value=value)

        return replace(row, value=value, error=f"no ratio: {outside}")

    def _value(
        self, number: int, problem: Problem, spec: str | Scheduler, seeds: int
    ) -> tuple[float | None, str | None]:
        """Return the mean of the objective, and why a schedule has none or is outside the model.

        `number`: the place of the instance, a part of all seeds. `seeds`: how many runs.
        """
        runs = [
            run_within(problem, spec, Budget(self.time_limit_s), [self.seed, number, run])
            for run in range(seeds)
        ]
        values = [problem.goal.of(run.evaluation) for run in runs]
        if None in values:
            return None, f"its schedule has no {problem.goal}"

        mean = math.fsum(v for v in values if v is not None) / seeds
        reasons = (outside_reason(run.evaluation, problem) for run in runs)
        return mean, next(filter(None, reasons), None)

    def _reference(
        self, number: int, problem: Problem, values: list[float]
    ) -> tuple[float | None, float | None]:
        """Return a bound and a best known value between which the reference lies, None if missing.

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
            value = _best(problem, *values, None if best is None else best.value)
            return value, value

        result = optimum(problem, self.store, time_limit_s=self.time_limit_s, seed=self.seed)
        proved = result.certified
        if self.store is not None and (proved is None or not is_met(result.value, proved)):
            self.uncertified.append(f"{problem.instance.name}: solved by {result.method}")

        # They may differ by the rounding of floats, and a ratio is exact if they are equal.
        if is_met(result.value, result.bound):
            return result.value, result.value

        return result.bound, _best(problem, *values, result.value)


def _best(problem: Problem, *values: float | None) -> float | None:
    """Return the best of some values of the objective, None without any."""
    known = (value for value in values if value is not None)
    return min(known, key=problem.goal.signed, default=None)
