"""Whole batches of a real engine, as ``optsched gpu profile`` measures them."""

from pathlib import Path

import numpy as np

from optsched.costs.architectures import (
    ARCHITECTURES,
    Architecture,
    architecture_of,
    not_modelled,
    read_config,
)
from optsched.costs.profiles.identity import Claim, kind_of
from optsched.costs.profiles.tables import Profile, Table, columns_of
from optsched.problem.errors import InputError

BATCH = ("n_prefill", "prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
"""Columns of a batch's content."""
TERMS = "token base decode_kv decode_request prefill_square prefill_cross prefill_base"
"""Coefficients that whole batches tell apart."""


def read_steps(path: Path, claim: Claim) -> Profile | None:
    """Return the profile of steps.csv, or None. Its times are not held against the device.

    `claim`: what the profile is asked to be, and what its files say (`Claim`).
    """
    file, config = path / "steps.csv", path / "config.json"
    if not file.is_file():
        return None

    configuration = read_config(config)
    reason = not_modelled(configuration)
    name = claim.model or path.resolve().name
    if reason is None:
        claim.shape = architecture_of(configuration, name, config)
        _check_model(claim.shape, claim.model, config)
    else:  # whole batches are priced without a shape, which gives a name and no sizes
        # One layer, one head and one KV head; the widths and the vocabulary are 0.
        claim.shape = Architecture(name, 1, 0, 1, 1, 0, 0)
        claim.notes.append(f"config.json: {reason}; no KV capacity is derived")

    claim.notes += claim.shape.notes
    for about in (path / "device.json", path / "settings.json"):
        facts = read_config(about) if about.is_file() else {}
        # Times of other types are right; only the capacity is that of 16-bit numbers.
        claim.check(about, {k: v for k, v in facts.items() if kind_of(k) in ("device", "degree")})

    also_known = ("shape", "spread_us", "repeats")
    frame = claim.read(file, (*BATCH, "time_us"), also_known=also_known)
    (rows,) = claim.measured(path, {file: frame})
    # p requests prefill c tokens over m cached ones, and n decode over k cached ones: of each.
    p, c, m, n, k = (rows.numbers(name) for name in BATCH)
    columns = columns_of(c, m, n, k, p)
    limits = {
        "max_batch_tokens": p * c + n,
        "max_prefill_chunk_tokens": c,
        "max_decode_requests": n,
        "max_request_kv_tokens": np.maximum(k, c + m),
    }
    # `ladder`: a limit that the fit may raise, and what it limits by row, infinite where nothing
    # prefills. `identified`: the coefficients that such rows can tell apart.
    table = Table(
        "batch",
        rows.times("time_us") / 1000,
        columns,
        limits,
        ladder=("min_prefill_chunk_tokens", np.where(c > 0, c, np.inf)),
        identified=tuple(TERMS.split()),
        operators=np.where(n == 0, "prefill", np.where(c == 0, "decode", "both")),
        whole_batch=True,
    )
    claim.notes.append("whole batches of the engine, with its scheduling; one layer stands for all")
    return claim.profile("steps.csv", [table], str(file))


def _check_model(shape: Architecture, model: str | None, config: Path) -> None:
    """Raise InputError if a known model is named, and the configuration is another's."""
    if model is None or model not in ARCHITECTURES:
        return

    for field in ("layers", "hidden", "heads", "kv_heads", "ffn", "head_size"):
        found, expected = getattr(shape, field), getattr(ARCHITECTURES[model], field)
        if found != expected:
            raise InputError(
                f"{config}: {field}: found {found}; expected {expected}, as {model} has it, or "
                "another --model"
            )
