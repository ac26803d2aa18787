"""``simulate``, ``evaluate``, ``verify`` and ``why``: make and judge schedules."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from optsched.cli import output
from optsched.cli.library import verify as verify_library
from optsched.cli.options import (
    ARGUMENT,
    AT_LEAST_0,
    UNSET,
    Given,
    Seed,
    check_requests_out,
    read_problem,
    runs,
)
from optsched.cli.output import emit_json, number, tell, unit
from optsched.files.library import PREFIX
from optsched.files.read_write import (
    check_format,
    read_instance,
    read_json,
    read_schedule,
    schedule_from_dict,
)
from optsched.files.results import result_dict
from optsched.files.sources import schedule_of
from optsched.files.strict_json import Place
from optsched.judge.evaluate import Evaluation, evaluate as judge
from optsched.problem.errors import InputError, UsageError, ViolationError
from optsched.problem.objective import TOTAL_LATENCY
from optsched.problem.scope import Scope
from optsched.workloads.problem import Problem

_RESULT = "optsched-result"


def simulate(
    problem: Problem,
    policy: str,
    seed: Seed = 0,
    schedule_out: str | None = None,
    requests_out: str | None = None,
    json_out: str | None = None,
) -> None:
    """Run an online policy and evaluate its schedule.

    Parameters:
      policy --policy SPEC: The policy (`optsched list policies`).
    """
    check_requests_out(requests_out)
    from optsched.policies import lengths_note, make_policy, runner_of
    from optsched.policies.run import run

    made, info = make_policy(policy)
    instance, done = problem.instance, run(problem, policy, seed=seed)
    if schedule_out is not None:
        output.save_schedule(done.schedule, schedule_out)

    output.write_requests(done.evaluation, requests_out)
    if _emit(done.evaluation, {**done.to_dict(), "schedule": schedule_out}, json_out):
        return

    if info.predictor is not None:
        print(f"predictor: {info.predictor} (the policy's own)")
    elif not instance.has_predictions:
        print("predictor: oracle (the instance carries no predictions)")

    for off in runner_of(made).switched_off(instance):
        print(f"{policy}: {off}")

    note = lengths_note(made, info, instance)
    if note is not None:
        print(f"{policy} {note}")


def evaluate(
    problem: Problem,
    schedule_file: str,
    requests_out: str | None = None,
    json_out: str | None = None,
) -> None:
    """Evaluate a schedule: check every constraint and compute every metric."""
    check_requests_out(requests_out)
    evaluation = judge(problem, read_schedule(schedule_file, problem.instance))
    output.write_requests(evaluation, requests_out)
    data = result_dict(
        problem.instance,
        "evaluate",
        cost_model=problem.cost_model,
        objective=TOTAL_LATENCY.of(evaluation),
        metrics=evaluation.metrics,
        workers=evaluation.workers,
        pools=problem.pools and problem.pools.to_dict(),
        schedule=schedule_file,
    )
    _emit(evaluation, data, json_out)


@runs("optsched.analysis.why.why")
def why(
    instance_file: str,
    schedule_file: str,
    against: str | None = None,
    cost_model: str | None = None,
    limit: Annotated[int, AT_LEAST_0] = 10,
    json_out: str | None = None,
    **options: Any,
) -> None:
    """Say what each request waits for, or loses to another schedule.

    Parameters:
      against SCHEDULE: Another schedule: best.json of `compare --schedules-out`.
      max_num_seqs N: Max requests with KV, if the instance has no limit.
      max_num_batched_tokens N: Max tokens of a batch, if the instance has no limit.
      limit N: How many requests to show that lose, and that gain.
    """
    from optsched.analysis.why import CAUSES, why as run

    instance = read_instance(instance_file)
    schedule, cost = schedule_of(schedule_file, instance, cost_model)
    other = None if against is None else schedule_of(against, instance, cost_model)[0]
    with output.stop_at_ctrl_c() as stop:
        found = run(Problem(instance, cost), schedule, against=other, stop=stop, **options)

    if against is not None and found.against is None:
        tell(f"note: interrupted before {against}; the answer is of {schedule_file} alone")
        against = None
    if emit_json(found.to_dict(), json_out):
        return

    words, times = "in all" if against is None else "lost", unit(instance)
    headers = ("request", *(f"{cause}\n[{times}]" for cause in CAUSES), f"{words}\n[{times}]")
    output.show_table(headers, list(found.to_frame(limit).itertuples(index=False)))
    whole = "latency" if against is None else f"latency less that in {against}"
    print(f"\nparts of the {whole}: what stood in a request's own way (docs/howto/gap.md)")
    print("order: it would have fitted; what another order of all would save, `compare` says")


def _emit(evaluation: Evaluation, data: dict[str, Any], json_out: str | None) -> bool:
    """Write a result of a schedule, or print its metrics. Returns whether JSON was printed."""
    alone = emit_json(data, json_out)
    if not alone:
        output.show_metrics(evaluation.metrics, evaluation.instance)
        print(f"\n{_on_workers(evaluation)}")

    return alone


def _on_workers(evaluation: Evaluation) -> str:
    """Return how many workers a schedule uses, and what bounds say of it if these are several."""
    used = Scope(evaluation.workers)
    if used.workers == 1:
        return f"it runs {used.machines}"

    return f"it runs {used.machines}: bounds and optima on one worker say nothing of it"


def verify(
    instance_file: str,
    file: Annotated[str | None, ARGUMENT] = None,
    cost_model: str | None = None,
    tight: bool = False,
    machines: Given = UNSET,
) -> None:
    """Check schedules and certificates. The exit status is 5 if one fails.

    Parameters:
      instance_file INSTANCE|DIR|library[/NAME]: The instance; or a folder of instances with
        schedules, certificates and cost models of them, as `ratios --store` writes it; or the
        library, or one instance or family of it, whose best known are checked.
      file FILE: The schedule or certificate: a JSON file.
      tight: Whether to say also where the check of one unit more fails: a round, or a tick. In the
        library, whether it is wrong that it does not fail.
    """

    def check(instance_file: str, claim: str, model: str | None = cost_model) -> None:
        from optsched.bounds.verify import refusal

        data = read_json(claim)
        problem = read_problem(instance_file, model, machines=machines)
        print(_verified(problem, claim, data))
        if tight and data["format"] == "optsched-certificate":
            print(f"{claim}: a unit more is refused: {refusal(problem, data)}")

    if file is not None:
        check(instance_file, file)
        return

    if (instance_file + "/").startswith(PREFIX) and not Path(instance_file).exists():
        names = [instance_file.removeprefix(PREFIX)] if PREFIX in instance_file else []
        verify_library(names, tight=tight)
        return

    files = {path: read_json(path) for path in sorted(Path(instance_file).glob("*.json"))}
    paths = [path for path, data in files.items() if data.get("format") == "optsched-instance"]
    instances = {read_instance(path).sha256: str(path) for path in paths}
    claims = {path: data for path, data in files.items() if data.get("format") in _CHECKERS}
    if not claims:
        raise InputError(
            f"{instance_file}: found no folder with schedules or certificates; expected one, or an "
            "instance and a FILE"
        )

    wrong = 0
    for claim, data in claims.items():
        found = instances.get(str(data.get("instance_sha256")))
        try:
            if found is None:
                raise ViolationError(f"{claim}: found no instance of it there", rule="instance")

            check(found, str(claim), cost_model or _model_of(claim))
        except (InputError, ViolationError) as error:
            wrong += 1
            tell(str(error))

    print(f"files: {len(claims)}, failures: {wrong}")
    if wrong:
        raise typer.Exit(5)

    optima = [
        path
        for path, data in files.items()
        if data.get("format") == _RESULT and data["status"] == "optimal"
    ]
    if not optima:
        return

    from optsched.analysis.optima import Optima
    from optsched.optimize.consistency import is_met

    store, proved = Optima(Path(instance_file)), 0
    for path in optima:
        found, goal = instances[files[path]["instance"]["sha256"]], files[path]["objective_name"]
        problem = read_problem(found, cost_model or _model_of(path), machines, objective=goal)
        kept, _ = store.known(problem, 0.0)
        proved += kept is not None and is_met(kept.value, kept.certified)

    print(f"optima: {len(optima)}, of which certificates prove {proved}")


def _model_of(file: Path) -> str | None:
    """Return the cost model that a store keeps beside a file, if any."""
    kept = file.with_name(f"{file.stem.rpartition('-')[0]}-model.toml")
    return str(kept) if kept.exists() else None


def _verified(problem: Problem, file: str, data: dict[str, Any]) -> str:
    """Check what a file has, as its format names it, and return what it proves in words."""
    kind = data.get("format")
    checker = _CHECKERS.get(kind) if isinstance(kind, str) else None
    if checker is None:
        raise InputError(f"{file}: format: found {kind!r}; expected one of {', '.join(_CHECKERS)}")

    with Place(Path(file)):
        check_format(data, str(kind).removeprefix("optsched-"))

    return checker(problem, file, data)


def _verify_schedule(problem: Problem, file: str, data: dict[str, Any]) -> str:
    instance = problem.instance
    digest = data.get("instance_sha256")
    if digest is not None and digest != instance.sha256:
        raise ViolationError(
            f"{file}: instance_sha256: found {digest}; expected {instance.sha256}, the digest of "
            f"the instance {instance.name!r}",
            rule="instance_sha256",
        )

    with Place(Path(file)):
        schedule = schedule_from_dict(data, instance, folder=Path(file).parent)

    evaluation = judge(problem, schedule)
    if digest is None:
        tell(f"note: {file} names no instance (instance_sha256); it was checked against this one")

    times, makespan = unit(instance), number(evaluation.metrics["makespan"])
    return (
        f"{file}: valid schedule of {instance.n} requests, {TOTAL_LATENCY} "
        f"{number(TOTAL_LATENCY.of(evaluation))} {times}, makespan {makespan} {times}\n"
        + _on_workers(evaluation)
    )


def _verify_certificate(problem: Problem, file: str, certificate: dict[str, Any]) -> str:
    from optsched.bounds.certificate import chain_in_words, limits_in_words
    from optsched.bounds.checker.seconds import CAPACITY, IN_TIME
    from optsched.bounds.verify import verify as prove

    instance, pools = problem.instance, problem.pools
    try:
        value = prove(problem, certificate)
    except (UsageError, ViolationError) as error:
        error.args = (f"{file}: {error}",)
        raise

    metric, scope = certificate["objective"], Scope(drafts=instance.granted)
    if pools is not None:
        scope = Scope(len(pools), pools=pools.words)
    if metric == CAPACITY:
        proved = chain_in_words(instance, certificate)
        return f"{file}: valid certificate: {proved}, in {scope}"

    words = f"{unit(instance)} or more in {scope}"

    if certificate["claim"] == "optimal":
        words = f"{unit(instance)} is optimal {scope.machines}"
    if metric == IN_TIME:
        words = f"or less in {scope}, within {limits_in_words(certificate)}"

    return f"{file}: valid certificate: {metric} {number(value)} {words}"


_CHECKERS: dict[str, Callable[[Problem, str, dict[str, Any]], str]] = {
    "optsched-schedule": _verify_schedule,
    "optsched-certificate": _verify_certificate,
}
