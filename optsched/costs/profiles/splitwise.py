"""Whole-batch times of Splitwise (Patel et al. 2024), from its file perf_model.csv.

A row is one prefill batch, followed by decode batches of the same requests.
"""

from pathlib import Path

import numpy as np

from optsched.costs.architectures import BYTES
from optsched.costs.profiles.identity import Claim
from optsched.costs.profiles.tables import Profile, Table, attention_flops, columns_of

SPLITWISE_TOKENS = 128
"""Longest output in perf_model.csv, in tokens, that is generated to its end."""
_SIZES, _TIMES = ("batch_size", "prompt_size", "token_size"), ("prompt_time", "token_time")
COLUMNS = ("model", "hardware", *_SIZES, *_TIMES, "e2e_time", "tensor_parallel")
IDENTIFIED = ("token", "base", "decode_kv", "decode_request", "decode_base", "prefill_square")


def read_splitwise(path: Path, claim: Claim) -> Profile | None:
    """Return the profile from a folder, or None if it has no perf_model.csv.

    `claim`: what the profile is asked to be, and what its files say (`Claim`).
    """
    file = path / "perf_model.csv"
    if not file.is_file():
        return None

    frame = claim.read(file, COLUMNS)
    shape = claim.find_shape(file)
    (rows,) = claim.measured(path, {file: frame})
    degree = rows.degree
    # n requests of s prompt and o output tokens each.
    n, s, o = (rows.numbers(name, 1) for name in _SIZES)
    prompt, token = map(rows.times, _TIMES)
    weight_bytes = shape.weight_bytes / degree
    dense_flops = weight_bytes / BYTES * 2  # a product and a sum for each weight, per token
    attention = shape.layers * attention_flops(shape, s, 0.0, degree)
    prefills = rows.possible("prompt_time", prompt, n * (dense_flops * s + attention), weight_bytes)
    reads = weight_bytes + n * s * shape.kv_bytes / degree
    decodes = rows.possible("token_time", token, dense_flops * n, reads)
    # Where a prefill is impossible, the decodes of its row are not trusted either. Longer outputs
    # stop at the end-of-sequence token, so their context is not known.
    decodes &= prefills & (o <= SPLITWISE_TOKENS)

    # Every row becomes two batches: the prefills come first, then the decodes. A batch of decodes
    # stands for all steps, over the mean of their KV. No prefill has cached KV (0.0).
    zero = 0 * n
    c, n_decodes, kv = np.append(s, zero), np.append(zero, n), np.append(zero, s + (o - 1) / 2)
    columns = columns_of(c, 0.0, n_decodes, kv, np.tile(n, 2))
    last = np.append(zero, s + o - 1)  # the KV of a request at its last token
    limits = {
        "max_batch_tokens": columns["token"],
        "max_prefill_chunk_tokens": c,
        "max_decode_requests": n_decodes,
        "max_request_kv_tokens": last,
        "max_kv_tokens": n_decodes * last,
    }
    # `ladder`: a limit that the fit may raise, and what it limits by row, infinite for decodes.
    # `identified`: the coefficients that such rows can tell apart.
    table = Table(
        "batch",
        np.append(prompt, token),
        columns,
        limits,
        ladder=("min_prefill_chunk_tokens", np.where(c > 0, c, np.inf)),
        identified=IDENTIFIED,
        operators=np.where(c > 0, "prefill", "decode"),
        whole_batch=True,
    ).only(np.append(prefills, decodes))
    claim.notes.append("whole-batch times: one layer stands for all")
    return claim.profile("Splitwise", [table], str(file))
