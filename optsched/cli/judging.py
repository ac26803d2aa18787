"""``simulate``, ``evaluate`` and ``verify``: make, evaluate and check schedules."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optsched.cli.options import (
    NO_SLOS,
    CostModelName,
    InstanceFile,
    JsonOut,
    RequestsOut,
    ScheduleFile,
    ScheduleOut,
    Seed,
    Slos,
    TtftWeight,
    argument,
    check_requests_out,
    read_checked,
    required,
    takes_slos,
)
from optsched.cli.output import emit_json, number, save_schedule, show_metrics, unit, write_requests
from optsched.problem.errors import InputError, ViolationError
from optsched.problem.objective import TOTAL_LATENCY
from optsched.problem.scope import ONE_WORKER, Scope

if TYPE_CHECKING:
    from optsched.costs.cost import CostModel
    from optsched.judge.evaluate import Evaluation
    from optsched.problem.instance import Instance


@takes_slos
def simulate(
    instance_file: InstanceFile,
    policy: str = required("SPEC", "The policy. `optsched policies` lists them."),
    cost_model: CostModelName = None,
    seed: Seed = 0,
    slos: Slos = NO_SLOS,
    ttft_weight: TtftWeight = None,
    schedule_out: ScheduleOut = None,
    requests_out: RequestsOut = None,
    json_out: JsonOut = None,
) -> None:
    """Run an online policy and evaluate its schedule."""
    check_requests_out(requests_out)
    from optsched.files.results import result_dict
    from optsched.judge.evaluate import evaluate as judge
    from optsched.policies import lengths_note, make_policy
    from optsched.policies.engine.simulate import simulate as run

    made, info = make_policy(policy)
    instance, cost = read_checked(instance_file, cost_model, schedule_out, requests_out, json_out)
    begin = time.perf_counter()
    schedule = run(instance, policy, cost, seed=seed, slos=slos)
    wall_s = time.perf_counter() - begin
    evaluation = judge(instance, schedule, cost, **slos, ttft_weight=ttft_weight)
    if schedule_out is not None:
        save_schedule(schedule, schedule_out)

    write_requests(evaluation, requests_out)
    data = result_dict(
        instance,
        "simulate",
        method=policy,
        policy=policy,
        predictor=info.predictor,
        objective=TOTAL_LATENCY.of(evaluation),
        metrics=evaluation.metrics,
        cost_model=cost,
        seed=seed,
        solve_s=wall_s,
        schedule=schedule_out,
        workers=evaluation.workers,
    )
    if emit_json(data, json_out):
        return

    show_metrics(evaluation.metrics, instance)
    print(f"\n{_on_workers(evaluation)}")
    if info.predictor is not None:
        print(f"predictor: {info.predictor} (the policy's own)")
    elif not instance.has_predictions:
        print("predictor: oracle (the instance carries no predictions)")

    note = lengths_note(made, info, instance)
    if note is not None:
        print(f"{policy} {note}")


@takes_slos
def evaluate(
    instance_file: InstanceFile,
    schedule_file: ScheduleFile,
    cost_model: CostModelName = None,
    slos: Slos = NO_SLOS,
    ttft_weight: TtftWeight = None,
    requests_out: RequestsOut = None,
    json_out: JsonOut = None,
) -> None:
    """Evaluate a schedule: check every constraint and compute every metric."""
    check_requests_out(requests_out)
    from optsched.files.read_write import read_schedule
    from optsched.files.results import result_dict
    from optsched.judge.evaluate import evaluate as judge

    instance, cost = read_checked(instance_file, cost_model, requests_out, json_out)
    schedule = read_schedule(schedule_file, instance)
    evaluation = judge(instance, schedule, cost, **slos, ttft_weight=ttft_weight)
    write_requests(evaluation, requests_out)
    data = result_dict(
        instance,
        "evaluate",
        objective=TOTAL_LATENCY.of(evaluation),
        metrics=evaluation.metrics,
        cost_model=cost,
        schedule=schedule_file,
        workers=evaluation.workers,
    )

    if not emit_json(data, json_out):
        show_metrics(evaluation.metrics, instance)
        print(f"\n{_on_workers(evaluation)}")


def _on_workers(evaluation: Evaluation) -> str:
    """Return how many workers a schedule uses, and what bounds say of it if these are several."""
    used = Scope(evaluation.workers)
    if used.workers == 1:
        return f"it runs {used.machines}"

    return f"it runs {used.machines}: bounds and optima on one worker say nothing of it"


def verify(
    instance_file: InstanceFile,
    file: str = argument("FILE", "The schedule or certificate: a JSON file."),
    cost_model: CostModelName = None,
) -> None:
    """Check a schedule or a certificate. The exit status is 5 if it fails."""
    from optsched.files.read_write import check_format, read_json
    from optsched.files.strict_json import Place

    data = read_json(file)
    kind = data.get("format")
    checker = _CHECKERS.get(kind) if isinstance(kind, str) else None
    if checker is None:
        raise InputError(f"{file}: format: found {kind!r}; expected one of {', '.join(_CHECKERS)}")

    instance, cost = read_checked(instance_file, cost_model)
    with Place(Path(file)):
        check_format(data, str(kind).removeprefix("optsched-"))

    print(checker(instance, file, data, cost))


def _verify_schedule(
    instance: Instance, file: str, data: dict[str, Any], cost: CostModel | None
) -> str:
    from optsched.files.read_write import schedule_from_dict
    from optsched.files.strict_json import Place
    from optsched.judge.evaluate import evaluate as judge

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
        print(
            f"note: {file} names no instance (instance_sha256); it was checked against this one",
            file=sys.stderr,
        )

    times, makespan = unit(instance), number(evaluation.metrics["makespan"])
    return (
        f"{file}: valid schedule of {instance.n} requests, {TOTAL_LATENCY} "
        f"{number(TOTAL_LATENCY.of(evaluation))} {times}, makespan {makespan} {times}\n"
        + _on_workers(evaluation)
    )


def _verify_certificate(
    instance: Instance, file: str, certificate: dict[str, Any], cost: CostModel | None
) -> str:
    from optsched.bounds.certificate import verify_certificate

    try:
        value = verify_certificate(instance, certificate, cost)
    except ViolationError as error:
        raise ViolationError(f"{file}: {error}", rule=error.rule) from None

    words = f"or more in {ONE_WORKER}"
    if certificate["claim"] == "optimal":
        words = f"is optimal {ONE_WORKER.machines}"

    metric = certificate["objective"]
    return f"{file}: valid certificate: {metric} {number(value)} {unit(instance)} {words}"


_CHECKERS: dict[str, Callable[[Instance, str, dict[str, Any], CostModel | None], str]] = {
    "optsched-schedule": _verify_schedule,
    "optsched-certificate": _verify_certificate,
}
