"""``solve``, ``bound`` and ``tradeoff``: the best schedule, and bounds on every schedule."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from optsched.cli.options import (
    NO_SLOS,
    CostModelName,
    InstanceFile,
    JsonOut,
    Policies,
    ScheduleOut,
    Seed,
    Slos,
    TimeLimit,
    above_0,
    at_least_0,
    flag,
    option,
    read_checked,
    takes_slos,
)
from optsched.cli.output import (
    LiveLine,
    emit_json,
    number,
    percent,
    save_schedule,
    show_metrics,
    show_table,
    stop_at_ctrl_c,
)
from optsched.problem.budget import Budget
from optsched.problem.errors import (
    InfeasibleError,
    InputError,
    NoIncumbentError,
    SolverError,
    UsageError,
)
from optsched.problem.objective import (
    TOTAL_LATENCY,
    Objective,
    first_metric,
    parse_objective,
    parse_objectives,
    with_service_limits,
)
from optsched.problem.scope import ONE_WORKER, Scope

if TYPE_CHECKING:
    from optsched.costs.cost import CostModel
    from optsched.optimize.bound import BoundResult
    from optsched.optimize.question import Question
    from optsched.problem.instance import Instance
    from optsched.problem.schedule import Schedule


@takes_slos
def solve(
    instance_file: InstanceFile,
    formulation: str | None = option(
        "NAME", "The formulation. The default is hindsight in rounds and infermax in seconds."
    ),
    method: str = option(
        "auto|NAME", "The method of solving. `optsched methods` lists them.", "auto"
    ),
    cost_model: CostModelName = None,
    objective: str | None = option(
        "NAME[,NAME...]",
        "The objective. Several are lexicographic. The default is tel in rounds and "
        "makespan in seconds.",
    ),
    slos: Slos = NO_SLOS,
    workers: int = option("N", "Equal workers. Who runs where is searched for, too.", 1),
    pulp_solver: str | None = option("NAME", "Another solver of PuLP for the method pulp-bigm."),
    eviction_free: bool = flag("--eviction-free", "Forbid evictions."),
    below: float | None = option(
        "PHI",
        "Ask whether a schedule exists below PHI times a policy's value; needs --than.",
        callback=above_0,
    ),
    than: str | None = option("POLICY", "The policy that --below refers to."),
    time_limit: TimeLimit = 60.0,
    mip_rel_gap: float = option(
        "G", "The relative gap at which the solver may stop.", 0.0, callback=at_least_0
    ),
    threads: int | None = option("N", "The number of threads. By default all are used."),
    seed: Seed = 0,
    warm_start: str | None = option(
        "SCHEDULE|POLICY", "The schedule file or the policy to start from."
    ),
    schedule_out: ScheduleOut = None,
    json_out: JsonOut = None,
    log: str | None = option("FILE", "Write the solver's log to this file."),
) -> None:
    """Find an optimal schedule, or the best one within the time limit and a bound."""
    if (below is None) != (than is None):
        raise UsageError(
            "--below, --than: found one of them; expected both --below PHI and --than POLICY, or "
            "neither"
        )

    instance, cost = read_checked(
        instance_file, cost_model, json_out, schedule_out, log, formulation=formulation
    )
    goals = _goals(objective, slos)
    options: dict[str, Any] = {}
    # The hindsight program has uninterrupted runs only, which never evict.
    hindsight = formulation == "hindsight" or (formulation is None and instance.in_rounds)
    if eviction_free and not hindsight:
        options["eviction_free"] = True
    if pulp_solver is not None:
        options["solver"] = pulp_solver

    start = _warm_start(instance, warm_start, cost, seed, slos, Budget(time_limit))
    asked = _asked(instance, below, than, goals, cost, seed, Budget(time_limit))
    if asked is not None and not instance.in_rounds:
        options["below"] = asked.value

    from optsched.optimize.solve import solve as run

    with LiveLine() as line, stop_at_ctrl_c() as stop:
        result = run(
            instance,
            formulation=formulation,
            method=method,
            cost_model=cost,
            objective=goals,
            workers=workers,
            time_limit_s=time_limit,
            mip_rel_gap=mip_rel_gap,
            threads=threads,
            seed=seed,
            warm_start=start,
            log=log,
            progress=line.solving,
            stop=stop,
            **options,
        )

    data, question = result.to_dict(), None
    if asked is not None:
        question = {**asked.to_dict(), "answer": asked.answer(result)}
        # After an error there is no answer to the question.
        if question["answer"] != "yes" and data["status"] != "error":
            _end_unanswered(instance, data, question, result.scope, json_out)

    if result.schedule is not None and schedule_out is not None:
        save_schedule(result.schedule, schedule_out)
        data["schedule"] = schedule_out

    if question is not None:
        data["below"] = question

    if not emit_json(data, json_out):
        _show_result(instance, data)
        if question is not None:
            print(_question_text(question, result.scope))

    _check_status(data, instance_file, time_limit, stop.is_set())


def _check_status(
    data: dict[str, Any], instance_file: str, time_limit: float, stopped: bool
) -> None:
    """Raise the error of a result without a schedule."""
    if data["status"] == "infeasible":
        raise InfeasibleError(f"{instance_file}: no schedule exists in {data['formulation']}")
    if data["status"] == "no_incumbent":
        raise NoIncumbentError(
            "interrupted before a first schedule was found"
            if stopped
            else f"no schedule was found within {time_limit:g} s; give a larger --time-limit or a "
            "--warm-start"
        )

    if data["status"] == "error":
        raise SolverError(f"{data['method']} failed; --log FILE writes its log")


@takes_slos
def bound(
    instance_file: InstanceFile,
    method: str = option(
        "auto|NAME", "The name of a bound. With auto the best bound is taken.", "auto"
    ),
    objective: str = option(
        "NAME", "The objective to bound, for example makespan.", TOTAL_LATENCY.name
    ),
    slos: Slos = NO_SLOS,
    cost_model: CostModelName = None,
    time_limit: TimeLimit = 60.0,
    seed: Seed = 0,
    certificate_out: str | None = option("FILE", "Write the certificate to this file."),
    json_out: JsonOut = None,
) -> None:
    """Compute what no schedule beats: a bound on total latency, or on another objective."""
    instance, cost = read_checked(instance_file, cost_model, json_out, certificate_out)
    from optsched.bounds import bounds
    from optsched.optimize.bound import bound as run

    (goal,) = _goals(parse_objective(objective), slos) or ()
    if certificate_out is not None:
        _check_certified(method, goal, instance)
    with LiveLine() as line, stop_at_ctrl_c() as stop:
        found = run(
            instance,
            cost_model=cost,
            objective=goal,
            method=method,
            time_limit_s=time_limit,
            seed=seed,
            certify=certificate_out is not None,
            progress=line.solving,
            stop=stop,
        )

    data = {**found.to_dict(), "method": found.name or method}
    if found.certificate is not None and certificate_out is not None:
        from optsched.files.read_write import write_json

        write_json(found.certificate, certificate_out)
        data["certificate"] = certificate_out

    emit_json(data, json_out)
    metric = goal.metric
    words = "total latency" if goal == TOTAL_LATENCY else metric.words
    times = metric.unit_words(instance.time_unit)

    if found.value is None:
        there = [one for one in bounds().values() if one.time_unit == instance.time_unit]
        raise NoIncumbentError(
            f"no bound is known yet for {words} in {instance.time_unit}s; expected one of "
            + ", ".join(sorted({name for one in there for name in one.objectives}))
        )

    if json_out != "-":
        _show_bound(found, words, times)
        if found.objective is not None:
            such = "such " if found.scope.without else ""
            print(
                f"best {such}schedule found: {number(found.objective)} {times} ({found.found_by}), "
                f"gap {percent(found.gap)}"
            )

        if found.certificate is not None and certificate_out is not None:
            anyone = f", for {ONE_WORKER}" if found.scope.without else ""
            print(f"{certificate_out}: certificate of {number(found.certified)}{anyone}")
        elif certificate_out is not None:
            print(f"certificate: none, since {found.certificate_missing}")


def _show_bound(found: BoundResult, words: str, times: str) -> None:
    """Print the bound, and the best one for every schedule if it leaves some out."""

    def show(scope: Scope, value: float | None, name: str | None) -> None:
        limit = f"{found.sign} {number(value)} {times} ({name})"
        print(f"{words} of {scope.schedules} {limit}, {scope.machines}")

    show(found.scope, found.value, found.name)
    if found.scope.without and found.general is not None:
        show(ONE_WORKER, *found.general)


def tradeoff(
    instance_file: InstanceFile,
    policy: Policies = None,
    cost_model: CostModelName = None,
    time_limit: TimeLimit = 60.0,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Bound mean latency and mean TTFT together, beside what policies reach."""
    instance, cost = read_checked(instance_file, cost_model, json_out)
    from optsched.optimize.tradeoff import tradeoff as run

    with LiveLine() as line, stop_at_ctrl_c() as stop:
        found = run(
            instance,
            policy or None,
            cost_model=cost,
            time_limit_s=time_limit,
            seed=seed,
            progress=line.show,
            stop=stop,
        )

    if emit_json(found.to_dict(), json_out):
        return

    show_table(
        ("TTFT weight", "bound\n[s]", "by"),
        [(f"{one.weight:g}", f"{one.value:.4g}", one.name) for one in found.bounds],
        text_columns=(0, 2),
    )
    print()
    show_table(
        ("policy", "mean latency\n[s]", "mean TTFT\n[s]", "any schedule so fast:\nTTFT >= [s]"),
        [
            (p.policy, f"{p.mean_latency:.4g}", f"{p.mean_ttft:.4g}", f"{floor:.4g}")
            for p in found.points
            if (floor := found.ttft_at(p.mean_latency)) is not None
        ],
    )
    print(f"the bounds hold for {ONE_WORKER}")


