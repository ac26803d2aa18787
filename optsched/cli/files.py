"""``generate``, ``import`` and ``export``: instances from generators and traces, and as models."""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import typer

from optsched.cli.options import Seed, check_rounds, key_values, runs
from optsched.cli.output import LiveLine, emit_json, tell, unit
from optsched.costs.fleet import fleet_of
from optsched.costs.load import load_cost_model
from optsched.files.measured import settings_beside, write_measured
from optsched.files.read_write import read_instance, write_bytes, write_instance
from optsched.files.sources import stated_cost_model
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance, Limits
from optsched.problem.room import KvWindow
from optsched.workloads.datasets import datasets, fetch_dataset
from optsched.workloads.drafts import parse_drafts
from optsched.workloads.predict import check_predictor, predict
from optsched.workloads.problem import Problem


def generate(
    name: str,
    seed: Seed = 0,
    settings: list[str] | None = None,
    cost_model: str | None = None,
    out: str | None = None,
) -> None:
    """Draw a random instance.

    Parameters:
      name NAME: The generator (`optsched list generators`).
      settings --set KEY=VALUE: Set a parameter of the generator (repeatable).
      cost_model MODEL: Take the KV capacity of this model's machine.
      out -o --out FILE: Write the instance. The default is standard output.
    """
    texts, window = key_values(settings), None
    if cost_model is not None:
        stated = texts.get("kv_capacity")
        # Generators have blocks of one token.
        capacity, window = _kv_of_machine(cost_model, stated, 1, "--set kv_capacity")
        texts["kv_capacity"] = str(capacity)

    from optsched.workloads.generate import generate as run, parse_parameters

    instance = run(name, seed=seed, **parse_parameters(name, texts))
    instance = instance if window is None else replace(instance, kv_window=window)
    _write(instance, out)


@runs("optsched.workloads.traces.TraceOptions")
def import_trace(
    format_name: str,
    file: str,
    cost_model: str | None = None,
    column: list[str] | None = None,
    units: list[str] | None = None,
    measured_out: str | None = None,
    out: str | None = None,
    **options: Any,
) -> None:
    """Make an instance from a trace.

    Parameters:
      format_name FORMAT: The format (`optsched list formats`).
      file FILE: A file, or the name of a public trace (`optsched list data`).
      offset N: The number of rows to skip.
      limit N: The max number of rows to take.
      sample N: Keep N of the rows, drawn at random.
      kv_capacity N: The KV tokens. By default 100000, or of meta.json.
      cost_model MODEL: Take the KV capacity and window of its machine.
      kv_window W:S/L: S of L layers keep the last W tokens alone.
      kv_block_tokens N: The tokens of a KV block.
      rate R: Poisson arrivals of R per second; inf: all arrive at 0.
      rate_scale X: Make arrivals X times as fast.
      round_seconds --rounds SECONDS: Make an instance in rounds, each of this length.
      column FIELD=NAME: csv, jsonl: the column of a field (repeatable).
      units --unit UNIT|FIELD=UNIT: s, ms, us, ns or datetime (repeatable).
      success WORD: csv, jsonl: a status of success (repeatable).
      run N: The run to read of several; -1 is the last.
      tokenizer NAME|FILE: sharegpt, lmsys: by default words count.
      prefixes --prefixes/--no-prefixes: Keep shared prefixes; by default not in rounds.
      outputs none|granted: Outputs in prompts that go on.
      slack: Let requests share what ids of blocks may hide.
      sessions: Release calls when those before end, after think times.
      think_scale X: Multiply think times by X.
      ids_tokens N: The tokens that an id stands for.
      prefix_block_tokens N: The tokens of the blocks of shared KV.
      strict: Refuse rows that must be dropped or moved.
      measured_out FILE: Write the server's times, for `compare --measured`.
      out -o --out FILE: Write the instance. The default is standard output.
      Rare: kv_block_tokens, kv_window, units, success, run, tokenizer, prefixes, outputs, slack,
        think_scale, ids_tokens, prefix_block_tokens, strict, sample
    """
    columns = key_values(column, "--column")
    # Units by field; the one of "" is of all fields without a unit of their own.
    unit_of = key_values([text for text in units or () if "=" in text], "--unit")
    for text in units or ():
        if "=" not in text and unit_of.setdefault("", text) != text:
            raise UsageError(f"--unit: found {text!r} beside {unit_of['']!r}; expected FIELD=UNIT")

    if not Path(file).exists() and file in datasets():
        file = _download(file)
    if format_name == "llmservingsim" and Path(file).is_dir():
        file = str(Path(file) / "requests.jsonl")
    limits = Limits()
    capacity, block_tokens = options["kv_capacity"], options["kv_block_tokens"]
    if cost_model is not None:
        capacity, window = _kv_of_machine(cost_model, capacity, block_tokens)
        options["kv_window"] = options["kv_window"] or window
    # The limits of a server are of its seconds, and say nothing of rounds.
    if format_name == "llmservingsim" and options["round_seconds"] is None:
        capacity, block_tokens, limits = _server_beside(file, capacity, block_tokens)

    from optsched.workloads.traces import read_trace_report

    options |= {"columns": columns, "unit": unit_of, "success": options["success"] or ()}
    options |= {"kv_capacity": capacity, "kv_block_tokens": block_tokens}
    with LiveLine() as line:
        options["progress"] = lambda rows: line.show(f"{rows} rows")
        instance, report = read_trace_report(format_name, file, **options)

    for note in report.notes:
        tell(f"warning: {file}: {note}")
    if measured_out is not None and report.measured is None:
        raise UsageError(
            f"--measured-out: found no measured times: found {report.unmeasured}; expected a trace "
            "that has latencies and arrivals and is read whole, at its own arrivals, in seconds"
        )

    measured = report.measured
    if limits.as_dict():
        instance = replace(instance, limits=limits)
        if measured is not None:
            measured = replace(measured, instance_sha256=instance.sha256)

    _write(instance, out)
    if capacity is None:
        tell(
            f"note: no KV capacity is given, so it is {instance.kv_capacity} tokens, whatever "
            "machine a cost model describes; --cost-model NAME takes the machine's"
        )

    if measured_out is not None and measured is not None:
        write_measured(measured, measured_out)


