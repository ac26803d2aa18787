"""Whole batches of a real engine, as ``optsched profile`` measures them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from optsched.costs.hardware import Architecture, Device
from optsched.costs.profiles.tables import (
    Measurements,
    Profile,
    Table,
    Terms,
    features_of,
    read_table,
)
from optsched.problem.errors import InputError
from optsched.problem.text_files import read_object

FIELDS = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "ffn": "intermediate_size", "vocab": "vocab_size",
}  # fmt: skip
"""Fields of an `Architecture` and their names in ``config.json``."""


def read_steps(path: Path, model: str | None, degree: int, peak: Device) -> Profile | None:
    """Return the profile from a folder. Its times are not held against the device.

    Parameters
    ----------
    path : Path
        The folder, with ``steps.csv`` and ``config.json``.
    model : str or None
        What the cost model is named after; by default the folder.
    degree : int
        Degree of tensor parallelism that was profiled.
    peak : Device
        Device that was profiled.

    Returns
    -------
    Profile or None
        None if the folder has no steps.csv.

    Raises
    ------
    InputError
        A column or a field is missing, or a value is out of range.
    """
    file, config = path / "steps.csv", path / "config.json"
    if not file.is_file():
        return None
    found = read_object(config, "a model's configuration")
    try:
        found.setdefault("num_key_value_heads", found["num_attention_heads"])
        sizes = {name: int(found[key]) for name, key in FIELDS.items()}
        sizes["head_size"] = int(found.get("head_dim") or 0)
    except (ValueError, TypeError) as error:
        raise InputError(f"{config}: expected a model's configuration; found {error}") from None
    except KeyError as error:
        raise InputError(f"{config}: found no {error}; expected a model's configuration") from None
    names = ("n_prefill", "prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    rows = Measurements(file, read_table(file, (*names, "time_us")), peak, [])
    p, c, m, n, k = (rows.numbers(name) for name in names)
    measured_ms = rows.times("time_us") / 1000
    terms: Terms = {
        "token": p * c + n, "base": np.ones(len(c)), "decode_kv": n * k, "decode_request": n,
        "prefill_square": p * c * c, "prefill_cross": p * c * m,
        "prefill_base": np.where(c > 0, 1.0, 0.0),
    }  # fmt: skip
    kinds = np.where(n == 0, "prefill", np.where(c == 0, "decode", "both"))
    table = Table(
        "batch", kinds, features_of(len(c), terms), measured_ms, tuple(terms), whole_batch=True,
        ladders={"min_prefill_chunk_tokens": np.where(c > 0, c, np.inf)},
        limits={
            "max_batch_tokens": p * c + n, "max_prefill_chunk_tokens": c, "max_decode_requests": n,
            "max_request_kv_tokens": np.maximum(k, c + m),
        },
    )  # fmt: skip
    shape = Architecture(model or path.absolute().name, **sizes)
    note = "whole batches of the engine, with its scheduling; one layer stands for all"
    return Profile("steps.csv", shape, degree, peak, (table,), (), (note,))
