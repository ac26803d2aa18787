"""Measured times of operators from public profiles, of four kinds.

Each source has a reader in a file of its own. It recognises its files in a folder, checks every
row against the peaks of the device, and returns `Table` objects that say what each row's batch
held and how long it took.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from optsched.costs.architectures import same_architecture
from optsched.costs.devices import Device, device, devices_named
from optsched.costs.profiles.aiconfigurator import read_aiconfigurator
from optsched.costs.profiles.identity import Claim
from optsched.costs.profiles.llmservingsim import read_llmservingsim
from optsched.costs.profiles.splitwise import SPLITWISE_TOKENS, read_splitwise, splitwise_rows
from optsched.costs.profiles.steps import read_steps
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
    tensor_parallel: int | None = None,
    hardware: str | Device | None = None,
    link_gb_s: float | None = None,
    only: Mapping[str, str] | None = None,
) -> Profile:
    """Read the profiles in a folder.

    `folder`: a folder with Vidur's ``mlp.csv`` and ``attention*.csv`` (Agrawal et al. 2024),
    Splitwise's ``perf_model.csv`` (Patel et al. 2024), AIConfigurator's ``*.parquet`` (Xu et al.
    2026), or LLMServingSim's ``dense.csv`` and ``attention.csv`` (Cho et al. 2026). If a folder
    inside it has the name of ``model``, that one is read. AIConfigurator's tables may lie in
    folders inside it.
    `model`: name of the model, or its config.json. By default it is the one that the files name;
    Vidur's profiles name it by their folder, and AIConfigurator's do not name it.
    `tensor_parallel`: degree of tensor parallelism of the rows to read, >= 1. The default is the
    file's only one, or 1, and for LLMServingSim that of the run beside the profile, or else the
    profiled one.
    `hardware`: device that was profiled. No row may be faster than its peaks allow. By default it
    is the one that the files name, or the folder, or else `DEFAULT_DEVICE`, which the notes say.
    """
    asked = hardware if isinstance(hardware, str) and len(devices_named(hardware)) > 1 else ""
    peak = device(hardware) if isinstance(hardware, str) and not asked else None
    if isinstance(hardware, Device):
        peak = hardware

    path = Path(folder)
    if not path.is_dir():
        raise InputError(f"{path}: no such folder; expected a folder of profiles")
    if tensor_parallel is not None and tensor_parallel < 1:
        raise InputError(f"tensor_parallel: found {tensor_parallel!r}; expected an integer >= 1")
    if model is not None:
        inside = [p for p in sorted(path.iterdir()) if p.is_dir()]
        path = next((p for p in inside if same_architecture(p.name, model)), path)

    claim = Claim(model, tensor_parallel, peak, asked, link_gb_s, only or {})
    for reader in (
        read_llmservingsim,
        read_steps,
        read_vidur,
        read_splitwise,
        read_aiconfigurator,
    ):
        found = reader(path, claim)
        if found is not None:
            claim.check_only(path)
            return found

    raise InputError(
        f"{path}: found no profiles; expected mlp.csv with attention*.csv (Vidur), perf_model.csv "
        "(Splitwise), steps.csv (optsched profile), dense.csv with attention.csv (LLMServingSim) "
        "or *.parquet (aiconfigurator)"
    )
