"""Profiles of LLMServingSim: kernels of vLLM, timed one by one in microseconds.

``dense.csv`` has the layers that process every token, ``per_sequence.csv`` those that run once per
request, ``attention.csv`` the attention of batches that prefill and decode, and ``skew.csv``
attention over unequal KV. ``meta.yaml`` names the model and the GPU.

The tables do not say how many devices shared a layer when they were measured. The output layer
does: it reads its weights, which are too many for a cache, so its time for one request cannot be
shorter than the bandwidth allows. The profiled degree is the smallest at which it is not. Times at
another degree are derived: what is shared takes inversely as long, what every device does for
itself takes the same, and all-reduces go at the peak of the link.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.costs.architectures import BYTES, Architecture
from optsched.costs.hardware import all_reduce_ms
from optsched.costs.profiles.identity import Claim
from optsched.costs.profiles.tables import Measurements, Profile, Rejected, read_table
from optsched.costs.table import Grid, no_skew
from optsched.problem.errors import InputError
from optsched.problem.text_files import read_object, read_text

FILES = ("dense.csv", "per_sequence.csv", "attention.csv")
ONCE = ("embedding", "final_layernorm", "lm_head", "sampler")
"""Layers that run once per batch. The others run in every layer of the model."""
WHOLE = ("layernorm", "final_layernorm", "sampler")
"""Layers that every device runs for itself."""
TWICE = ("layernorm",)
"""Layers that run twice in every layer of the model."""
MATRICES = {
    "qkv_proj": "attn_pre_proj", "o_proj": "attn_post_proj", "gate_up_proj": "mlp_up_proj",
    "down_proj": "mlp_down_proj",
}  # fmt: skip
"""Matrix products, and what `Architecture.layer_weights` calls them."""
ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
COLUMNS: dict[str, tuple[str, ...]] = {
    "dense.csv": ("layer", "tokens", "time_us"),
    "per_sequence.csv": ("layer", "sequences", "time_us"),
    "attention.csv": (*ATTENTION, "time_us"),
    "skew.csv": ("n", "t_mean_us", "t_max_us", "t_skew_us"),
}
SKEW = ("regime", "nb", "ratio", "skew", "pc", "kp", "kvs", "kv_big", "kv_mean", "alpha")
"""Columns that say how the rows of skew.csv were made."""
AXES = ("prefill_tokens", "prefill_kv", "decode_requests", "decode_kv")


def read_llmservingsim(path: Path, claim: Claim) -> Profile | None:
    """Return the profile from a folder, or None if it has no such tables.

    The tables lie in the folder, or in one inside it that is called ``profile`` or ``tp`` and the
    degree. The model is that of the claim or of ``meta.yaml``. The degree is that of the claim, or
    of the run beside the profile (``meta.json``), or else the one that was profiled. InputError: a
    file, a column or a part of a grid is missing, or ``meta.yaml`` is not what is claimed.
    """
    run, notes = _run(path), claim.notes
    of_run = run.pop("tensor_parallel_size", None)
    wanted = claim.degree or of_run

    for folder in (path / f"tp{wanted or 1}", path / "profile", path):
        if (folder / FILES[0]).is_file() and (folder / FILES[2]).is_file():
            break
    else:
        return None

    meta, facts = _meta(folder)
    claim.check(meta, facts)
    claim.check(path / "meta.json", run)
    _check_dense(folder)
    frames = {}

    for name, needed in COLUMNS.items():
        file = folder / name
        if name in FILES or (file.is_file() and facts.get("skew_profile") != "false"):
            frames[file] = claim.select(file, read_table(file, needed), known=(*needed, *SKEW))

    if claim.model is None:
        raise InputError(f"{folder}: found no meta.yaml that names the model; expected --model")

    shape, peak = claim.shape(meta), claim.peak(path)
    rejected: list[Rejected] = []
    dense_rows, request_rows, attention_rows, *skew_rows = (
        Measurements(file, frame, peak, rejected) for file, frame in frames.items()
    )
    profiled = _profiled(request_rows, shape)
    degree = wanted or profiled

    if degree != profiled:
        notes.append(
            f"the tables are those of tensor parallel {profiled}; the times of {degree} are derived"
        )

    if degree != 1 and wanted is None:
        notes.append(f"tensor parallel {degree} was found in the tables")
    elif degree != 1:
        notes.append(f"for tensor parallel {degree}, as asked for or as in meta.json")

    share = (profiled, profiled / degree)
    dense = _layers(dense_rows, "tokens", shape, share)
    if degree > 1:
        ring = all_reduce_ms(shape, peak, degree)
        dense = Grid(dense.axes, dense.values + ring * dense.axes["tokens"])
        notes.append(
            f"all-reduces were not profiled and are priced at {peak.link_gb_s:g} GB/s of the link, "
            "both directions together; without direct access between the devices they take longer"
        )

    grids = [dense, _layers(request_rows, "requests", shape, share)]
    attention, (points, ms) = _attention(attention_rows)
    attention, apart = Grid(attention.axes, attention.values * share[1]), (points, ms * share[1])
    if not skew_rows:
        notes.append("skew: not profiled, so decodes of unequal KV are taken as equal")

    skew = _skew(skew_rows[0]) if skew_rows else no_skew()
    claim.degree = degree
    return claim.profile(
        "LLMServingSim's tables", shape, (), {}, rejected, grids=(*grids, attention), skew=skew,
        apart=apart,
    )  # fmt: skip


def _run(path: Path) -> dict[str, Any]:
    """Return what meta.json says of the run that lies beside a profile, if one does."""
    try:
        meta = read_object(path / "meta.json", "a measured run")
        engine = meta["engine_kwargs"]
        names = ("model", "dtype", "kv_cache_dtype", "quantization")
        facts = {name: engine[name] for name in names if engine.get(name)}
        if "device_name" in meta.get("hardware", {}):
            facts["device_name"] = meta["hardware"]["device_name"]

        return facts | {"tensor_parallel_size": int(engine["tensor_parallel_size"])}
    except (InputError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _profiled(rows: Measurements, shape: Architecture) -> int:
    """Return the smallest degree at which the output layer is not faster than the bandwidth."""
    head = rows.only(rows.frame["layer"] == "lm_head")
    if not len(head):
        return 1

    ms = head.times("time_us")[np.argmin(head.numbers("sequences", 1))] / 1000
    whole = rows.peak.least_ms(0.0, BYTES * shape.vocab * shape.hidden)
    return next((g for g in (1, 2, 4) if whole / g <= ms), 8)


def _meta(folder: Path) -> tuple[Path, dict[str, str]]:
    """Return meta.yaml and those of its fields that are needed, without a reader of YAML."""
    names = ("model", "gpu", "hardware", "variant")
    inside = ("dtype", "kv_cache_dtype", "quantization", "num_experts", "num_local_experts",
              "sliding_window")  # fmt: skip
    for file in (folder / "meta.yaml", folder.parent / "meta.yaml"):
        if file.is_file():
            text = read_text(file, "a description of a profile")
            found = {key: re.search(rf"^{key}: *(\S.*)$", text, re.M) for key in names}
            # What the engine was given stands one level deeper.
            found |= {key: re.search(rf"^ *{key}: *(\S.*)$", text, re.M) for key in inside}
            found["skew_profile"] = re.search(r"^skew_profile:\s+enabled: *(\w+)", text, re.M)
            texts = {k: match[1].strip().strip("'\"") for k, match in found.items() if match}

            return file, {k: text for k, text in texts.items() if text not in ("null", "~")}

    return folder / "meta.yaml", {}


def _check_dense(folder: Path) -> None:
    """Raise InputError if the profile is one of experts, or lacks the feed-forward network."""
    for table in sorted(folder.glob("*.csv")):
        if re.search("moe|expert", table.name):
            raise InputError(f"{table}: found a table of experts; expected one of dense layers")

    file = folder / FILES[0]
    layers = {str(name) for name in read_table(file, ("layer",))["layer"].unique()}
    experts = sorted(name for name in layers if re.search("moe|expert|router|^gate$", name))

    if experts:
        raise InputError(
            f"{file}: layer: found {', '.join(experts)}; expected dense layers, without experts"
        )

    if not layers & {"gate_up_proj", "down_proj"}:
        raise InputError(
            f"{file}: layer: found {', '.join(sorted(layers))}; expected gate_up_proj and down_proj"
        )


def _layers(rows: Measurements, axis: str, shape: Architecture, share: tuple[int, float]) -> Grid:
    """Return the time of all kernels of a table by tokens or by requests, in ms per layer.

    Of ``share``, the first is the profiled degree, and the second the factor of what is shared.
    """
    column = {"requests": "sequences"}.get(axis, axis)
    sizes, ms = rows.numbers(column, 1), rows.times("time_us") / 1000
    layer = rows.frame["layer"].astype(str).to_numpy()
    matrix, good = np.isin(layer, list(MATRICES)), np.ones(len(layer), dtype=bool)

    if matrix.any():
        weights = {name: shape.layer_weights[own] / share[0] for name, own in MATRICES.items()}
        weight = np.array([weights[name] for name in layer[matrix]])
        flops = 2 * weight * sizes[matrix]
        only = rows.only(matrix)
        good[matrix] = only.possible("time_us", ms[matrix], flops, BYTES * weight)

    values = np.unique(sizes)
    total = np.zeros(len(values))
    for name in np.unique(layer):
        mine = good & (layer == name)
        if not mine.any():
            raise InputError(f"{rows.path}: layer {name}: found no usable rows; expected some")

        order = np.argsort(sizes[mine])
        one = np.interp(values, sizes[mine][order], ms[mine][order])
        one *= 1 if name in WHOLE else share[1]
        total += one / shape.layers if name in ONCE else one * (1 + (name in TWICE))

    return Grid({axis: values}, total)


def _attention(
    rows: Measurements,
) -> tuple[Grid, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return the grid of attention, and the rows that are not on it.

    Where decode batches were measured with more requests than any mixed batch had, mixed ones go on
    as decodes alone do.
    """
    points = np.stack([rows.numbers(name) for name in ATTENTION], axis=1)
    ms = rows.times("time_us") / 1000
    prefills, decodes = points[:, 0] > 0, points[:, 2] > 0
    pure = ~prefills & decodes
    if not (prefills & decodes).any() or not pure.any():
        raise InputError(f"{rows.path}: found no mixed batches or no decodes; expected both")

    axes = _complete(points[prefills & decodes])
    last = axes[2][-1]
    more = np.unique(points[pure, 2])
    axes[0] = np.concatenate([[0.0], axes[0]])
    axes[2] = np.concatenate([[0.0], axes[2], more[more > last]])
    values = np.full([len(axis) for axis in axes], np.nan)
    place = np.stack([np.searchsorted(a, points[:, k]) for k, a in enumerate(axes)], axis=1)
    found = [np.isin(points[:, k], axis) for k, axis in enumerate(axes)]
    mixed, alone = np.all(found, axis=0) & prefills & decodes, prefills & ~decodes
    values[tuple(place[mixed].T)] = ms[mixed]
    alone &= found[0] & found[1]
    values[place[alone, 0], place[alone, 1], 0] = ms[alone, None]
    decode_only = pure & found[2] & found[3]
    for p, t in zip(place[decode_only], ms[decode_only], strict=True):
        values[0, :, p[2], p[3]] = t

    values[0, :, 0] = 0.0
    k = int(np.searchsorted(axes[2], last))
    further = values[:1, :, k + 1 :] - values[:1, :, k : k + 1]
    values[1:, :, k + 1 :] = values[1:, :, k : k + 1] + further

    if np.isnan(values).any():
        hole = np.argwhere(np.isnan(values))[0]
        at = ", ".join(f"{n} {a[i]:g}" for n, a, i in zip(ATTENTION, axes, hole, strict=True))
        raise InputError(f"{rows.path}: found no row of {at}; expected one")

    apart = ~(mixed | alone | decode_only)
    grid = Grid(dict(zip(AXES, axes, strict=True)), values)
    return grid, (points[apart], ms[apart])


