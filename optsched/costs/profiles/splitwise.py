"""Whole-batch times of Splitwise (Patel et al. 2024), from its file perf_model.csv.

A row is one prefill batch, followed by decode batches of the same requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from optsched.costs.architectures import BYTES
from optsched.costs.devices import Device
from optsched.costs.profiles.identity import Claim
from optsched.costs.profiles.tables import (
    Measurements,
    Profile,
    Table,
    attention_flops,
    features_of,
    read_table,
)

if TYPE_CHECKING:
    import pandas as pd

SPLITWISE_TOKENS = 128
"""Longest output in perf_model.csv, in tokens, that is generated to its end."""

COLUMNS = (
    "model", "hardware", "prompt_size", "batch_size", "token_size", "prompt_time", "token_time",
    "e2e_time", "tensor_parallel",
)  # fmt: skip


def read_splitwise(path: Path, claim: Claim) -> Profile | None:
    """Return the profile from a folder, or None if it has no perf_model.csv.

    InputError: see `splitwise_rows` and `read_profile`.
    """
    file = path / "perf_model.csv"
    if not file.is_file():
        return None

    frame = _rows(file, claim)
    degree = claim.degree or 1
    rows = Measurements(file, frame, claim.peak(path), [])
    shape = claim.shape(file)
    n, s, o = (rows.numbers(name, 1) for name in ("batch_size", "prompt_size", "token_size"))
    prompt, token = rows.times("prompt_time"), rows.times("token_time")
    weights = shape.weight_bytes / degree
    attention = shape.layers * attention_flops(shape, s, 0.0, degree)
    fits = rows.possible("prompt_time", prompt, n * (weights / BYTES * 2 * s + attention), weights)
    kv = s + (o - 1) / 2  # mean over the decode steps
    reads = weights + n * s * shape.kv_bytes / degree
    works = rows.possible("token_time", token, weights / BYTES * 2 * n, reads)
    works &= fits  # where a prefill is impossible, the decodes of its row are not trusted either
    # Longer outputs stop at the end-of-sequence token, so their context is not known.
    works &= o <= SPLITWISE_TOKENS
    a, b = int(fits.sum()), int(works.sum())
    prefill = {
        "token": n * s, "base": 1 + 0 * n, "prefill_square": n * s**2, "prefill_base": 1 + 0 * n,
        "prefill_request": n,
    }  # fmt: skip
    decode = {
        "token": n, "base": 1 + 0 * n, "decode_kv": n * kv, "decode_request": n,
        "decode_base": 1 + 0 * n,
    }  # fmt: skip
    features = [
        features_of(a, {key: column[fits] for key, column in prefill.items()}),
        features_of(b, {key: column[works] for key, column in decode.items()}),
    ]

    def both(of_prefills: np.ndarray | float, of_decodes: np.ndarray | float) -> np.ndarray:
        parts = np.broadcast_to(of_prefills, n.shape), np.broadcast_to(of_decodes, n.shape)
        return np.concatenate([parts[0][fits], parts[1][works]])

    last = s + o - 1
    table = Table(
        "batch",
        np.repeat(["prefill", "decode"], [a, b]),
        np.concatenate(features),
        both(prompt, token),
        ("token", "base", "decode_kv", "decode_request", "decode_base", "prefill_square"),
        whole_batch=True,
        ladders={"min_prefill_chunk_tokens": both(s, np.inf)},
        limits={
            "max_batch_tokens": both(n * s, n),
            "max_prefill_chunk_tokens": both(s, 0),
            "max_decode_requests": both(0, n),
            "max_request_kv_tokens": both(0, last),
            "max_kv_tokens": both(0, n * last),
        },
    )
    claim.notes.append("whole-batch times: one layer stands for all")
    return claim.profile("Splitwise", shape, [table], str(file), rows.rejected)


def splitwise_rows(file: Path, model: str | None, degree: int, peak: Device) -> pd.DataFrame:
    """Return the rows of perf_model.csv for a model, a degree of parallelism and a device."""
    return _rows(file, Claim(model, degree, peak))


def _rows(file: Path, claim: Claim) -> pd.DataFrame:
    return claim.select(file, read_table(file, COLUMNS), known=COLUMNS)
