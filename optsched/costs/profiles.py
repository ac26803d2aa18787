"""Measured operator times from public profiles: Vidur, Splitwise, aiconfigurator.

A reader recognises its files in a folder, checks every row against the peaks of the device, and
returns `Table` objects: what each row's batch held, and how long it took.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from optsched.costs.batch import COEFFICIENTS
from optsched.costs.hardware import BYTES, Architecture, Device, architecture, device
from optsched.problem.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    Frame = pd.DataFrame

LAYER_OPERATORS = (
    "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj",
    "post_attention_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj", "add",
)  # fmt: skip
"""Operators of a layer in Vidur's mlp.csv. ``emb`` is left out: it runs once per batch.

So is ``attn_kv_cache_save`` of attention.csv: in the public A800 table a prefill's takes 50 times
as long as its memory traffic, up to three times the attention itself, which is the harness that
measured it and not a serving system.
"""

COLUMN = {name: k for k, name in enumerate(COEFFICIENTS)}


@dataclass(frozen=True)
class Rejected:
    """A row that was left out.

    Parameters
    ----------
    file : str
    line : int
        Line of a CSV file (the header is line 1), or row of a Parquet file from 1.
    reason : str
    """

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}"


@dataclass(frozen=True, eq=False)
class Table:
    """Rows whose times share coefficients.

    Parameters
    ----------
    name : str
    operator : ndarray of str, shape (rows,)
        The operator that each row measures; errors are reported for each.
    features : ndarray, shape (rows, 11)
        What multiplies each of `optsched.costs.batch.COEFFICIENTS`.
    measured_ms : ndarray, shape (rows,)
        Per layer, or per whole batch.
    terms : tuple of str
        Coefficients that the table can identify.
    whole_batch : bool
        Whether a time covers all layers.
    ladders : dict of str to ndarray
        Lower limits of validity and their value in each row; `fit` may raise one of them where
        small values do not follow a linear model.
    limits : dict of str to ndarray
        The other quantities whose range bounds validity, by name of the limit.
    """

    name: str
    operator: NDArray[np.str_]
    features: NDArray[np.float64]
    measured_ms: NDArray[np.float64]
    terms: tuple[str, ...]
    whole_batch: bool = False
    ladders: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    limits: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Profile:
    """What was read from a folder of profiles.

    Parameters
    ----------
    source : str
        The kind of profile.
    shape : Architecture
    tensor_parallel : int
    hardware : Device
    tables : tuple of Table
    rejected : tuple of Rejected
    notes : tuple of str
        What the profile lacks.
    """

    source: str
    shape: Architecture
    tensor_parallel: int
    hardware: Device
    tables: tuple[Table, ...]
    rejected: tuple[Rejected, ...]
    notes: tuple[str, ...] = ()


def read_profile(
    folder: str | Path,
    *,
    model: str | None = None,
    tensor_parallel: int = 1,
    hardware: str | Device = "a100-80gb",
) -> Profile:
    """Read the profiles in a folder.

    Parameters
    ----------
    folder : path
        With Vidur's ``mlp.csv`` and ``attention*.csv``, Splitwise's ``perf_model.csv``, or
        aiconfigurator's ``*.parquet``. ``model`` may name a folder inside it.
    model : str, optional
        Default: the folder's name.
    tensor_parallel : int
    hardware : str or Device
        Whose peaks no row may beat.

    Raises
    ------
    InputError
        Nothing to read, a missing column, a value that cannot be, times in another unit.
    """
    peak = device(hardware) if isinstance(hardware, str) else hardware
    path = Path(folder)
    if not path.is_dir():
        raise InputError(f"{path}: no such folder; a folder of profiles is right")
    if tensor_parallel < 1:
        raise InputError(f"tensor_parallel: {tensor_parallel!r}; an integer >= 1 is right")
    if model is not None:
        inside = [p for p in sorted(path.iterdir()) if p.is_dir() and _same(p.name, model)]
        path = inside[0] if inside else path
    for reader in (_read_vidur, _read_splitwise, _read_aiconfigurator):
        found = reader(path, model, tensor_parallel, peak)
        if found is not None:
            return found
    raise InputError(
        f"{path}: no profiles; mlp.csv with attention*.csv (Vidur), perf_model.csv (Splitwise) or "
        "*.parquet (aiconfigurator) is right"
    )


def _same(folder: str, model: str) -> bool:
    try:
        return architecture(folder) == architecture(model)
    except InputError:
        return folder == model


# --- checks of rows -------------------------------------------------------------------------


def _read_csv(path: Path, needed: Sequence[str]) -> Frame:
    import pandas as pd

    try:
        frame = pd.read_csv(path)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise InputError(f"{path}: not a readable CSV file ({error})") from None
    return _checked(frame, path, needed, first_line=2)


def _checked(frame: Frame, path: Path, needed: Sequence[str], *, first_line: int) -> Frame:
    missing = [name for name in needed if name not in frame]
    if missing:
        raise InputError(f"{path}: column {missing[0]!r} is missing; needed: {', '.join(needed)}")
    return frame.assign(line=np.arange(len(frame)) + first_line)


def _column(frame: Frame, name: str, path: Path, low: float = 0.0) -> NDArray[np.float64]:
    """Return a column of numbers >= low, naming the first that is not."""
    import pandas as pd

    values = pd.to_numeric(frame[name], errors="coerce").to_numpy(dtype=np.float64)
    bad = ~(np.isfinite(values) & (values >= low))
    if bad.any():
        k = int(bad.argmax())
        raise InputError(
            f"{path}, line {frame['line'].iloc[k]}: {name}: {frame[name].iloc[k]!r}; a number "
            f">= {low:g} is right"
        )
    return values


def _times(frame: Frame, name: str, path: Path) -> NDArray[np.float64]:
    values = _column(frame, name, path)
    if (values == 0).any():
        line = frame["line"].iloc[int((values == 0).argmax())]
        raise InputError(f"{path}, line {line}: {name}: 0 ms; a time > 0 is right")
    return values


def _possible(
    frame: Frame,
    path: Path,
    what: str,
    measured_ms: NDArray[np.float64],
    flops: NDArray[np.float64],
    memory_bytes: NDArray[np.float64],
    peak: Device,
    rejected: list[Rejected],
) -> NDArray[np.bool_]:
    """Return which rows do not beat the device, after a check of the unit."""
    by_flops = flops / peak.tflops / 1e9
    by_bytes = memory_bytes / peak.bandwidth_gb_s / 1e6
    least = np.maximum(by_flops, by_bytes)
    slack = measured_ms / least
    beats = slack < 1
    if beats.mean() > 0.5:
        in_seconds = slack.min() < 0.01 and (1000 * slack >= 1).mean() > 0.9
        k = int(beats.argmax())
        where = f"{path}, line {frame['line'].iloc[k]}: {what}: {measured_ms[k]:.6g} ms"
        right = (
            "the times look like seconds, milliseconds are right"
            if in_seconds
            else "a profile of this device is right"
        )
        raise InputError(
            f"{where} beats {peak.name} ({least[k]:.4g} ms at its peak), as {beats.mean():.0%} of "
            f"the rows do; {right}"
        )
    if least.max() > 0.01 and slack.min() > 100:
        raise InputError(
            f"{path}: {what}: every row is more than {slack.min():.0f} times slower than "
            f"{peak.name}'s peak; the times look like microseconds, milliseconds are right"
        )
    for k in np.flatnonzero(beats).tolist():
        if by_flops[k] >= by_bytes[k]:
            rate = f"{flops[k] / measured_ms[k] / 1e9:.4g} TFLOP/s; the peak is {peak.tflops:g}"
        else:
            speed = memory_bytes[k] / measured_ms[k] / 1e6
            rate = f"{speed:.4g} GB/s; the peak is {peak.bandwidth_gb_s:g}"
        reason = f"{what}: {measured_ms[k]:.6g} ms is {rate}"
        rejected.append(Rejected(path.name, int(frame["line"].iloc[k]), reason))
    return ~beats


def _features(rows: int, **columns: NDArray[np.float64] | float) -> NDArray[np.float64]:
    features = np.zeros((rows, len(COEFFICIENTS)))
    for name, values in columns.items():
        features[:, COLUMN[name]] = values
    return features


def _labels(rows: int, name: str) -> NDArray[np.str_]:
    return np.full(rows, name)


def _attention_flops(
    shape: Architecture, c: NDArray[np.float64], m: NDArray[np.float64], degree: int
) -> NDArray[np.float64]:
    """Return the arithmetic of causal attention: two products over c m + c (c + 1) / 2 pairs."""
    return 4 * shape.hidden / degree * (c * m + c * (c + 1) / 2)


def _decode_table(
    n: NDArray[np.float64], m: NDArray[np.float64], measured_ms: NDArray[np.float64]
) -> Table:
    return Table(
        "decode",
        _labels(len(n), "decode"),
        _features(len(n), decode_kv=n * m, decode_request=n, decode_base=1),
        measured_ms,
        ("decode_kv", "decode_request", "decode_base"),
        ladders={"min_decode_requests": n},
        limits={"max_decode_requests": n, "max_request_kv_tokens": m, "max_kv_tokens": n * m},
    )


# --- Vidur ----------------------------------------------------------------------------------


def _median(name: str) -> str:
    return f"time_stats.{name}.median"


def _read_vidur(path: Path, model: str | None, degree: int, peak: Device) -> Profile | None:
    dense_file = path / "mlp.csv"
    attention_file = next(iter(sorted(path.glob("attention*.csv"))), None)
    if not dense_file.is_file() and attention_file is None:
        return None
    rejected: list[Rejected] = []
    notes: list[str] = []
    tables: list[Table] = []
    shape = _vidur_shape(dense_file, model or path.name)
    if dense_file.is_file():
        tables.append(_vidur_dense(dense_file, shape, degree, peak, rejected))
    else:
        notes.append("no mlp.csv: token and base are missing")
    if attention_file is not None:
        tables += _vidur_attention(attention_file, shape, degree, peak, rejected)
    else:
        notes.append("no attention*.csv: attention costs nothing")
    if degree > 1:
        notes.append("all-reduces are not in these profiles")
    return Profile(
        "Vidur's columns", shape, degree, peak, tuple(tables), tuple(rejected), tuple(notes)
    )


def _vidur_shape(dense_file: Path, model: str) -> Architecture:
    try:
        return architecture(model)
    except InputError:
        raise InputError(
            f"{dense_file.parent}: model {model!r} is unknown; --model with a known name is right"
        ) from None


def _vidur_dense(
    path: Path, shape: Architecture, degree: int, peak: Device, rejected: list[Rejected]
) -> Table:
    times = [_median(name) for name in LAYER_OPERATORS]
    frame = _read_csv(path, ["num_tokens", "num_tensor_parallel_workers", *times])
    frame = _of_degree(frame, path, degree)
    tokens = _column(frame, "num_tokens", path, 1)
    total = np.zeros(len(frame))
    good = np.ones(len(frame), dtype=bool)
    for name in LAYER_OPERATORS:
        measured = _times(frame, _median(name), path)
        weights = shape.layer_weights.get(name, 0) / degree
        if weights:
            good &= _possible(
                frame, path, name, measured, 2 * weights * tokens,
                np.full(len(frame), BYTES * weights), peak, rejected,
            )  # fmt: skip
        total += measured
    tokens, total = tokens[good], total[good]
    return Table(
        "layer",
        _labels(len(tokens), "layer"),
        _features(len(tokens), token=tokens, base=1),
        total,
        ("token", "base"),
        limits={"max_batch_tokens": tokens},
    )


def _vidur_attention(
    path: Path, shape: Architecture, degree: int, peak: Device, rejected: list[Rejected]
) -> list[Table]:
    needed = [
        "num_tensor_parallel_workers", "batch_size", "prefill_chunk_size", "kv_cache_size",
        "is_prefill", _median("attn_prefill"), _median("attn_decode"),
    ]  # fmt: skip
    frame = _of_degree(_read_csv(path, needed), path, degree)
    is_prefill = frame["is_prefill"].astype(str).str.lower() == "true"
    n = _column(frame, "batch_size", path, 1)
    c = _column(frame, "prefill_chunk_size", path)
    m = _column(frame, "kv_cache_size", path)
    tables = []
    pick = np.flatnonzero(~is_prefill)
    if pick.size:
        rows = frame.iloc[pick]
        measured = _times(rows, _median("attn_decode"), path)
        held = n[pick] * m[pick]
        good = _possible(
            rows, path, "attn_decode", measured, 4 * shape.hidden / degree * held,
            held * shape.layer_kv_bytes / degree, peak, rejected,
        )  # fmt: skip
        tables.append(_decode_table(n[pick][good], m[pick][good], measured[good]))
    pick = np.flatnonzero(is_prefill)
    if pick.size:
        rows = frame.iloc[pick]
        measured = _times(rows, _median("attn_prefill"), path)
        nn, cc, mm = n[pick], c[pick], m[pick]
        good = _possible(
            rows, path, "attn_prefill", measured, nn * _attention_flops(shape, cc, mm, degree),
            nn * (cc + mm) * shape.layer_kv_bytes / degree, peak, rejected,
        )  # fmt: skip
        nn, cc, mm = nn[good], cc[good], mm[good]
        terms = ["prefill_square", "prefill_cross", "prefill_kv", "prefill_token", "prefill_base"]
        if len(np.unique(nn)) > 1:  # one request at a time cannot tell it from prefill_base
            terms.append("prefill_request")
        tables.append(
            Table(
                "prefill",
                np.where(mm > 0, "prefill with cached KV", "prefill"),
                _features(
                    len(nn), prefill_square=nn * cc**2, prefill_cross=nn * cc * mm,
                    prefill_kv=nn * mm, prefill_token=nn * cc, prefill_request=nn, prefill_base=1,
                ),
                measured[good],
                tuple(terms),
                ladders={"min_prefill_chunk_tokens": cc},
                limits={"max_prefill_chunk_tokens": cc, "max_request_kv_tokens": cc + mm},
            )
        )  # fmt: skip
    return tables


def _of_degree(frame: Frame, path: Path, degree: int) -> Frame:
    column = "num_tensor_parallel_workers"
    chosen = frame[frame[column] == degree]
    if chosen.empty:
        known = ", ".join(map(str, sorted(frame[column].unique())))
        raise InputError(f"{path}: {column}: no row has {degree}; {known} is right")
    return chosen


# --- Splitwise ------------------------------------------------------------------------------


def _read_splitwise(path: Path, model: str | None, degree: int, peak: Device) -> Profile | None:
    """Read whole-batch times: one prefill batch, then decode batches of the same requests."""
    file = path / "perf_model.csv"
    if not file.is_file():
        return None
    frame = splitwise_rows(file, model, degree, peak)
    shape = architecture(model or str(frame["model"].iloc[0]))
    rejected: list[Rejected] = []
    n, s, o = (
        _column(frame, name, file, 1) for name in ("batch_size", "prompt_size", "token_size")
    )
    prompt, token = _times(frame, "prompt_time", file), _times(frame, "token_time", file)
    weights = shape.weight_bytes / degree
    fits = _possible(
        frame, file, "prompt_time", prompt,
        n * (weights / BYTES * 2 * s + shape.layers * _attention_flops(shape, s, 0 * s, degree)),
        np.full(len(frame), weights), peak, rejected,
    )  # fmt: skip
    kv = s + (o - 1) / 2  # mean over the decode steps
    reads = weights + n * s * shape.kv_bytes / degree
    works = _possible(
        frame, file, "token_time", token, weights / BYTES * 2 * n, reads, peak, rejected
    )
    works &= fits  # a repetition with an impossible prefill is not to be trusted in its decodes
    # Longer outputs stop at the end-of-sequence token: their context is not known.
    works &= o <= SPLITWISE_TOKENS
    a, b = int(fits.sum()), int(works.sum())
    features = np.concatenate(
        [
            _features(
                a, token=(n * s)[fits], base=1, prefill_square=(n * s**2)[fits], prefill_base=1,
                prefill_request=n[fits],
            ),
            _features(
                b, token=n[works], base=1, decode_kv=(n * kv)[works], decode_request=n[works],
                decode_base=1,
            ),
        ]
    )  # fmt: skip
    empty = np.zeros(a)
    table = Table(
        "batch",
        np.concatenate([_labels(a, "prefill"), _labels(b, "decode")]),
        features,
        np.concatenate([prompt[fits], token[works]]),
        ("token", "base", "decode_kv", "decode_request", "decode_base", "prefill_square"),
        whole_batch=True,
        ladders={"min_prefill_chunk_tokens": np.concatenate([s[fits], np.full(b, np.inf)])},
        limits={
            "max_batch_tokens": np.concatenate([(n * s)[fits], n[works]]),
            "max_prefill_chunk_tokens": np.concatenate([s[fits], np.zeros(b)]),
            "max_decode_requests": np.concatenate([empty, n[works]]),
            "max_request_kv_tokens": np.concatenate([empty, (s + o - 1)[works]]),
            "max_kv_tokens": np.concatenate([empty, (n * (s + o - 1))[works]]),
        },
    )
    notes = ("whole-batch times: one layer stands for all",)
    return Profile("Splitwise", shape, degree, peak, (table,), tuple(rejected), notes)


SPLITWISE_TOKENS = 128
"""Longest output in perf_model.csv that is generated to its end."""


def splitwise_rows(file: Path, model: str | None, degree: int, peak: Device) -> Frame:
    """Return the rows of perf_model.csv of a model, a tensor-parallel degree and a device.

    Raises
    ------
    InputError
        A missing column, several models and none named, or no such rows.
    """
    needed = (
        "model", "hardware", "prompt_size", "batch_size", "token_size", "prompt_time",
        "token_time", "e2e_time", "tensor_parallel",
    )  # fmt: skip
    frame = _read_csv(file, needed)
    names = sorted(frame["model"].unique())
    if model is None and len(names) > 1:
        raise InputError(f"{file}: holds {', '.join(names)}; --model with one of them is right")
    chosen = frame[
        (frame["model"].map(lambda name: model is None or _same(name, model)))
        & (frame["hardware"] == peak.name)
        & (frame["tensor_parallel"] == degree)
    ]
    if chosen.empty:
        known = sorted(
            f"{a} on {b} x {c}"
            for a, b, c in frame[["model", "hardware", "tensor_parallel"]]
            .drop_duplicates()
            .itertuples(index=False)
        )
        raise InputError(
            f"{file}: no row for {model or names[0]} on {peak.name} x {degree}; it holds "
            + ", ".join(known)
        )
    return chosen


# --- aiconfigurator -------------------------------------------------------------------------


def _read_aiconfigurator(
    path: Path, model: str | None, degree: int, peak: Device
) -> Profile | None:
    """Read GEMM, context and generation attention (bf16) of one model's shapes."""
    files = {
        kind: next(iter(sorted(path.glob(f"*{kind}_perf*.parquet"))), None)
        for kind in ("gemm", "context_attention", "generation_attention")
    }
    if not any(files.values()):
        return None
    if model is None:
        raise InputError(f"{path}: aiconfigurator's tables hold every shape; --model is needed")
    shape = architecture(model)
    rejected: list[Rejected] = []
    tables: list[Table] = []
    notes = [
        f"no {kind} table: {cost}"
        for kind, cost in (
            ("generation_attention", "attention of decodes costs nothing"),
            ("context_attention", "attention of prefills costs nothing"),
        )
        if files[kind] is None
    ]
    if files["gemm"] is not None:
        tables.append(_gemm_table(files["gemm"], shape, degree, peak, rejected))
        notes.append("the layer is its four matrix products; norms and activations are missing")
    if files["generation_attention"] is not None:
        frame, n, s, measured = _heads(files["generation_attention"], shape, degree)
        m = s + _column(frame, "step", files["generation_attention"])
        good = _possible(
            frame, files["generation_attention"], "latency", measured,
            4 * shape.hidden / degree * n * m, n * m * shape.layer_kv_bytes / degree, peak,
            rejected,
        )  # fmt: skip
        tables.append(_decode_table(n[good], m[good], measured[good]))
    if files["context_attention"] is not None:
        frame, n, c, measured = _heads(files["context_attention"], shape, degree)
        good = _possible(
            frame, files["context_attention"], "latency", measured,
            n * _attention_flops(shape, c, 0 * c, degree), n * c * shape.layer_kv_bytes / degree,
            peak, rejected,
        )  # fmt: skip
        n, c = n[good], c[good]
        # Without cached KV the cross term cannot be seen; the arithmetic makes it twice the
        # square (c m pairs against c^2 / 2), so the two are fitted as one.
        tables.append(
            Table(
                "prefill",
                _labels(len(n), "prefill"),
                _features(
                    len(n), prefill_square=n * c**2, prefill_token=n * c, prefill_request=n,
                    prefill_base=1,
                ),
                measured[good],
                ("prefill_square", "prefill_token", "prefill_request", "prefill_base"),
                ladders={"min_prefill_chunk_tokens": c},
                limits={"max_prefill_chunk_tokens": c, "max_batch_tokens": n * c},
            )
        )  # fmt: skip
    return Profile(
        "aiconfigurator", shape, degree, peak, tuple(tables), tuple(rejected), tuple(notes)
    )


