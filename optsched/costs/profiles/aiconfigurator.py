"""Parquet tables of AIConfigurator (Xu et al. 2026): matrix products and attention in bf16."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.costs.architectures import BYTES
from optsched.costs.profiles.identity import Claim
from optsched.costs.profiles.tables import (
    Measurements,
    Profile,
    Table,
    decode_table,
    layer_table,
    prefill_table,
)
from optsched.problem.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

# The kind of table that has each part of a model.
_PART = {
    "layers": "gemm",
    "attention of decodes": "generation_attention",
    "attention of prefills": "context_attention",
}
_PRODUCTS = ("m", "n", "k", "gemm_dtype", "latency")
_HEADS = ("num_heads", "num_key_value_heads", "head_dim")
_BATCH = ("batch_size", "isl", "step", *_HEADS, "attn_dtype", "latency")
# Tables of products of experts and attention of encoders, which are other kinds of layers.
_OTHER_LAYERS = re.compile("moe|expert|grouped|encoder|wideep")


def read_aiconfigurator(path: Path, claim: Claim) -> Profile | None:
    """Return the profile of one model from all folders inside one, or None without such tables.

    `claim`: what the profile is asked to be, and what its files say (`Claim`).
    """
    files = _files(path, claim)
    if not files:
        return None
    if claim.model is None:
        raise InputError(
            f"{path}: found aiconfigurator's tables, which hold every shape; expected --model"
        )

    # A tensor-parallel degree shows in the heads that each device has. It has one KV head at least.
    shape = claim.find_shape(path)
    claim.degree = degree = claim.degree or 1
    shape.check_degree(degree)
    sizes = (shape.heads // degree, max(1, shape.kv_heads // degree), shape.head_size)
    heads = dict(zip(_HEADS, sizes, strict=True))
    frames = {}
    for kind in _PART.values():
        if kind not in files:
            continue

        exact: dict[str, Any] = {"op_name": kind}
        if kind != "gemm":
            exact |= heads
        if kind == "context_attention":
            exact["step"] = 0  # with cached KV a prefill has another term

        needed = _PRODUCTS if kind == "gemm" else _BATCH
        frames[files[kind]] = claim.read(files[kind], needed, exact=exact)

    readers = {"gemm": _gemm, "generation_attention": _decode, "context_attention": _prefill}
    kinds = {file: kind for kind, file in files.items()}
    tables = [readers[kinds[rows.path]](rows) for rows in claim.measured(path, frames)]
    claim.notes.append("the layer is its four matrix products; norms and activations are missing")
    places = {part: f"a table {kind}_perf in a folder of {path}" for part, kind in _PART.items()}

    return claim.profile("aiconfigurator", tables, places)


def _files(path: Path, claim: Claim) -> dict[str, Path]:
    """Return one framework's and version's tables by kind, or none if there are none.

    A set of tables is in folders of the same names but for the kind, such as ``vllm/0.9/gemm`` and
    ``vllm/0.9/attention``.
    """
    sets: dict[tuple[str, ...], dict[str, Path]] = {}
    for file in sorted(path.rglob("*_perf.*")):
        kind = next((k for k in _PART.values() if re.search(rf"(^|_){k}_perf$", file.stem)), None)
        readable = file.suffix in (".parquet", ".txt", ".csv")
        if kind is None or not readable or _OTHER_LAYERS.search(file.stem):
            continue

        folders = file.relative_to(path).parts[:-1]
        tables = sets.setdefault(tuple(p for p in folders if p not in ("gemm", "attention")), {})
        if kind in tables and tables[kind].stem != file.stem:
            raise InputError(f"{file}: found beside {tables[kind].name}; expected one {kind} table")
        if kind not in tables or file.suffix == ".parquet":  # older versions are text as well
            tables[kind] = file

    for name in ("framework", "version"):
        if name in claim.only and len(sets) > 1:
            claim.met.add(name)  # a folder says it, so no column has to be there
            sets = {place: tables for place, tables in sets.items() if claim.only[name] in place}

    # A whole set is preferred, and one alone needs no choice.
    whole = {place: tables for place, tables in sets.items() if len(tables) == len(_PART)} or sets
    if len(whole) <= 1:
        return next(iter(whole.values()), {})

    # The error's example is the innermost folder of the last set by name.
    words = []
    for place, tables in whole.items():
        missing = ", ".join(kind for kind in _PART.values() if kind not in tables)
        words.append(("/".join(place) or ".") + (f" without {missing}" if missing else ""))

    raise InputError(
        f"{path}: found tables of {'; '.join(words)}; expected {', '.join(_PART.values())} of one "
        f"of them, as in --only version={next(reversed(max(whole)), '')}"
    )


def _decode(rows: Measurements) -> Table:
    """Return the table of decodes, over the prompt and the tokens that were produced before."""
    m = rows.numbers("isl", 1) + rows.numbers("step")
    return decode_table(rows, "latency", rows.numbers("batch_size", 1), m)


def _prefill(rows: Measurements) -> Table:
    """Return the table of whole prompts."""
    n, c = rows.numbers("batch_size", 1), rows.numbers("isl", 1)
    limits = {"max_prefill_chunk_tokens": c, "max_batch_tokens": n * c}
    # Without cached KV the cross term does not show. By the arithmetic it is twice the square,
    # c m pairs against c^2 / 2, so the two are fitted as one.
    terms = ("prefill_square", "prefill_token", "prefill_request", "prefill_base")
    return prefill_table(rows, "latency", (n, c, 0.0), terms, limits)


def _gemm(rows: Measurements) -> Table:
    """Return the table of layers: the sum of a layer's four matrix products.

    Between measured shapes the time per weight is linear in the logarithms of both widths.
    """
    # m tokens of k numbers each are multiplied by a matrix of k x n weights.
    m, n, k = (rows.numbers(name, 1) for name in "mnk")
    measured = rows.times("latency")
    good = rows.possible("latency", measured, 2 * m * n * k, BYTES * (m * k + n * k + m * n))
    frame = rows.frame[good].assign(ms_per_weight=(measured / (n * k))[good])
    shape, degree = rows.shape, rows.degree
    kv = max(shape.kv_heads / degree, 1) * shape.head_size  # a device has one KV head at least
    products = (  # n and k of queries, keys and values; of the output; of up and down projections
        (shape.attention_width / degree + 2 * kv, shape.hidden),
        (shape.hidden, shape.attention_width / degree),
        (2 * shape.ffn / degree, shape.hidden),
        (shape.hidden, shape.ffn / degree),
    )
    times: dict[float, float] = {}
    for tokens, group in frame.groupby("m"):
        grid = group.pivot_table(index="n", columns="k", values="ms_per_weight").dropna()
        if min(grid.shape) > 1:  # one row or column has nothing between
            ms = sum(a * b * _interpolate(grid, a, b) for a, b in products)
            times[float(str(tokens))] = ms  # pandas may give the number as any type

    return layer_table(np.array(list(times.values()), dtype=np.float64), np.array(list(times)))


def _interpolate(grid: pd.DataFrame, n: float, k: float) -> float:
    """Return a value between those of a grid with rows n and columns k; the edge's outside."""
    rows, columns = np.log(grid.index.to_numpy(float)), np.log(grid.columns.to_numpy(float))
    over_k = [np.interp(np.log(k), columns, row) for row in grid.to_numpy(float)]
    return float(np.interp(np.log(n), rows, over_k))
