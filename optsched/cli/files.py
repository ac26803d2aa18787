"""``generate``, ``import`` and ``export``: instances from generators and traces, and as models."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer.core import TyperCommand

from optsched.cli import options
from optsched.cli.options import ABOVE_0, AT_LEAST_0, AT_LEAST_1, Seed, check_outputs, key_values
from optsched.cli.output import LiveLine, emit_json, tell, unit
from optsched.costs.cost import load_cost_model
from optsched.costs.fleet import fleet_of
from optsched.files.library import cost_model_of
from optsched.files.measured import settings_beside, write_measured
from optsched.files.read_write import read_instance, write_bytes, write_instance
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance, Limits

RATE = {"callback": options.in_range(0.0, strict=True, infinite=True)}


def generate(
    name: str,
    seed: Seed = 0,
    settings: list[str] | None = None,
    cost_model: str | None = None,
    out: str | None = None,
) -> None:
    """Draw a random instance.

    Parameters:
      name NAME: The generator: jaillet-model-1, jaillet-model-2, uniform, lognormal,
        infermax-fixed, infermax-mix, prefix-trees or agent-sessions, as described below.
      settings --set KEY=VALUE: Set a parameter of the generator (repeatable).
      cost_model NAME|FILE.toml: Take the KV capacity of this model's machine.
      out -o --out FILE: Write the instance to this file. The default is standard output.
    """
    texts = key_values(settings)
    if cost_model is not None:
        given = texts.get("kv_capacity")
        texts["kv_capacity"] = str(_capacity_of(cost_model, given, 1, "--set kv_capacity"))

    from optsched.workloads.generate import generate as run, parse_parameters

    instance = run(name, seed=seed, **parse_parameters(name, texts))
    _write(instance, out)


class RegistryCommand(TyperCommand):
    """The commands ``import`` and ``generate``, whose help lists what registries find."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help; only now are the registries loaded."""
        from optsched.workloads.generate import generators
        from optsched.workloads.traces import trace_formats

        kinds = [f"FORMAT: {', '.join(trace_formats())}."]
        if self.name == "generate":
            kinds = [
                f"{name}: {one.summary}. Parameters: {', '.join(one.parameters)}."
                for name, one in generators().items()
            ]

        self.epilog = "\n\n".join([*kinds, str(self.epilog)])

        super().format_help(ctx, formatter)


