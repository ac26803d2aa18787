"""How long a batch takes: one round, or milliseconds per layer from A100 profiles."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.costs.batch import COEFFICIENTS
from optsched.problem.errors import InputError, UsageError
from optsched.problem.instance import Instance, canonical_json

MAX_LAYERS, MAX_COEFFICIENT, MIN_BATCH_S = 10_000, 1e6, 1e-12
"""Largest number of layers, largest coefficient in ms per layer, and least seconds of a batch.

Beyond them no machine is meant, times overflow, or a clock does not move when a batch ends.
"""

UNIT = "ms_per_layer"
"""The one unit that a cost model file may state for its coefficients."""


@dataclass(frozen=True, eq=False)
class UnitCost:
    """The round model: every batch takes one round."""

    name: str = "rounds"

    @property
    def sha256(self) -> None:
        """No digest: there is nothing to record."""
        return None

    @cached_property
    def array(self) -> NDArray[np.float64]:
        """A marker for `batch_time`: no layers, so every batch takes 1."""
        array = np.zeros(1 + len(COEFFICIENTS))
        array.setflags(write=False)  # the type of `BatchCost.array`: compiled code is compiled once
        return array


@dataclass(frozen=True, eq=False)
class BatchCost:
    """Batch time as a linear model of what a batch holds (Kim et al. 2024, section 3.2).

    `optsched.costs.batch` writes it out, and says what each coefficient multiplies.

    Parameters
    ----------
    name : str
    layers : int
    coefficients : mapping of str to str
        Decimal text of each coefficient in milliseconds per layer (`COEFFICIENTS`); those left
        out are 0. The text is kept so that exact arithmetic can start from it.
    kv_capacity_tokens : int, optional
        KV capacity of the machine that was profiled, in tokens.
    provenance : str
        Where the figures are from and whether they were checked.
    valid : mapping of str to number, optional
        Range of validity, for example ``max_batch_tokens``: the limits that
        `optsched.judge.validity.WORDS` lists. The judge warns when a schedule leaves it.

    Raises
    ------
    InputError
        Layers or a coefficient that are unknown, unreadable or out of range, or a batch of one
        token that takes less than `MIN_BATCH_S`.
    """

    name: str
    layers: int
    coefficients: Mapping[str, str]
    kv_capacity_tokens: int | None = None
    provenance: str = ""
    valid: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (
            isinstance(self.layers, bool)
            or not isinstance(self.layers, int)
            or not 1 <= self.layers <= MAX_LAYERS
        ):
            raise InputError(
                f"layers: {_short(self.layers)} is not an integer from 1 to {MAX_LAYERS}"
            )
        for key, text in self.coefficients.items():
            if key not in COEFFICIENTS:
                raise InputError(
                    f"coefficients.{key}: unknown; known are {', '.join(COEFFICIENTS)}"
                )
            try:
                value = float(text)
            except (TypeError, ValueError):
                value = float("nan")
            if not 0 <= value <= MAX_COEFFICIENT:
                raise InputError(
                    f"coefficients.{key}: {_short(text)} is not a number from 0 to "
                    f"{MAX_COEFFICIENT:g}, in milliseconds per layer"
                )
        one = self.layers * (self["base"] + self["token"]) / 1000.0
        if one < MIN_BATCH_S:
            raise InputError(
                f"coefficients: token and base make a batch of one token take {one:g} s; "
                f"at least {MIN_BATCH_S:g} s is right"
            )

    @cached_property
    def array(self) -> NDArray[np.float64]:
        """``layers`` and the coefficients in ms per layer, for `batch_time`."""
        values = [float(self.layers)] + [float(self.coefficients.get(k, 0)) for k in COEFFICIENTS]
        array = np.array(values, dtype=np.float64)
        array.setflags(write=False)
        return array

    def __getitem__(self, coefficient: str) -> float:
        """Return a coefficient in milliseconds per layer."""
        return float(self.coefficients.get(coefficient, 0))

    @cached_property
    def sha256(self) -> str:
        """Digest of what the times depend on: layers and the coefficients' decimal text."""
        data = {"layers": self.layers, "unit": UNIT, "coefficients": dict(self.coefficients)}
        return hashlib.sha256(canonical_json(data)).hexdigest()


CostModel = UnitCost | BatchCost


