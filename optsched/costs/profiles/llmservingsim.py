"""Profiles of LLMServingSim: kernels of vLLM, timed one by one in microseconds.

``dense.csv`` has the layers that process every token, ``per_sequence.csv`` those that run once per
request, ``attention.csv`` the attention of batches that prefill and decode, and ``skew.csv``
attention over unequal KV. ``meta.yaml`` names the model and the GPU. Where layers have experts,
``moe.csv`` has their time (`optsched.costs.profiles.experts`).

The tables do not say how many devices shared a layer when they were measured. The output layer
does: it reads its weights, which are too many for a cache, so its time for one request cannot be
shorter than the bandwidth allows. The profiled degree is the smallest at which it is not. Times at
another degree are derived: what is shared takes inversely as long, what every device does for
itself takes the same, and all-reduces go at the peak of the link.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.costs.architectures import BYTES
from optsched.costs.hardware import all_reduce_ms
from optsched.costs.profiles import experts
from optsched.costs.profiles.identity import Claim
from optsched.costs.profiles.tables import Measurements, Profile, read_table
from optsched.costs.table import Floats, Grid, no_skew
from optsched.problem.errors import InputError
from optsched.problem.text_files import read_object, read_text

if TYPE_CHECKING:
    from optsched.costs.profiles.tables import Frame

FILES = ("dense.csv", "per_sequence.csv", "attention.csv")
ONCE = ("embedding", "final_layernorm", "lm_head", "sampler")
"""Layers that run once per batch. The others run in every layer of the model."""
WHOLE = ("layernorm", "final_layernorm", "sampler")
"""Layers that every device runs for itself."""
TWICE = ("layernorm",)
"""Layers that run twice in every layer of the model."""
MATRICES = {
    "qkv_proj": "attn_pre_proj",
    "o_proj": "attn_post_proj",
    "gate_up_proj": "mlp_up_proj",
    "down_proj": "mlp_down_proj",
}
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

    They may lie in a folder inside it, ``profile`` or ``tp`` and the degree. The degree is that of
    the claim, of the run beside the profile (``meta.json``), or the one that was profiled. `claim`:
    what the profile is asked to be; its degree and notes are filled in.
    """
    run, notes = _run_facts(path), claim.notes
    degree_of_run = run.pop("tensor_parallel_size", None)
    asked_degree = claim.degree or degree_of_run

    # The tables of layers and of attention tell a profile.
    for folder in (path / f"tp{asked_degree or 1}", path / "profile", path):
        if (folder / FILES[0]).is_file() and (folder / FILES[2]).is_file():
            break
    else:
        return None

    meta, facts = _meta_facts(folder)
    table = folder / "moe.csv"
    sparse = table.is_file()
    # The profiler runs a small model, with fewer experts than the one that it names.
    claim.check(meta, {k: v for k, v in facts.items() if not (sparse and "experts" in k)})
    claim.check(path / "meta.json", run)
    _check_layers(folder, sparse=sparse)
    frames = _read_tables(folder, claim, skew=facts.get("skew_profile") != "false")
    if claim.model is None:
        raise InputError(f"{folder}: found no meta.yaml that names the model; expected --model")

    shape = claim.find_shape(meta, experts=sparse)
    if sparse:
        rows = read_table(table, experts.COLUMNS)
        frames[table] = rows[rows["ep"] == 1]  # all experts on one device

    # In the order of `COLUMNS`, where skew may be missing, and then experts if there are some.
    dense_rows, request_rows, attention_rows, *others = claim.measured(path, frames)
    expert_rows = others.pop() if sparse else None
    skew_rows = others.pop() if others else None
    peak, profiled = dense_rows.peak, _profiled_degree(request_rows)
    claim.degree = degree = asked_degree or profiled
    if degree != profiled:
        notes.append(
            f"the tables are those of tensor parallel {profiled}; the times of {degree} are derived"
        )

    if degree != 1 and asked_degree is None:
        notes.append(f"tensor parallel {degree} was found in the tables")
    elif degree != 1:
        notes.append(f"for tensor parallel {degree}, as asked for or as in meta.json")

    # `share` is the factor of the times of what devices share, at another degree.
    share, of_experts = profiled / degree, None
    dense = _layers(dense_rows, "tokens", profiled, share)
    if expert_rows is not None:
        if degree != profiled:
            raise InputError(
                f"{table}: tensor_parallel: found {degree}, where {profiled} was profiled; "
                "expected that, since the times of experts at another degree are not known"
            )

        # `ms`: by the axis of `dense`. `of_experts`: rows, measured and predicted, for the report.
        ms, of_experts = experts.experts_of(expert_rows, dense.axes["tokens"])
        dense = Grid(dense.axes, dense.values + ms)
        notes.append(shape.routing)

    if degree > 1:
        reduce_ms = all_reduce_ms(shape, peak, degree)
        dense = Grid(dense.axes, dense.values + reduce_ms * dense.axes["tokens"])
        notes.append(
            f"all-reduces were not profiled and are priced at {peak.link_gb_s:g} GB/s of the link, "
            "both directions together; without direct access between the devices they take longer"
        )

    request = _layers(request_rows, "requests", profiled, share)
    # `apart`: measured batches that are not on the grid, which test it (`fit`).
    attention, apart = _attention(attention_rows, share)
    if skew_rows is None:
        notes.append("skew: not profiled, so decodes of unequal KV are taken as equal")

    skew = no_skew() if skew_rows is None else _skew(skew_rows)
    tables: dict[str, Any] = {"grids": (dense, request, attention), "skew": skew}
    source = "LLMServingSim's tables"
    return claim.profile(source, (), {}, **tables, apart=apart, experts=of_experts)


