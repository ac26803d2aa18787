"""Parquet tables of AIConfigurator (Xu et al. 2026): matrix products and attention in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.costs.hardware import BYTES, Architecture, Device, architecture
from optsched.costs.profiles.tables import (
    Measurements,
    Profile,
    Table,
    Terms,
    attention_flops,
    decode_table,
    read_table,
)
from optsched.problem.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

_HEADS = (
    "batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim", "attn_dtype",
    "latency",
)  # fmt: skip


def read_aiconfigurator(path: Path, model: str | None, degree: int, peak: Device) -> Profile | None:
    """Return the profile of one model from a folder.

    Parameters
    ----------
    path : Path
        The folder.
    model : str or None
        Name of the model; needed, since the tables hold every shape.
    degree : int
        Degree of tensor parallelism.
    peak : Device
        Device that was profiled.

    Returns
    -------
    Profile or None
        None if the folder has no tables of this kind.

    Raises
    ------
    InputError
        No model is named, or no row has its heads; or as for `read_profile`.
    """
    files = {
        kind: next(iter(sorted(path.glob(f"*{kind}_perf*.parquet"))), None)
        for kind in ("gemm", "generation_attention", "context_attention")
    }
    if not any(files.values()):
        return None
    if model is None:
        raise InputError(
            f"{path}: found aiconfigurator's tables, which hold every shape; expected --model"
        )
    shape = architecture(model)
    notes: list[str] = []
    rejected: list[Any] = []
    tables: list[Table] = []
    for kind, what in (("generation_attention", "decodes"), ("context_attention", "prefills")):
        if files[kind] is None:
            notes.append(f"no {kind} table: attention of {what} costs nothing")
    for kind, table in (
        ("gemm", _gemm), ("generation_attention", _decode), ("context_attention", _prefill),
    ):  # fmt: skip
        file = files[kind]
        if file is not None:
            needed = ("m", "n", "k", "gemm_dtype", "latency") if kind == "gemm" else _HEADS
            rows = Measurements(file, read_table(file, needed), peak, rejected)
            tables.append(table(rows, shape, degree))
    if files["gemm"] is not None:
        notes.append("the layer is its four matrix products; norms and activations are missing")
    return Profile(
        "aiconfigurator", shape, degree, peak, tuple(tables), tuple(rejected), tuple(notes)
    )


def _decode(rows: Measurements, shape: Architecture, degree: int) -> Table:
    rows = _of_heads(rows, shape, degree)
    n, s, measured = rows.numbers("batch_size", 1), rows.numbers("isl", 1), rows.times("latency")
    m = s + rows.numbers("step")
    good = rows.possible(
        "latency", measured, 4 * shape.hidden / degree * n * m,
        n * m * shape.layer_kv_bytes / degree,
    )  # fmt: skip
    return decode_table(n[good], m[good], measured[good])


def _prefill(rows: Measurements, shape: Architecture, degree: int) -> Table:
    rows = _of_heads(rows, shape, degree)
    n, c, measured = rows.numbers("batch_size", 1), rows.numbers("isl", 1), rows.times("latency")
    good = rows.possible(
        "latency", measured, n * attention_flops(shape, c, 0.0, degree),
        n * c * shape.layer_kv_bytes / degree,
    )  # fmt: skip
    n, c = n[good], c[good]
    # Without cached KV the cross term does not show. By the arithmetic it is twice the square,
    # c m pairs against c^2 / 2, so the two are fitted as one.
    return Table.of(
        "prefill",
        measured[good],
        {
            "prefill_square": n * c**2, "prefill_token": n * c, "prefill_request": n,
            "prefill_base": 1,
        },
        ladders={"min_prefill_chunk_tokens": c},
        limits={"max_prefill_chunk_tokens": c, "max_batch_tokens": n * c},
    )  # fmt: skip


def _of_heads(rows: Measurements, shape: Architecture, degree: int) -> Measurements:
    frame = rows.frame
    heads, kv_heads = shape.heads // degree, max(1, shape.kv_heads // degree)
    same = (frame["attn_dtype"] == "bfloat16") & (frame["head_dim"] == shape.head_size)
    same &= frame["num_heads"] == heads
    chosen = same & (frame["num_key_value_heads"] == kv_heads)
    if not chosen.any():
        known = sorted({int(k) for k in frame[same]["num_key_value_heads"]})
        raise InputError(
            f"{rows.path}: expected rows of {heads} heads with {kv_heads} KV heads ({shape.name}, "
            f"tensor parallel {degree}); found KV heads {', '.join(map(str, known)) or 'none'}"
        )
    return rows.only(chosen)


def _gemm(rows: Measurements, shape: Architecture, degree: int) -> Table:
    """Return the table of layers: the sum of a layer's four matrix products.

    Shapes between the measured ones are interpolated. The time per weight varies slowly over the
    grid, so it is interpolated linearly in the logarithms of both widths.
    """
    rows = rows.only(rows.frame["gemm_dtype"] == "bfloat16")
    m, n, k = (rows.numbers(name, 1) for name in "mnk")
    measured = rows.times("latency")
    good = rows.possible("latency", measured, 2 * m * n * k, BYTES * (m * k + n * k + m * n))
    frame = rows.frame[good].assign(each=(measured / (n * k))[good])
    kv = shape.kv_heads * shape.head_size
    products = (
        ((shape.hidden + 2 * kv) / degree, shape.hidden),
        (shape.hidden, shape.hidden / degree),
        (2 * shape.ffn / degree, shape.hidden),
        (shape.hidden, shape.ffn / degree),
    )
    times: dict[float, float] = {}
    for size, group in frame.groupby("m"):
        grid = group.pivot_table(index="n", columns="k", values="each").dropna()
        if min(grid.shape) > 1:
            times[float(str(size))] = sum(a * b * _between(grid, a, b) for a, b in products)
    tokens = np.array(list(times))
    total = np.array(list(times.values()), dtype=np.float64)
    terms: Terms = {"token": tokens, "base": 1}
    return Table.of("layer", total, terms, limits={"max_batch_tokens": tokens})


def _between(grid: pd.DataFrame, n: float, k: float) -> float:
    rows, columns = np.log(grid.index.to_numpy(float)), np.log(grid.columns.to_numpy(float))
    values: Any = grid.to_numpy()
    over_k = [np.interp(np.log(k), columns, row) for row in values]
    return float(np.interp(np.log(n), rows, over_k))
