"""``capacity``: the largest load within SLOs, or the fewest workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optsched.cli.options import (
    NO_SLOS,
    CostModelName,
    InstanceFile,
    JsonOut,
    Seed,
    Slos,
    above_0,
    option,
    read_checked,
    takes_slos,
)
from optsched.cli.output import LiveLine, emit_json, number, show_table, stop_at_ctrl_c
from optsched.problem.errors import NoIncumbentError, UsageError

if TYPE_CHECKING:
    from optsched.analysis.capacity import Capacity
    from optsched.analysis.reached import Reach


@takes_slos
def capacity(
    instance_file: InstanceFile,
    slos: Slos = NO_SLOS,
    attainment: float = option("A", "The share of requests within all their SLOs.", 0.99),
    policy: list[str] | None = option("SPEC", "A policy to run (repeatable)."),
    workers: str = option("N|auto", "Equal workers. With auto the fewest are searched for.", "1"),
    router: str = option("NAME", "The router in front of several workers.", "least-requests"),
    rate_scale: float = option(
        "X", "The rate, as a multiple of the instance's.", 1.0, callback=above_0
    ),
    cost_model: CostModelName = None,
    time_limit: float | None = option(
        "S", "The time limit in seconds, without the search.", callback=above_0
    ),
    search: float = option(
        "S", "Seconds for the offline search, which knows lengths and arrivals.", 0.0, min=0.0
    ),
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Find the largest load within SLOs, or the fewest workers, and what is proved impossible."""
    from optsched.analysis.capacity import capacity as run

    count: int | str = workers
    if workers != "auto":
        try:
            count = int(workers)
        except ValueError:
            raise UsageError(
                f"--workers: found {workers!r}; expected an integer >= 1, or auto"
            ) from None

    instance, cost = read_checked(instance_file, cost_model, json_out)
    with LiveLine() as line, stop_at_ctrl_c() as stop:
        found = run(
            instance,
            policy or None,
            cost_model=cost,
            attainment=attainment,
            workers=count,
            router=router,
            rate_scale=rate_scale,
            time_limit_s=time_limit,
            seed=seed,
            progress=lambda spec, at, share: line.show(f"{spec} at {at:.4g}: {share:.4f}"),
            stop=stop,
            search_s=search,
            **slos,
        )

    if json_out is not None:  # a file has more points of the bound, for pictures
        emit_json(found.to_dict(), json_out)
    if json_out != "-":
        _show(found)
    if found.best is None and found.impossible is None:
        raise NoIncumbentError("no policy attains this at any value tried, and nothing is proved")


def _words(row: Reach, rates: bool) -> str:
    """Return "up to", with "at least" before it if the search ended before a rate was missed."""
    if not rates:
        return "with"

    return "up to" if row.missed is not None else "at least up to"


def _show(found: Capacity) -> None:
    rates = found.searched == "rate_scale"
    what = "rate scale" if rates else "workers"
    limit = "missed\nfrom" if rates else "missed\nwith"
    headers = ("policy", "", what, "SLO\nattainment", limit, "wall\n[s]")
    rows = [
        (r.policy, ("", "clairvoyant")[r.clairvoyant], r.value, r.attainment, r.missed, r.wall_s)
        for r in found.rows
    ]
    if rows:
        show_table(headers, rows, text_columns=(0, 1), drop=["wall\n[s]", limit, ""])
        print()

    best, proved = found.best, "nothing is proved impossible"
    reached = "no policy attains it" + (" so far" if found.interrupted else "")
    if best is not None:
        reached = f"{best.policy} attains it {_words(best, rates)} {what} {number(best.value)}"
    if found.impossible is not None:
        proved = (
            f"impossible for any schedule {'from' if rates else 'with'} {what} "
            f"{number(found.impossible)} {'on' if rates else 'or fewer'}"
        )

    print(f"attainment {found.question.attainment:g}: {reached}; {proved}")
    if rates and found.impossible is not None:
        print(f"the bound holds for {found.scope}")
    for row in found.rows:
        if row.error is not None:
            print(f"{row.policy}: {row.error}")

    if found.interrupted:
        print("interrupted: the values above are those found until then")
