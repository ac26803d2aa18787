"""The text of a cost model's file."""

from __future__ import annotations

from collections.abc import Iterable

from optsched.costs.batch import COEFFICIENTS
from optsched.costs.cost import BatchCost

UNITS = {
    "token": "ms per token processed in the batch",
    "base": "ms per batch",
    "decode_kv": "ms per KV token cached before the batch, over the decode requests",
    "decode_request": "ms per decode request",
    "decode_base": "ms per batch that decodes",
    "prefill_square": "ms per squared token, per prefill request",
    "prefill_cross": "ms per token times cached KV token, per prefill request",
    "prefill_kv": "ms per KV token cached before the batch, over the prefill requests",
    "prefill_token": "ms per prefill token, beside `token`",
    "prefill_request": "ms per prefill request",
    "prefill_base": "ms per batch that prefills",
}


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
    lines += [f"provenance = {_quoted(model.provenance)}", "", "[coefficients]"]
    for key in COEFFICIENTS:
        if key in model.coefficients:
            lines.append(f"{key} = {_decimal(model.coefficients[key])} # {UNITS[key]}")
    if model.valid:
        lines += ["", "[valid]"]
        lines += [f"{key} = {value:.15g}" for key, value in sorted(model.valid.items())]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    plain = "".join(c if c.isprintable() else " " for c in text)
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _decimal(text: str) -> str:
    """Return the text of a number as TOML writes floats: with a point or an exponent."""
    return text if any(mark in text for mark in ".e") else f"{text}.0"
