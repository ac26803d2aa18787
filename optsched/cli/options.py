"""Arguments and options that several commands share, and the checks before the work begins."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from optsched.problem.errors import InputError, UsageError
from optsched.problem.specs import read_pairs
from optsched.problem.text_files import parse_json

if TYPE_CHECKING:
    from optsched.costs.cost import CostModel
    from optsched.problem.instance import Instance


def argument(metavar: str, words: str) -> Any:
    """Declare an argument that has no default."""
    return typer.Argument(..., metavar=metavar, show_default=False, help=words)


def option(metavar: str, words: str, default: Any = None, *, names: str = "", **more: Any) -> Any:
    """Declare an option of a command, as the default of a parameter.

    Its name is the parameter's, unless `names` gives others, which spaces separate.
    """
    return typer.Option(default, *names.split(), metavar=metavar, help=words, **more)


def required(metavar: str, words: str, *, names: str = "") -> Any:
    """Declare an option that must be given."""
    return option(metavar, words, ..., names=names, show_default=False)


def flag(names: str, words: str, default: bool = False, **more: Any) -> Any:
    """Declare an option without a value. A name after ``/`` switches it off."""
    return typer.Option(default, names, help=words, **more)


def shared(metavar: str, words: str, **more: Any) -> Any:
    """Declare an option of several commands, each of which gives its own default."""
    return option(metavar, words, ..., **more)


def in_range(
    low: float, *, strict: bool = False, infinite: bool = False
) -> Callable[[typer.CallbackParam, Any], Any]:
    """Return an option's callback that checks that its number is >=, or >, a limit, and finite."""

    def check(parameter: typer.CallbackParam, value: Any) -> Any:
        finite = value is None or math.isfinite(value) or (infinite and value == math.inf)
        if not finite or (value is not None and (value < low or (strict and value == low))):
            least = f"{'>' if strict else '>='} {low:g}"
            name = max(parameter.opts, key=len)
            raise UsageError(f"{name}: found {value!r}; expected a number {least}")

        return value

    return check


at_least_0, above_0 = in_range(0.0), in_range(0.0, strict=True)

InstanceFile = Annotated[
    str, argument("INSTANCE", "The instance: a JSON file, or the name of a shipped instance.")
]
ScheduleFile = Annotated[str, argument("SCHEDULE", "The schedule: a JSON file.")]
_MODELS = "The cost model, which an instance in seconds needs. `optsched models` lists names."
CostModelName = Annotated[str | None, shared("NAME|FILE.toml", _MODELS)]
Policies = Annotated[
    list[str] | None,
    shared(
        "SPEC",
        "A policy to run (repeatable). By default all run that the instance allows. "
        "`optsched policies` lists them.",
        names="--policy",
    ),
]
TimeLimit = Annotated[float, shared("S", "The time limit in seconds.", callback=at_least_0)]
Seed = Annotated[int, shared("N", "The seed of all random choices.", min=0)]
JsonOut = Annotated[
    str | None,
    shared("FILE|-", "Write the result as JSON. With - nothing else is printed.", names="--json"),
]
ScheduleOut = Annotated[str | None, shared("FILE", "Write the schedule to this file.")]
RequestsOut = Annotated[
    str | None, shared("FILE", "Write a row per request to this .csv or .parquet file.")
]
TtftWeight = Annotated[float | None, shared("A", "The weight of TTFT beside latency, from 0 to 1.")]
EngineSettings = Annotated[
    list[str] | None, shared("KEY=VALUE", "An argument of vllm.LLM (repeatable).", names="--set")
]

_SLO_WORDS = {
    "slo_ttft": "The SLO on the time to first token, in the instance's time unit.",
    "slo_tpot": "The SLO on the mean time per further token.",
    "slo_gap": "The SLO on the largest time between two tokens.",
    "slo_latency": "The SLO on the time from arrival to last token.",
}


Slos = Mapping[str, float]
NO_SLOS: Slos = MappingProxyType({})


def takes_slos(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each SLO. It gets those that are given as a dict ``slos``."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        given = {name: values.pop(name) for name in _SLO_WORDS}
        command(slos={k: v for k, v in given.items() if v is not None}, **values)

    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for one in inspect.signature(command).parameters.values():
        if one.name != "slos":
            parameters.append(one.replace(annotation=hints[one.name]))
            continue

        for name, words in _SLO_WORDS.items():
            given = option("S", words, callback=above_0)
            parameters.append(one.replace(name=name, default=given, annotation=float | None))

    parameters = [one.replace(kind=one.KEYWORD_ONLY) for one in parameters]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def check_suffix(path: str, option: str, *suffixes: str) -> None:
    """Raise UsageError unless a file's name has one of the suffixes."""
    if not path.endswith(suffixes):
        raise UsageError(
            f"{option}: found {path!r}; expected a name ending in {' or '.join(suffixes)}"
        )


def read_checked(
    instance_file: str,
    cost_model: str | None,
    *outputs: str | None,
    folder: str | None = None,
    formulation: str | None = None,
) -> tuple[Instance, CostModel | None]:
    """Return a command's instance and cost model, and check that its outputs can be written.

    Errors in the instance are found first, then those in the outputs and in the cost model.
    """
    from optsched.files.read_write import read_instance

    instance = read_instance(instance_file)
    check_outputs(*outputs)
    check_folder(folder)
    check_rounds(instance, formulation)
    return instance, cost_model_for(instance, cost_model)


def check_outputs(*paths: str | None) -> None:
    """Check that every output can be written, before work is done whose result would be lost."""
    from optsched.files.outputs import check_output

    seen: set[Path] = set()
    for text in paths:
        target = None if text is None or text == "-" else check_output(text)
        if target in seen:
            raise InputError(f"{text}: found for two outputs; expected two files")
        if target is not None:
            seen.add(target)


def check_folder(text: str | None) -> None:
    """Check that a folder exists or can be made, and that files can be written there."""
    from optsched.files import outputs

    if text is not None:
        outputs.check_folder(text)


def check_requests_out(text: str | None) -> None:
    """Check the suffix of a file of requests, and that Parquet can be written if it is one."""
    if text is None:
        return

    check_suffix(text, "--requests-out", ".csv", ".parquet")
    if text.endswith(".parquet") and find_spec("pyarrow") is None:
        raise UsageError(
            f"--requests-out: {text!r} needs the package pyarrow; install it, or use .csv"
        )


def cost_model_for(instance: Instance, name: str | None) -> CostModel | None:
    """Return an instance's cost model, or None in rounds. One that does not fit is an error."""
    from optsched.costs.cost import cost_for

    cost = cost_for(instance, name)
    return None if instance.in_rounds else cost


def check_rounds(instance: Instance, formulation: str | None) -> None:
    """Raise UsageError if the formulation is ``hindsight`` and the instance is in seconds."""
    if formulation == "hindsight" and not instance.in_rounds:
        raise UsageError(
            "--formulation: found hindsight for an instance in seconds; expected an instance in "
            "rounds (`optsched import --rounds SECONDS` makes one from a trace)"
        )


def key_values(pairs: list[str] | None, option: str = "--set") -> dict[str, str]:
    """Return the ``key=value`` texts of an option that may be repeated as a dict."""
    return read_pairs(pairs or [], option, UsageError)


def engine_settings(pairs: list[str] | None) -> dict[str, Any]:
    """Return arguments of an engine by name: each value as JSON if it is that, else as text."""
    found: dict[str, Any] = {}
    for key, text in key_values(pairs).items():
        try:
            found[key] = parse_json(text)
        except InputError:
            found[key] = text

    return found
