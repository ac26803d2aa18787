"""Score a policy on the library's instances, beside the score that no policy can have.

For loops that evolve schedulers: the score is one number, it has a proved floor, equal runs give
equal bytes, and a policy that hangs, eats memory or breaks a rule costs a row and not the loop.
"""

import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.analysis.library import judged, load, read_library, select
from optsched.analysis.policy_process import Link
from optsched.files.library import shipped_folder
from optsched.files.outputs import make_folder, write_bytes
from optsched.files.read_write import write_json
from optsched.optimize.bounded import relative_gap
from optsched.optimize.consistency import end_of, reconcile
from optsched.policies import make_policy
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import Budget
from optsched.problem.errors import (
    InputError,
    OptschedError,
    OutOfTimeError,
    UsageError,
    check_kind,
    named,
)
from optsched.problem.markup import html_of_frame
from optsched.problem.objective import parse_objective
from optsched.problem.schedule import Schedule
from optsched.workloads.problem import Problem

if TYPE_CHECKING:
    import pandas as pd

BASELINE = "fcfs"
"""The policy whose values a score divides by."""


@dataclass(frozen=True)
class Row:
    """A policy on an instance.

    Attributes
    ----------
    instance, family : str
    objective : str
        The metric of the values, all of which are better if they are smaller.
    value : float or None
        The policy's value, as judged. None: it failed.
    bound, best_known, fcfs : float
        No schedule is below the bound; a schedule of the best known value exists.
    failure : dict or None
        What went wrong: ``error``, ``rule`` and ``request`` if a rule was broken, and
        ``first_requests``: so many first requests of the instance show it already.
    wall_s : float
        Seconds that the policy took for its schedule.
    """

    instance: str
    family: str
    objective: str
    value: float | None
    bound: float
    best_known: float
    fcfs: float
    failure: dict[str, Any] | None = None
    wall_s: float = 0.0

    @property
    def captured(self) -> tuple[float, float] | None:
        """The interval of (fcfs - policy) / (fcfs - optimum), of which the optimum is not known.

        The optimum lies between the bound and the best value known, the policy's own included. None
        if the policy failed, or if the optimum may be fcfs's own value.
        """
        if self.value is None:
            return None

        lost = self.fcfs - min(self.best_known, self.value)
        if lost <= 0:
            return None

        # Worse than fcfs, the share is negative, and the bound gives its upper end and not the
        # lower one.
        gained = self.fcfs - self.value
        low, high = sorted((gained / (self.fcfs - self.bound), gained / lost))
        return low, high


@dataclass(frozen=True)
class Score:
    """What `score` found.

    Attributes
    ----------
    policy : str
    seed : int
    release : str
        The library's.
    rows : tuple of Row
    folder : str, optional
        Another library's.
    """

    policy: str
    seed: int
    release: str
    rows: tuple[Row, ...]
    folder: str | None = None

    @property
    def value(self) -> float | None:
        """The score: the mean of the policy's values over fcfs's. None: the policy failed once.

        Means are geometric.
        """
        values = [row.value for row in self.rows if row.value is not None]
        return self._mean(values) if len(values) == len(self.rows) else None

    @property
    def bound(self) -> float:
        """The score of the bounds, the floor: no policy is below it."""
        return self._mean([row.bound for row in self.rows])

    @property
    def best_known(self) -> float:
        """The score of the best known schedules."""
        return self._mean([row.best_known for row in self.rows])

    @property
    def reached(self) -> float:
        """The floor over the score: 1 is proved optimal, and 0 a policy that failed."""
        return 0.0 if self.value is None else self.bound / self.value

    @property
    def gap(self) -> float | None:
        """The relative gap (value - bound) / value. None if the policy failed."""
        return relative_gap(self.value, self.bound)

    def counterexample(self) -> dict[str, Any]:
        """Return the instance to look at first.

        The first at which the policy failed, with the ``failure`` and the columns of the fewest
        first ``requests`` that show it; or else the one where it is farthest from the best known.
        """
        failed = [row for row in self.rows if row.failure is not None]
        farthest = max(self.rows, key=lambda row: (row.value or 0) / row.best_known)
        row = failed[0] if failed else farthest
        data = {name: value for name, value in asdict(row).items() if name != "wall_s"}
        if row.failure is not None and row.failure.get("first_requests"):
            whole = load(row.instance, self.folder)
            part = whole.subset(np.arange(row.failure["first_requests"]))
            data["requests"] = part.to_dict()["requests"]

        return data

    def write_task(self, folder: str | Path, time_limit_s: float = 10.0) -> None:
        """Write a folder that OpenEvolve and its kin take, with this policy to begin with.

        Parameters
        ----------
        folder : path
            Where ``evaluator.py``, ``initial_program.py``, ``config.yaml`` and ``task.json`` go.
        time_limit_s : float
            Seconds for each instance.
        """
        target, shipped = make_folder(folder), shipped_folder() / "evolve"
        # A policy that is only a name has no file to change, so that the shipped program begins.
        program, scheduler = shipped / "initial_program.py", "Evolved"
        if _names_file(self.policy):
            file, _, scheduler = self.policy.partition(":")
            program = Path(file)

        write_bytes(program.read_bytes(), target / "initial_program.py")
        for name in ("evaluator.py", "config.yaml"):
            write_bytes((shipped / name).read_bytes(), target / name)

        task = {
            "scheduler": scheduler,
            "library": [row.instance for row in self.rows],
            "time_limit_s": time_limit_s,
        }
        write_json(task, target / "task.json")

    def _mean(self, values: Sequence[float]) -> float:
        """Return the geometric mean of values over fcfs's, one for each row."""
        pairs = zip(values, self.rows, strict=True)
        return math.exp(math.fsum(math.log(v / row.fcfs) for v, row in pairs) / len(self.rows))

    def __repr__(self) -> str:
        return f"<Score of {self.policy}: {self.value}, bound {self.bound}>"

    _repr_html_ = html_of_frame

    def to_frame(self) -> "pd.DataFrame":
        """Return a row for each instance, as `Row` has it."""
        import pandas as pd

        return pd.DataFrame([vars(row) for row in self.rows])

    def to_dict(self, *, times: bool = False) -> dict[str, Any]:
        """Return the JSON object of a score; equal runs give equal ones, but for times.

        Parameters
        ----------
        times : bool
            Whether it has the seconds of each run.
        """
        rows = [{**asdict(row), "captured": row.captured} for row in self.rows]
        if not times:
            for row in rows:
                del row["wall_s"]

        return {
            "format": "optsched-score",
            "version": 1,
            "policy": self.policy,
            "seed": self.seed,
            "release": self.release,
            "score": self.value,
            "floor": self.bound,
            "best_known": self.best_known,
            "combined_score": self.reached,
            "failed": sum(row.value is None for row in self.rows),
            "instances": rows,
        }


