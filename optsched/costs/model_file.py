"""The text of a cost model's file."""

import json
from collections.abc import Iterable

from optsched.costs.batch import TERMS
from optsched.costs.cost import BatchCost
from optsched.costs.table import Grid


def to_toml(model: BatchCost, remarks: Iterable[str] = ()) -> str:
    """Return a cost model as the text of a file for `load_cost_model`."""
    lines = [f"# {remark}" for remark in remarks]
    lines += [
        "# A batch's time is given in optsched.costs.cost.BatchCost; coefficients left out are 0.",
        "",
        'format = "optsched-cost-model"',
        "version = 1",
        f"name = {_quoted(model.name)}",
        'unit = "ms_per_layer"' + (" # one layer stands for the whole model" * (model.layers == 1)),
        f"layers = {model.layers}",
    ]
    if model.kv_capacity_tokens is not None:
        lines.append(f"kv_capacity_tokens = {model.kv_capacity_tokens}")
    if model.kv_window is not None:
        lines.append(f"kv_window = {_quoted(str(model.kv_window))}")

    lines += [f"provenance = {_quoted(model.provenance)}", "", "[coefficients]"]
    for key, unit in TERMS.items():
        if key in model.coefficients:
            lines.append(f"{key} = {_decimal(model.coefficients[key])} # {unit}")

    if model.valid:
        lines += ["", "[valid]"]
        lines += [f"{key} = {value:.15g}" for key, value in sorted(model.valid.items())]

    if model.table is not None:
        for minorant in model.table.minorants:
            lines += ["", "[[table.minorants]] # no batch takes less"]
            lines += [f"{key} = {_decimal(text)}" for key, text in minorant.items()]

        lines += ["", "[table.skew]", *_grid(model.table.skew)]
        for grid in model.table.grids:
            lines += ["", "[[table.grids]] # ms per layer", *_grid(grid)]

    return "\n".join(lines) + "\n"


def _grid(grid: Grid) -> list[str]:
    """Return the lines of a grid, which `table_from_dict` reads."""
    axes = ", ".join(f"{name} = {axis.tolist()}" for name, axis in grid.axes.items())
    return [f"axes = {{ {axes} }}", f"values = {grid.values.ravel().tolist()}"]


def _quoted(text: str) -> str:
    return json.dumps("".join(c if c.isprintable() else " " for c in text), ensure_ascii=False)


def _decimal(text: str) -> str:
    """Return the text of a number as a float in TOML, which needs a point or an exponent."""
    return text if any(mark in text for mark in ".e") else f"{text}.0"
