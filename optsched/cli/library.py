"""``library``: instances with their best known schedules and bounds; and ``score``, the referee."""

from functools import partial
from typing import Annotated, Any

import typer

from optsched.cli.options import ABOVE_0, ARGUMENT, runs
from optsched.cli.output import LiveLine, emit_json, number, show_table, tell
from optsched.files.library import PREFIX, entry_of, instance_file, library_folder, read_library
from optsched.problem.processes import memory_bytes

_HEADERS = ("instance", "family", "objective", "requests", "best known", "bound", "gap", "status")


def list_library(folder: str | None = None, json_out: str | None = None) -> None:
    """List the instances with their best known values and bounds.

    Parameters:
      folder DIR: Another library's folder.
    """
    from optsched.analysis.library import gap

    data = read_library(folder)
    if emit_json(data, json_out):
        return

    rows = []
    for name, entry in data["instances"].items():
        what = [entry["family"], entry["objective"], entry["requests"]]
        known = [entry.get(key) for key in ("best", "bound")]
        values = [None if one is None else number(one["value"]) for one in known]
        share = gap(entry)
        shown = None if share is None else f"{share:.2%}"
        rows.append([name, *what, *values, shown, entry["status"]])

    show_table(_HEADERS, rows, text_columns=(0, 1, 2, 7), drop=("requests", "objective"))
    still = sum(entry["status"] == "open" for entry in data["instances"].values())
    print(f"\nrelease {data['release']}: {len(rows)} instances, {still} of them open")


def show(name: str, folder: str | None = None, json_out: str | None = None) -> None:
    """Show what is known of an instance.

    Parameters:
      name NAME: The instance, as `optsched list library` names it.
      folder DIR: Another library's folder.
    """
    bare = name.removeprefix(PREFIX)
    data = read_library(folder)
    entry = entry_of(name, data)
    families = {entry["family"]: data["families"][entry["family"]]}
    if emit_json({**data, "families": families, "instances": {bare: entry}}, json_out):
        return

    print(f"{bare} ({entry['family']}): {entry['purpose']}\n")
    print(f"file: {instance_file(bare, folder)}")
    about = ("source", "objective", "cost_model", "workers", "pools", "link")
    for key in (*about, "requests", "instance_sha256"):
        if entry.get(key) is not None:
            print(f"{key}: {entry[key]}")

    for key in ("best", "bound"):
        record = entry.get(key)
        if record is None:
            print(f"{key}: none")
            continue

        took = "" if record["seconds"] is None else f", {record['seconds']:g} s"
        print(
            f"{key}: {record['value']} ({record['date']}, {record['by']}, {record['method']}{took})"
        )
        print(f"  in {library_folder(folder) / record['file']}")

    print(f"status: {entry['status']}")


@runs("optsched.analysis.library.verify")
def verify(
    names: Annotated[list[str] | None, ARGUMENT] = None,
    **options: Any,
) -> None:
    """Replay every schedule and check every certificate, without a solver.

    The exit status is 5 if anything is not as the library says.

    Parameters:
      names NAME: Instances or families (repeatable). By default all are verified.
      folder DIR: Another library's folder.
      jobs N: How many processes to use. By default as many as there are cores.
      tight: Whether a certificate that proves a unit more than its value is wrong, too.
    """
    from optsched.analysis import library

    chosen = library.select(names or [], library.read_library(options.get("folder")))
    with LiveLine() as line:
        told = partial(line.show_count, what="instances")
        wrong = library.verify(names or [], progress=told, **options)

    for name, words in wrong.items():
        tell(f"{name}: {words}")

    print(f"instances: {len(chosen)}, failures: {len(wrong)}")
    if wrong:
        raise typer.Exit(5)


@runs("optsched.analysis.library.check")
def check(files: list[str], write: bool = False, **options: Any) -> None:
    """Say whether schedules or certificates beat those of the library.

    The answer is better (with the line to put into bks.json), not better, or not feasible (with the
    rule that is broken); for the last the exit status is 5.

    Parameters:
      files FILE: Schedules or certificates, which name their instance by its digest.
      by NAME: Who found them.
      method TEXT: How they were found.
      seconds --took S: The seconds that it took.
      threads N: The number of threads that it took.
      write: Put what is better into the library: the file, and the line of bks.json.
      folder DIR: Another library's folder.
    """
    from optsched.analysis import library

    failed = False
    for file in files:
        answer = library.check(file, **options)
        print(f"{file}: {answer.instance}: {answer.verdict}: {answer.words}")
        failed |= answer.verdict == "not feasible"
        if answer.line is None:
            continue

        if write:
            library.adopt(answer, options["folder"])
            print(f"it is in {library.library_folder(options['folder'])} now")
        else:
            print(f"the line for bks.json (--write puts it there):\n    {answer.line}")

    if failed:
        raise typer.Exit(5)


@runs("optsched.analysis.score.score")
def score(
    policy: str,
    families: list[str] | None = None,
    time_limit: Annotated[float, ABOVE_0] = 10.0,
    memory_limit: str = "4GiB",
    timings: bool = False,
    task_out: str | None = None,
    json_out: str | None = None,
    **options: Any,
) -> None:
    """Score a policy on the library, beside a score that none can have.

    The policy runs in a process of its own, under limits on time and memory. The score is the
    geometric mean of its values over those of fcfs, and the floor is that of the bounds.

    Parameters:
      policy POLICY: The policy: a name, or my_policy.py:Class.
      families --library NAME: A family or an instance (repeatable). By default all with a bound.
      objective METRIC: Of these, those about this metric only.
      time_limit S: The time limit in seconds for each instance.
      memory_limit SIZE: The max memory of the policy's process, such as 4GiB.
      timings: Write the seconds of each run into the JSON, too.
      task_out DIR: Write a folder that OpenEvolve takes, to evolve this policy here.
      folder DIR: Another library's folder.
      Rare: memory_limit, timings, folder
    """
    from optsched.analysis.score import score as run

    options |= {"time_limit_s": time_limit, "memory_limit": memory_bytes(memory_limit)}
    found = run(policy, families or [], **options)
    if task_out is not None:
        found.write_task(task_out, time_limit)
    if emit_json(found.to_dict(times=timings), json_out):
        return

    rows = []
    for row in found.rows:
        share = "-" if row.captured is None else "{:.1%} to {:.1%}".format(*row.captured)
        what = "failed" if row.failure else share
        rows.append((row.instance, row.value, row.fcfs, row.best_known, row.bound, what))

    headers = ("instance", "value", "fcfs", "best known", "bound", "of the headroom")
    show_table(headers, rows, text_columns=(0, 5))
    for row in found.rows:
        if row.failure is not None:
            tell(f"{row.instance}: {row.failure['error']}")

    value = "none, since it failed" if found.value is None else f"{found.value:.4f}"
    print(f"\nscore {value}; fcfs 1, best known {found.best_known:.4f}, floor {found.bound:.4f}")
    if found.value is not None:
        above = found.value / found.bound - 1
        print(f"no policy is below the floor; this one is {above:.1%} above it")
