"""Arguments and options that several commands share, and the checks that come before work."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optsched.problem.errors import InputError, UsageError
from optsched.problem.specs import read_pairs

if TYPE_CHECKING:
    from optsched.costs.cost import CostModel
    from optsched.problem.instance import Instance


def argument(metavar: str, words: str) -> Any:
    """Declare an argument that has no default."""
    return typer.Argument(metavar=metavar, show_default=False, help=words)


def option(names: str, metavar: str | None, words: str, **more: Any) -> Any:
    """Declare an option by its names, apart by spaces, and what help says of it."""
    return typer.Option(*names.split(), metavar=metavar, help=words, **more)


def required(names: str, metavar: str, words: str) -> Any:
    """Declare an option that must be given."""
    return option(names, metavar, words, show_default=False)


def in_range(low: float, *, strict: bool = False) -> Callable[[typer.CallbackParam, Any], Any]:
    """Return a callback of an option whose number is finite and at least, or above, a limit."""

    def check(parameter: typer.CallbackParam, value: Any) -> Any:
        check_number(value, max(parameter.opts, key=len), low, strict=strict)
        return value

    return check


at_least_0, above_0 = in_range(0.0), in_range(0.0, strict=True)

InstanceFile = Annotated[str, argument("INSTANCE", "Instance file (JSON).")]
ScheduleFile = Annotated[str, argument("SCHEDULE", "Schedule file (JSON).")]
CostModelName = Annotated[
    str | None, option("--cost-model", "NAME|FILE.toml", "For instances in seconds: `models`.")
]
TimeLimit = Annotated[float, option("--time-limit", "S", "Seconds in all.", callback=at_least_0)]
Seed = Annotated[int, option("--seed", "N", "Seed of every random choice.", min=0)]
JsonOut = Annotated[
    str | None, option("--json", "FILE|-", "Write the result as JSON; - prints it alone.")
]
ScheduleOut = Annotated[str | None, option("--schedule-out", "FILE", "Write the schedule.")]
RequestsOut = Annotated[
    str | None, option("--requests-out", "FILE", "One row per request: .csv or .parquet.")
]
SloTtft = Annotated[
    float | None, option("--slo-ttft", "S", "Goal for the time to first token.", callback=above_0)
]
SloTpot = Annotated[
    float | None, option("--slo-tpot", "S", "Goal for the time per token.", callback=above_0)
]


def check_number(value: float | None, option: str, low: float, *, strict: bool = False) -> None:
    """Raise UsageError unless an option's number is finite and in range."""
    if value is None or (math.isfinite(value) and value >= low and not (strict and value == low)):
        return
    raise UsageError(f"{option}: {value!r}; a number {'>' if strict else '>='} {low:g} is right")


def check_suffix(path: str, option: str, *suffixes: str) -> None:
    """Raise UsageError unless a file's name ends as it should."""
    if not path.endswith(suffixes):
        raise UsageError(f"{option}: {path!r}; a name ending in {' or '.join(suffixes)} is right")


def read_checked(
    instance_file: str, cost_model: str | None, *outputs: str | None
) -> tuple[Instance, CostModel | None]:
    """Return a command's instance and cost model, once its outputs are known to be writable.

    Mistakes are found in this order: instance, outputs, cost model.
    """
    from optsched.files.read_write import read_instance

    instance = read_instance(instance_file)
    check_outputs(*outputs)
    return instance, cost_model_for(instance, cost_model)


def check_outputs(*paths: str | None) -> None:
    """Check that every output can be written, before work is done that would be lost."""
    from optsched.files.strict_json import descriptor

    seen: set[Path] = set()
    for text in paths:
        if text is None or text == "-" or descriptor(text) is not None:
            continue
        path = Path(text)
        if not text or path.is_dir():
            raise InputError(f"{text!r}: is a folder; a file is right")
        if path.is_file() or not path.exists():  # nothing is put beside a device or a pipe
            _check_folder(path, path.parent)
        if path.exists() and not os.access(path, os.W_OK):
            raise InputError(f"{path}: cannot be written (permission denied)")
        if path.resolve() in seen:
            raise InputError(f"{path}: named for two outputs; two files are right")
        seen.add(path.resolve())


def check_folder(text: str | None) -> None:
    """Check that a folder exists or can be made, and that files can be written there."""
    if text is None:
        return
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise InputError(f"{path}: is a file; a folder is right")
    nearest = path.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    _check_folder(path, nearest)


def _check_folder(path: Path, folder: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"{path}: cannot be written ({folder} is no folder)")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None


def check_requests_out(text: str | None) -> None:
    """Check the suffix of a file of requests, and that Parquet can be written here."""
    if text is None:
        return
    check_suffix(text, "--requests-out", ".csv", ".parquet")
    if text.endswith(".parquet") and find_spec("pyarrow") is None:
        raise UsageError(
            f"--requests-out: {text!r} needs the package pyarrow; install it, or use .csv"
        )


def cost_model_for(instance: Instance, name: str | None) -> CostModel | None:
    """Return what functions take as ``cost_model``: None in rounds; errors come here."""
    from optsched.costs.cost import cost_for

    cost = cost_for(instance, name)
    return None if instance.in_rounds else cost


def check_rounds(instance: Instance, formulation: str | None) -> None:
    """Check that ``hindsight`` is asked of an instance in rounds."""
    if formulation == "hindsight" and not instance.in_rounds:
        raise UsageError(
            "--formulation: hindsight needs an instance in rounds; `optsched import --rounds "
            "SECONDS` makes one from a trace"
        )


def key_values(pairs: list[str] | None, option: str = "--set") -> dict[str, str]:
    """Return ``--set key=value`` options, or another's, as a dict."""
    return read_pairs(pairs or [], option, UsageError)
