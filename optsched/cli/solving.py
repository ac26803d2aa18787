"""``solve`` and ``bound``: the best schedule, and bounds on every schedule."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from optsched.cli import output
from optsched.cli.options import ABOVE_0, runs
from optsched.cli.output import LiveLine, emit_json, number, percent, stop_at_ctrl_c
from optsched.files.read_write import read_schedule, write_json
from optsched.judge.evaluate import evaluate
from optsched.problem import errors, objective as objectives
from optsched.problem.budget import Budget
from optsched.problem.errors import InfeasibleError, InputError, NoIncumbentError, UsageError
from optsched.problem.instance import Instance
from optsched.problem.objective import TOTAL_LATENCY, Objective
from optsched.problem.schedule import Schedule
from optsched.problem.scope import ONE_WORKER, Scope
from optsched.workloads.problem import Problem

if TYPE_CHECKING:
    from optsched.optimize.bound import BoundResult
    from optsched.optimize.bounded import Bounded


@runs("optsched.optimize.solve.solve")
def solve(
    problem: Problem,
    pulp_solver: Annotated[str | None, {"hidden": True}] = None,
    eviction_free: bool = False,
    below: Annotated[float | None, ABOVE_0] = None,
    than: str | None = None,
    warm_start: str | None = None,
    schedule_out: str | None = None,
    certificate_out: str | None = None,
    json_out: str | None = None,
    **options: Any,
) -> None:
    """Find an optimal schedule, or the best one and a bound.

    Parameters:
      formulation NAME: hindsight (rounds) or infermax (seconds).
      method auto|NAME: See `optsched list methods`.
      objective NAME,...: One, or several in order.
      pulp_solver NAME: Another solver of PuLP, for pulp-bigm.
      eviction_free: Forbid evictions.
      below PHI: Is there a schedule below PHI times --than's value?
      than POLICY: The policy that --below refers to.
      mip_rel_gap G: The relative gap at which to stop.
      threads N: The number of threads. By default all are used.
      warm_start FILE|POLICY: The schedule or the policy to start from.
      certificate_out FILE: Write a certificate of the bound, if there is one.
      log FILE: Write the solver's log.
      Rare: pulp_solver, eviction_free, below, than, mip_rel_gap, threads, log
    """
    if (below is None) != (than is None):
        raise UsageError(
            "--below, --than: found one of them; expected both --below PHI and --than POLICY, or "
            "neither"
        )

    instance = problem.instance
    time_limit_s = options["time_limit_s"]
    # The hindsight program, the default in rounds, has uninterrupted runs only, which never evict.
    is_hindsight = (options["formulation"] or instance.time_unit) in ("hindsight", "round")
    if eviction_free and not is_hindsight:
        options["eviction_free"] = True
    if pulp_solver is not None:
        options["solver"] = pulp_solver

    from optsched.optimize.solve import below as ask, solve as run

    start = _warm_start(problem, warm_start, options["seed"], time_limit_s)
    question = None
    if below is not None and than is not None:
        budget = Budget(time_limit_s)
        question = ask(problem, below, than, seed=options["seed"], budget=budget)
        if not instance.in_rounds:  # in rounds the optimum answers it
            options["below"] = question.value

    with LiveLine() as line, stop_at_ctrl_c() as stop:
        options |= {"certify": certificate_out is not None, "progress": line.show_progress}
        result = run(problem, warm_start=start, stop=stop, **options)

    data, answered = result.to_dict(), None
    _write_certificate(result, certificate_out, data)
    if question is not None:
        answered = {**question.to_dict(), "answer": question.answer(result)}
        # After an error there is no answer to the question.
        if answered["answer"] != "yes" and data["status"] != "error":
            _end_without_schedule_below(instance, data, answered, result.scope, json_out)

    if result.schedule is not None and schedule_out is not None:
        output.save_schedule(result.schedule, schedule_out)
        data["schedule"] = schedule_out

    if answered is not None:
        data["below"] = answered

    if not emit_json(data, json_out):
        _show_result(instance, data)
        _show_certificate(result, certificate_out)
        if answered is not None:
            print(_question_text(answered, result.scope, _unit(instance, data)))

    _check_status(data, instance.name, time_limit_s, stop.is_set())


def _check_status(data: dict[str, Any], name: str, time_limit_s: float, stopped: bool) -> None:
    """Raise the error of a result without a schedule.

    `name`: the instance's. `stopped`: whether Ctrl-C ended the work.
    """
    if data["status"] == "infeasible":
        raise InfeasibleError(f"{name}: no schedule exists in {data['formulation']}")
    if data["status"] == "error":
        raise errors.SolverError(f"{data['method']} failed; --log FILE writes its log")
    if data["status"] != "no_incumbent":
        return

    if stopped:
        raise NoIncumbentError("interrupted before a first schedule was found")
    raise NoIncumbentError(
        f"no schedule was found within {time_limit_s:g} s; give a larger --time-limit or a "
        "--warm-start"
    )


@runs("optsched.optimize.bound.bound")
def bound(
    problem: Problem,
    certificate_out: str | None = None,
    json_out: str | None = None,
    **options: Any,
) -> None:
    """Compute what no schedule beats: a bound on an objective.

    Parameters:
      method auto|NAME: A bound (`optsched list bounds`); auto takes the best.
      objective NAME: The objective to bound, for example makespan.
      certificate_out FILE: Write the certificate.
    """
    instance, goal = problem.instance, problem.goal
    from optsched.bounds import list_bounds
    from optsched.optimize.bound import bound as run

    if certificate_out is not None:
        _check_has_certificate(options["method"], goal, instance)

    with LiveLine() as line, stop_at_ctrl_c() as stop:
        options |= {"certify": certificate_out is not None, "progress": line.show_progress}
        found = run(problem, stop=stop, **options)

    data = {**found.to_dict(), "method": found.method or options["method"]}
    _write_certificate(found, certificate_out, data)
    emit_json(data, json_out)
    words = "total latency" if goal == TOTAL_LATENCY else goal.metric.words
    unit = goal.metric.unit_words(instance.time_unit)

    if found.bound is None:
        infos = [info for info in list_bounds().values() if info.time_unit == instance.time_unit]
        bounded = sorted({name for info in infos for name in info.objectives})
        raise NoIncumbentError(
            f"no bound is known yet for {words} in {instance.time_unit}s; expected one of "
            + ", ".join(bounded)
        )

    if json_out != "-":
        _show_bound(found, words, unit)
        if found.value is not None:
            such = "such " if found.scope.without else ""  # the bound leaves schedules out
            print(
                f"best {such}schedule found: {number(found.value)} {unit} ({found.found_by}), "
                f"gap {percent(found.gap)}"
            )

        _show_certificate(found, certificate_out)


def _write_certificate(found: Bounded, file: str | None, data: dict[str, Any]) -> None:
    """Write a result's certificate, if one was asked for and there is one."""
    if found.certificate is not None and file is not None:
        write_json(found.certificate, file)
        data["certificate"], data["certificate_missing"] = file, None


