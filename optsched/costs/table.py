"""Tables of measured times, interpolated: the second kind of cost model.

A tabulated model prices a batch by its grids, summed over them. Each grid gives milliseconds per
layer over some of `QUANTITIES`. Between the values of an axis the time is linear, below the first
it is that of the first, and beyond the last it goes on as between the last two. A batch takes the
larger of this sum and of the *minorants*, which are linear like the models without tables. So

- every minorant is at most the time of every batch, whatever the tables hold. A schedule's tokens
  therefore appear at times that a schedule under the minorant also reaches: let each batch end when
  it ends here, and start later. Any bound on the times of tokens that is proved for the minorant
  and for schedules that may wait holds here;
- methods that take the formula of `optsched.costs.batch` for the time of a batch must refuse the
  feature ``cost.table``.

Decodes of one batch that hold unequal amounts of KV take longer than their mean would. `skew` is
the share, by number of decodes, of the way from the mean to the maximum at which the grids are
read. Where its table goes on below 0 or above 1, it stays there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from optsched.costs.batch import COEFFICIENTS
from optsched.problem.errors import InputError

Floats = NDArray[np.float64]
QUANTITIES = ("tokens", "requests", "prefill_tokens", "prefill_kv", "decode_requests", "decode_kv")
"""What an axis may be: tokens processed, requests, tokens of prefills, KV cached before them,
requests that decode, and the KV that each of these has cached."""

# The largest time in milliseconds, and the largest quantity.
_MAX = 1e12
MAX_CELLS = 1_000_000
"""Maximum number of values in a grid."""


@dataclass(frozen=True, eq=False)
class Grid:
    """Values over some quantities of a batch.

    `axes` has at least two ascending values by quantity, and `values` a dimension for each.
    """

    axes: Mapping[str, Floats]
    values: Floats

    def __post_init__(self) -> None:
        if not self.axes:
            raise InputError("axes: found none; expected a table of quantities")

        axes = {}
        for name, values in self.axes.items():
            if name not in QUANTITIES:
                raise InputError(f"axes.{name}: unknown; known are {', '.join(QUANTITIES)}")

            axis = axes[name] = _numbers(values, f"axes.{name}")
            if axis.ndim != 1 or len(axis) < 2 or (np.diff(axis) <= 0).any():
                raise InputError(f"axes.{name}: expected two or more numbers that ascend")

        # A file has the values in one row, in which the last axis runs fastest.
        shape = tuple(len(axis) for axis in axes.values())
        cells = _numbers(self.values, "values")
        if cells.size != math.prod(shape) or cells.size > MAX_CELLS:
            expected = " x ".join(map(str, shape))
            raise InputError(
                f"values: found {cells.size}; expected {expected}, and at most {MAX_CELLS}"
            )

        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "values", cells.reshape(shape))

    @property
    def array(self) -> Floats:
        """The number of axes, each axis as its quantity, length and values, and the values."""
        parts: list[ArrayLike] = [[len(self.axes)]]
        for name, axis in self.axes.items():
            parts += [[QUANTITIES.index(name), len(axis)], axis]

        return np.concatenate([*parts, self.values.ravel()]).astype(np.float64)

    def to_dict(self) -> dict[str, Any]:
        """Return the grid as a file holds it."""
        axes = {name: axis.tolist() for name, axis in self.axes.items()}
        return {"axes": axes, "values": self.values.ravel().tolist()}


def _numbers(values: Any, name: str) -> Floats:
    """Return numbers from a file as a read-only array, checked. `name`: theirs, for errors."""
    try:
        numbers = np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        numbers = np.array(np.nan)  # which the check refuses

    if not ((numbers >= 0).all() and (numbers <= _MAX).all()):
        raise InputError(f"{name}: found something else; expected numbers from 0 to {_MAX:g}")

    numbers.setflags(write=False)
    return numbers


def no_skew() -> Grid:
    """Return the skew of a machine that decodes unequal requests like equal ones."""
    return Grid({"decode_requests": [0, 1]}, [0, 0])  # type: ignore[arg-type, dict-item]


@dataclass(frozen=True, eq=False)
class CostTable:
    """The tables of a cost model, of which a batch takes the sum, in milliseconds per layer.

    `minorants` has decimal texts of coefficients, and `skew` a share by ``decode_requests``.
    """

    grids: Sequence[Grid]
    minorants: Sequence[Mapping[str, str]]
    skew: Grid = field(default_factory=no_skew)

    def __post_init__(self) -> None:
        for name in ("grids", "minorants"):
            if not getattr(self, name):
                raise InputError(f"{name}: found none; expected at least one")

        if list(self.skew.axes) != ["decode_requests"]:
            raise InputError("skew: found other axes; expected decode_requests alone")

    @property
    def array(self) -> Floats:
        """What `batch_time` reads behind the coefficients: minorants, then grids, skew first."""
        forms = [[float(m.get(name, 0)) for name in COEFFICIENTS] for m in self.minorants]
        grids = [self.skew.array, *(grid.array for grid in self.grids)]
        return np.concatenate([[len(forms)], *forms, [len(grids)], *grids])

    def to_dict(self) -> dict[str, Any]:
        """Return the table as a file holds it."""
        return {
            "minorants": [dict(minorant) for minorant in self.minorants],
            "skew": self.skew.to_dict(),
            "grids": [grid.to_dict() for grid in self.grids],
        }


def table_from_dict(data: Any) -> CostTable:
    """Return the table of a parsed cost model file."""
    if not isinstance(data, Mapping) or not set(data) <= {"minorants", "grids", "skew"}:
        raise InputError("expected minorants, grids and skew")

    def grid(entry: Any, name: str) -> Grid:
        if not isinstance(entry, Mapping) or set(entry) != {"axes", "values"}:
            raise InputError(f"{name}: expected axes and values")
        if not isinstance(entry["axes"], Mapping):
            raise InputError(f"{name}.axes: expected a table of quantities")
        try:
            return Grid(entry["axes"], entry["values"])
        except InputError as error:
            raise InputError(f"{name}.{error}") from None

    for name in ("minorants", "grids"):
        entries = data.get(name)
        if not isinstance(entries, list):
            raise InputError(f"{name}: found {type(entries).__name__}; expected a list of tables")

    minorants = []
    for k, entry in enumerate(data["minorants"]):
        if not isinstance(entry, Mapping):
            raise InputError(f"minorants[{k}]: expected a table of coefficients")
        # Python refuses to print integers of thousands of digits.
        if any(type(value) is int and abs(value) > _MAX for value in entry.values()):
            raise InputError(f"minorants[{k}]: found a larger number; expected at most {_MAX:g}")

        minorants.append({key: str(value) for key, value in entry.items()})

    grids = [grid(entry, f"grids[{k}]") for k, entry in enumerate(data["grids"])]
    skew = grid(data["skew"], "skew") if "skew" in data else no_skew()
    return CostTable(grids, minorants, skew)