def import_trace(
    format_name: str,
    file: str,
    offset: Annotated[int, AT_LEAST_0] = 0,
    limit: Annotated[int | None, AT_LEAST_1] = None,
    sample: Annotated[int | None, AT_LEAST_1] = None,
    seed: Seed = 0,
    kv_capacity: int | None = None,
    cost_model: str | None = None,
    kv_block_tokens: Annotated[int, AT_LEAST_1] = 1,
    rate: Annotated[float | None, RATE] = None,
    rate_scale: Annotated[float, ABOVE_0] = 1.0,
    rounds: Annotated[float | None, ABOVE_0] = None,
    column: list[str] | None = None,
    units: list[str] | None = None,
    success: list[str] | None = None,
    run: int | None = None,
    tokenizer: str | None = None,
    prefixes: bool | None = None,
    outputs: str = "none",
    slack: bool = False,
    sessions: bool = False,
    think_scale: Annotated[float, ABOVE_0] = 1.0,
    ids_tokens: Annotated[int | None, AT_LEAST_1] = None,
    prefix_block_tokens: Annotated[int | None, AT_LEAST_1] = None,
    strict: bool = False,
    measured_out: str | None = None,
    out: str | None = None,
) -> None:
    """Make an instance from a trace.

    Parameters:
      format_name FORMAT: The format, one of those below.
      file FILE: The file of the trace.
      offset N: The number of rows to skip.
      limit N: The max number of rows to take.
      sample N: Keep N of the rows, drawn at random.
      kv_capacity N: The KV capacity in tokens. The default in seconds is 100000, Llama-2-7B on one
        A100. For llmservingsim it is that of meta.json beside the run, as are the limits.
      cost_model NAME|FILE.toml: Take the KV capacity of this model's machine.
      kv_block_tokens B: The tokens of a KV block. A request holds whole blocks.
      rate R: Draw Poisson arrivals of R per second. With inf all arrive at 0. By default the
        trace's own arrivals are kept.
      rate_scale X: Make arrivals X times as fast.
      rounds SECONDS: Make an instance in rounds, each of this length.
      column FIELD=NAME: For csv and jsonl, the name of the column of a field (repeatable): arrival,
        prompt_tokens and output_tokens (A+B adds two columns), ttft and latency, first_token_at and
        finished_at as points in time, status, and rows, the list of requests in a JSON document. In
        JSON a point leads into an object: usage.prompt_tokens.
      units --unit UNIT|FIELD=UNIT: The unit of times, or of one field (repeatable): s, ms, us, ns
        or datetime. By default it is the format's; s for csv and jsonl.
      success WORD: For csv and jsonl, a further word of the status that means success
        (repeatable).
      run N: Of a file with several runs, the run to read; -1 is the last.
      tokenizer NAME|FILE: For sharegpt and lmsys, the tokenizer: file.py:NAME, tokenizer.json, or a
        Hugging Face name. By default words are counted.
      prefixes --prefixes/--no-prefixes: Whether to keep the prefixes that requests share, which
        the trace has as ids of blocks or tokens. By default they are kept, but not in rounds.
      outputs none|granted: Whether a prompt that goes on behind an earlier one repeats its output,
        too, where only prompts have ids.
      slack: Let requests share what ids of blocks may hide, up to the next block.
      sessions: Release each call when the ones before it have ended, after the trace's think time;
        --rate then draws the arrivals of sessions.
      think_scale X: With --sessions, make think times X times as long.
      ids_tokens N: The tokens that an id stands for. By default it is the format's.
      prefix_block_tokens B: The tokens of the blocks in which KV is shared. By default those of an
        id.
      strict: Refuse rows that must be dropped or moved, and what is odd.
      measured_out FILE: Write the times that the server measured, for `compare --measured`.
      out -o --out FILE: Write the instance to this file. The default is standard output.
    """
    columns = key_values(column, "--column")
    by_field = key_values([text for text in units or () if "=" in text], "--unit")
    for text in units or ():
        if "=" not in text and by_field.setdefault("", text) != text:
            raise UsageError(f"--unit: found {text!r} beside {by_field['']!r}; expected FIELD=UNIT")

    check_outputs(out, measured_out)
    if format_name == "llmservingsim" and Path(file).is_dir():
        file = str(Path(file) / "requests.jsonl")
    limits = Limits()
    if cost_model is not None:
        kv_capacity = _capacity_of(cost_model, kv_capacity, kv_block_tokens)
    if format_name == "llmservingsim" and rounds is None:
        kv_capacity, kv_block_tokens, limits = _server_beside(file, kv_capacity, kv_block_tokens)

    from optsched.workloads.traces import read_trace_report

    asked: dict[str, Any] = {"offset": offset, "limit": limit, "sample": sample, "seed": seed}
    asked |= {"kv_capacity": kv_capacity, "kv_block_tokens": kv_block_tokens, "run": run}
    asked |= {"rate": rate, "rate_scale": rate_scale, "round_seconds": rounds, "strict": strict}
    asked |= {"columns": columns, "unit": by_field, "success": success or ()}
    asked |= {"sessions": sessions, "think_scale": think_scale}
    of_prefixes = {
        "--outputs": outputs != "none",
        "--slack": slack,
        "--ids-tokens": ids_tokens,
        "--prefix-block-tokens": prefix_block_tokens,
    }
    named = [name for name, given in of_prefixes.items() if given]
    if named and prefixes is False:
        raise UsageError(f"{', '.join(named)}: found with --no-prefixes; expected either")

    asked |= {"prefixes": True if named else prefixes, "outputs": outputs, "slack": slack}
    asked |= {"ids_tokens": ids_tokens, "prefix_block_tokens": prefix_block_tokens}
    with LiveLine() as line:
        asked |= {"tokenizer": tokenizer, "progress": lambda rows: line.show(f"{rows} rows")}
        instance, report = read_trace_report(format_name, file, **asked)

    for note in report.notes:
        tell(f"warning: {file}: {note}")
    if measured_out is not None and report.measured is None:
        raise UsageError(
            f"--measured-out: found no measured times: found {report.unmeasured}; expected a trace "
            "that has latencies and arrivals and is read whole, at its own arrivals, in seconds"
        )

    taken = report.measured
    if limits.as_dict():
        instance = replace(instance, limits=limits)
        taken = None if taken is None else replace(taken, instance_sha256=instance.sha256)

    _write(instance, out)
    if kv_capacity is None:
        tell(
            f"note: no KV capacity is given, so it is {instance.kv_capacity} tokens, whatever "
            "machine a cost model describes; --cost-model NAME takes the machine's"
        )

    if measured_out is not None and taken is not None:
        write_measured(taken, measured_out)


