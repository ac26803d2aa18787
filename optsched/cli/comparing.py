"""``compare``: policies on one instance, with the best known value and a bound."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, floor
from typing import TYPE_CHECKING, Any

from optsched.cli import output
from optsched.cli.options import Given, runs
from optsched.cli.output import number
from optsched.files.outputs import file_name, make_folder
from optsched.problem.budget import Budget
from optsched.problem.errors import NoIncumbentError, UsageError, ViolationError
from optsched.problem.metrics import TABLE
from optsched.workloads.problem import Problem

if TYPE_CHECKING:
    from optsched.analysis.compare import Comparison

# The share of the time limit for ``--pools auto``.
_SPLIT_SHARE = 0.5


@runs("optsched.analysis.compare.compare")
def compare(
    problem: Problem,
    machines: Given,
    schedules_out: str | None = None,
    measured: str | None = None,
    json_out: str | None = None,
    **options: Any,
) -> None:
    """Compare policies with the best known schedule and a bound.

    Parameters:
      workers N: Equal machines; also those that --pools auto splits, 2 to 64.
      objective METRIC: What policies are compared by (`optsched list metrics`).
      bound --bound/--no-bound: Whether to look for a bound and a better schedule.
      schedules_out DIR: Write every policy's schedule, and best.json.
      store DIR: Begin with the optima that `ratios` has kept here.
      measured FILE: Add a row of what a server measured (`import --measured-out`).
      Rare: workers, measured, store
    """
    is_split = machines.get("pools") == "auto"  # of so many workers
    if is_split and "workers" not in machines:
        raise UsageError("--pools auto: found no --workers; expected both")

    from optsched.analysis.compare import compare as run
    from optsched.analysis.splits import best_split

    with output.LiveLine() as line, output.stop_at_ctrl_c() as stop:
        options |= {"progress": line.show_progress, "stop": stop}
        if is_split:
            budget = Budget(options["time_limit_s"])
            of_split = {**options, "time_limit_s": _SPLIT_SHARE * budget.limit_s}
            for name in ("bound", "store"):
                del of_split[name]  # these are not for `best_split`
            best, words = best_split(problem, **of_split)
            output.tell(words)
            problem = replace(problem, fleet=problem.fleet.split(best))
            options["time_limit_s"] = budget.left_s

        keep = schedules_out is not None
        comparison = run(problem, keep_schedules=keep, measured=measured, **options)

    data = comparison.to_dict()
    if schedules_out is not None:
        _save_schedules(comparison, schedules_out, data)
    if not output.emit_json(data, json_out):
        _show(comparison, options["bound"])

    for row in comparison.rows:
        if row.rule is not None:
            raise ViolationError(str(row.error), rule=row.rule)

    ran = [row for row in comparison.rows if not row.measured]
    if all(row.metrics is None for row in ran):
        reasons = "; ".join(f"{row.policy}: {row.error}" for row in ran)
        raise NoIncumbentError(f"no policy found a schedule ({reasons})")


def _save_schedules(comparison: Comparison, target: str, data: dict[str, Any]) -> None:
    """Write all schedules into a folder, and their files' names into the object of the JSON."""
    folder = make_folder(target)
    used = {"best"}  # to which `file_name` adds each name, so that no two files have one
    for row, entry in zip(comparison.rows, data["policies"], strict=True):
        if row.schedule is not None:
            file = str(folder / f"{file_name(row.policy, used)}.json")
            output.save_schedule(row.schedule, file)
            entry["schedule"] = file

    if comparison.schedule is not None:
        file = str(folder / "best.json")
        output.save_schedule(comparison.schedule, file)
        data["best"]["schedule"] = file


# Words of columns that are shorter on a terminal.
_SHORT = {
    "kind": "",
    "/ best known": "/ best",
    "SLO attainment": "SLO\nattainment",
    "decisions": "wall",
}
# Columns that a narrow terminal goes without, the first of them first. The mean latency is the TEL
# over the number of requests, and the column "" has "clairvoyant".
_DROPPED = ("wall", "mean TPOT", "evictions", "makespan", "mean TTFT", "mean latency", "")


def _show(comparison: Comparison, bound_wanted: bool) -> None:
    """Print the table of policies, what their ratios mean, both ends, and all notes."""
    _show_policies(comparison)
    _show_ends(comparison, bound_wanted)
    if comparison.predictor == "oracle":
        print("predictor: oracle (the instance carries no predictions)")
    for row in comparison.rows:
        for note in row.notes:
            print(f"{row.policy}: {note}")
        if row.error is not None:
            print(f"{row.policy}: no schedule: {row.error}")

    for note in comparison.notes:
        print(note)
    if comparison.interrupted:
        print("interrupted: the results above are those that had finished")


def _show_policies(comparison: Comparison) -> None:
    """Print a row for each policy, and below, unless one table is wanted, what ratios mean."""
    from optsched.analysis.comparison import MEANING, outwards, policy_columns

    ranked = comparison.shown
    shown: list[dict[str, Any]] = [row.to_dict() for row in ranked]
    if not shown:
        return
    if comparison.bounds:
        shown.append({"policy": "bound", "metrics": comparison.bounds})

    # A metric's name may have parameters behind a colon.
    metric = TABLE[comparison.objective_name.partition(":")[0]]
    columns = policy_columns(shown, comparison.instance.time_unit, metric.name)
    if output.one_table():
        columns.append(MEANING)

    heads = [(_SHORT.get(words, words), unit) for words, unit, _ in columns]
    headers = [f"{words}\n[{unit}]" if unit else words for words, unit in heads]
    drop = [header for name in _DROPPED for header in headers if header.split("\n")[0] == name]
    rows = [[value(row) for *_, value in columns] for row in shown]
    if comparison.status != "optimal" and not output.one_table():
        for k, rounded in (3, floor), (4, ceil):  # the two ratios, as the words below have them
            for cells in rows:
                cells[k] = None if cells[k] is None else outwards(cells[k], rounded, 3)

    missing = output.show_table(headers, rows, text_columns=(0, 1), drop=drop)
    if "" in missing:  # the column of kinds, which has no header, did not fit
        names = [row.policy for row in ranked if row.clairvoyant]
        print(f"clairvoyant: {', '.join(names) or 'none'}")

    print()
    explained = [row for row in ranked if row.meaning is not None and row is not comparison.best]
    if explained and comparison.bound is not None and not output.one_table():
        words = "times the optimum"
        cells = [(row.policy, str(row.meaning).removesuffix(f" {words}")) for row in explained]
        output.show_table(["policy", words], cells, text_columns=(0, 1))
        print()


def _show_ends(comparison: Comparison, bound_wanted: bool) -> None:
    """Print the bound and the best known value, and what the bound holds for."""
    metric = TABLE[comparison.objective_name.partition(":")[0]]
    unit = metric.unit_words(comparison.instance.time_unit)
    best = f"best known {number(comparison.value)} {unit} from {comparison.found_by}"
    if comparison.bound is not None:
        bound = f"bound {number(comparison.bound)} {unit} from {comparison.method}"
        optimal = " (optimal)" if comparison.status == "optimal" else ""
        print(f"{bound}; {best}; gap {output.percent(comparison.gap)}{optimal}")
        print(f"the bound holds for {comparison.scope}")
        return

    print("bound: " + ("none known" if bound_wanted else "not asked for"))
    if comparison.value is not None:
        print(best)
