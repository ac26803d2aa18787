"""How long a batch takes: one round, or a model fitted to profiles of a machine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from optsched.costs.batch import COEFFICIENTS, EMPTY, add_prefill, batch_time
from optsched.costs.table import CostTable, table_from_dict
from optsched.problem.errors import InputError, UsageError
from optsched.problem.instance import DEFAULT_KV_CAPACITY, Instance, canonical_json
from optsched.problem.notes import warn
from optsched.problem.room import KvWindow, kv_window_of

if TYPE_CHECKING:
    from optsched.costs.architectures import Architecture
    from optsched.costs.devices import Device

MAX_LAYERS, MAX_COEFFICIENT, MIN_BATCH_S = 10_000, 1e6, 1e-12
"""Maximum number of layers, maximum coefficient in ms per layer, and minimum seconds of a batch.

No real machine is beyond these limits. There, times would overflow, or a batch would be too short
to move a float64 clock.
"""

SAME_CAPACITY = 0.05
"""Relative difference up to which two KV capacities are taken for those of one machine."""

UNIT = "ms_per_layer"
"""The only unit of coefficients that a cost model file may have."""

FIXED = {"format": "optsched-cost-model", "version": 1, "unit": UNIT}
"""Fields of a cost model file that have one value."""
_OTHERS = "name layers coefficients kv_capacity_tokens kv_window provenance valid table"
FIELDS = {*FIXED, *_OTHERS.split()}
"""All fields of a cost model file."""


@dataclass(frozen=True, eq=False)
class UnitCost:
    """The cost model of the round model, where every batch takes one round.

    Parameters
    ----------
    name : str
    """

    name: str = "rounds"

    @property
    def sha256(self) -> None:
        """None: schedules in rounds depend on no cost model, so no digest is recorded."""
        return None

    @cached_property
    def array(self) -> NDArray[np.float64]:
        """Zeros for `batch_time`: with 0 layers, every batch takes 1 round."""
        array = np.zeros(1 + len(COEFFICIENTS))
        array.setflags(write=False)  # the type of `BatchCost.array`, so loops are compiled once
        return array


@dataclass(frozen=True, eq=False)
class BatchCost:
    """Batch time as a linear model of what a batch holds (Kim et al. 2024, section 3.2).

    `optsched.costs.batch` writes it out, and says what each coefficient multiplies.

    Parameters
    ----------
    name : str
    layers : int
        Number of layers of the model, from 1 to `MAX_LAYERS`.
    coefficients : mapping of str to str
        Decimal text of each coefficient of `COEFFICIENTS`, in milliseconds per layer. Those left
        out are 0. The text is kept so that exact arithmetic can start from it.
    kv_capacity_tokens : int, optional
        KV capacity of the profiled machine, in tokens.
    provenance : str
        Where the figures come from, and whether they were checked.
    valid : mapping of str to float, optional
        Range of validity: limits by name, for example ``max_batch_tokens``, as
        `optsched.judge.validity.WORDS` lists them. The judge warns when a schedule leaves it.
    table : CostTable, optional
        Tables by which batches are priced (`optsched.costs.table`). Then the coefficients are a
        linear approximation, and price single requests alone, for schedulers that order by work.
    kv_window : KvWindow, optional
        The layers of the model that keep the KV of a window alone (`optsched.Instance`).

    Raises
    ------
    InputError
        ``layers`` is out of range, a coefficient is unknown, unreadable or out of range, or a
        batch of one token takes less than `MIN_BATCH_S`.
    """

    name: str
    layers: int
    coefficients: Mapping[str, str]
    kv_capacity_tokens: int | None = None
    provenance: str = ""
    valid: Mapping[str, float] = field(default_factory=dict)
    table: CostTable | None = None
    kv_window: KvWindow | None = None

    def __post_init__(self) -> None:
        if type(self.layers) is not int or not 1 <= self.layers <= MAX_LAYERS:
            found = f"layers: found {_short(self.layers)}"
            raise InputError(f"{found}; expected an integer from 1 to {MAX_LAYERS}")

        for key, text in self.coefficients.items():
            if key not in COEFFICIENTS:
                known = ", ".join(COEFFICIENTS)
                raise InputError(f"coefficients.{key}: unknown; known are {known}")
            if not 0 <= _number(text) <= MAX_COEFFICIENT:
                raise InputError(
                    f"coefficients.{key}: found {_short(text)}; expected a number from 0 to "
                    f"{MAX_COEFFICIENT:g}, in milliseconds per layer"
                )

        shortest_s = self.layers * (self["base"] + self["token"]) / 1000.0
        if shortest_s < MIN_BATCH_S:
            found = f"found token and base that make a batch of one token take {shortest_s:g} s"
            raise InputError(f"coefficients: {found}; expected at least {MIN_BATCH_S:g} s")

        if self.table is not None:
            try:
                self.minorants  # noqa: B018 (making them checks their coefficients)
            except InputError as error:
                raise InputError(f"table.minorants: {error}") from None

    @cached_property
    def minorants(self) -> tuple[BatchCost, ...]:
        """Linear models under which no batch takes longer: the model itself if it is linear."""
        if self.table is None:
            return (self,)

        linear = replace(self, table=None, kv_capacity_tokens=None)  # they are of no machine
        return tuple(
            replace(linear, name=f"{self.name}, minorant {k}", coefficients=texts)
            for k, texts in enumerate(self.table.minorants)
        )

    @cached_property
    def array(self) -> NDArray[np.float64]:
        """``layers``, the coefficients in ms per layer, and the table, for `batch_time`."""
        tail = [] if self.table is None else self.table.array.tolist()
        array = np.array([self.layers, *map(self.__getitem__, COEFFICIENTS), *tail], np.float64)
        array.setflags(write=False)
        return array

    @cached_property
    def cheap_tokens(self) -> int | None:
        """The tokens of a prefill up to which further ones cost half of a usual one, or less.

        It is the largest batch of the tables whose tokens beyond the first take, each, at most half
        of the mean time of a token in the very largest. Kernels are made for whole tiles of
        tokens, and small batches wait for the weights. None for linear models.
        """
        grids = () if self.table is None else self.table.grids
        axes = [grid.axes["tokens"] for grid in grids if "tokens" in grid.axes]
        if not axes:
            return None

        tokens = np.unique(np.concatenate(axes)).astype(np.int64)
        tokens = tokens[tokens >= 1]
        if not len(tokens):
            return None

        def time(c: int) -> float:  # of one prefill of c tokens, with no KV cached
            return batch_time(self.array, add_prefill(EMPTY, c, 0))

        beyond_first = np.array([time(c) for c in tokens.tolist()]) - time(1)
        half_price = time(int(tokens[-1])) / tokens[-1] / 2
        # The last one that qualifies; one token stands for none.
        return int(np.append(1, tokens[beyond_first <= half_price * (tokens - 1)])[-1])

    def __getitem__(self, coefficient: str) -> float:
        """Return a coefficient in milliseconds per layer."""
        return float(self.coefficients.get(coefficient, 0))

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of what times depend on: layers, the text of the coefficients, the table."""
        coefficients = dict(self.coefficients)
        data: dict[str, Any] = {"layers": self.layers, "unit": UNIT, "coefficients": coefficients}
        if self.table is not None:
            data["table"] = self.table.to_dict()

        return hashlib.sha256(canonical_json(data)).hexdigest()