def _show_certificate(found: Bounded, file: str | None) -> None:
    """Say what a result's certificate proves, or why there is none."""
    if found.certificate is not None and file is not None:
        # Certificates are of every schedule, also where the bound leaves some out.
        scope = f", for {ONE_WORKER}" if found.scope.without else ""
        print(f"{file}: certificate of {number(found.certified)}{scope}")
    elif file is not None:
        print(f"certificate: none, since {found.certificate_missing}")


def _show_bound(found: BoundResult, words: str, unit: str) -> None:
    """Print the bound, and the best one for every schedule if it leaves some out.

    `words`, `unit`: those of the objective.
    """

    def show(scope: Scope, value: float | None, name: str | None) -> None:
        sign = "<=" if found.maximized else ">="
        limit = f"{sign} {number(value)} {unit} ({name})"
        print(f"{words} of {scope.schedules} {limit}, {scope.machines}")

    show(found.scope, found.bound, found.method)
    # `without`: what the bound leaves out. `general`: value and name of the best that does not.
    if found.scope.without and found.general is not None:
        show(ONE_WORKER, *found.general)


def _check_has_certificate(method: str, goal: Objective, instance: Instance) -> None:
    """Raise UsageError if the bound, or every bound on the objective, has no certificate."""
    from optsched.bounds import list_bounds
    from optsched.bounds.certificate import CERTIFIED

    if method in list_bounds() and not list_bounds()[method].certifies:
        raise UsageError(
            f"--certificate-out: found the bound {method!r}, which has no certificate; expected "
            "--method auto"
        )

    infos = [info for info in list_bounds().values() if info.time_unit == instance.time_unit]
    bounded = {name for info in infos for name in info.objectives}
    certified = CERTIFIED[instance.time_unit]
    # An objective without any bound has an error of its own, later.
    if goal.name in bounded.difference(certified):
        raise UsageError(
            f"--certificate-out: found the objective {goal.name} in {instance.time_unit}s, whose "
            f"bounds have no certificates; expected one of {', '.join(sorted(certified))}"
        )