def _check_certified(method: str, goal: Objective, instance: Instance) -> None:
    """Raise UsageError if the bound, or every bound on the objective, has no certificate."""
    from optsched.bounds import bounds
    from optsched.bounds.certificate import CERTIFIED

    if method in bounds() and not bounds()[method].certifies:
        raise UsageError(
            f"--certificate-out: found the bound {method!r}, which has no certificate; expected "
            "--method auto"
        )

    there = [one for one in bounds().values() if one.time_unit == instance.time_unit]
    certified = CERTIFIED[instance.time_unit]
    known = {name for one in there for name in one.objectives}

    if goal.name in known.difference(certified):
        raise UsageError(
            f"--certificate-out: found the objective {goal.name} in {instance.time_unit}s, whose "
            f"bounds have no certificates; expected one of {', '.join(sorted(certified))}"
        )


def _goals(objective: str | Objective | None, slos: Slos) -> tuple[Objective, ...] | None:
    """Return the objectives with the SLOs that options give; None for the formulation's own."""
    if objective is None and not slos:
        return None

    return with_service_limits(parse_objectives(objective or TOTAL_LATENCY), slos)


def _asked(
    instance: Instance,
    phi: float | None,
    policy: str | None,
    goals: tuple[Objective, ...] | None,
    cost: CostModel | None,
    seed: int,
    budget: Budget,
) -> Question | None:
    """Return the question of --below and --than, or None without them."""
    if phi is None or policy is None:
        return None

    from optsched.optimize.question import below

    return below(instance, phi, policy, objective=goals, cost_model=cost, seed=seed, budget=budget)


