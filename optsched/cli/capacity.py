"""``capacity``: the largest load within SLOs, or the fewest workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optsched.cli.options import Given, key_values, runs, time_of
from optsched.cli.output import LiveLine, emit_json, show_table, stop_at_ctrl_c, tell
from optsched.files.outputs import make_folder
from optsched.files.read_write import write_instance, write_schedule
from optsched.files.strict_json import write_json
from optsched.problem.errors import NoIncumbentError, UsageError
from optsched.problem.instance import clients_words
from optsched.problem.progress import number
from optsched.workloads.problem import Problem

if TYPE_CHECKING:
    from optsched.analysis.capacity import Capacity


@runs("optsched.analysis.capacity.capacity")
def capacity(
    problem: Problem,
    machines: Given,
    percentiles: list[str] | None = None,
    schedules_out: str | None = None,
    certificate_out: str | None = None,
    replicas_over_time: float | None = None,
    startup: float = 0.0,
    json_out: str | None = None,
    **options: Any,
) -> None:
    """Find the largest load within SLOs, or the fewest workers.

    It says what is proved impossible, too.

    Parameters:
      attainment A: The share within all their SLOs. Default: 0.99.
      policies --policy SPEC: A policy to run (repeatable).
      percentiles --percentile NAME=S: Not SLOs, but p99_ttft=1s and its kin (repeatable).
      workers N|auto: Equal machines; auto: the fewest.
      router NAME: The router of workers.
      rate_scale X: A multiple of the rate.
      time_limit S: The time limit in seconds, the search included.
      search S: Seconds for the search; 0: none. Default: 10 or 30.
      schedules_out DIR: Write the best schedule and its instance.
      certificate_out FILE: Write a certificate of what is impossible.
      replicas_over_time CELL: Replica-hours, if machines come and go each CELL.
      startup S: Seconds until a new machine serves.
      Rare: percentiles, rate_scale, search, router, startup
    """
    if replicas_over_time is not None:
        if certificate_out is not None or schedules_out is not None:
            raise UsageError(
                "--replicas-over-time: found a certificate or schedules to write; expected none, "
                "since it makes neither"
            )

        _replicas(problem, replicas_over_time, startup, json_out, options)
        return

    from optsched.analysis.capacity import capacity as run
    from optsched.bounds.certificate import chain_in_words

    instance, fewest = problem.instance, machines.get("workers") == "auto"
    if instance.clients is not None:
        tell(
            f"warning: {instance.name}: {clients_words(instance.clients)}; the load found here is "
            "of open traffic in this pattern, and no limit of such clients"
        )

    with LiveLine() as line, stop_at_ctrl_c() as stop:
        options |= {"certify": certificate_out is not None, "progress": line.show_progress}
        limits = key_values(percentiles, "--percentile")
        options["percentiles"] = {
            name: time_of("--percentile", text) for name, text in limits.items()
        }
        found = run(problem, fewest=fewest, stop=stop, **options)

    if schedules_out is not None and found.served is not None:
        folder = make_folder(schedules_out)
        write_schedule(found.served[1], folder / "best-slo.json")
        moved = found.question.problem_at(found.served[0]).instance
        write_instance(moved, folder / "best-slo-instance.json")

    if certificate_out is not None and found.certificate is not None:
        write_json(found.certificate, certificate_out)
    if json_out is not None:  # only then, since further points of the bound are computed for it
        emit_json(found.to_dict(), json_out)
    if json_out != "-":
        _show(found)
        if certificate_out is not None and found.certificate is not None:
            print(f"{certificate_out}: {chain_in_words(found.instance, found.certificate)}")
        elif certificate_out is not None:
            print(f"certificate: none, since {found.certificate_missing}")
    if found.value is None and found.bound is None:
        raise NoIncumbentError("no policy attains this at any value tried, and nothing is proved")


def _replicas(
    problem: Problem, cell_s: float, startup_s: float, json_out: str | None, options: dict[str, Any]
) -> None:
    """Print the replica-hours of policies under threshold scaling, and the bound on all.

    `cell_s`: seconds for which the number of replicas stays. `startup_s`: seconds until a new one
    serves. `options`: those of the command that are left.
    """
    from optsched.analysis.replicas import replica_hours

    share = options["attainment"]
    stated: dict[str, Any] = {} if share is None else {"attainment": share}
    found = [
        replica_hours(problem, cell_s, startup_s=startup_s, policy=policy, **stated)
        for policy in options["policies"] or ["vllm-v1"]
    ]
    bound_s = found[0].bound  # of every policy
    head = {"format": "optsched-replicas", "version": 1, "bound_s": bound_s}
    if emit_json(head | {"policies": [vars(one) for one in found]}, json_out):
        return

    headers = ("policy", "replica-hours", "unfinished\nfor each", "SLO\nattainment", "most")
    rows = []
    for one in found:
        hours = None if one.value is None else one.value / 3600
        max_replicas = max(one.replicas, default=None)
        rows.append((one.policy, hours, one.threshold, one.attainment, max_replicas))

    show_table(headers, rows, text_columns=(0,))
    print(f"\nno schedule with this attainment takes less than {bound_s / 3600:.4g}")


def _show(found: Capacity) -> None:
    """Print a row for each policy, the verdict, and what there is to say of both."""
    rates = found.searched == "rate_scale"
    what = "rate scale" if rates else "workers"
    missed = "missed\nfrom" if rates else "missed\nwith"
    per = f"[1/{'round' if found.instance.in_rounds else 's'}]"
    loads = (f"{found.arriving}\n{per}", f"per worker\n{per}")
    headers = ("policy", "", what, *loads, "SLO\nattainment", missed, "wall\n[s]")
    rows = []
    for row in found.rows:
        kind = "clairvoyant" if row.clairvoyant else ""
        cells = (row.policy, kind, row.value, *found.loads(row.value))
        rows.append((*cells, row.attainment, row.missed, row.wall_s))

    if rows:
        # A narrow terminal goes without these, the first of them first. "" is whether clairvoyant.
        drop = ["wall\n[s]", missed, loads[1], ""]
        show_table(headers, rows, text_columns=(0, 1), drop=drop)
        print()

    print(found.verdict)
    judged = found.best_schedule
    if judged is not None and found.served is not None:
        tails = ((name, judged.metrics[f"p99_{name}"]) for name in ("ttft", "tpot", "latency"))
        words = ", ".join(f"{name} {value:.3g} s" for name, value in tails if value is not None)
        print(f"best schedule found, at {what} {number(found.served[0])}: p99 of {words}")
    if rates and found.bound is not None:
        print(f"the bound holds for {found.scope}")
    for row in found.rows:
        if row.error is not None:
            print(f"{row.policy}: {row.error}")

    if found.interrupted:
        print("stopped by the time limit or Ctrl-C: the values above are those found until then")
