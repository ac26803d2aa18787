"""Measured operator times from public profiles: Vidur, Splitwise, aiconfigurator.

The reader of a source, in a file of its own, recognises its files in a folder, checks every row
against the peaks of the device, and returns `Table` objects: what each row's batch held, and how
long it took.
"""

from __future__ import annotations

from pathlib import Path

from optsched.costs.hardware import Device, device, same_architecture
from optsched.costs.profiles.aiconfigurator import read_aiconfigurator
from optsched.costs.profiles.splitwise import SPLITWISE_TOKENS, read_splitwise, splitwise_rows
from optsched.costs.profiles.tables import COLUMN, Profile, Rejected, Table
from optsched.costs.profiles.vidur import LAYER_OPERATORS, read_vidur
from optsched.problem.errors import InputError

__all__ = [
    "COLUMN", "LAYER_OPERATORS", "SPLITWISE_TOKENS", "Profile", "Rejected", "Table",
    "read_profile", "splitwise_rows",
]  # fmt: skip


def read_profile(
    folder: str | Path,
    *,
    model: str | None = None,
    tensor_parallel: int = 1,
    hardware: str | Device = "a100-80gb",
) -> Profile:
    """Read the profiles in a folder.

    Parameters
    ----------
    folder : path
        With Vidur's ``mlp.csv`` and ``attention*.csv``, Splitwise's ``perf_model.csv``, or
        aiconfigurator's ``*.parquet``. ``model`` may name a folder inside it.
    model : str, optional
        Default: the folder's name.
    tensor_parallel : int
    hardware : str or Device
        Whose peaks no row may beat.

    Raises
    ------
    InputError
        Nothing to read, a missing column, a value that cannot be, times in another unit.
    """
    peak = device(hardware) if isinstance(hardware, str) else hardware
    path = Path(folder)
    if not path.is_dir():
        raise InputError(f"{path}: no such folder; a folder of profiles is right")
    if tensor_parallel < 1:
        raise InputError(f"tensor_parallel: {tensor_parallel!r}; an integer >= 1 is right")
    if model is not None:
        inside = [p for p in sorted(path.iterdir()) if p.is_dir()]
        path = next((p for p in inside if same_architecture(p.name, model)), path)
    for reader in (read_vidur, read_splitwise, read_aiconfigurator):
        found = reader(path, model, tensor_parallel, peak)
        if found is not None:
            return found
    raise InputError(
        f"{path}: no profiles; mlp.csv with attention*.csv (Vidur), perf_model.csv (Splitwise) or "
        "*.parquet (aiconfigurator) is right"
    )