def _read_parquet(path: Path, needed: Sequence[str]) -> Frame:
    import pandas as pd

    try:
        frame = pd.read_parquet(path)
    except ImportError:
        raise InputError(f"{path}: reading Parquet needs the package pyarrow; install it") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable Parquet file ({error})") from None
    return _checked(frame, path, needed, first_line=1)


def _heads(
    path: Path, shape: Architecture, degree: int
) -> tuple[Frame, NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    needed = (
        "batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim", "attn_dtype",
        "latency",
    )  # fmt: skip
    frame = _read_parquet(path, needed)
    frame = frame[(frame["attn_dtype"] == "bfloat16") & (frame["head_dim"] == shape.head_size)]
    heads, kv_heads = shape.heads // degree, max(1, shape.kv_heads // degree)
    chosen = frame[(frame["num_heads"] == heads) & (frame["num_key_value_heads"] == kv_heads)]
    if chosen.empty:
        known = sorted(int(k) for k in frame[frame["num_heads"] == heads].num_key_value_heads)
        raise InputError(
            f"{path}: no rows of {heads} heads with {kv_heads} KV heads ({shape.name}, tensor "
            f"parallel {degree}); KV heads at hand: {', '.join(map(str, sorted(set(known))))}"
        )
    n, s = _column(chosen, "batch_size", path, 1), _column(chosen, "isl", path, 1)
    return chosen, n, s, _times(chosen, "latency", path)


def _gemm_table(
    path: Path, shape: Architecture, degree: int, peak: Device, rejected: list[Rejected]
) -> Table:
    """Sum the four products of a layer; shapes between those measured are interpolated.

    Time per weight varies slowly over the grid, so it is interpolated linearly in the logarithms
    of both widths.
    """
    frame = _read_parquet(path, ("m", "n", "k", "gemm_dtype", "latency"))
    frame = frame[frame["gemm_dtype"] == "bfloat16"]
    m, n, k = (_column(frame, name, path, 1) for name in "mnk")
    measured = _times(frame, "latency", path)
    good = _possible(
        frame, path, "latency", measured, 2 * m * n * k, BYTES * (m * k + n * k + m * n), peak,
        rejected,
    )  # fmt: skip
    frame = frame[good].assign(each=(measured / (n * k))[good])
    kv = shape.kv_heads * shape.head_size
    products = (
        ((shape.hidden + 2 * kv) / degree, shape.hidden),
        (shape.hidden, shape.hidden / degree),
        (2 * shape.ffn / degree, shape.hidden),
        (shape.hidden, shape.ffn / degree),
    )
    tokens, total = [], []
    for size, group in frame.groupby("m"):
        grid = group.pivot_table(index="n", columns="k", values="each").dropna()
        if grid.shape[0] < 2 or grid.shape[1] < 2:
            continue
        tokens.append(float(str(size)))
        total.append(sum(a * b * _between(grid, a, b) for a, b in products))
    count = len(tokens)
    column = np.array(tokens)
    return Table(
        "layer",
        _labels(count, "layer"),
        _features(count, token=column, base=1),
        np.array(total, dtype=np.float64),
        ("token", "base"),
        limits={"max_batch_tokens": column},
    )


def _between(grid: Frame, n: float, k: float) -> float:
    rows, columns = np.log(grid.index.to_numpy(float)), np.log(grid.columns.to_numpy(float))
    values: Any = grid.to_numpy()
    over_k = [np.interp(np.log(k), columns, row) for row in values]
    return float(np.interp(np.log(n), rows, over_k))
