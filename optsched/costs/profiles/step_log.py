"""Steps that a server wrote down while it served: a line each, with what was in it and its time.

Three kinds of file are read. Forward pass metrics as JSON lines, as Dynamo, SGLang and TensorRT-LLM
send them; vLLM's log with ``--enable-logging-iteration-details``; and a CSV with `COLUMNS`. They
have sums over the requests of a step. Where several prefill, they are taken as equally long.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.costs.architectures import Architecture
from optsched.costs.profiles.identity import Claim
from optsched.costs.profiles.tables import Measurements, Profile, Table, columns_of, read_table
from optsched.problem.errors import InputError
from optsched.problem.text_files import parse_json, read_text

if TYPE_CHECKING:
    from optsched.costs.profiles.tables import Frame

COLUMNS = (
    "prefill_requests",
    "prefill_tokens",
    "prefill_kv",
    "decode_requests",
    "decode_kv",
    "time_ms",
)
"""Of each step: the requests that prefill, their tokens in it and the KV cached before, the
requests that decode and the KV cached before, and milliseconds."""
_METRICS = (
    "num_prefill_requests",
    "sum_prefill_tokens",
    "sum_prefill_kv_tokens",
    "num_decode_requests",
    "sum_decode_kv_tokens",
)
"""Fields of ``scheduled_requests`` in forward pass metrics, in the order of `COLUMNS`."""
_STEP = re.compile(
    r"Iteration\(\d+\): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, "
    r"(\d+) generation tokens, iteration elapsed time: ([\d.]+) ms( \(dummy\))?"
    r"(?:, GPU KV cache usage: ([\d.]+)%)?"
)
_CAPACITY = re.compile(r"GPU KV cache size: ([\d,]+) tokens")


def read_step_log(path: Path, claim: Claim) -> Profile:
    """Return the profile of a log of steps.

    `claim`: what the profile is asked to be, and what its files say (`Claim`).
    """
    kv_known, capacity = True, None
    if path.suffix in (".csv", ".parquet"):
        frame = read_table(path, COLUMNS)
    else:
        text = read_text(path)
        if "Iteration(" in text:
            rows, kv_known, capacity = _read_vllm(path, text, claim)
        else:
            rows = _read_metrics(path, text)

        frame = _frame(path, rows)

    # Without a model steps are priced without a shape: it gives a name, one layer with one head and
    # one KV head, and widths and a vocabulary of 0.
    if claim.model is None:
        claim.shape = Architecture(path.stem, 1, 0, 1, 1, 0, 0)
        if capacity is None:
            claim.notes.append("no model is named (--model); no KV capacity is derived")
    else:  # steps were timed with all that is in them, so the model may have experts
        claim.find_shape(path, experts=True)

    (steps,) = claim.measured(path.parent, {path: frame})
    tokens = steps.numbers("prefill_tokens") + steps.numbers("decode_requests")
    busy = (tokens > 0) & (steps.numbers("time_ms") > 0)
    if not busy.all():
        claim.notes.append(f"{path.name}: left out are {int((~busy).sum())} steps without requests")

    table = _table(steps.only(busy), kv_known=kv_known)
    claim.notes.append("whole steps of a server, as it served; one layer stands for all")
    return claim.profile(path.name, [table], str(path), kv_capacity=capacity)


def _table(steps: Measurements, *, kv_known: bool) -> Table:
    """Return the table of whole steps. `kv_known`: whether they say what KV decodes read."""
    # p requests prefill c tokens over m cached ones, and n decode over k cached ones. The log has
    # sums, and their means stand for each request. The last of `COLUMNS` is the time.
    p, tokens, cached, n, kv = (steps.numbers(name) for name in COLUMNS[:-1])
    c, m = tokens / np.maximum(p, 1), cached / np.maximum(p, 1)
    k = kv / np.maximum(n, 1)
    # Whole steps tell no other coefficients apart.
    terms = ["token", "base", "decode_request", "prefill_square", "prefill_base"]
    if kv_known:
        terms.append("decode_kv")
    if cached.any():  # without cached KV the cross term does not show
        terms.append("prefill_cross")

    return Table(
        "step",
        steps.times("time_ms"),
        columns_of(c, m, n, k, p),
        {
            "max_batch_tokens": tokens + n,
            "max_prefill_chunk_tokens": c,
            "max_decode_requests": n,
            "max_request_kv_tokens": np.maximum(k, c + m),
        },
        identified=tuple(terms),
        operators=np.where(n == 0, "prefill", np.where(p == 0, "decode", "both")),
        whole_batch=True,
        cornered=True,
    )


def _frame(path: Path, rows: Sequence[Sequence[float]]) -> Frame:
    """Return steps, each with `COLUMNS` and its line, as a table."""
    import pandas as pd

    if not rows:
        raise InputError(
            f"{path}: found no steps; expected lines of vLLM's log with "
            "--enable-logging-iteration-details, forward pass metrics as JSON lines, or a .csv "
            f"file with the columns {', '.join(COLUMNS)}"
        )

    return pd.DataFrame(rows, columns=[*COLUMNS, "line"])


def _read_metrics(path: Path, text: str) -> list[list[float]]:
    """Return a row of each line of forward pass metrics: `COLUMNS` and the line."""
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue

        place = f"{path}, line {number}"
        try:
            step = parse_json(line)
        except InputError as error:
            raise InputError(f"{place}: {error}") from None

        content = step.get("scheduled_requests") if isinstance(step, dict) else None
        if not isinstance(content, dict):
            found = type(step).__name__ if not isinstance(step, dict) else ", ".join(step)
            raise InputError(
                f"{place}: found {found}; expected an object with wall_time (seconds) and "
                "scheduled_requests"
            )

        counts = [_number(content, name, place) for name in _METRICS]
        rows.append([*counts, 1000 * _number(step, "wall_time", place), number])

    return rows


def _number(of: dict[str, Any], name: str, place: str) -> float:
    value = of.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise InputError(f"{place}: {name}: found {value!r}; expected a number >= 0")

    return value


def _read_vllm(path: Path, text: str, claim: Claim) -> tuple[list[list[float]], bool, int | None]:
    """Return a row of each step of vLLM's log: `COLUMNS` and the line.

    Return also whether the log says what KV was held, and the KV capacity, None if it says none.
    """
    match = _CAPACITY.search(text)
    capacity = 0 if match is None else int(match[1].replace(",", ""))
    rows: list[list[float]] = []
    kv_known = False
    for number, line in enumerate(text.splitlines(), 1):
        if "Iteration(" not in line:
            continue
        # Its groups: three counts, a fourth that is not read, milliseconds, whether it is a dummy,
        # and the percentage of the cache that is used.
        if (step := _STEP.search(line)) is None:
            raise InputError(
                f"{path}, line {number}: found {line.strip()[:60]!r}; expected the requests, "
                "tokens and time of an iteration"
            )
        if step[6]:  # a dummy step: the engine waits for another one
            continue

        prefills, tokens, decodes = (int(step[k]) for k in (1, 2, 3))
        # What the cache holds is what decodes read, and the tokens that this step prefills.
        held = capacity * float(step[7] or 0) / 100
        kv_known |= held > 0
        kv = max(held - tokens, 0.0) if decodes else 0.0
        rows.append([prefills, tokens, 0, decodes, kv, float(step[5]), number])

    what = "no size and usage of the KV cache"
    if kv_known:
        what = "what decodes read is the cache's usage"

    claim.notes.append(f"{path.name}: {what}, and no KV cached before a chunk")
    return rows, kv_known, capacity or None
