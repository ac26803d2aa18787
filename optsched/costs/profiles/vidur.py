"""Profiles in the columns of Vidur (Agrawal et al. 2024): mlp.csv and attention*.csv."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from optsched.costs.architectures import BYTES, Architecture
from optsched.costs.profiles.identity import Claim
from optsched.costs.profiles.tables import (
    PARTS,
    Measurements,
    Profile,
    Rejected,
    Table,
    Terms,
    attention_flops,
    decode_table,
    read_table,
)

LAYER_OPERATORS = (
    "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj",
    "post_attention_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj", "add",
)  # fmt: skip
"""Operators of a layer in Vidur's mlp.csv.

``emb`` is left out, since it runs once per batch and not in every layer. ``attn_kv_cache_save`` of
attention.csv is left out too. In the public A800 table, that of a prefill takes 50 times as long
as its memory traffic and up to three times as long as the attention. This comes from the program
that measured it and not from serving.
"""

_DEGREE = "num_tensor_parallel_workers"


def _median(name: str) -> str:
    return f"time_stats.{name}.median"


def read_vidur(path: Path, claim: Claim) -> Profile | None:
    """Return the profile from a folder, or None if it has neither mlp.csv nor attention*.csv.

    The model is that of the claim, or else the folder's name. InputError: it is unknown, or no row
    is what is claimed; or as for `read_profile`.
    """
    dense_file = path / "mlp.csv"
    attention_files = sorted(path.glob("attention*.csv"))
    if not dense_file.is_file() and not attention_files:
        return None

    claim.notes += [f"{other.name} is not read" for other in attention_files[1:]]
    claim.model = claim.model or path.resolve().name
    shape = claim.shape(path)
    sizes = {
        "n_head": shape.heads,
        "n_q_head": shape.heads,
        "n_kv_head": shape.kv_heads,
        "n_embd": shape.hidden,
        "n_expanded_embd": shape.ffn,
        "use_gated_mlp": True,
    }
    columns = {dense_file: ["num_tokens", *map(_median, LAYER_OPERATORS)]}

    for file in attention_files[:1]:
        columns[file] = ["batch_size", "prefill_chunk_size", "kv_cache_size", "is_prefill"]
        columns[file] += [_median("attn_prefill"), _median("attn_decode")]

    frames = {}
    for file, needed in columns.items():
        if file.is_file():
            rows = read_table(file, [*needed, _DEGREE])
            frames[file] = claim.select(file, rows, exact=sizes, known=needed)

    degree, peak = claim.degree or 1, claim.peak(path)
    rejected: list[Rejected] = []
    tables: list[Table] = []

    for file, frame in frames.items():
        measured = Measurements(file, frame, peak, rejected)
        if file == dense_file:
            tables.append(_dense(measured, shape, degree))
        else:
            tables += _attention(measured, shape, degree)

    if degree > 1:
        claim.notes.append("all-reduces are not in these profiles")

    files = dict.fromkeys(PARTS, f"{path / 'attention*.csv'}") | {"layers": str(dense_file)}
    return claim.profile("Vidur's columns", shape, tables, files, rejected)


def _dense(rows: Measurements, shape: Architecture, degree: int) -> Table:
    tokens = rows.numbers("num_tokens", 1)
    total = np.zeros(len(rows))
    good = np.ones(len(rows), dtype=bool)

    for name in LAYER_OPERATORS:
        measured = rows.times(_median(name))
        weights = shape.layer_weights.get(name, 0) / degree
        if weights:
            good &= rows.possible(name, measured, 2 * weights * tokens, BYTES * weights)

        total += measured

    tokens = tokens[good]
    terms: Terms = {"token": tokens, "base": 1}
    return Table.of("layer", total[good], terms, limits={"max_batch_tokens": tokens})


def _attention(rows: Measurements, shape: Architecture, degree: int) -> list[Table]:
    is_prefill = rows.frame["is_prefill"].astype(str).str.lower() == "true"
    for name, low in (("batch_size", 1), ("prefill_chunk_size", 0), ("kv_cache_size", 0)):
        rows.numbers(name, low)  # checks all rows before they are split by kind

    tables = []
    for kind, table in ((~is_prefill, _decode), (is_prefill, _prefill)):
        if kind.any():
            tables.append(table(rows.only(kind), shape, degree))

    return tables


def _decode(rows: Measurements, shape: Architecture, degree: int) -> Table:
    n, m = rows.numbers("batch_size"), rows.numbers("kv_cache_size")
    return decode_table(rows, _median("attn_decode"), n, m, shape, degree)


def _prefill(rows: Measurements, shape: Architecture, degree: int) -> Table:
    measured = rows.times(_median("attn_prefill"))
    n, c, m = map(rows.numbers, ("batch_size", "prefill_chunk_size", "kv_cache_size"))
    good = rows.possible(
        "attn_prefill", measured, n * attention_flops(shape, c, m, degree),
        n * (c + m) * shape.layer_kv_bytes / degree,
    )  # fmt: skip
    n, c, m = n[good], c[good], m[good]
    terms: Terms = {
        "prefill_square": n * c**2, "prefill_cross": n * c * m, "prefill_kv": n * m,
        "prefill_token": n * c, "prefill_base": 1, "prefill_request": n,
    }  # fmt: skip
    table = Table.of(
        "prefill", measured[good], terms, ladders={"min_prefill_chunk_tokens": c},
        limits={"max_prefill_chunk_tokens": c, "max_request_kv_tokens": c + m},
    )  # fmt: skip
    identified = tuple(terms)
    if len(np.unique(n)) == 1:  # prefill_request then cannot be told from prefill_base
        identified = identified[:-1]

    operator = np.where(m > 0, "prefill with cached KV", "prefill")
    return replace(table, terms=identified, operator=operator)
