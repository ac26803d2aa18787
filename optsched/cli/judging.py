"""``simulate``, ``verify``, ``why`` and ``hits``: make, evaluate, check and explain schedules."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from optsched.cli import output
from optsched.cli.library import verify as verify_library
from optsched.cli.options import (
    ABOVE_0,
    ARGUMENT,
    AT_LEAST_0,
    AT_LEAST_1,
    UNSET,
    Given,
    Seed,
    check_outputs,
    check_requests_out,
    hardware_of,
    read_checked,
)
from optsched.cli.output import emit_json, number, tell, unit
from optsched.costs.cost import CostModel
from optsched.costs.machine import Pools
from optsched.files.library import PREFIX
from optsched.files.read_write import (
    check_format,
    read_instance,
    read_json,
    read_schedule,
    schedule_from_dict,
)
from optsched.files.results import head, result_dict
from optsched.files.sources import schedule_of
from optsched.files.strict_json import Place
from optsched.judge.evaluate import Evaluation, evaluate as judge
from optsched.problem.errors import InputError, UsageError, ViolationError
from optsched.problem.instance import Instance
from optsched.problem.objective import TOTAL_LATENCY
from optsched.problem.scope import ONE_WORKER, Scope


def simulate(
    instance_file: str,
    policy: str | None = None,
    schedule_file: str | None = None,
    cost_model: str | None = None,
    machines: Given = UNSET,
    seed: Seed = 0,
    slos: Given = UNSET,
    schedule_out: str | None = None,
    requests_out: str | None = None,
    json_out: str | None = None,
) -> None:
    """Run an online policy, or a schedule, and evaluate it.

    Parameters:
      policy --policy SPEC: The policy to run (`optsched list policies`).
      schedule_file --schedule FILE: The schedule to evaluate, instead of a policy.
    """
    check_requests_out(requests_out)
    if (policy is None) == (schedule_file is None):
        found = "neither" if policy is None else "both"
        raise UsageError(f"--policy, --schedule: found {found}; expected one")
    if policy is None and schedule_out is not None:
        raise UsageError("--schedule-out: found it with --schedule; expected --policy")

    if policy is None:
        of = cost_model, machines, slos
        _evaluate(instance_file, str(schedule_file), *of, requests_out, json_out)
        return

    from optsched.optimize.strategies import run_policy
    from optsched.policies import lengths_note, make_policy, runner_of

    made, info = make_policy(policy)
    instance, cost = read_checked(instance_file, cost_model, schedule_out, requests_out, json_out)
    hardware = hardware_of(instance, cost, machines)
    schedule, evaluation, wall_s = run_policy(instance, policy, hardware, seed=seed, **slos)
    if schedule_out is not None:
        output.save_schedule(schedule, schedule_out)

    output.write_requests(evaluation, requests_out)
    made_by = {"method": policy, "policy": policy, "predictor": info.predictor, "seed": seed}
    more = {**made_by, "solve_s": wall_s, "schedule": schedule_out}
    if _emit("simulate", evaluation, cost, json_out, **more):
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


def _evaluate(
    instance_file: str,
    schedule_file: str,
    cost_model: str | None,
    machines: Given,
    slos: Given,
    requests_out: str | None,
    json_out: str | None,
) -> None:
    """Evaluate a schedule: check every constraint and compute every metric."""
    instance, cost = read_checked(instance_file, cost_model, requests_out, json_out)
    hardware = hardware_of(instance, cost, machines)
    schedule = read_schedule(schedule_file, instance)
    evaluation = judge(instance, schedule, hardware, **slos)
    output.write_requests(evaluation, requests_out)
    _emit("evaluate", evaluation, cost, json_out, schedule=schedule_file)


def hits(
    instance_file: str,
    schedule: str | None = None,
    policy: str = "fcfs",
    cost_model: str | None = None,
    kv_capacity: list[int] | None = None,
    bytes_per_token: Annotated[float | None, ABOVE_0] = None,
    seed: Seed = 0,
    json_out: str | None = None,
) -> None:
    """Say where prefix hits go: to memory, or to what is evicted.

    Parameters:
      schedule FILE: The schedule. By default it is that of the policy.
      policy --policy SPEC: The policy.
      kv_capacity N: A KV capacity of the caches, in tokens (repeatable). By default the instance's.
      bytes_per_token N: The bytes of KV of one token, for the price of a GiB.
    """
    for one in kv_capacity or ():
        if one < 1:
            raise UsageError(f"--kv-capacity: found {one}; expected an integer >= 1")

    from optsched.analysis.hits import Found, prefix_hits
    from optsched.policies.engine.simulate import simulate as run

    instance, cost = read_checked(instance_file, cost_model, json_out)
    made = read_schedule(schedule, instance) if schedule else run(instance, policy, cost, seed=seed)
    found = prefix_hits(instance, made, cost)
    capacities = kv_capacity or [instance.kv_capacity]
    more = None if bytes_per_token is None else int(2**30 / bytes_per_token)
    data = found.to_dict(capacities, more)
    label = schedule or policy
    if emit_json({**head("optsched-hits", "hits", instance), "schedule": label, **data}, json_out):
        return

    rows: list[tuple[Any, ...]] = [(None, "infinite", *found.cells(found.infinite()))]
    for one in data["caches"]:
        rows += [
            (one["kv_capacity"], name, *found.cells(Found(**one[name]))) for name in ("best", "lru")
        ]

    rows.append((instance.kv_capacity, label, *found.cells(found.own)))
    headers = ("M\n[tokens]", "cache", "found\n[tokens]", "[share]", "prefill saved\n[s]")
    output.show_table(headers, rows, text_columns=(1,))
    print(f"\n{found.verdict()}")
    for one in data["caches"] if more else ():
        words = ", ".join(f"{name} {one['gib_s'][name]:.4g} s" for name in ("best", "lru"))
        print(f"a GiB more than {one['kv_capacity']} tokens saves of the prefills: {words}")


def why(
    instance_file: str,
    schedule_file: str,
    against: str | None = None,
    cost_model: str | None = None,
    max_num_seqs: Annotated[int | None, AT_LEAST_1] = None,
    max_num_batched_tokens: Annotated[int | None, AT_LEAST_1] = None,
    limit: Annotated[int, AT_LEAST_0] = 10,
    json_out: str | None = None,
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
    check_outputs(json_out)
    schedule, cost = schedule_of(schedule_file, instance, cost_model)
    other = None if against is None else schedule_of(against, instance, cost_model)[0]
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    with output.stop_at_ctrl_c() as stop:
        found = run(instance, schedule, cost, against=other, stop=stop, **limits)

    if against is not None and found.against is None:
        tell(f"note: interrupted before {against}; the answer is of {schedule_file} alone")
        against = None
    if emit_json(found.to_dict(), json_out):
        return

    words, times = "in all" if against is None else "lost", unit(instance)
    headers = ("request", *(f"{cause}\n[{times}]" for cause in CAUSES), f"{words}\n[{times}]")
    output.show_table(headers, found.rows(limit))
    whole = "latency" if against is None else f"latency less that in {against}"
    print(f"\nparts of the {whole}: what stood in a request's own way (docs/howto/gap.md)")
    print("order: it would have fitted; what another order of all would save, `compare` says")


def _emit(
    name: str, evaluation: Evaluation, cost: CostModel | None, json_out: str | None, **more: Any
) -> bool:
    """Write a result of a schedule, or print its metrics. Returns whether JSON was printed."""
    metrics, objective = evaluation.metrics, TOTAL_LATENCY.of(evaluation)
    more |= {"objective": objective, "metrics": metrics, "workers": evaluation.workers}
    more["pools"] = evaluation.pools and evaluation.pools.to_dict()
    alone = emit_json(result_dict(evaluation.instance, name, cost_model=cost, **more), json_out)
    if not alone:
        output.show_metrics(metrics, evaluation.instance)
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
    machines: Given = UNSET,
) -> None:
    """Check schedules and certificates. The exit status is 5 if one fails.

    Parameters:
      instance_file INSTANCE|DIR|library[/NAME]: The instance; or a folder of instances with
        schedules and certificates of them, as `ratios --certificates-out` writes it; or the
        library, or one instance or family of it, whose best known are checked.
      file FILE: The schedule or certificate: a JSON file.
    """

    def check(instance_file: str, claim: str) -> None:
        instance, cost = read_checked(instance_file, cost_model)
        hardware = hardware_of(instance, cost, machines)
        print(_verified(instance, claim, hardware))

    if file is not None:
        check(instance_file, file)
        return

    if (instance_file + "/").startswith(PREFIX) and not Path(instance_file).exists():
        verify_library([instance_file.removeprefix(PREFIX)] if PREFIX in instance_file else [])
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

            check(found, str(claim))
        except (InputError, ViolationError) as error:
            wrong += 1
            tell(str(error))

    print(f"files: {len(claims)}, failures: {wrong}")
    if wrong:
        raise typer.Exit(5)


def _verified(instance: Instance, file: str, cost: CostModel | Pools | None) -> str:
    """Check a file that its format names, and return what it proves in words."""
    data = read_json(file)
    kind = data.get("format")
    checker = _CHECKERS.get(kind) if isinstance(kind, str) else None
    if checker is None:
        raise InputError(f"{file}: format: found {kind!r}; expected one of {', '.join(_CHECKERS)}")

    with Place(Path(file)):
        check_format(data, str(kind).removeprefix("optsched-"))

    return checker(instance, file, data, cost)


def _verify_schedule(
    instance: Instance, file: str, data: dict[str, Any], cost: CostModel | Pools | None
) -> str:

    digest = data.get("instance_sha256")
    if digest is not None and digest != instance.sha256:
        raise ViolationError(
            f"{file}: instance_sha256: found {digest}; expected {instance.sha256}, the digest of "
            f"the instance {instance.name!r}",
            rule="instance_sha256",
        )

    with Place(Path(file)):
        schedule = schedule_from_dict(data, instance, folder=Path(file).parent)

    evaluation = judge(instance, schedule, cost)
    if digest is None:
        tell(f"note: {file} names no instance (instance_sha256); it was checked against this one")

    times, makespan = unit(instance), number(evaluation.metrics["makespan"])
    return (
        f"{file}: valid schedule of {instance.n} requests, {TOTAL_LATENCY} "
        f"{number(TOTAL_LATENCY.of(evaluation))} {times}, makespan {makespan} {times}\n"
        + _on_workers(evaluation)
    )


def _verify_certificate(
    instance: Instance, file: str, certificate: dict[str, Any], cost: CostModel | Pools | None
) -> str:
    from optsched.bounds.certificate import verify_certificate
    from optsched.bounds.pools import verify_pools

    on_pools = "pools" in certificate
    if on_pools != isinstance(cost, Pools):
        found, rest = ("a", "say") if on_pools else ("no", "leave out")
        raise UsageError(
            f"{file}: found {found} certificate about pools; {rest} --pools and --link, "
            "of which it is checked to be"
        )

    try:
        value = (
            verify_pools(instance, certificate, cost)
            if isinstance(cost, Pools)
            else verify_certificate(instance, certificate, cost)
        )
    except ViolationError as error:
        raise ViolationError(f"{file}: {error}", rule=error.rule) from None

    words = f"or more in {ONE_WORKER}"
    if isinstance(cost, Pools):
        words = f"or more in {Scope(len(cost.machines), pools=cost.words)}"

    if certificate["claim"] == "optimal":
        words = f"is optimal {ONE_WORKER.machines}"

    metric = certificate["objective"]
    return f"{file}: valid certificate: {metric} {number(value)} {unit(instance)} {words}"


_CHECKERS: dict[str, Callable[[Instance, str, dict[str, Any], CostModel | Pools | None], str]] = {
    "optsched-schedule": _verify_schedule,
    "optsched-certificate": _verify_certificate,
}
