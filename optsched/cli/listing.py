"""The commands that list what there is, print schemas, and compile all loops."""

import inspect
from typing import Annotated

from optsched.cli.options import ARGUMENT
from optsched.cli.output import LiveLine, emit_json, show_table
from optsched.costs.cost import load_cost_model, shipped_models
from optsched.files.read_write import json_schema


def policies(name: Annotated[str | None, ARGUMENT] = None) -> None:
    """List the policies with their parameters, or say what there is to know of one.

    Parameters:
      name NAME: A policy, also my_policy.py:Class. By default all are listed.
    """
    from optsched.policies import list_policies as registry, make_policy

    if name is not None:
        _, info = make_policy(name)
        print(f"{name}: {info.summary}\n\n{inspect.getdoc(info.make) or ''}\n")
        shown = [(key, p.type.__name__, _text(p.default)) for key, p in info.parameters.items()]
        show_table(("parameter", "type", "default"), shown, text_columns=range(3))
        print(f"\nsource: {info.paper or 'optsched'}")
        return

    rows = []
    for name, info in registry().items():
        parameters = ", ".join(
            key if p.default is inspect.Parameter.empty else f"{key}={_text(p.default)}"
            for key, p in info.parameters.items()
        )
        lengths = "clairvoyant" if info.clairvoyant else ""
        rows.append((name, lengths, info.summary, parameters, info.paper))

    headers = ("policy", "lengths", "summary", "parameters", "source")
    show_table(headers, rows, text_columns=range(5))
    print("\nclairvoyant: uses true output lengths unless the instance carries predictions")
    print("my_policy.py:Class runs a policy of your own")


def formulations() -> None:
    """List the formulations: mathematical models of scheduling."""
    from optsched.optimize.formulations import formulations as registry

    rows = [(name, f.time_unit, f.summary) for name, f in sorted(registry().items())]
    show_table(("formulation", "time unit", "summary"), rows, text_columns=range(3))


def methods() -> None:
    """List the methods that solve each formulation."""
    from optsched.optimize.formulations import formulations as registry

    rows = []
    for formulation, f in sorted(registry().items()):
        for name, method in f.methods.items():
            objectives, switches = ", ".join(method.objectives), ", ".join(sorted(method.switches))
            rows.append((formulation, name, method.summary, objectives, switches))

    headers = ("formulation", "method", "summary", "objectives", "switches")
    show_table(headers, rows, text_columns=range(5))


def models() -> None:
    """List the shipped cost models."""
    rows = []
    for name in shipped_models():
        model = load_cost_model(name)
        valid = ", ".join(f"{key} {value:g}" for key, value in model.valid.items())
        rows.append((name, model.layers, model.kv_capacity_tokens, valid, model.provenance))

    headers = ("model", "layers", "KV capacity [tokens]", "valid for", "provenance")
    show_table(headers, rows, text_columns=(0, 3, 4))


def schema(name: str) -> None:
    """Print the JSON Schema of a file format.

    Parameters:
      name NAME: The format: instance, schedule, result, comparison, certificate, library ...
    """
    emit_json(json_schema(name), "-")


def warmup() -> None:
    """Compile the loops of all commands now, so that none has to wait for them later."""
    from optsched.analysis.warm import warm_up

    with LiveLine(every_s=10.0) as line:
        warm_up(line.show)

    print("every loop that commands use is compiled")


def _text(value: object) -> str:
    if value is None:
        return "none"

    return str(value).lower() if isinstance(value, bool) else str(value)
