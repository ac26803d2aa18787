"""``generate``, ``import`` and ``export``: instances from generators and traces, and as models."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer.core import TyperArgument, TyperCommand

from optsched.cli.options import (
    CostModelName,
    InstanceFile,
    Seed,
    above_0,
    argument,
    at_least_0,
    check_outputs,
    check_rounds,
    flag,
    in_range,
    key_values,
    option,
    required,
    shared,
)
from optsched.cli.output import LiveLine, emit_json, unit
from optsched.problem.errors import UsageError

if TYPE_CHECKING:
    from optsched.problem.instance import Instance

Out = Annotated[
    str | None,
    shared(
        "FILE", "Write the instance to this file. The default is standard output.", names="-o --out"
    ),
]
GENERATORS = (
    "The generator: jaillet-model-1, jaillet-model-2, uniform, lognormal, infermax-fixed or "
    "infermax-mix."
)


def generate(
    name: str = argument("NAME", GENERATORS),
    seed: Seed = 0,
    settings: list[str] | None = option(
        "KEY=VALUE", "Set a parameter of the generator (repeatable).", names="--set"
    ),
    out: Out = None,
) -> None:
    """Draw a random instance."""
    texts = key_values(settings)
    from optsched.workloads.generate import generate as run, parse_parameters

    instance = run(name, seed=seed, **parse_parameters(name, texts))
    _write(instance, out)


class ImportCommand(TyperCommand):
    """The command ``import``, whose help lists the formats that the registry finds."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help; only now are the formats loaded."""
        from optsched.workloads.traces import trace_formats

        for parameter in self.params:
            if isinstance(parameter, TyperArgument) and parameter.name == "format_name":
                parameter.help = f"The format: {', '.join(trace_formats())}."

        super().format_help(ctx, formatter)


def import_trace(
    format_name: str = argument("FORMAT", ""),
    file: str = argument("FILE", "The file of the trace."),
    offset: int = option("N", "The number of rows to skip.", 0, callback=at_least_0),
    limit: int | None = option("N", "The max number of rows to take.", callback=in_range(1)),
    sample: int | None = option("N", "Keep N of the rows, drawn at random.", callback=in_range(1)),
    seed: Seed = 0,
    kv_capacity: int | None = option(
        "N", "The KV capacity in tokens. The default in seconds is 100000, Llama-2-7B on one A100."
    ),
    cost_model: str | None = option(
        "NAME|FILE.toml", "Take the KV capacity of this model's machine."
    ),
    kv_block_tokens: int = option(
        "B", "The tokens of a KV block. A request holds whole blocks.", 1, callback=in_range(1)
    ),
    rate: float | None = option(
        "R",
        "Draw Poisson arrivals of R per second. With inf all arrive at 0. "
        "By default the trace's own arrivals are kept.",
        callback=in_range(0.0, strict=True, infinite=True),
    ),
    rate_scale: float = option("X", "Make arrivals X times as fast.", 1.0, callback=above_0),
    rounds: float | None = option(
        "SECONDS", "Make an instance in rounds, each of this length.", callback=above_0
    ),
    column: list[str] | None = option(
        "FIELD=NAME",
        "For csv and jsonl, the name of the column of a field (repeatable): arrival, "
        "prompt_tokens, output_tokens, ttft and latency from the arrival, first_token_at and "
        "finished_at as points in time, status, and rows, the list of requests in a JSON "
        "document. In JSON a point leads into an object: usage.prompt_tokens.",
    ),
    units: list[str] | None = option(
        "UNIT|FIELD=UNIT",
        "The unit of times, or of one field (repeatable): s, ms, us, ns or datetime. By "
        "default it is the format's; s for csv and jsonl.",
        names="--unit",
    ),
    success: list[str] | None = option(
        "WORD", "For csv and jsonl, a further word of the status that means success (repeatable)."
    ),
    run: int | None = option("N", "Of a file with several runs, the run to read; -1 is the last."),
    tokenizer: str | None = option(
        "NAME|FILE",
        "For sharegpt and lmsys, the tokenizer: file.py:NAME, tokenizer.json, or a Hugging "
        "Face name. By default words are counted.",
    ),
    strict: bool = flag("--strict", "Refuse rows that must be dropped or moved, and what is odd."),
    measured_out: str | None = option(
        "FILE", "Write the times that the server measured, for `compare --measured`."
    ),
    out: Out = None,
) -> None:
    """Make an instance from a trace."""
    columns = key_values(column, "--column")
    by_field = key_values([text for text in units or () if "=" in text], "--unit")
    for text in units or ():
        if "=" not in text and by_field.setdefault("", text) != text:
            raise UsageError(f"--unit: found {text!r} beside {by_field['']!r}; expected FIELD=UNIT")

    check_outputs(out, measured_out)
    if cost_model is not None:
        kv_capacity = _capacity_of(cost_model, kv_capacity, kv_block_tokens)

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
            kv_block_tokens=kv_block_tokens,
            rate=rate,
            rate_scale=rate_scale,
            round_seconds=rounds,
            columns=columns,
            unit=by_field,
            success=success or (),
            run=run,
            tokenizer=tokenizer,
            strict=strict,
            progress=lambda rows: line.show(f"{rows} rows"),
        )

    for note in report.notes:
        print(f"warning: {file}: {note}", file=sys.stderr)
    if measured_out is not None and report.measured is None:
        raise UsageError(
            f"--measured-out: found no measured times: found {report.unmeasured}; expected a trace "
            "that has latencies and arrivals and is read whole, at its own arrivals, in seconds"
        )

    _write(instance, out)
    if kv_capacity is None:
        print(
            f"note: no KV capacity is given, so it is {instance.kv_capacity} tokens, whatever "
            "machine a cost model describes; --cost-model NAME takes the machine's",
            file=sys.stderr,
        )

    if measured_out is not None and report.measured is not None:
        from optsched.files.measured import write_measured

        write_measured(report.measured, measured_out)