def export(
    instance_file: str,
    out: str,
    format_name: str = "json",
    predictor: str | None = None,
    drafts: str | None = None,
    seed: Seed = 0,
    formulation: str | None = None,
    cost_model: str | None = None,
    objective: str | None = None,
) -> None:
    """Write an instance anew, or its mathematical model.

    Parameters:
      out -o --out FILE: Write to this file.
      format_name --format json|lp|mps: json is the instance itself, with the KV capacity of a cost
        model's machine if one is given; lp and mps are the mathematical model.
      predictor --predictor NAME[:key=value,...]: Add predictions of output lengths (`optsched list
        predictors`), such as noisy:mae=20, column:file=FILE.csv or FILE.py:FUNCTION.
      drafts --drafts K[:key=value]: Let decode steps verify K drafts (speculative decoding), all
        accepted, or accepted=MEAN a step, rates=R1/R2/... of each, or share=SHARE of all, evenly.
      formulation NAME: The formulation for lp and mps (`optsched list formulations`).
      objective METRIC: What lp and mps minimize; total latency in rounds, in seconds the makespan.
    """
    if format_name not in ("lp", "mps", "json"):
        raise UsageError(f"--format: found {format_name!r}; expected lp, mps or json")
    if predictor is not None:
        check_predictor(predictor)

    instance = read_instance(instance_file)
    if predictor is not None:
        instance = predict(instance, predictor, seed=seed)
        print(f"{out}: {instance.n} requests; {_predictions(instance)}")
    if drafts is not None:
        instance = parse_drafts(instance, drafts, seed)
    if format_name == "json":
        if cost_model is not None:
            # None: no option states a capacity here.
            capacity, window = _kv_of_machine(cost_model, None, instance.kv_block_tokens)
            # What is known of the instance was with its own KV capacity.
            instance = replace(instance, kv_capacity=capacity, kv_window=window, known=None)

        write_instance(instance, out)
        return

    from optsched.optimize.formulations import get
    from optsched.optimize.model import model as readable

    model = get(formulation or ("hindsight" if instance.in_rounds else "infermax"))
    if model.time_unit == "round":
        check_rounds(instance, model.name)
    elif instance.in_rounds:
        raise UsageError(
            f"--formulation: found {model.name} for an instance in rounds; expected an instance in "
            "seconds"
        )

    fleet = fleet_of(stated_cost_model(instance, cost_model, instance_file))
    if objective is None:
        objective = "tel" if instance.in_rounds else "makespan"

    problem = Problem(instance, fleet, objective)
    # Solvers write to files only, and ``out`` may be a pipe.
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"model.{format_name}"
        readable(problem).write(file, format_name)
        write_bytes(file.read_bytes(), out)