def export(
    instance_file: str,
    format_name: str,
    out: str,
    formulation: str | None = None,
    cost_model: str | None = None,
) -> None:
    """Write an instance's mathematical model, or the instance itself, also for another machine.

    Parameters:
      format_name --format lp|mps|json: The format: lp or mps for the mathematical model, json for
        the instance itself, with the KV capacity of a cost model's machine if one is given.
      out -o --out FILE: Write to this file.
      formulation NAME: The formulation for lp and mps. `optsched formulations` lists them.
    """
    if format_name not in ("lp", "mps", "json"):
        raise UsageError(f"--format: found {format_name!r}; expected lp, mps or json")

    instance = read_instance(instance_file)
    check_outputs(out)
    if format_name == "json":
        if cost_model is not None:
            held = _capacity_of(cost_model, None, instance.kv_block_tokens)
            instance = replace(instance, kv_capacity=held, known=None)

        write_instance(instance, out)
        return

    from optsched.optimize.formulations import Task, formulations, get

    model = get(formulation or ("hindsight" if instance.in_rounds else "infermax"))
    if model.export is None:
        able = ", ".join(name for name, one in formulations().items() if one.export)
        raise UsageError(
            f"--formulation: found {model.name!r}, which has no {format_name} export; expected "
            f"{able}"
        )

    if model.time_unit == "round":
        options.check_rounds(instance, model.name)
    elif instance.in_rounds:
        raise UsageError(
            f"--formulation: found {model.name} for an instance in rounds; expected an instance in "
            "seconds"
        )

    cost = cost_model or cost_model_of(instance_file)
    task = Task(instance, fleet_of(cost))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"model.{format_name}"
        model.export(task, format_name, file)
        write_bytes(file.read_bytes(), out)


def _capacity_of(cost_model: str, given: object, block: int, option: str = "--kv-capacity") -> int:
    """Return the KV capacity of a cost model's machine, in whole blocks."""
    if given is not None:
        raise UsageError(
            f"{option}: found {given} beside --cost-model, which sets it; expected one of both"
        )

    cost = load_cost_model(cost_model)
    if cost.kv_capacity_tokens is None:
        raise UsageError(
            f"--cost-model: found no KV capacity in {cost.name!r}; expected {option}=N instead"
        )

    return cost.kv_capacity_tokens // block * block


def _server_beside(file: str, kv: int | None, block: int) -> tuple[int | None, int, Limits]:
    """Return the limits that meta.json beside a run says, and the KV capacity and the tokens of its
    blocks where no capacity is given; say so."""
    beside = settings_beside(file)
    limits = Limits(beside.get("max_num_batched_tokens"), None, beside.get("max_num_seqs"))
    found = limits.as_dict()
    if kv is None and "num_gpu_blocks" in beside:
        size = beside.get("block_size", 1)
        block = size if block == 1 else block
        kv = beside["num_gpu_blocks"] * size // block * block
        found |= {"kv_capacity": kv, "kv_block_tokens": block}

    if found:
        words = ", ".join(f"{name} {value}" for name, value in found.items())
        tell(f"note: of the server, from meta.json beside the run: {words}")

    return kv, block, limits


def _write(instance: Instance, out: str | None) -> None:
    if out is None or out == "-":
        emit_json(instance.to_dict(), "-")
        return

    check_outputs(out)
    write_instance(instance, out)
    last = instance.given_arrivals.max()
    print(
        f"{out}: {instance.n} requests, arrivals to {last:g} {unit(instance)}, "
        f"kv_capacity {instance.kv_capacity} tokens"
    )
