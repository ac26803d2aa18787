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
    return typer.Argument(metavar=metavar, show_default=False, help=words)


def option(names: str, metavar: str | None, words: str, **more: Any) -> Any:
    """Declare an option by its names, which spaces separate, and its help."""
    return typer.Option(*names.split(), metavar=metavar, help=words, **more)


def required(names: str, metavar: str, words: str) -> Any:
    """Declare an option that must be given."""
    return option(names, metavar, words, show_default=False)


def in_range(low: float, *, strict: bool = False) -> Callable[[typer.CallbackParam, Any], Any]:
    """Return an option's callback that checks that its number is finite and >=, or >, a limit."""

    def check(parameter: typer.CallbackParam, value: Any) -> Any:
        check_number(value, max(parameter.opts, key=len), low, strict=strict)
        return value

    return check


at_least_0, above_0 = in_range(0.0), in_range(0.0, strict=True)

InstanceFile = Annotated[
    str, argument("INSTANCE", "The instance: a JSON file, or the name of a shipped instance.")
]
ScheduleFile = Annotated[str, argument("SCHEDULE", "The schedule: a JSON file.")]
CostModelName = Annotated[
    str | None,
    option(
        "--cost-model",
        "NAME|FILE.toml",
        "The cost model, which an instance in seconds needs. `optsched models` lists names.",
    ),
]
TimeLimit = Annotated[
    float, option("--time-limit", "S", "The time limit in seconds.", callback=at_least_0)
]
Seed = Annotated[int, option("--seed", "N", "The seed of all random choices.", min=0)]
JsonOut = Annotated[
    str | None,
    option("--json", "FILE|-", "Write the result as JSON. With - nothing else is printed."),
]
ScheduleOut = Annotated[
    str | None, option("--schedule-out", "FILE", "Write the schedule to this file.")
]
RequestsOut = Annotated[
    str | None,
    option("--requests-out", "FILE", "Write a row per request to this .csv or .parquet file."),
]
TtftWeight = Annotated[
    float | None,
    option("--ttft-weight", "A", "The weight of TTFT beside latency, from 0 to 1."),
]
EngineSettings = Annotated[
    list[str] | None, option("--set", "KEY=VALUE", "An argument of vllm.LLM (repeatable).")
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
            parameters.append(one.replace(annotation=hints[one.name], kind=one.KEYWORD_ONLY))
            continue

        for name, words in _SLO_WORDS.items():
            kind = Annotated[
                float | None,
                option("--" + name.replace("_", "-"), "S", words, callback=above_0),
            ]
            parameters.append(
                inspect.Parameter(name, one.KEYWORD_ONLY, default=None, annotation=kind)
            )

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def check_number(value: float | None, option: str, low: float, *, strict: bool = False) -> None:
    """Raise UsageError unless an option's number is finite and in range."""
    if value is None or (math.isfinite(value) and value >= low and not (strict and value == low)):
        return

    least = f"{'>' if strict else '>='} {low:g}"
    raise UsageError(f"{option}: found {value!r}; expected a number {least}")


def check_suffix(path: str, option: str, *suffixes: str) -> None:
    """Raise UsageError unless a file's name has one of the suffixes."""
    if not path.endswith(suffixes):
        raise UsageError(
            f"{option}: found {path!r}; expected a name ending in {' or '.join(suffixes)}"
        )


def read_checked(
    instance_file: str, cost_model: str | None, *outputs: str | None
) -> tuple[Instance, CostModel | None]:
    """Return a command's instance and cost model, and check that its outputs can be written.

    Errors in the instance are found first, then those in the outputs and in the cost model.
    """
    from optsched.files.read_write import read_instance

    instance = read_instance(instance_file)
    check_outputs(*outputs)
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