def _predictions(instance: Instance) -> str:
    """Return words for the predictions that an instance has."""
    names = {"points": "predicted", "intervals": "predicted_lower", "a forecast": "forecast"}
    kinds = [name for name, key in names.items() if getattr(instance, key) is not None]
    return " and ".join(kinds) or "no predictions"


def _download(name: str) -> str:
    """Return the file of a public trace, which is downloaded if it is not there yet."""
    try:
        with LiveLine() as line:
            file = fetch_dataset(name, progress=partial(line.show_download, name))
    except KeyboardInterrupt:
        tell("error: interrupted")
        raise typer.Exit(130) from None

    dataset = datasets()[name]
    tell(f"note: {file}: {dataset.licence}; cite {dataset.cite}; format {dataset.format}")
    return str(file)


def _kv_of_machine(
    cost_model: str, stated: object, block_tokens: int, option: str = "--kv-capacity"
) -> tuple[int, KvWindow | None]:
    """Return the KV capacity of a cost model's machine, in tokens of whole blocks, and its window.

    `stated`: what the user says it is, which is one too many. `option`: the one that states it, for
    errors. `block_tokens`: the tokens of a block.
    """
    if stated is not None:
        raise UsageError(
            f"{option}: found {stated} beside --cost-model, which sets it; expected one of both"
        )

    cost = load_cost_model(cost_model)
    if cost.kv_capacity_tokens is None:
        raise UsageError(
            f"--cost-model: found no KV capacity in {cost.name!r}; expected {option}=N instead"
        )

    return cost.kv_capacity_tokens // block_tokens * block_tokens, cost.kv_window


def _server_beside(
    file: str, capacity: int | None, block_tokens: int
) -> tuple[int | None, int, Limits]:
    """Return the KV capacity, the tokens of its blocks, and the limits of a server; say them.

    Limits are from meta.json beside a run, and so is the capacity where none is given. `capacity`,
    `block_tokens`: what the user gave, or None and 1.
    """
    beside = settings_beside(file)
    # None stands for ``max_prefill_tokens``, which is not read from there.
    limits = Limits(beside.get("max_num_batched_tokens"), None, beside.get("max_num_seqs"))
    stated = limits.as_dict()
    if capacity is None and "num_gpu_blocks" in beside:
        size = beside.get("block_size", 1)
        # The user's size of a block replaces the server's. The capacity stays what the server's
        # blocks hold, as far as it fills whole blocks of that size.
        block_tokens = size if block_tokens == 1 else block_tokens
        capacity = beside["num_gpu_blocks"] * size // block_tokens * block_tokens
        stated |= {"kv_capacity": capacity, "kv_block_tokens": block_tokens}

    if stated:
        words = ", ".join(f"{name} {value}" for name, value in stated.items())
        tell(f"note: of the server, from meta.json beside the run: {words}")

    return capacity, block_tokens, limits


def _write(instance: Instance, out: str | None) -> None:
    """Write an instance to a file and say what is in it, or to standard output."""
    if out is None or out == "-":
        emit_json(instance.to_dict(), "-")
        return

    write_instance(instance, out)
    last = instance.given_arrivals.max()
    print(
        f"{out}: {instance.n} requests, arrivals to {last:g} {unit(instance)}, "
        f"kv_capacity {instance.kv_capacity} tokens"
    )
