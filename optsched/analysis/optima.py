"""Optima that are kept in a folder, which studies share and `optsched verify` checks."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from optsched.costs.cost import BatchCost
from optsched.costs.fleet import digest_of
from optsched.costs.model_file import to_toml
from optsched.files.outputs import make_folder, write_bytes
from optsched.files.read_write import (
    read_json,
    schedule_from_dict,
    write_instance,
    write_json,
    write_schedule,
)
from optsched.optimize.bounded import Bounded, relative_gap
from optsched.optimize.consistency import is_met
from optsched.optimize.formulations.base import Task
from optsched.optimize.interval import Interval
from optsched.optimize.solve import Result
from optsched.optimize.solvers.base import Status
from optsched.problem.instance import canonical_json
from optsched.workloads.problem import Problem

# The share of its time after which a search that proved no optimum counts as over.
_SPENT = 0.8
# The fields of a result that go with its value, and those that go with its bound.
_VALUE = ("objective", "objectives", "metrics", "schedule")
_BOUND = ("bound", "scope", "method", "certificate", "certificate_missing")


@dataclass(frozen=True)
class Optima:
    """A folder of instances with their optima, or what is known of these, by objective and fleet.

    `PLACE-result.json` has the value and the bound, and names the schedule and the certificate
    beside it; `PLACE-model.toml` is the cost model in seconds, unless there are several. A schedule
    is judged when it is read; a bound is believed, and `verify` checks its certificate.
    """

    folder: Path

    def __post_init__(self) -> None:
        make_folder(self.folder)

    def _place(self, problem: Problem) -> str:
        """Return how the names of a problem's files begin."""
        machines = problem.fleet.to_dict(), digest_of(problem.hardware.machines)
        about = canonical_json({"objective": str(problem.goal), "fleet": machines})
        question = hashlib.sha256(about).hexdigest()[:8]
        return f"{problem.instance.sha256[:16]}-{problem.goal.name}-{question}"

    def _file(self, problem: Problem, what: str, kind: str = "json") -> Path:
        return self.folder / f"{self._place(problem)}-{what}.{kind}"

    def known(self, problem: Problem, time_limit_s: float) -> tuple[Bounded | None, bool]:
        """Return what is kept, and whether to search for so many seconds would be in vain.

        It is where what is kept is an optimum, or where a search as long as that found no better.
        """
        interval = Interval(Task.of(problem))
        spent_s = self.offer(interval)
        if spent_s is None:
            return None, False

        return Bounded.of(interval), interval.closed or spent_s >= _SPENT * time_limit_s

    def offer(self, interval: Interval) -> float | None:
        """Improve an interval by what is kept, and return the seconds that it took, if anything."""
        problem = interval.task
        file = self._file(problem, "result")
        if not file.exists():
            return None

        data = read_json(file, expect="result")
        if data["schedule"] is not None:
            kept = read_json(self.folder / data["schedule"])
            schedule = schedule_from_dict(kept, problem.instance)
            origin = str(data["method"])
            # It is judged once more, and so without warnings.
            interval.take(schedule, interval.judge(schedule, quiet=True), origin)
        if data["bound"] is not None:
            # `left_out`: kinds of schedules for which the bound does not hold.
            named, left_out = data["certificate"], frozenset(data["scope"]["without"])
            certificate = None if named is None else read_json(self.folder / named)
            interval.prove(data["bound"], str(data["method"]), certificate, left_out)

        return float(data["build_s"]) + float(data["solve_s"])

    def keep(self, problem: Problem, found: Result) -> None:
        """Write what was found of a problem, but for an end that was better before.

        The result names the other files, so it is written last.
        """
        instance = self.folder / f"{problem.instance.sha256[:16]}-instance.json"
        if not instance.exists():  # that of another objective, or of other machines
            write_instance(problem.instance, instance)

        # A model is kept if it is the only one of all machines.
        cost = problem.cost_model
        if isinstance(cost, BatchCost) and cost.sha256 == digest_of(problem.hardware.machines):
            write_bytes(to_toml(cost).encode(), self._file(problem, "model", "toml"))

        data, goal = found.to_dict(), problem.goal
        result = self._file(problem, "result")
        before = read_json(result, expect="result") if result.exists() else dict.fromkeys(data)
        # Fields that go with the value (`_VALUE`) or the bound (`_BOUND`) stay as they were before
        # where those are better.
        if goal.better(before["objective"], found.value):
            data |= {key: before[key] for key in _VALUE}
        elif found.schedule is not None:
            data["schedule"] = self._file(problem, "schedule").name
            write_schedule(found.schedule, self.folder / data["schedule"])

        # Bounds lie on the other side of the optimum than values, so of two bounds the one that
        # would be the better value is the weaker bound.
        weaker = found.bound is None or goal.better(found.bound, before["bound"])
        if before["bound"] is not None and weaker:
            data |= {key: before[key] for key in _BOUND}
        elif found.certificate is None:  # that of a weaker bound says more than none
            data["certificate"] = before["certificate"]
        else:
            data["certificate"] = self._file(problem, "certificate").name
            data["certificate_missing"] = None
            write_json(found.certificate, self.folder / data["certificate"])

        data["gap"] = relative_gap(data["objective"], data["bound"], goal.maximized)
        if is_met(data["objective"], data["bound"]):
            data["status"] = Status.OPTIMAL.value
        write_json(data, result)