def export(
    instance_file: InstanceFile,
    format_name: str = required(
        "lp|mps|json",
        "The format: lp or mps for the mathematical model, json for the instance itself.",
        names="--format",
    ),
    out: str = required("FILE", "Write to this file.", names="-o --out"),
    formulation: str | None = option(
        "NAME", "The formulation for lp and mps. `optsched formulations` lists them."
    ),
    cost_model: CostModelName = None,
) -> None:
    """Write an instance's mathematical model, or the instance itself."""
    if format_name not in ("lp", "mps", "json"):
        raise UsageError(f"--format: found {format_name!r}; expected lp, mps or json")

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
        raise UsageError(
            f"--formulation: found {model.name!r}, which has no {format_name} export; expected "
            f"{able}"
        )

    if model.time_unit == "round":
        check_rounds(instance, model.name)
    elif instance.in_rounds:
        raise UsageError(
            f"--formulation: found {model.name} for an instance in rounds; expected an instance in "
            "seconds"
        )

    task = Task(instance, cost_for(instance, cost_model), parse_objectives(model.default_objective))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"model.{format_name}"
        model.export(task, format_name, file)
        write_bytes(file.read_bytes(), out)


def _capacity_of(cost_model: str, given: int | None, block: int) -> int:
    """Return the KV capacity of a cost model's machine, in whole blocks."""
    from optsched.costs.cost import load_cost_model

    if given is not None:
        raise UsageError(
            f"--kv-capacity: found {given} beside --cost-model, which sets it; expected one of both"
        )

    cost = load_cost_model(cost_model)
    if cost.kv_capacity_tokens is None:
        raise UsageError(
            f"--cost-model: found no KV capacity in {cost.name!r}; expected --kv-capacity"
        )

    return cost.kv_capacity_tokens // block * block


def _write(instance: Instance, out: str | None) -> None:
    if out is None or out == "-":
        emit_json(instance.to_dict(), "-")
        return

    from optsched.files.read_write import write_instance

    check_outputs(out)
    write_instance(instance, out)
    last = instance.release_times.max()
    print(
        f"{out}: {instance.n} requests, arrivals to {last:g} {unit(instance)}, "
        f"kv_capacity {instance.kv_capacity} tokens"
    )
