"""``splits``: which splits into prefill and decode machines can be best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from optsched.cli.options import ABOVE_0, NO_SLOS, Seed, Slos, check_suffix, read_checked
from optsched.cli.output import LiveLine, emit_json, show_table, stop_at_ctrl_c, tell
from optsched.problem.errors import NoIncumbentError
from optsched.problem.metrics import TABLE

if TYPE_CHECKING:
    from optsched.analysis.splits import Splits


def splits(
    instance_file: str,
    workers: int = 8,
    policies: list[str] | None = None,
    cost_model: str | None = None,
    link: str | None = None,
    router: str = "least-requests",
    slos: Slos = NO_SLOS,
    time_limit: Annotated[float | None, ABOVE_0] = None,
    seed: Seed = 0,
    out: str | None = None,
    certificates: str | None = None,
    json_out: str | None = None,
) -> None:
    """Find which splits of machines into prefill and decode pools can be best, with proofs.

    Parameters:
      workers N: The number of machines, from 2 to 64.
      policies --policy SPEC: A policy to run on every split (repeatable).
      link TEXT: What a move of KV takes, such as latency=50us,bandwidth=50GB/s,model=llama3-8b.
      router NAME: The router in front of both pools.
      out -o --out FILE: Draw the intervals of mean latency to this .png, .svg or .pdf file.
      certificates DIR: Write certificates of the bounds into this folder.
    """
    if out is not None:
        check_suffix(out, "--out", ".png", ".svg", ".pdf")

    instance, cost = read_checked(instance_file, cost_model, json_out, out, folder=certificates)
    from optsched.analysis.splits import splits as run

    with LiveLine() as line, stop_at_ctrl_c() as stop:
        found = run(
            instance,
            workers,
            policies or None,
            cost_model=cost,
            link=link,
            router=router,
            time_limit_s=time_limit,
            seed=seed,
            certify=certificates is not None,
            progress=lambda name: line.show(f"split {name}"),
            stop=stop,
            **slos,
        )

    if certificates is not None:
        _write(found, certificates)
    if out is not None:
        _draw(found, out)
    if not emit_json(found.to_dict(), json_out):
        _show(found)
    if not any(row.bounds for row in found.rows):
        raise NoIncumbentError("the work was stopped before anything was proved")


def _write(found: Splits, folder: str) -> None:
    from optsched.files.outputs import make_folder
    from optsched.files.read_write import write_json

    there = make_folder(folder)
    for row in found.rows:
        for name, certificate in row.certificates.items():
            write_json(certificate, there / f"{row.pools}-{name}.json")


def _draw(found: Splits, out: str) -> None:
    from optsched.show.plot import plot_splits, style

    name = found.metrics[0]
    rows = [
        (row.pools, row.bounds.get(name), row.found.get(name), found.verdict(row, name))
        for row in found.rows
    ]
    canvas = style.figure()
    plot_splits(rows, ylabel=TABLE[name].header("second", " "), ax=canvas.subplots())
    style.save(canvas, out)


def _show(found: Splits) -> None:
    for name in found.metrics:
        metric = TABLE[name]
        headers = ("split", "bound", "found", "policy", "verdict")
        rows = [
            (
                row.pools,
                row.bounds.get(name),
                row.found.get(name),
                row.policies.get(name, ""),
                found.verdict(row, name),
            )
            for row in found.rows
        ]
        print(metric.header("second", " "))
        show_table(headers, rows, text_columns=(0, 3, 4), drop=["policy"])
        print()

    for row in found.rows:
        for error in row.errors:
            tell(f"{row.pools}: {error}")
    if found.interrupted:
        print("interrupted: the values above are those found until then")
