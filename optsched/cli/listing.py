"""``list``: what there is of each kind, in a table or one by one; and compiling all loops."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, NamedTuple

from optsched.cli.options import ARGUMENT
from optsched.cli.output import LiveLine, emit_json, show_table
from optsched.costs.cost import load_cost_model, shipped_models
from optsched.files.read_write import json_schema
from optsched.problem.errors import UsageError, named


class Table(NamedTuple):
    """Headers and rows. `numbers` are the columns of numbers; `notes` are printed below."""

    headers: Sequence[str]
    rows: Sequence[Sequence[Any]]
    numbers: Sequence[int] = ()
    notes: Sequence[str] = ()


def list_kind(kind: str, name: Annotated[str | None, ARGUMENT] = None) -> None:
    """List policies, bounds, metrics, formats and other kinds.

    Parameters:
      kind KIND: policies, bounds, methods, formulations, metrics, models, gpus, formats,
        generators, predictors, data, experiments, schemas or library.
      name NAME: One of them. By default all are listed.
    """
    make = named("list", kind, KINDS, UsageError)
    if name is not None and kind in _ALONE:
        _ALONE[kind](name)
        return

    table = make()
    if table is None:
        return

    columns = [k for k in range(len(table.headers)) if k not in table.numbers]
    if name is None:
        show_table(table.headers, table.rows, text_columns=columns)
        for note in table.notes:
            print(f"\n{note}" if note == table.notes[0] else note)

        return

    row = named(f"list {kind}", name, {str(row[0]): row for row in table.rows}, UsageError)
    for header, value in zip(table.headers, row, strict=True):
        if value not in (None, ""):
            print(f"{header}: {value}")


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


def _policies() -> Table:
    from optsched.policies import policies as registry

    rows = []
    for name, info in registry().items():
        parameters = ", ".join(
            key if p.default is inspect.Parameter.empty else f"{key}={_text(p.default)}"
            for key, p in info.parameters.items()
        )
        lengths = "clairvoyant" if info.clairvoyant else ""
        rows.append((name, lengths, info.summary, parameters, info.paper))

    notes = (
        "clairvoyant: uses true output lengths unless the instance carries predictions",
        "my_policy.py:Class runs a policy of your own",
    )
    return Table(("policy", "lengths", "summary", "parameters", "source"), rows, notes=notes)


def _policy(name: str) -> None:
    from optsched.policies import make_policy

    _, info = make_policy(name)
    print(f"{name}: {info.summary}\n\n{inspect.getdoc(info.make) or ''}\n")
    shown = [(key, p.type.__name__, _text(p.default)) for key, p in info.parameters.items()]
    show_table(("parameter", "type", "default"), shown, text_columns=range(3))
    print(f"\nsource: {info.paper or 'optsched'}")


def _bounds() -> Table:
    import optsched.optimize  # noqa: F401  # it registers a bound of its own
    from optsched.bounds import bounds

    rows = [
        (
            name,
            one.time_unit,
            ", ".join(one.objectives),
            "yes" if one.certifies else "",
            one.summary,
        )
        for name, one in bounds().items()
    ]
    return Table(("bound", "time unit", "objectives", "certificate", "summary"), rows)


def _formulations() -> Table:
    from optsched.optimize.formulations import formulations

    rows = [(name, one.time_unit, one.summary) for name, one in formulations().items()]
    return Table(("formulation", "time unit", "summary"), rows)


def _methods() -> Table:
    from optsched.optimize.formulations import formulations

    rows = []
    for formulation, one in formulations().items():
        for name, method in one.methods.items():
            objectives, switches = ", ".join(method.objectives), ", ".join(sorted(method.switches))
            rows.append((name, formulation, method.summary, objectives, switches))

    return Table(("method", "formulation", "summary", "objectives", "switches"), rows)


def _metrics() -> Table:
    from optsched.problem.metrics import TABLE

    rows = [(name, one.words, one.unit, one.sense, one.meaning) for name, one in TABLE.items()]
    notes = ["unit: a time is in the instance's unit, rounds or seconds"]
    return Table(("metric", "words", "unit", "better", "meaning"), rows, notes=notes)


def _models() -> Table:
    rows = []
    for name in shipped_models():
        model = load_cost_model(name)
        valid = ", ".join(f"{key} {value:g}" for key, value in model.valid.items())
        rows.append((name, model.layers, model.kv_capacity_tokens, valid, model.provenance))

    headers = ("model", "layers", "KV capacity [tokens]", "valid for", "provenance")
    return Table(headers, rows, numbers=(1, 2))


def _gpus() -> Table:
    from optsched.costs.devices import DEVICES

    rows = [
        (one.name, one.memory_gib, one.bandwidth_gb_s, one.tflops, one.link_gb_s)
        for one in DEVICES.values()
    ]
    heads = ("memory [GiB]", "bandwidth [GB/s]", "16-bit [TFLOP/s]", "link [GB/s]")
    return Table(("gpu", *heads), rows, numbers=(1, 2, 3, 4))


def _formats() -> Table:
    from optsched.workloads.traces.base import FORMATS

    rows = [(name, one.summary, ", ".join(one.options)) for name, one in FORMATS.all().items()]
    return Table(("format", "summary", "options of its own"), rows)


def _generators() -> Table:
    from optsched.workloads.generate import generators

    return _with_parameters("generator", generators().values())


def _predictors() -> Table:
    from optsched.workloads.predict import predictors

    return _with_parameters("predictor", predictors().values())


def _with_parameters(head: str, found: Iterable[Any]) -> Table:
    rows = [(one.name, one.summary, ", ".join(one.parameters)) for one in found]
    return Table((head, "summary", "parameters"), rows)


def _data() -> Table:
    from optsched.workloads.datasets import cached, datasets

    rows = [
        (name, one.format, one.summary, one.licence, "yes" if cached(name) else "no")
        for name, one in datasets().items()
    ]
    notes = ["here: whether the user's cache has it; `optsched import FORMAT NAME` puts it there"]
    notes += [
        f"{name}: its sha256 is one that others report; the first download verifies it"
        for name, one in datasets().items()
        if one.reported
    ]
    return Table(("dataset", "format", "summary", "licence", "here"), rows, notes=notes)


def _experiments() -> Table:
    from optsched.experiments import experiments

    rows = [(e.name, e.summary, ", ".join(e.parameters), e.paper) for e in experiments().values()]
    return Table(("experiment", "summary", "parameters", "source"), rows)


def _schemas() -> Table:
    from optsched.files.schemas import MODELS

    rows = [(name, (inspect.getdoc(one) or "").partition("\n")[0]) for name, one in MODELS.items()]
    return Table(("schema", "summary"), rows)


def _library() -> None:
    from optsched.cli.library import list_library

    list_library()


def _show_of_library(name: str) -> None:
    from optsched.cli.library import show

    show(name)


KINDS: dict[str, Callable[[], Table | None]] = {
    "policies": _policies,
    "bounds": _bounds,
    "methods": _methods,
    "formulations": _formulations,
    "metrics": _metrics,
    "models": _models,
    "gpus": _gpus,
    "formats": _formats,
    "generators": _generators,
    "predictors": _predictors,
    "data": _data,
    "experiments": _experiments,
    "schemas": _schemas,
    "library": _library,
}
# Kinds that have more to say of one than a row of their table has.
_ALONE: dict[str, Callable[[str], None]] = {
    "policies": _policy,
    "schemas": schema,
    "library": _show_of_library,
}


def _text(value: object) -> str:
    if value is None:
        return "none"

    return str(value).lower() if isinstance(value, bool) else str(value)