def score(
    policy: str,
    names: Sequence[str] = (),
    *,
    objective: str | None = None,
    time_limit_s: float = 10.0,
    memory_limit: int = 4 << 30,
    seed: int = 0,
    folder: str | Path | None = None,
) -> Score:
    """Score a policy on instances of the library.

    Parameters
    ----------
    policy : str
        A specification, such as ``"mine.py:Mine"``. One of a file is made and runs in a process of
        its own, a fork of one that is kept for further scores.
    names : sequence of str
        Families and instances. None named: all that have a bound, for one worker.
    objective : str, optional
        Of these, those about this metric only, each of which has one in the library.
    time_limit_s : float
        Seconds for each instance.
    memory_limit : int
        Bytes that this process may use beyond what it begins with.
    seed : int
        Seed of policies that draw at random.
    folder : path, optional
        Another library's folder.

    Returns
    -------
    Score

    Raises
    ------
    UsageError
        There is nothing to score on, or the system cannot fork.
    InputError
        A name is unknown, of a policy, too, or the policy's file does not exist.
    """
    check_kind("policy", policy, str, "a specification, name:key=value,... or file.py:name")
    file = policy.partition(":")[0]
    if not _names_file(policy):
        make_policy(policy)  # a name that is wrong fails here, and not once for each instance
    elif file.endswith(".py") and not os.path.isfile(file):
        raise InputError(f"{file}: no such file; expected one with a policy")

    data = read_library(folder)
    chosen = _instances_to_score(data, names, objective)
    if not chosen or not hasattr(os, "fork"):
        raise UsageError("score: expected an instance with a bound, and a system that can fork")

    place = None if folder is None else str(folder)
    with warnings.catch_warnings():  # of ranges of cost models, and of forks beside threads
        warnings.simplefilter("ignore")
        entries = data["instances"]
        tasks = [_prepare(name, place, entries[name]["sha256"]) for name in chosen]
        rows = tuple(_rows(policy, tasks, seed, time_limit_s, memory_limit))

    return Score(policy, seed, data["release"], rows, place)


def _instances_to_score(
    data: Mapping[str, Any], names: Sequence[str], objective: str | None
) -> list[str]:
    """Return the instances that a policy is scored on: with a bound, and for one worker.

    With an ``objective`` only those about this metric. Without one, it is an error if an instance
    that is named, or one of a family that is named, is left out.
    """
    entries = data["instances"]
    chosen = select(names, data)
    single = [name for name in chosen if entries[name].get("workers", 1) == 1]
    bounded = [name for name in single if entries[name].get("bound") is not None]
    if objective is not None:
        known = {entries[name]["objective"]: None for name in bounded}
        named("score: objective", objective, known, UsageError)
        return [name for name in bounded if entries[name]["objective"] == objective]
    if names and len(bounded) < len(chosen):
        without = next(name for name in chosen if name not in bounded)
        raise UsageError(
            f"--library: found {without!r}, which has no bound for one worker; expected another"
        )

    return bounded