def _warm_start(
    instance: Instance,
    text: str | None,
    cost: CostModel | None,
    seed: int,
    slos: Slos,
    budget: Budget,
) -> Schedule | None:
    """Return the schedule of a file or of a policy, evaluated, or None without a text."""
    if text is None:
        return None

    from optsched.files.read_write import read_schedule
    from optsched.judge.evaluate import evaluate
    from optsched.policies.engine.simulate import simulate

    if Path(text).exists() and not Path(text).is_dir():  # a pipe counts too, so not `is_file`
        schedule = read_schedule(text, instance)
    elif text.endswith((".json", ".json.gz", ".parquet")):
        raise InputError(f"--warm-start: {text}: found no such file")
    else:
        schedule = simulate(instance, text, cost, seed=seed, slos=slos, budget=budget)

    evaluate(instance, schedule, cost)
    return schedule


def _end_unanswered(
    instance: Instance,
    data: dict[str, Any],
    question: dict[str, Any],
    scope: Scope,
    json_out: str | None,
) -> NoReturn:
    """Report that no schedule below the value exists, or that none was found, and exit.

    The exit status is 3 or 4. The JSON answers the question, so that it has no schedule and no
    objective. The best value found, which is not below the value asked for, is in its block
    ``below``.
    """
    no = question["answer"] == "no"
    unknown = ("objective", "objectives", "gap", "metrics")
    changed = {
        **{key: None for key in unknown if key in data},
        "status": "infeasible" if no else "no_incumbent",
        "below": {**question, "best_known": data["objective"]},
    }
    alone = emit_json({**data, **changed}, json_out)
    if not alone:
        _show_result(instance, data)

    print(_question_text(question, scope), file=sys.stderr if alone else sys.stdout)

    raise typer.Exit(InfeasibleError.exit_code if no else NoIncumbentError.exit_code)


def _question_text(question: dict[str, Any], scope: Scope) -> str:
    text = (
        f"a schedule below {question['phi']:g} x {question['than']} = {number(question['value'])}"
    )
    return {
        "yes": f"{text}: yes",
        "no": f"{text}: none exists" + (f" {scope.limitation}" if scope.without else ""),
        "unknown": f"{text}: neither found nor excluded within the limits",
    }[question["answer"]]


def _show_result(instance: Instance, data: dict[str, Any]) -> None:
    metric = first_metric(data["objective_name"])
    times = "" if metric is None else metric.unit_words(instance.time_unit)
    if data["metrics"]:
        show_metrics(data["metrics"], instance)
        print()

    if data["bound"] is not None:
        print(f"the bound holds for {data['scope']['words']}")

    print(
        f"{data['status']}: {data['objective_name']} {number(data['objective'])} {times}, "
        f"bound {number(data['bound'])} {times}, gap {percent(data['gap'])} "
        f"({data['formulation']} by {data['method']}, build {data['build_s']:.2f} s, "
        f"solve {data['solve_s']:.2f} s)"
    )