CostModel = UnitCost | BatchCost
PROFILED = {
    ("llama3-8b", "h100-80gb"): "llama-3.1-8b-h100-torch",
    ("llama3-8b", "h200"): "llama-3.1-8b-h200-vllm",
}
"""Shipped cost models that were measured, by model and GPU."""


def _short(value: object) -> str:
    """Return a value for an error, shortened if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a number of thousands of digits"

    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"


def _number(value: object) -> float:
    """Return what a value is as a number; NaN if it is none."""
    try:
        return float("nan") if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def models_folder() -> Path:
    """Return the folder of the shipped cost models, in a checkout or an installed wheel."""
    inside = Path(str(resources.files("optsched"))) / "_data" / "models"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[2] / "models"


def shipped_models() -> list[str]:
    """Return the names of the shipped cost models, sorted."""
    return sorted(path.stem for path in models_folder().glob("*.toml"))


def roofline(
    model: str | Architecture,
    hardware: str | Device = "a100-80gb",
    *,
    tensor_parallel: int = 1,
    usable: float = 0.9,
    beside_gib: float = 0.0,
    exponent: float | None = None,
    request_tokens: int | None = None,
) -> BatchCost:
    """Return the cost model of a machine that runs at its published peaks.

    Every operator takes the larger of its arithmetic time and its memory time, and nothing else
    costs anything (Yuan et al. 2024, LLM-Viewer). This is a lower estimate: measured times are
    longer. By name: ``load_cost_model("roofline:llama2-7b,device=a100-80gb,tp=1")``.

    Parameters
    ----------
    model : str or Architecture
        A name in `optsched.costs.architectures.ARCHITECTURES`, or an architecture.
    hardware : str or Device
        A name in `optsched.costs.devices.DEVICES`, or a device.
    tensor_parallel : int
        Number of devices that share every layer, with two all-reduces per layer.
    usable : float
        Share of the memory that weights and KV may take; it decides the KV capacity.
    beside_gib : float
        What a server holds beside both, in 2**30 bytes of each device.
    exponent : float, optional
        Infinite for the model with the roofline's corner itself, which is tabulated; less for one
        with a rounder corner (`corner`). By default the model is linear; with experts it is
        tabulated.
    request_tokens : int, optional
        The tokens of a request, prompt and output, for which the KV capacity is: every token then
        counts for what a request of that length takes in the mean. By default the capacity is that
        of tokens held in all layers, beside the `kv_window` of those that slide.

    Notes
    -----
    The time of the dense operators, the maximum of arithmetic and reading weights, is not linear
    in the tokens. In the linear model ``token`` and ``base`` are its relative least squares fit
    over batches of 1 to 4096 tokens, which is up to a third too long near the corner, and for
    larger batches too short. Decode attention is taken as memory-bound and prefill attention as
    compute-bound, which holds except in the smallest chunks. Causal prefill attention counts half
    of c^2 and all of c m.
    """
    from optsched.costs.architectures import architecture
    from optsched.costs.devices import device
    from optsched.costs.hardware import roofline_data

    shape = architecture(model) if isinstance(model, str) else model
    peak = device(hardware) if isinstance(hardware, str) else hardware
    apart = exponent is not None
    memory = usable, beside_gib
    cost = BatchCost(**roofline_data(shape, peak, tensor_parallel, *memory, apart, request_tokens))
    return cost if exponent is None else corner(cost, exponent)


def corner(cost: BatchCost, exponent: float, *, kv: bool = False) -> BatchCost:
    """Return a model in which a step takes the p-norm of its reading and its arithmetic.

    Parameters
    ----------
    cost : BatchCost
        A linear model. ``base`` reads the weights, and ``token`` is arithmetic.
    exponent : float
        From 1, which gives the model itself, to infinity, which gives the larger of both.
    kv : bool
        Whether reading KV counts as reading and attention of prefills as arithmetic. Otherwise both
        come on top, as where one operator follows the other.
    """
    if cost.table is not None:
        raise UsageError(f"corner: found {cost.name}, which is tabulated; expected a linear model")
    if not exponent >= 1:
        raise InputError(f"exponent: found {exponent!r}; expected a number >= 1, or inf")
    if exponent == 1:
        return cost

    from optsched.costs.corner import norm

    words = f"{cost.provenance}; the p-norm of reading and arithmetic, p = {exponent:g}"
    table = norm(cost.coefficients, exponent, kv=kv)
    return replace(cost, provenance=words.lstrip("; "), table=table)


def cost_model_from_dict(data: Mapping[str, Any], *, default_name: str = "") -> BatchCost:
    """Return the cost model of a parsed TOML file, whose floats are texts, as they stand there."""
    for key, expected in FIXED.items():  # the format, its version and the unit
        if data.get(key) != expected:
            found = repr(data[key]) if key in data else "nothing"
            raise InputError(f"{key}: found {found}; expected {expected!r}")

    for key in data:
        if key not in FIELDS:
            raise InputError(f"{key}: unknown field; known are {', '.join(sorted(FIELDS))}")

    coefficients = data.get("coefficients")
    if not isinstance(coefficients, Mapping) or not coefficients:
        raise InputError("coefficients: found none; expected a table of milliseconds per layer")
    capacity = data.get("kv_capacity_tokens")
    if capacity is not None and type(capacity) is not int:
        raise InputError(f"kv_capacity_tokens: found {capacity!r}; expected an integer")
    if "layers" not in data:
        raise InputError("layers: found nothing; expected the number of model layers")

    valid = data.get("valid", {})
    if not isinstance(valid, Mapping):
        raise InputError(f"valid: found {valid!r}; expected a table of limits")
    for key, value in valid.items():
        if not _number(value) >= 0:
            raise InputError(f"valid.{key}: found {_short(value)}; expected a number >= 0")

    try:
        table = table_from_dict(data["table"]) if "table" in data else None
    except InputError as error:
        raise InputError(f"table: {error}") from None

    # Floats are texts already, and an integer may be too long to print as one.
    return BatchCost(
        str(data.get("name", default_name)),
        data["layers"],
        {k: x if isinstance(x, str) else _short(x) for k, x in coefficients.items()},
        capacity,
        str(data.get("provenance", "")),
        {key: float(value) for key, value in valid.items()},
        table,
        kv_window_of(data.get("kv_window")),
    )


def warn_of_default(instance: Instance, cost: BatchCost) -> None:
    """Warn where the instance's KV capacity is the default, and not that of the model's machine."""
    default, of_machine = DEFAULT_KV_CAPACITY, cost.kv_capacity_tokens
    if instance.kv_capacity != default or of_machine is None:
        return
    if abs(of_machine - default) > SAME_CAPACITY * default:
        warn(
            f"the instance's KV capacity is the default of {default} tokens, and the machine of "
            f"cost model {cost.name!r} holds {of_machine}; --cost-model of `import` or `export` "
            "sets it",
            stacklevel=3,
        )