def _read_tables(folder: Path, claim: Claim, *, skew: bool) -> dict[Path, Frame]:
    """Return the rows of each table by file, with that of skew if it is there and `skew`."""
    frames = {}
    for name, needed in COLUMNS.items():
        file = folder / name
        if name in FILES or (skew and file.is_file()):
            frames[file] = claim.read(file, needed, also_known=SKEW)

    return frames


def _run_facts(path: Path) -> dict[str, Any]:
    """Return what meta.json says of the run that lies beside a profile, if one does.

    A file of this name that is written otherwise says nothing.
    """
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


def _profiled_degree(rows: Measurements) -> int:
    """Return the smallest degree at which the output layer is not faster than the bandwidth.

    That layer's weights are shared by the devices, which all read their part. Profiles have up to
    8 devices.
    """
    output_layer = rows.only((rows.frame["layer"] == "lm_head").to_numpy())
    if not len(output_layer):
        return 1

    fewest = np.argmin(output_layer.numbers("sequences", 1))
    ms = output_layer.times("time_us")[fewest] / 1000
    on_one_ms = rows.peak.least_ms(0.0, BYTES * rows.shape.vocab * rows.shape.hidden)
    return next((degree for degree in (1, 2, 4) if on_one_ms / degree <= ms), 8)


def _meta_facts(folder: Path) -> tuple[Path, dict[str, str]]:
    """Return meta.yaml and those of its fields that are needed, without a reader of YAML."""
    names = ("model", "gpu", "hardware", "variant")
    numbers = ("num_experts", "num_local_experts")
    inside = ("dtype", "kv_cache_dtype", "quantization", "sliding_window", *numbers)
    # The tables may lie in a folder of their degree, with meta.yaml above it.
    for file in (folder / "meta.yaml", folder.parent / "meta.yaml"):
        if file.is_file():
            text = read_text(file, "a description of a profile")
            matches = {key: re.search(rf"^{key}: *(\S.*)$", text, re.M) for key in names}
            # What the engine was given stands one level deeper.
            matches |= {key: re.search(rf"^ *{key}: *(\S.*)$", text, re.M) for key in inside}
            matches["skew_profile"] = re.search(r"^skew_profile:\s+enabled: *(\w+)", text, re.M)
            texts = {k: match[1].strip().strip("'\"") for k, match in matches.items() if match}

            return file, {k: text for k, text in texts.items() if text not in ("null", "~")}

    return folder / "meta.yaml", {}


def _check_layers(folder: Path, *, sparse: bool) -> None:
    """Raise InputError if the profile lacks the feed-forward network, or has experts as layers.

    `sparse`: whether there is a table of experts in the place of the network.
    """
    file = folder / FILES[0]
    layers = {str(name) for name in read_table(file, ("layer",))["layer"].unique()}
    routed = sorted(name for name in layers if re.search("moe|expert|router|^gate$", name))

    if routed:
        raise InputError(
            f"{file}: layer: found {', '.join(routed)}; expected dense layers, without experts"
        )

    if not sparse and not layers & {"gate_up_proj", "down_proj"}:
        raise InputError(
            f"{file}: layer: found {', '.join(sorted(layers))}; expected gate_up_proj and down_proj"
        )


def _layers(rows: Measurements, axis: str, profiled: int, share: float) -> Grid:
    """Return the time of all kernels of a table by tokens or by requests, in ms per layer.

    `axis` is ``tokens`` or ``requests``, `profiled` the degree of the tables, and `share` the
    factor of what devices share.
    """
    sizes = rows.numbers("sequences" if axis == "requests" else axis, 1)
    ms, shape = rows.times("time_us") / 1000, rows.shape
    layer = rows.frame["layer"].astype(str).to_numpy()
    # `good`: the rows that are possible on the device, which only matrix products are checked for.
    is_product, good = np.isin(layer, list(MATRICES)), np.ones(len(layer), dtype=bool)

    if is_product.any():
        weights = {name: shape.layer_weights[key] / profiled for name, key in MATRICES.items()}
        weight = np.array([weights[name] for name in layer[is_product]])
        products = rows.only(is_product)
        flops = 2 * weight * sizes[is_product]
        good[is_product] = products.possible("time_us", ms[is_product], flops, BYTES * weight)

    values = np.unique(sizes)
    total = np.zeros(len(values))
    for name in np.unique(layer):
        of_layer = good & (layer == name)
        if not of_layer.any():
            raise InputError(f"{rows.path}: layer {name}: found no usable rows; expected some")

        order = np.argsort(sizes[of_layer])
        layer_ms = np.interp(values, sizes[of_layer][order], ms[of_layer][order])
        layer_ms *= 1 if name in WHOLE else share
        # Times are multiplied by the layers later, so what runs once is divided by them. Some run
        # twice in each layer (`TWICE`), and those of `WHOLE`, above, are not shared by devices.
        total += layer_ms / shape.layers if name in ONCE else layer_ms * (1 + (name in TWICE))

    return Grid({axis: values}, total)


