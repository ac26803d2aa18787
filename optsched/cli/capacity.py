"""``capacity``: the largest load within SLOs, or the fewest workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from optsched.cli.options import (
    ABOVE_0,
    UNSET,
    Given,
    Seed,
    TimeLimitOrNone,
    read_problem,
)
from optsched.cli.output import LiveLine, emit_json, show_table, stop_at_ctrl_c, tell
from optsched.problem.errors import NoIncumbentError
from optsched.problem.instance import clients_words

if TYPE_CHECKING:
    from optsched.analysis.capacity import Capacity


def capacity(
    instance_file: str,
    slos: Given = UNSET,
    attainment: float = 0.99,
    policies: list[str] | None = None,
    router: str = "least-requests",
    rate_scale: Annotated[float, ABOVE_0] = 1.0,
    cost_model: str | None = None,
    machines: Given = UNSET,
    time_limit: TimeLimitOrNone = None,
    search: Annotated[float, {"min": 0.0}] = 0.0,
    seed: Seed = 0,
    json_out: str | None = None,
) -> None:
    """Find the largest load within SLOs, or the fewest workers.

    It says what is proved impossible, too.

    Parameters:
      attainment A: The share of requests within all their SLOs.
      policies --policy SPEC: A policy to run (repeatable).
      workers N|auto: Equal machines; auto: the fewest.
      router NAME: The router in front of several workers.
      rate_scale X: The rate, as a multiple of the instance's.
      time_limit S: The time limit in seconds, the search included.
      search S: Seconds for the offline search, which knows all lengths.
      Rare: rate_scale, search, router
    """
    from optsched.analysis.capacity import capacity as run

    fewest = machines.get("workers") == "auto"
    if fewest:
        machines = {name: text for name, text in machines.items() if name != "workers"}

    problem = read_problem(instance_file, cost_model, json_out, machines=machines, slos=slos)
    instance = problem.instance
    if instance.clients is not None:
        tell(
            f"warning: {instance_file}: {clients_words(instance.clients)}; the load found here is "
            "of open traffic in this pattern, and no limit of such clients"
        )

    asked: dict[str, Any] = {"attainment": attainment, "fewest": fewest, "router": router}
    asked |= {"rate_scale": rate_scale, "time_limit_s": time_limit, "search_s": search}
    with LiveLine() as line, stop_at_ctrl_c() as stop:
        more: dict[str, Any] = {"progress": line.solving, "stop": stop}
        found = run(problem, policies or None, seed=seed, **asked, **more)

    if json_out is not None:  # a file has more points of the bound, for pictures
        emit_json(found.to_dict(), json_out)
    if json_out != "-":
        _show(found)
    if found.value is None and found.bound is None:
        raise NoIncumbentError("no policy attains this at any value tried, and nothing is proved")


def _show(found: Capacity) -> None:
    rates = found.searched == "rate_scale"
    what = "rate scale" if rates else "workers"
    limit = "missed\nfrom" if rates else "missed\nwith"
    per = f"[1/{'round' if found.instance.in_rounds else 's'}]"
    loads = (f"requests\n{per}", f"per worker\n{per}")
    headers = ("policy", "", what, *loads, "SLO\nattainment", limit, "wall\n[s]")
    rows = []
    for r in found.rows:
        kind = "clairvoyant" if r.clairvoyant else ""
        rows.append(
            (r.policy, kind, r.value, *found.loads(r.value), r.attainment, r.missed, r.wall_s)
        )

    if rows:
        drop = ["wall\n[s]", limit, loads[1], ""]
        show_table(headers, rows, text_columns=(0, 1), drop=drop)
        print()

    print(found.verdict)
    if rates and found.bound is not None:
        print(f"the bound holds for {found.scope}")
    for row in found.rows:
        if row.error is not None:
            print(f"{row.policy}: {row.error}")

    if found.interrupted:
        print("stopped by the time limit or Ctrl-C: the values above are those found until then")
