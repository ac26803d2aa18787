"""Parquet tables of AIConfigurator (Xu et al. 2026): matrix products and attention in bf16."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.costs.architectures import BYTES, Architecture
from optsched.costs.profiles.identity import Claim
from optsched.costs.profiles.tables import (
    Measurements,
    Profile,
    Rejected,
    Table,
    Terms,
    attention_flops,
    decode_table,
    read_table,
)
from optsched.problem.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

_PART = {
    "layers": "gemm",
    "attention of decodes": "generation_attention",
    "attention of prefills": "context_attention",
}
"""The kind of table that has each part of a model."""
_HEADS = (
    "batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim", "attn_dtype",
    "latency",
)  # fmt: skip


def read_aiconfigurator(path: Path, claim: Claim) -> Profile | None:
    """Return the profile of one model from a folder, or None if it has no tables of this kind.

    The repository sorts its tables into folders by kind, framework and version within a device's
    folder, so they are searched for in all folders of ``path``. InputError: no model is named,
    tables are missing, or no row has its heads; or as for `read_profile`.
    """
    files = _files(path, claim)
    if not files:
        return None
    if claim.model is None:
        raise InputError(
            f"{path}: found aiconfigurator's tables, which hold every shape; expected --model"
        )

    shape, degree = claim.shape(path), claim.degree or 1
    claim.degree = degree
    shape.check_degree(degree)
    heads = {
        "num_heads": shape.heads // degree,
        "num_key_value_heads": max(1, shape.kv_heads // degree),
        "head_dim": shape.head_size,
    }
    frames = {}

    for kind in (one for one in _PART.values() if one in files):
        file = files[kind]
        needed = ("m", "n", "k", "gemm_dtype", "latency") if kind == "gemm" else _HEADS
        rows = read_table(file, needed)
        exact: dict[str, Any] = {"op_name": kind} if kind == "gemm" else {"op_name": kind, **heads}
        if kind == "context_attention":
            exact["step"] = 0  # with cached KV a prefill has another term

        frames[kind] = claim.select(file, rows, exact=exact, known=needed)

    peak = claim.peak(path)
    rejected: list[Rejected] = []
    tables = [
        _READERS[kind](Measurements(files[kind], frame, peak, rejected), shape, degree)
        for kind, frame in frames.items()
    ]
    claim.notes.append("the layer is its four matrix products; norms and activations are missing")
    places = {part: f"a table {kind}_perf in a folder of {path}" for part, kind in _PART.items()}

    return claim.profile("aiconfigurator", shape, tables, places, rejected)


def _files(path: Path, claim: Claim) -> dict[str, Path]:
    """Return the tables of a folder by kind: those of one framework and version.

    A gemm and an attention table belong together if their folders differ in nothing but the kind.
    """
    sets: dict[tuple[str, ...], dict[str, Path]] = {}
    for file in sorted(path.rglob("*_perf.*")):
        kind = next((k for k in _PART.values() if re.search(rf"(^|_){k}_perf$", file.stem)), None)
        if kind is None or file.suffix not in (".parquet", ".txt", ".csv"):
            continue
        if re.search("moe|expert|grouped|encoder|wideep", file.stem):
            continue  # products of experts and attention of encoders are other kinds of layers

        place = tuple(
            p for p in file.relative_to(path).parts[:-1] if p not in ("gemm", "attention")
        )
        own = sets.setdefault(place, {})
        if kind in own and own[kind].stem != file.stem:
            raise InputError(f"{file}: found beside {own[kind].name}; expected one {kind} table")
        if kind not in own or file.suffix == ".parquet":  # older versions are text as well
            own[kind] = file

    for name in ("framework", "version"):
        if name in claim.only and len(sets) > 1:
            claim.met.add(name)
            sets = {place: own for place, own in sets.items() if claim.only[name] in place}

    whole = {place: own for place, own in sets.items() if len(own) == len(_PART)} or sets
    if len(whole) <= 1:
        return next(iter(whole.values()), {})

    words = []
    for place, own in whole.items():
        lacking = ", ".join(kind for kind in _PART.values() if kind not in own)
        words.append(("/".join(place) or ".") + (f" without {lacking}" if lacking else ""))

    raise InputError(
        f"{path}: found tables of {'; '.join(words)}; expected {', '.join(_PART.values())} of one "
        f"of them, as in --only version={next(reversed(max(whole)), '')}"
    )


def _decode(rows: Measurements, shape: Architecture, degree: int) -> Table:
    m = rows.numbers("isl", 1) + rows.numbers("step")
    return decode_table(rows, "latency", rows.numbers("batch_size", 1), m, shape, degree)


def _prefill(rows: Measurements, shape: Architecture, degree: int) -> Table:
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


def _gemm(rows: Measurements, shape: Architecture, degree: int) -> Table:
    """Return the table of layers: the sum of a layer's four matrix products.

    Shapes between the measured ones are interpolated. The time per weight varies slowly over the
    grid, so it is interpolated linearly in the logarithms of both widths.
    """
    m, n, k = (rows.numbers(name, 1) for name in "mnk")
    measured = rows.times("latency")
    good = rows.possible("latency", measured, 2 * m * n * k, BYTES * (m * k + n * k + m * n))
    frame = rows.frame[good].assign(each=(measured / (n * k))[good])
    kv = max(shape.kv_heads / degree, 1) * shape.head_size
    products = (
        (shape.attention_width / degree + 2 * kv, shape.hidden),
        (shape.hidden, shape.attention_width / degree),
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


_READERS = {"gemm": _gemm, "generation_attention": _decode, "context_attention": _prefill}