def _warm_start(
    problem: Problem, text: str | None, seed: int, time_limit_s: float
) -> Schedule | None:
    """Return the schedule of a file or of a policy, evaluated, or None without a text."""
    if text is None:
        return None

    from optsched.policies.engine.simulate import simulate

    if Path(text).exists() and not Path(text).is_dir():  # a pipe counts too, so not `is_file`
        schedule = read_schedule(text, problem.instance)
    elif text.endswith((".json", ".json.gz", ".parquet")):
        raise InputError(f"--warm-start: {text}: found no such file")
    else:
        schedule = simulate(problem, text, seed=seed, budget=Budget(time_limit_s))

    evaluate(problem, schedule)  # which raises an error if it is not valid
    return schedule


def _end_without_schedule_below(
    instance: Instance,
    data: dict[str, Any],
    question: dict[str, Any],
    scope: Scope,
    json_out: str | None,
) -> NoReturn:
    """Report that no schedule below the value exists (exit status 3), or that none was found (4).

    The JSON has no objective. Its block ``below`` has the best value found, which is not below.
    `data`: the object of the result. `question`: that of ``--below``, with its answer.
    """
    is_excluded = question["answer"] == "no"
    answer = {
        **data,
        "status": "infeasible" if is_excluded else "no_incumbent",
        "below": {**question, "best_known": data["objective"]},
    }
    for key in ("objective", "objectives", "gap", "metrics"):
        if key in data:
            answer[key] = None

    is_printed = emit_json(answer, json_out)
    if not is_printed:
        _show_result(instance, data)

    words = _question_text(question, scope, _unit(instance, data))
    print(words, file=sys.stderr if is_printed else sys.stdout)
    raise typer.Exit((InfeasibleError if is_excluded else NoIncumbentError).exit_code)


def _unit(instance: Instance, data: dict[str, Any]) -> str:
    """Return the unit and the name of a result's objective, for a sentence."""
    metric = objectives.first_metric(data["objective_name"])
    assert metric is not None  # a question is about one
    return f"{metric.unit_words(instance.time_unit)} of {metric.words}"


def _question_text(question: dict[str, Any], scope: Scope, unit: str) -> str:
    """Return the question of ``--below`` with its answer."""
    share = f"{question['phi']:g} x {question['than']}"
    text = f"a schedule below {share} = {number(question['value'])} {unit}"
    return {
        "yes": f"{text}: yes",
        "no": f"{text}: none exists" + (f" {scope.limitation}" if scope.without else ""),
        "unknown": f"{text}: neither found nor excluded within the limits",
    }[question["answer"]]


def _show_result(instance: Instance, data: dict[str, Any]) -> None:
    """Print a result: its metrics, what the bound holds for, and last the status with both ends."""
    metric = objectives.first_metric(data["objective_name"])
    unit = "" if metric is None else metric.unit_words(instance.time_unit)
    if metric is not None:
        words = "total latency" if metric.name == TOTAL_LATENCY.name else metric.words
        verb = "maximized" if metric.sense == "max" else "minimized"
        unit_words = {"s": " in seconds", "rounds": " in rounds"}.get(unit, "")
        print(f"{verb}: {words}{unit_words} ({data['objective_name']})\n")
    if data["metrics"]:
        output.show_metrics(data["metrics"], instance)
        print()

    if data["bound"] is not None:
        print(f"the bound holds for {data['scope']['words']}")

    print(
        f"{data['status']}: {data['objective_name']} {number(data['objective'])} {unit}, "
        f"bound {number(data['bound'])} {unit}, gap {percent(data['gap'])} "
        f"({data['formulation']} by {data['method']}, build {data['build_s']:.2f} s, "
        f"solve {data['solve_s']:.2f} s)"
    )
