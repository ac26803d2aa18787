"""The text of a cost model's file."""

from __future__ import annotations

from collections.abc import Iterable

from optsched.costs.batch import TERMS
from optsched.costs.cost import BatchCost


def to_toml(model: BatchCost, remarks: Iterable[str] = ()) -> str:
    """Return a cost model as the text of a file for `load_cost_model`.

    Parameters
    ----------
    model : BatchCost
    remarks : iterable of str
        Comments for the top of the file, one line each.

    Returns
    -------
    str
        TOML, with the unit of every coefficient in a comment.
    """
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
    lines += [f"provenance = {_quoted(model.provenance)}", "", "[coefficients]"]
    for key, unit in TERMS.items():
        if key in model.coefficients:
            lines.append(f"{key} = {_decimal(model.coefficients[key])} # {unit}")
    if model.valid:
        lines += ["", "[valid]"]
        lines += [f"{key} = {value:.15g}" for key, value in sorted(model.valid.items())]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    plain = "".join(c if c.isprintable() else " " for c in text)
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _decimal(text: str) -> str:
    """Return the text of a number as a float in TOML, which needs a point or an exponent."""
    return text if any(mark in text for mark in ".e") else f"{text}.0"
