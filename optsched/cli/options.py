"""Arguments and options that several commands share, and the checks that come before work."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optsched.problem.errors import InputError, UsageError
from optsched.problem.specs import read_pairs

if TYPE_CHECKING:
    from optsched.costs.cost import CostModel
    from optsched.problem.instance import Instance

InstanceFile = Annotated[
    str, typer.Argument(metavar="INSTANCE", show_default=False, help="Instance file (JSON).")
]
CostModelName = Annotated[
    str | None,
    typer.Option(
        "--cost-model", metavar="NAME|FILE.toml", help="For instances in seconds: `models`."
    ),
]
TimeLimit = Annotated[
    float, typer.Option("--time-limit", metavar="S", help="Seconds for the solver.")
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", min=0, help="Seed of every random choice.")
]
JsonOut = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write the result as JSON; - prints it alone."),
]
ScheduleOut = Annotated[
    str | None, typer.Option("--schedule-out", metavar="FILE", help="Write the schedule.")
]
RequestsOut = Annotated[
    str | None,
    typer.Option("--requests-out", metavar="FILE", help="One row per request: .csv or .parquet."),
]
SloTtft = Annotated[
    float | None,
    typer.Option("--slo-ttft", metavar="S", help="Goal for the time to first token."),
]
SloTpot = Annotated[
    float | None, typer.Option("--slo-tpot", metavar="S", help="Goal for the time per token.")
]


def check_number(
    value: float | None, option: str, low: float, *, strict: bool = False, high: float = math.inf
) -> None:
    """Check that an option's number is finite and in range.

    Raises
    ------
    UsageError
        NaN, infinity, or out of range.
    """
    if value is None:
        return
    if not math.isfinite(value) or value < low or value > high or (strict and value == low):
        right = f"a number {'>' if strict else '>='} {low:g}"
        if high < math.inf:
            right += f" and <= {high:g}"
        raise UsageError(f"{option}: {value!r}; {right} is right")


def check_outputs(*paths: str | None) -> None:
    """Check that every output can be written, before work is done that would be lost.

    Raises
    ------
    InputError
        A missing folder, a folder in place of a file, no permission, or one path for two
        outputs.
    """
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
    """Check that a folder exists or can be made, and that files can be written there.

    Raises
    ------
    InputError
        It is a file, or its nearest existing parent is not writable.
    """
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
    """Check the suffix of a file of requests, and that Parquet can be written here.

    Raises
    ------
    UsageError
        Another suffix, or no pyarrow.
    """
    if text is None:
        return
    if not text.endswith((".csv", ".parquet")):
        raise UsageError(f"--requests-out: {text!r}; a name ending in .csv or .parquet is right")
    if text.endswith(".parquet"):
        from importlib.util import find_spec

        if find_spec("pyarrow") is None:
            raise UsageError(
                f"--requests-out: {text!r} needs the package pyarrow; install it, or use .csv"
            )


def cost_model_for(instance: Instance, name: str | None) -> CostModel | None:
    """Return what functions take as ``cost_model``: None in rounds; errors come here."""
    from optsched.costs.cost import cost_for

    cost = cost_for(instance, name)
    return None if instance.in_rounds else cost


def check_rounds(instance: Instance, formulation: str | None) -> None:
    """Check that ``hindsight`` is asked of an instance in rounds.

    Raises
    ------
    UsageError
        It is in seconds.
    """
    if formulation == "hindsight" and not instance.in_rounds:
        raise UsageError(
            "--formulation: hindsight needs an instance in rounds; `optsched import --rounds "
            "SECONDS` makes one from a trace"
        )


def key_values(pairs: list[str] | None, option: str = "--set") -> dict[str, str]:
    """Return ``--set key=value`` options, or another's, as a dict.

    Raises
    ------
    UsageError
        No ``=``, no key, or a key twice.
    """
    return read_pairs(pairs or [], option, UsageError)
