"""``experiment``: named, resumable experiments."""

from __future__ import annotations

from typing import Annotated

import typer

from optsched.cli.options import JsonOut, Seed, check_folder, check_outputs, key_values
from optsched.cli.output import LiveLine, emit_json, show_table


def experiment(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME|list", show_default=False, help="An experiment, or list."),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A parameter; lists as a,b,c."),
    ] = None,
    trials: Annotated[
        int | None, typer.Option("--trials", metavar="N", help="How many trials, from the first.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", help="Processes.")] = 1,
    engine: Annotated[
        str, typer.Option("--engine", metavar="local|dask", help="Where the processes are.")
    ] = "local",
    seed: Seed = 0,
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="DIR", help="Store, results.csv and summary.json."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Keep or forget finished trials in --out.")
    ] = True,
    json_out: JsonOut = None,
) -> None:
    """Run a paper's experiment and print its statements beside ours."""
    if name == "list":
        _list()
        return
    given = key_values(settings)
    check_folder(out)
    check_outputs(json_out)
    from optsched.errors import InputError
    from optsched.experiments.runner import run_experiment

    with LiveLine() as line:
        outcome = run_experiment(
            name,
            given,
            trials=trials,
            jobs=jobs,
            engine=engine,
            seed=seed,
            out=out,
            resume=resume,
            progress=lambda done, of: line.show(f"{done} of {of} trials"),
        )
    emit_json(outcome.summary(), json_out)
    if json_out == "-":
        return
    errors = sorted({str(row["error"]) for row in outcome.rows if row.get("error")})
    if errors and not outcome.claims:
        raise InputError(f"experiment {outcome.experiment.name}: no trial succeeded: {errors[0]}")
    words = {True: "yes", False: "NO", None: ""}
    show_table(
        ("statement", "paper", "ours", "within 15 %"),
        [(c.what, _text(c.paper), _text(c.ours), words[c.verdict]) for c in outcome.claims],
        text_columns=range(4),
    )
    failed = sum(1 for row in outcome.rows if row.get("error"))
    print(
        f"\n{len(outcome.rows)} trials ({outcome.resumed} from the store, {failed} without a "
        f"schedule), {outcome.experiment.paper}"
    )


def _list() -> None:
    from optsched.experiments import experiments

    show_table(
        ("experiment", "summary", "parameters", "source"),
        [
            (e.name, e.summary, ", ".join(e.parameters), e.paper)
            for e in experiments().values()
        ],
        text_columns=range(4),
    )  # fmt: skip


def _text(value: float | str | None) -> str | None:
    return f"{value:.4g}" if isinstance(value, float) else value
