"""Measured times of operators from public profiles, of several kinds.

Each source has a reader in a file of its own. It recognises its files in a folder, checks every
row against the peaks of the device, and returns `Table` objects that say what each row's batch
held and how long it took.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict, Unpack

from optsched.costs.architectures import same_architecture
from optsched.costs.devices import Device, device, devices_named
from optsched.costs.profiles.aiconfigurator import read_aiconfigurator
from optsched.costs.profiles.identity import Claim
from optsched.costs.profiles.llmservingsim import read_llmservingsim
from optsched.costs.profiles.splitwise import read_splitwise
from optsched.costs.profiles.step_log import read_step_log
from optsched.costs.profiles.steps import read_steps
from optsched.costs.profiles.tables import Profile
from optsched.costs.profiles.vidur import read_vidur
from optsched.problem.columns import check_whole
from optsched.problem.errors import InputError

READERS = (read_llmservingsim, read_steps, read_vidur, read_splitwise, read_aiconfigurator)


class Asked(TypedDict, total=False):
    """What a profile is asked to be; what is left out or None, the files say."""

    model: str | None
    tensor_parallel: int | None
    hardware: str | Device | None
    link_gb_s: float | None
    only: Mapping[str, str] | None


def read_profile(folder: str | Path, **asked: Unpack[Asked]) -> Profile:
    """Read the profiles in a folder, or in one inside it that has the name of ``model``.

    Instead of a folder it may be a file: the log of a server's steps
    (`optsched.costs.profiles.step_log`).

    They are Vidur's ``mlp.csv`` and ``attention*.csv`` (Agrawal et al. 2024), Splitwise's
    ``perf_model.csv`` (Patel et al. 2024), AIConfigurator's ``*.parquet`` (Xu et al. 2026), in
    folders or not, or LLMServingSim's ``dense.csv`` and ``attention.csv`` (Cho et al. 2026). What
    is asked is documented at `optsched.costs.fit.fit`.
    """
    model, degree = asked.get("model"), asked.get("tensor_parallel")
    peak, ambiguous = asked.get("hardware"), ""
    if isinstance(peak, str):
        # A name that may mean several devices is kept as it is, since the files may say which.
        if len(devices_named(peak)) > 1:
            ambiguous = peak
            peak = None
        else:
            peak = device(peak)

    path = Path(folder)
    if not path.exists():
        raise InputError(f"{path}: no such file or folder; expected profiles, or a log of steps")
    if degree is not None:
        check_whole(degree, "tensor_parallel", 1)
    if model is not None and path.is_dir():
        inside = [p for p in sorted(path.iterdir()) if p.is_dir()]
        path = next((p for p in inside if same_architecture(p.name, model)), path)

    # Each reader returns None where its files are not there, and the first that has some decides.
    claim = Claim(model, degree, peak, ambiguous, asked.get("link_gb_s"), asked.get("only") or {})
    for reader in READERS if path.is_dir() else [read_step_log]:
        profile = reader(path, claim)
        if profile is not None:
            claim.check_only(path)
            return profile

    raise InputError(
        f"{path}: found no profiles; expected mlp.csv with attention*.csv (Vidur), perf_model.csv "
        "(Splitwise), steps.csv (optsched gpu profile), dense.csv, attention.csv (LLMServingSim) "
        "or *.parquet (aiconfigurator)"
    )
