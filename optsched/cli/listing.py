"""``list``: what there is of each kind, in a table or one by one; and compiling all loops."""

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

from optsched.cli.options import ARGUMENT
from optsched.cli.output import LiveLine, emit_json, show_table
from optsched.costs.cost import shipped_models
from optsched.costs.load import load_cost_model
from optsched.files.read_write import json_schema
from optsched.problem.errors import UsageError, named


class Kind(NamedTuple):
    """Where values of a kind are by name, and which attributes of them a table shows.

    `fields` are those attributes, each with the words of its column if they are others, and
    before them the words of the column of names. `numbers` are the columns of numbers.
    """

    home: str
    fields: str
    notes: Sequence[str] = ()
    numbers: Sequence[int] = ()


def list_kind(kind: str, name: Annotated[str | None, ARGUMENT] = None) -> None:
    """List policies, bounds, metrics, formats and other kinds.

    Parameters:
      kind KIND: policies, bounds, methods, formulations, metrics, models, gpus, formats,
        generators, predictors, data, experiments, schemas or library.
      name NAME: One of them. By default all are listed.
    """
    shows_alone: Mapping[str, Any] = {
        "policies": _show_policy,
        "schemas": schema,
        "library": _show_library,
    }
    # The library is no table of attributes, but has a command that lists it.
    shape = named("list", kind, {**KINDS, "library": None}, UsageError)
    if shape is None or (name is not None and kind in shows_alone):
        shows_alone[kind](name)
        return

    module, _, attribute = shape.home.rpartition(".")
    home = getattr(import_module(module), attribute)
    values = home() if callable(home) else home
    if name is not None:
        values = {name: named(f"list {kind}", name, values, UsageError)}

    # `name` or `name:words` of each attribute, behind the words for the column of names.
    first_words, *fields = shape.fields.split()
    attributes = [field.partition(":")[0] for field in fields]
    words = [field.rpartition(":")[2] for field in fields]
    headers = [text.replace("_", " ") for text in (first_words, *words)]
    rows = [(key, *(_cell(getattr(value, a)) for a in attributes)) for key, value in values.items()]
    if name is not None:
        for header, cell in zip(headers, rows[0], strict=True):
            if cell not in (None, ""):
                print(f"{header}: {cell}")

        return

    text_columns = [k for k in range(len(headers)) if k not in shape.numbers]
    show_table(headers, rows, text_columns=text_columns)
    if shape.notes:
        print("\n" + "\n".join(shape.notes))


def policies(name: Annotated[str | None, ARGUMENT] = None) -> None:
    """List the policies, as `optsched list policies` does, or describe one.

    Parameters:
      name NAME: A policy, also my_policy.py:Class. By default all are listed.
    """
    list_kind("policies", name)


def models() -> None:
    """List the shipped cost models, as `optsched list models` does."""
    list_kind("models")


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


def _show_policy(name: str) -> None:
    """Print what a policy does, its parameters, and its source."""
    from optsched.policies import make_policy

    _, info = make_policy(name)
    print(f"{name}: {info.summary}\n\n{inspect.getdoc(info.make) or ''}\n")
    rows = [(key, p.type.__name__, _text(p.default)) for key, p in info.parameters.items()]
    show_table(("parameter", "type", "default"), rows, text_columns=range(3))
    print(f"\nsource: {info.paper or 'optsched'}")


def _show_library(name: str | None) -> None:
    """List the library, or show one instance of it."""
    from optsched.cli.library import list_library, show

    if name is None:
        list_library()
    else:
        show(name)


def _bounds() -> Mapping[str, Any]:
    import optsched.optimize  # noqa: F401  # it registers a bound of its own
    from optsched.bounds import list_bounds

    return list_bounds()


def _methods() -> Mapping[str, Any]:
    """Return the methods by ``formulation:method``."""
    from optsched.optimize.formulations import formulations

    return {
        f"{formulation.name}:{name}": method
        for formulation in formulations().values()
        for name, method in formulation.methods.items()
    }


def _models() -> Mapping[str, Any]:
    return {name: load_cost_model(name) for name in shipped_models()}


def _formats() -> Mapping[str, Any]:
    from optsched.workloads.traces.base import FORMATS

    return FORMATS.all()


def _data() -> Mapping[str, Any]:
    """Return the public traces, each with whether it is at hand and how its digest is known."""
    from optsched.workloads.datasets import cached, datasets

    return {
        name: SimpleNamespace(
            **vars(dataset),
            here="yes" if cached(name) else "no",
            sum="as others report it" if dataset.reported else "",
        )
        for name, dataset in datasets().items()
    }


def _schemas() -> Mapping[str, Any]:
    from optsched.files.schemas import MODELS

    docs = {name: inspect.getdoc(model) or "" for name, model in MODELS.items()}
    return {name: SimpleNamespace(summary=text.partition("\n")[0]) for name, text in docs.items()}


_HERE = "optsched.cli.listing."
KINDS: dict[str, Kind] = {
    "policies": Kind(
        "optsched.policies.list_policies",
        "policy clairvoyant summary parameters paper:source",
        (
            "clairvoyant: uses true output lengths unless the instance carries predictions",
            "my_policy.py:Class runs a policy of your own",
        ),
    ),
    "bounds": Kind(f"{_HERE}_bounds", "bound time_unit objectives certifies:certificate summary"),
    "methods": Kind(f"{_HERE}_methods", "method summary objectives switches"),
    "formulations": Kind(
        "optsched.optimize.formulations.formulations", "formulation time_unit summary"
    ),
    "metrics": Kind("optsched.problem.metrics.TABLE", "metric words unit sense:better meaning"),
    "models": Kind(
        f"{_HERE}_models",
        "model layers kv_capacity_tokens:KV_capacity valid:valid_for provenance",
        numbers=(1, 2),
    ),
    "gpus": Kind(
        "optsched.costs.devices.DEVICES",
        "gpu memory_gib:GiB bandwidth_gb_s:GB/s tflops:TFLOP/s link_gb_s:link_GB/s",
        ("TFLOP/s: dense, 16 bits; link: to other GPUs, both ways",),
        numbers=range(1, 5),
    ),
    "formats": Kind(f"{_HERE}_formats", "format summary options:options_of_its_own"),
    "generators": Kind("optsched.workloads.generate.generators", "generator summary parameters"),
    "predictors": Kind("optsched.workloads.predict.predictors", "predictor summary parameters"),
    "data": Kind(
        f"{_HERE}_data",
        "dataset format summary licence here sum:sha256",
        (
            "here: whether the user's cache has it; `optsched import FORMAT NAME` puts it there",
            "sha256: that others report is verified by the first download",
        ),
    ),
    "experiments": Kind(
        "optsched.experiments.experiments", "experiment summary parameters paper:source"
    ),
    "schemas": Kind(f"{_HERE}_schemas", "schema summary"),
}


def _cell(value: Any) -> Any:
    """Return a value as a table has it; of parameters their names, and the defaults of some."""
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, Mapping):
        return ", ".join(_with_default(key, entry) for key, entry in value.items())
    if isinstance(value, frozenset):
        return ", ".join(sorted(value))

    return ", ".join(value) if isinstance(value, tuple) else value


def _with_default(key: str, value: Any) -> str:
    """Return a parameter's name, with its default if it has one; or a number with its name."""
    default = getattr(value, "default", value if isinstance(value, float) else None)
    return key if default in (None, inspect.Parameter.empty) else f"{key}={_text(default)}"


def _text(value: object) -> str:
    """Return a default as users write it in a specification."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:g}"

    return str(value).lower() if isinstance(value, bool) else str(value)