def _names_file(policy: str) -> bool:
    """Whether a specification names code of a user's file, the policy's or its predictor's."""
    return ".py" in policy


class _Task(NamedTuple):
    """An instance, and the row of a policy that has not run on it yet."""

    problem: Problem
    row: Row


@lru_cache(maxsize=256)
def _prepare(name: str, folder: str | None, digest: str) -> _Task:
    """Return an instance with what is known of it, and with the code compiled that policies use.

    `digest`: of the entry, so that what is kept here is not that of an entry before a change.
    """
    entry, instance = read_library(folder)["instances"][name], load(name, folder)
    problem = Problem(instance, entry.get("cost_model"))
    fcfs, _ = judged(problem, entry, simulate(problem, BASELINE))
    known = {"bound": entry["bound"]["value"], "best_known": entry["best"]["value"], "fcfs": fcfs}
    return _Task(problem, Row(name, entry["family"], entry["objective"], None, **known))


def _rows(
    policy: str, tasks: Sequence[_Task], seed: int, time_limit_s: float, memory_limit: int
) -> Iterator[Row]:
    """Yield the row of each instance. A policy's process that had to end is followed by another.

    `memory_limit`: bytes, for the process of a user's file. Other policies run in this process.
    """
    link = None
    try:
        for task in tasks:
            if link is not None and link.lost:
                link.close()
                link = None
            if link is None and _names_file(policy):
                link = Link(policy, memory_limit)

            yield _row(task, policy, seed, time_limit_s, link)
    finally:
        if link is not None:
            link.close()


def _row(task: _Task, policy: str, seed: int, limit_s: float, link: Link | None) -> Row:
    """Return the row of a policy on an instance, as judged.

    `link`: the process of a user's file, which runs the policy; None: it runs in this one.
    """
    budget = Budget(limit_s)
    schedule = _schedule_or_failure(task, policy, seed, link, budget)
    if isinstance(schedule, dict):
        failure = schedule
        failure["first_requests"] = _fewest_failing(task, policy, seed, link, failure, budget)
        return replace(task.row, failure=failure)

    wall_s, objective = budget.spent_s, parse_objective(task.row.objective)
    try:
        # This stands for an entry of the library on one machine.
        value, evaluation = judged(task.problem, {"objective": task.row.objective}, schedule)
        # A value that beats the bound raises an error, since one of the two is wrong.
        # The later the schedule ends (`end_of`), the more rounding of its clock is allowed for.
        known, bound = (value, "policy"), (task.row.bound, "library")
        reconcile(task.problem.instance, objective, known, bound, end_of(evaluation))
    except OptschedError as error:
        return replace(task.row, failure=_failure_of(error))

    return replace(task.row, value=value, wall_s=wall_s)


def _schedule_or_failure(
    task: _Task, policy: str, seed: int, link: Link | None, budget: Budget
) -> Schedule | dict[str, Any]:
    """Return the schedule of a policy, or what went wrong."""
    try:
        if link is not None:
            return link.simulate(task.problem, seed, budget)

        return simulate(task.problem, policy, seed=seed, budget=budget)
    except OutOfTimeError:
        return {"kind": "OutOfTimeError", "error": f"no schedule within {budget.limit_s:g} s"}
    except Exception as error:  # a policy's own code may raise anything
        return _failure_of(error)


def _fewest_failing(
    task: _Task,
    policy: str,
    seed: int,
    link: Link | None,
    failure: Mapping[str, Any],
    budget: Budget,
) -> int | None:
    """Return a number of first requests, a power of two or all, that show a failure.

    All show it, so they are the answer, too, if there is no time to try fewer. None if the policy's
    process has ended, so that it cannot be asked again.
    """
    count, whole = 1, task.problem.instance
    # With less than a fifth of the time left, it is not clear that a run would fail by itself.
    while count < whole.n and budget.spent_s < 0.8 * budget.limit_s:
        if link is not None and link.lost:
            return None

        part = task._replace(problem=task.problem.on(whole.subset(np.arange(count))))
        answer = _schedule_or_failure(part, policy, seed, link, budget)
        if isinstance(answer, dict) and answer["kind"] == failure["kind"]:
            return count

        count *= 2

    return whole.n


def _failure_of(error: BaseException) -> dict[str, Any]:
    """Return an error as `Row.failure` has it."""
    return {
        "kind": getattr(error, "kind", type(error).__name__),
        "error": " ".join(str(error).split()),  # on one line
        "rule": getattr(error, "rule", None),
        "request": getattr(error, "request", None),
    }
