"""``simulate``, ``evaluate``, ``verify`` and ``why``: make and judge schedules."""

from collections.abc import Callable, Mapping
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

    scheduler, info = make_policy(policy)
    done = run(problem, policy, seed=seed)
    if schedule_out is not None:
        output.save_schedule(done.schedule, schedule_out)

    output.write_requests(done.evaluation, requests_out)
    if _emit(done.evaluation, {**done.to_dict(), "schedule": schedule_out}, json_out):
        return

    if info.predictor is not None:
        print(f"predictor: {info.predictor} (the policy's own)")
    elif not problem.instance.has_predictions:
        print("predictor: oracle (the instance carries no predictions)")

    for feature_note in runner_of(scheduler).switched_off(problem.instance):
        print(f"{policy}: {feature_note}")

    note = lengths_note(scheduler, info, problem.instance)
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

    total, whole = "in all", "latency"
    if against is not None:
        total, whole = "lost", f"latency less that in {against}"

    headers = ("request", *(f"{name}\n[{unit(instance)}]" for name in (*CAUSES, total)))
    output.show_table(headers, list(found.to_frame(limit).itertuples(index=False)))
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

    if file is not None:
        _verify_file(instance_file, file, cost_model, machines, tight)
    elif (instance_file + "/").startswith(PREFIX) and not Path(instance_file).exists():
        # "library" alone is all of it. An existing file or folder of such a name goes first.
        names = [instance_file.removeprefix(PREFIX)] if PREFIX in instance_file else []
        verify_library(names, tight=tight)
    else:
        _verify_folder(instance_file, cost_model, machines, tight)


def _verify_file(
    instance_file: str, file: str, cost_model: str | None, machines: Given, tight: bool
) -> None:
    """Check a schedule or a certificate, and print what it proves."""
    from optsched.bounds.verify import refusal

    data = read_json(file)
    problem = read_problem(instance_file, cost_model, machines=machines)
    print(_words_of_checked(problem, file, data))
    if tight and data["format"] == "optsched-certificate":
        print(f"{file}: a unit more is refused: {refusal(problem, data)}")


def _verify_folder(folder: str, cost_model: str | None, machines: Given, tight: bool) -> None:
    """Check all schedules and certificates of a folder, each with the instance it names.

    Raises `typer.Exit` with the status 5 if one fails. `tight`: whether to say also where the check
    of one unit more fails.
    """
    files = {path: read_json(path) for path in sorted(Path(folder).glob("*.json"))}
    paths = [path for path, data in files.items() if data.get("format") == "optsched-instance"]
    instances = {read_instance(path).sha256: str(path) for path in paths}
    claims = {path: data for path, data in files.items() if data.get("format") in _CHECKERS}
    if not claims:
        raise InputError(
            f"{folder}: found no folder with schedules or certificates; expected one, or an "
            "instance and a FILE"
        )

    failures = 0
    for claim, data in claims.items():
        instance_file = instances.get(str(data.get("instance_sha256")))
        try:
            if instance_file is None:
                raise ViolationError(f"{claim}: found no instance of it there", rule="instance")

            model = cost_model or _model_beside(claim)
            _verify_file(instance_file, str(claim), model, machines, tight)
        except (InputError, ViolationError) as error:
            failures += 1
            tell(str(error))

    print(f"files: {len(claims)}, failures: {failures}")
    if failures:
        raise typer.Exit(5)

    _count_proved_optima(Path(folder), files, instances)


def _count_proved_optima(
    folder: Path, files: Mapping[Path, dict[str, Any]], instances: Mapping[str, str]
) -> None:
    """Print how many results of a folder say optimal, and how many of these certificates prove.

    All certificates are checked by now. `instances`: files by digest.
    """
    from optsched.bounds.certificate import certified_value
    from optsched.optimize.consistency import is_met

    results = (data for data in files.values() if data.get("format") == _RESULT)
    optima = [data for data in results if data["status"] == "optimal"]
    proved = 0
    for data in optima:
        # Without a certificate its name is None, and no JSON file is called that.
        certificate = files.get(folder / str(data["certificate"]))
        if certificate is not None:
            instance = read_instance(instances[data["instance"]["sha256"]])
            proved += is_met(data["objective"], certified_value(instance, certificate))

    if optima:
        print(f"optima: {len(optima)}, of which certificates prove {proved}")


def _model_beside(file: Path) -> str | None:
    """Return the cost model that a store (`Optima`) keeps beside PLACE-WHAT.json, if any."""
    model = file.with_name(f"{file.stem.rpartition('-')[0]}-model.toml")
    return str(model) if model.exists() else None


def _words_of_checked(problem: Problem, file: str, data: dict[str, Any]) -> str:
    """Check what a file has, as its format names it, and return what it proves in words."""
    kind = data.get("format")
    checker = _CHECKERS.get(kind) if isinstance(kind, str) else None
    if checker is None:
        raise InputError(f"{file}: format: found {kind!r}; expected one of {', '.join(_CHECKERS)}")

    with Place(Path(file)):
        check_format(data, str(kind).removeprefix("optsched-"))

    return checker(problem, file, data)


def _verify_schedule(problem: Problem, file: str, data: dict[str, Any]) -> str:
    """Judge a schedule, and return what it has in words."""
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
    """Check a certificate, and return what it proves in words."""
    from optsched.bounds.certificate import chain_in_words, limits_in_words
    from optsched.bounds.checker.seconds import CAPACITY, IN_TIME
    from optsched.bounds.verify import verify as prove

    instance, pools = problem.instance, problem.pools
    try:
        value = prove(problem, certificate)
    except (UsageError, ViolationError) as error:
        error.args = (f"{file}: {error}",)  # the checker does not know the file
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
