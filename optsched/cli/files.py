"""``generate``, ``import`` and ``export``: instances from generators, traces, and into models."""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optsched.cli.options import (
    CostModelName,
    InstanceFile,
    Seed,
    check_number,
    check_outputs,
    check_rounds,
    key_values,
)
from optsched.cli.output import LiveLine, emit_json, unit
from optsched.problem.errors import UsageError

if TYPE_CHECKING:
    from optsched.problem.instance import Instance

Out = Annotated[
    str | None, typer.Option("-o", "--out", metavar="FILE", help="Default: standard output.")
]


def generate(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            show_default=False,
            help="jaillet-model-1, jaillet-model-2, uniform, lognormal, infermax-fixed, "
            "infermax-mix.",
        ),
    ],
    seed: Seed = 0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A parameter.")
    ] = None,
    out: Out = None,
) -> None:
    """Draw a random instance."""
    texts = key_values(settings)
    from optsched.workloads.generate import generate as run
    from optsched.workloads.generate import parse_parameters

    instance = run(name, seed=seed, **parse_parameters(name, texts))
    _write(instance, out)


def import_trace(
    format_name: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT",
            show_default=False,
            help="azure, burstgpt, csv, lmsys, mooncake, sharegpt, vidur, vllm.",
        ),
    ],
    file: Annotated[str, typer.Argument(metavar="FILE", show_default=False, help="The trace.")],
    offset: Annotated[int, typer.Option(metavar="N", help="Rows to skip.")] = 0,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Rows to take.")] = None,
    sample: Annotated[
        int | None, typer.Option(metavar="N", help="Keep N of them, drawn at random.")
    ] = None,
    seed: Seed = 0,
    kv_capacity: Annotated[
        int | None, typer.Option(metavar="N", help="KV capacity in tokens.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="R", help="Poisson arrivals of R per second; inf: all at 0. Default: its own."
        ),
    ] = None,
    rate_scale: Annotated[
        float, typer.Option(metavar="X", help="Arrivals come X times as fast.")
    ] = 1.0,
    rounds: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Make an instance in rounds of this length."),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=NAME",
            help="csv: the column of arrival, prompt_tokens, output_tokens, ttft, latency.",
        ),
    ] = None,
    unit_name: Annotated[
        str | None,
        typer.Option("--unit", metavar="UNIT", help="csv: of times: s, ms, us, ns, datetime."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="sharegpt, lmsys: file.py:NAME, tokenizer.json, or a Hugging Face name. "
            "Default: words.",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="A row that must be dropped or moved is an error.")
    ] = False,
    measured_out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the server's measured times: `compare`."),
    ] = None,
    out: Out = None,
) -> None:
    """Turn a trace into an instance."""
    check_number(rate_scale, "--rate-scale", 0.0, strict=True)
    check_number(rounds, "--rounds", 0.0, strict=True)
    check_number(offset, "--offset", 0)
    check_number(limit, "--limit", 1)
    check_number(sample, "--sample", 1)
    if rate != math.inf:
        check_number(rate, "--rate", 0.0, strict=True)
    columns = key_values(column, "--column")
    check_outputs(out, measured_out)
    from optsched.workloads.traces import read_trace_report

    with LiveLine() as line:
        instance, report = read_trace_report(
            format_name,
            file,
            offset=offset,
            limit=limit,
            sample=sample,
            seed=seed,
            kv_capacity=kv_capacity,
            rate=rate,
            rate_scale=rate_scale,
            round_seconds=rounds,
            columns=columns,
            unit=unit_name,
            tokenizer=tokenizer,
            strict=strict,
            progress=lambda rows: line.show(f"{rows} rows"),
        )
    for note in report.notes:
        print(f"warning: {file}: {note}", file=sys.stderr)
    if measured_out is not None and report.measured is None:
        raise UsageError(
            "--measured-out: there are measured times only where the trace carries them (vllm; "
            "csv with a column of latency) and is read whole, at its own arrivals, in seconds"
        )
    _write(instance, out)
    if measured_out is not None and report.measured is not None:
        from optsched.files.measured import write_measured

        write_measured(report.measured, measured_out)


def export(
    instance_file: InstanceFile,
    format_name: Annotated[
        str, typer.Option("--format", metavar="lp|mps|json", show_default=False, help="What.")
    ],
    out: Annotated[
        str, typer.Option("-o", "--out", metavar="FILE", show_default=False, help="Where.")
    ],
    formulation: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model of lp and mps: `formulations`.")
    ] = None,
    cost_model: CostModelName = None,
) -> None:
    """Write an instance's mathematical model, or itself."""
    if format_name not in ("lp", "mps", "json"):
        raise UsageError(f"--format: {format_name!r}; lp, mps or json is right")
    from optsched.files.read_write import read_instance, write_bytes, write_instance

    instance = read_instance(instance_file)
    check_outputs(out)
    if format_name == "json":
        write_instance(instance, out)
        return
    from optsched.costs.cost import cost_for
    from optsched.optimize.formulations import Task, formulations, get
    from optsched.problem.objective import parse_objectives

    model = get(formulation or ("hindsight" if instance.in_rounds else "infermax"))
    if model.export is None:
        able = ", ".join(name for name, one in formulations().items() if one.export)
        raise UsageError(f"--formulation: {model.name!r} has no {format_name} export; {able} can")
    if model.time_unit == "round":
        check_rounds(instance, model.name)
    elif instance.in_rounds:
        raise UsageError(
            f"--formulation: {model.name} needs an instance in seconds, this one is in rounds"
        )
    task = Task(instance, cost_for(instance, cost_model), parse_objectives(model.default_objective))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"model.{format_name}"
        model.export(task, format_name, file)
        write_bytes(file.read_bytes(), out)


def _write(instance: Instance, out: str | None) -> None:
    if out is None or out == "-":
        emit_json(instance.to_dict(), "-")
        return
    from optsched.files.read_write import write_instance

    check_outputs(out)
    write_instance(instance, out)
    last = instance.arrival.max()
    print(
        f"{out}: {instance.n} requests, arrivals to {last:g} {unit(instance)}, "
        f"kv_capacity {instance.kv_capacity} tokens"
    )