def _short(value: object) -> str:
    """Return a value as an error shows it, however many digits it has."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"


def models_folder() -> Path:
    """Return the folder of the shipped cost models, in a checkout or an installed wheel."""
    inside = Path(str(resources.files("optsched"))) / "_data" / "models"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[2] / "models"


def shipped_models() -> list[str]:
    """Return the names of the shipped cost models, sorted."""
    return sorted(path.stem for path in models_folder().glob("*.toml"))


def load_cost_model(name_or_file: str | Path) -> BatchCost:
    """Return a shipped cost model by name, one read from a TOML file, or a roofline.

    ``roofline:MODEL,device=NAME,tp=N`` is a machine at its published peaks
    (`optsched.costs.roofline`).

    Raises
    ------
    InputError
        No such model or file, broken TOML, missing or foreign units, bad coefficients.
    """
    text = str(name_or_file)
    if text.startswith("roofline:"):
        from optsched.costs.hardware import roofline_from_spec

        return cost_model_from_dict(roofline_from_spec(text))
    path = Path(text)
    if not text.endswith(".toml"):
        path = models_folder() / f"{text}.toml"
        if not path.is_file():
            raise InputError(
                f"cost model: {text!r} is unknown; shipped are {', '.join(shipped_models())}, "
                "or give a .toml file or roofline:MODEL"
            )
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"), parse_float=str)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; a cost model in TOML is right") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a readable TOML file ({error})") from None
    try:
        return cost_model_from_dict(data, default_name=path.stem)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def cost_model_from_dict(data: Mapping[str, Any], *, default_name: str = "") -> BatchCost:
    """Return the cost model of a parsed TOML file (floats as decimal text).

    Raises
    ------
    InputError
        A missing or wrong field.
    """
    if data.get("format") != "optsched-cost-model":
        raise InputError(f"format: {data.get('format')!r}; 'optsched-cost-model' is right")
    if data.get("version") != 1:
        raise InputError(f"version: {data.get('version')!r}; 1 is right")
    if "unit" not in data:
        raise InputError(f"unit: missing; unit = {UNIT!r} is right")
    if data["unit"] != UNIT:
        raise InputError(f"unit: {data['unit']!r}; {UNIT!r} is right")
    known = {
        "format", "version", "name", "unit", "layers", "coefficients", "kv_capacity_tokens",
        "provenance", "valid",
    }  # fmt: skip
    for key in data:
        if key not in known:
            raise InputError(f"{key}: unknown field; known are {', '.join(sorted(known))}")
    coefficients = data.get("coefficients")
    if not isinstance(coefficients, Mapping) or not coefficients:
        raise InputError("coefficients: missing; a table of milliseconds per layer is right")
    for key, value in coefficients.items():
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise InputError(f"coefficients.{key}: {value!r} is not a number")
        if isinstance(value, int) and value > MAX_COEFFICIENT:  # it may have no decimal text
            raise InputError(
                f"coefficients.{key}: {_short(value)} is more than {MAX_COEFFICIENT:g}"
            )
    capacity = data.get("kv_capacity_tokens")
    if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int)):
        raise InputError(f"kv_capacity_tokens: {capacity!r} is not an integer")
    if "layers" not in data:
        raise InputError("layers: missing; the number of model layers is right")
    valid = data.get("valid", {})
    if not isinstance(valid, Mapping):
        raise InputError(f"valid: {valid!r} is not a table of limits")
    for key, value in valid.items():
        try:
            number = float("nan") if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = float("nan")
        if not number >= 0:
            raise InputError(f"valid.{key}: {_short(value)} is not a number >= 0")
    return BatchCost(
        name=str(data.get("name", default_name)),
        layers=data["layers"],
        coefficients={k: str(v) for k, v in coefficients.items()},
        kv_capacity_tokens=capacity,
        provenance=str(data.get("provenance", "")),
        valid={k: float(v) for k, v in valid.items()},
    )


def cost_for(instance: Instance, cost_model: CostModel | str | Path | None) -> CostModel:
    """Return the cost model that fits the instance's time unit, loading it by name if needed.

    Raises
    ------
    UsageError
        Seconds without a cost model, or rounds with one.
    """
    if instance.in_rounds:
        if cost_model is not None and not isinstance(cost_model, UnitCost):
            raise UsageError(
                "cost model: the instance is in rounds, where every batch takes one round; "
                "leave the cost model out, or give an instance in seconds"
            )
        return cost_model or UnitCost()
    if cost_model is None or isinstance(cost_model, UnitCost):
        raise UsageError(
            "cost model: the instance is in seconds and needs one; shipped are "
            + ", ".join(shipped_models())
        )
    if isinstance(cost_model, BatchCost):
        return cost_model
    return load_cost_model(cost_model)