def _complete(points: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """Return the axes of the largest grid whose cells are all among some points.

    A profile may hold several grids, each of some prefills. The one chosen has the shortest and
    the longest prefills, if any has.
    """
    cells: dict[float, set[tuple[float, ...]]] = {}
    for chunk, *rest in points.tolist():
        cells.setdefault(chunk, set()).add(tuple(rest))

    def of(grid: set[tuple[float, ...]]) -> list[float]:
        return [chunk for chunk, found in cells.items() if found >= grid]

    def score(grid: set[tuple[float, ...]]) -> tuple[bool, int]:
        chunks = of(grid)
        whole = min(chunks) == min(cells) and max(chunks) == max(cells)
        return whole, len(chunks) * len(grid)

    best = max(cells.values(), key=score)
    return [np.unique(of(best)), *(np.unique(column) for column in zip(*best, strict=True))]


def _skew(rows: Measurements) -> Grid:
    """Return the share of the way from mean to maximum KV by decodes: relative least squares."""
    n = rows.numbers("n", 1)
    mean, most, uneven = (rows.times(f"t_{name}_us") for name in ("mean", "max", "skew"))
    used = most > mean
    counts = np.unique(n[used])
    if len(counts) < 2:
        raise InputError(f"{rows.path}: n: found {len(counts)} values; expected at least two")

    x, y = (most - mean) / mean, (uneven - mean) / mean
    share = [float((x * y)[used & (n == k)].sum() / (x * x)[used & (n == k)].sum()) for k in counts]
    return Grid({"decode_requests": counts}, np.clip(share, 0.0, 1.0))
