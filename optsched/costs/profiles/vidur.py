"""Profiles in the columns of Vidur (Agrawal et al. 2024): mlp.csv and attention*.csv."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from optsched.costs.architectures import BYTES
from optsched.costs.profiles.identity import Claim
from optsched.costs.profiles.tables import (
    PARTS,
    Measurements,
    Profile,
    Table,
    decode_table,
    layer_table,
    prefill_table,
)

_OPERATORS = (
    "input_layernorm attn_pre_proj attn_rope attn_post_proj post_attention_layernorm mlp_up_proj "
    "mlp_act mlp_down_proj add"
)
LAYER_OPERATORS = tuple(_OPERATORS.split())
"""Operators of a layer in Vidur's mlp.csv.

``emb`` is left out, since it runs once per batch and not in every layer. ``attn_kv_cache_save`` of
attention.csv is left out too. In the public A800 table, that of a prefill takes 50 times as long
as its memory traffic and up to three times as long as the attention. This comes from the program
that measured it and not from serving.
"""

_DEGREE = "num_tensor_parallel_workers"
# Columns of a batch of attention, and the minimum of each.
_SIZES = {"batch_size": 1, "prefill_chunk_size": 0, "kv_cache_size": 0}
_IDENTIFIED = "prefill_square prefill_cross prefill_kv prefill_token prefill_base prefill_request"


def _median(name: str) -> str:
    return f"time_stats.{name}.median"


def read_vidur(path: Path, claim: Claim) -> Profile | None:
    """Return the profile from a folder, or None if it has neither mlp.csv nor attention*.csv.

    `claim`: what the profile is asked to be, and what its files say (`Claim`).
    """
    dense_file = path / "mlp.csv"
    attention_files = sorted(path.glob("attention*.csv"))
    if not dense_file.is_file() and not attention_files:
        return None

    claim.notes += [f"{other.name} is not read" for other in attention_files[1:]]
    # A folder has the name of its model. Rows of other sizes are another model's, and not read.
    claim.model = claim.model or path.resolve().name
    shape = claim.find_shape(path)
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
        times = map(_median, ("attn_prefill", "attn_decode"))
        columns[file] = [*_SIZES, "is_prefill", *times]

    frames = {
        file: claim.read(file, [*needed, _DEGREE], exact=sizes)
        for file, needed in columns.items()
        if file.is_file()
    }
    tables: list[Table] = []
    for rows in claim.measured(path, frames):
        tables += [_dense(rows)] if rows.path == dense_file else _attention(rows)

    if claim.degree and claim.degree > 1:
        claim.notes.append("all-reduces are not in these profiles")

    files = dict.fromkeys(PARTS, f"{path / 'attention*.csv'}") | {"layers": str(dense_file)}
    return claim.profile("Vidur's columns", tables, files)


def _dense(rows: Measurements) -> Table:
    """Return the table of layers: the sum of the operators that process every token."""
    tokens = rows.numbers("num_tokens", 1)
    total = np.zeros(len(rows))
    good = np.ones(len(rows), dtype=bool)

    for name in LAYER_OPERATORS:
        measured = rows.times(_median(name))
        weights = rows.shape.layer_weights.get(name, 0) / rows.degree
        if weights:  # the others do little, and no peak says how long that takes
            good &= rows.possible(name, measured, 2 * weights * tokens, BYTES * weights)

        total += measured

    return layer_table(total, tokens).only(good)


def _attention(rows: Measurements) -> list[Table]:
    """Return the tables of decodes and of prefills, as far as there are rows of them."""
    is_prefill = (rows.frame["is_prefill"].astype(str).str.lower() == "true").to_numpy()
    # A batch has n requests, each of c tokens over m cached ones; a decode has no c. `_SIZES` has
    # their columns, with the least number that may stand there.
    sizes = [rows.numbers(name, low) for name, low in _SIZES.items()]
    tables = []

    if not is_prefill.all():
        n, _, m = (values[~is_prefill] for values in sizes)
        tables.append(decode_table(rows.only(~is_prefill), _median("attn_decode"), n, m))

    if is_prefill.any():
        n, c, m = (values[is_prefill] for values in sizes)
        limits = {"max_prefill_chunk_tokens": c, "max_request_kv_tokens": c + m}
        terms = tuple(_IDENTIFIED.split())  # the coefficients that rows can tell apart
        prefills, times = rows.only(is_prefill), _median("attn_prefill")
        table = prefill_table(prefills, times, (n, c, m), terms, limits)
        if len(np.unique(table.columns["prefill_request"])) == 1:
            terms = terms[:-1]  # prefill_request, the last, cannot be told from prefill_base

        cached = table.columns["prefill_kv"] > 0
        kinds = np.where(cached, "prefill with cached KV", "prefill")
        tables.append(replace(table, identified=terms, operators=kinds))

    return tables