def _attention(rows: Measurements, share: float) -> tuple[Grid, tuple[Floats, Floats]]:
    """Return the grid of attention, and the points and times of rows that are not on it.

    All times are multiplied by ``share``. Where decode batches were measured with more requests
    than any mixed batch had, mixed ones go on as decodes alone do.
    """
    # A point is a batch: the chunk c and the cached KV m of a prefill, n decodes and their KV k.
    points = np.stack([rows.numbers(name) for name in ATTENTION], axis=1)
    ms = rows.times("time_us") / 1000
    prefills, decodes = points[:, 0] > 0, points[:, 2] > 0
    mixed, pure = prefills & decodes, decodes & ~prefills
    if not mixed.any() or not pure.any():
        raise InputError(f"{rows.path}: found no mixed batches or no decodes; expected both")

    axes = _complete_axes(points[mixed])
    # On the axes a 0 is for batches without a prefill, or without decodes.
    max_mixed, of_pure = axes[2][-1], np.unique(points[pure, 2])
    axes[0] = np.concatenate([[0.0], axes[0]])
    axes[2] = np.concatenate([[0.0], axes[2], of_pure[of_pure > max_mixed]])

    def key(c: float, m: float, n: float, k: float) -> tuple[float, float, float, float]:
        # What a batch lacks does not count: cached KV without prefills, and KV without decodes.
        return c, m if c else 0.0, n, k if n else 0.0

    measured = dict(zip((key(*point) for point in points.tolist()), ms.tolist(), strict=True))
    measured[0.0, 0.0, 0.0, 0.0] = 0.0  # a batch without attention

    def time(c: float, m: float, n: float, k: float) -> float:
        if c and n > max_mixed:  # the further decodes add what they add without a prefill
            return time(c, m, max_mixed, k) + (time(0.0, m, n, k) - time(0.0, m, max_mixed, k))

        return measured[key(c, m, n, k)]

    values = []
    for point in product(*(axis.tolist() for axis in axes)):
        try:
            values.append(time(*point))
        except KeyError:
            cell = ", ".join(f"{name} {x:g}" for name, x in zip(ATTENTION, point, strict=True))
            raise InputError(f"{rows.path}: found no row of {cell}; expected one") from None

    on_axis = [np.isin(points[:, k], axis) for k, axis in enumerate(axes)]
    prefills_fit = ~prefills | (on_axis[0] & on_axis[1])
    decodes_fit = ~decodes | (on_axis[2] & on_axis[3])
    on_grid = prefills_fit & decodes_fit & (prefills | decodes)
    grid = Grid(dict(zip(AXES, axes, strict=True)), np.array(values) * share)
    return grid, (points[~on_grid], ms[~on_grid] * share)


def _complete_axes(points: Floats) -> list[Floats]:
    """Return the axes of the largest grid whose cells are all among some points.

    A grid has what was measured with one chunk (cached KV, decodes and their KV), at this chunk and
    at all others with which the same was measured. Of several it is, if possible, one with the
    shortest and the longest prefills.
    """
    # By chunk: the cached KV, decodes and KV of decodes that were measured with it.
    cells: dict[float, set[tuple[float, ...]]] = {}
    for chunk, *others in points.tolist():
        cells.setdefault(chunk, set()).add(tuple(others))

    def chunks_of(grid: set[tuple[float, ...]]) -> list[float]:
        return [chunk for chunk, of_chunk in cells.items() if of_chunk >= grid]

    def score(grid: set[tuple[float, ...]]) -> tuple[bool, int]:
        chunks = chunks_of(grid)
        whole = min(chunks) == min(cells) and max(chunks) == max(cells)
        return whole, len(chunks) * len(grid)

    best = max(cells.values(), key=score)
    return [np.unique(chunks_of(best)), *(np.unique(column) for column in zip(*best, strict=True))]


def _skew(rows: Measurements) -> Grid:
    """Return the share of the way from mean to maximum KV by decodes: relative least squares."""
    # The times of n decodes that all hold the mean KV, that all hold the max, and as they were.
    n = rows.numbers("n", 1)
    mean, longest, uneven = (rows.times(f"t_{name}_us") for name in ("mean", "max", "skew"))
    used = longest > mean
    counts = np.unique(n[used])
    if len(counts) < 2:
        raise InputError(f"{rows.path}: n: found {len(counts)} values; expected at least two")

    # The share s that minimizes the sum of (s x - y)^2.
    x, y = (longest - mean) / mean, (uneven - mean) / mean
    groups = [used & (n == k) for k in counts]
    shares = [float((x * y)[group].sum() / (x * x)[group].sum()) for group in groups]
    return Grid({"decode_requests": counts}, np.clip(shares, 0.0, 1.0))
