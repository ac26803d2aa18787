"""``splits``: which splits into prefill and decode machines can be best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optsched.cli.options import UNSET, Given, read_problem, runs
from optsched.cli.output import LiveLine, emit_json, show_table, stop_at_ctrl_c, tell
from optsched.problem.errors import NoIncumbentError
from optsched.problem.metrics import TABLE

if TYPE_CHECKING:
    from optsched.analysis.splits import Splits


@runs("optsched.analysis.splits.splits")
def splits(
    instance_file: str,
    workers: int = 8,
    cost_model: str | None = None,
    link: str | None = None,
    slos: Given = UNSET,
    certificates_out: str | None = None,
    json_out: str | None = None,
    **options: Any,
) -> None:
    """Find which splits into prefill and decode pools can be best.

    Parameters:
      workers N: The number of machines, from 2 to 64.
      policies --policy SPEC: A policy to run on every split (repeatable).
      link LINK: A move of KV: latency=50us,bandwidth=50GB/s,model=llama3-8b.
      router NAME: The router in front of both pools.
      certificates_out DIR: Write certificates of the bounds into this folder.
      Rare: router
    """
    machines = {"workers": workers} if link is None else {"workers": workers, "link": link}
    problem = read_problem(instance_file, cost_model, machines, slos)
    from optsched.analysis.splits import splits as run
    from optsched.files.outputs import make_folder
    from optsched.files.read_write import write_json

    with LiveLine() as line, stop_at_ctrl_c() as stop:
        options |= {"certify": certificates_out is not None, "progress": line.show_progress}
        found = run(problem, stop=stop, **options)

    if certificates_out is not None:
        folder = make_folder(certificates_out)
        for row in found.rows:
            for name, certificate in row.certificates.items():
                write_json(certificate, folder / f"{row.pools}-{name}.json")

    if not emit_json(found.to_dict(), json_out):
        _show(found)
    if not any(row.bounds for row in found.rows):
        raise NoIncumbentError("the work was stopped before anything was proved")


def _show(found: Splits) -> None:
    for name in found.metrics:
        rows = [(row.pools, *found.cells(row, name)) for row in found.rows]
        print(TABLE[name].header("second", " "))
        headers = ("split", "bound", "found", "policy", "verdict")
        show_table(headers, rows, text_columns=(0, 3, 4), drop=["policy"])
        print()

    for row in found.rows:
        for error in row.errors:
            tell(f"{row.pools}: {error}")
    if found.interrupted:
        print("interrupted: the values above are those found until then")
