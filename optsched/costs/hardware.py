"""Machines for models: KV capacity and the roofline of published peaks.

`optsched.costs.devices` has the devices, and `optsched.costs.architectures` the models.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from optsched.costs.architectures import BYTES, Architecture, architecture
from optsched.costs.devices import OWN, Device, device, own_device
from optsched.costs.table import CostTable, Floats, Grid
from optsched.problem.columns import MAX_TOKENS
from optsched.problem.errors import InputError
from optsched.problem.specs import Parameter, convert_all, read_pairs


def kv_capacity(
    memory_gib: float,
    model_bytes: float,
    bytes_per_token: float,
    *,
    usable: float = 0.9,
    devices: int = 1,
    beside_gib: float = 0.0,
) -> int:
    """Return how many tokens of KV fit beside the weights (Kim et al. 2024, section 2.2).

    Parameters
    ----------
    memory_gib : float
        Memory of one device, in 2**30 bytes.
    model_bytes : float
        Bytes of the weights, over all devices together.
    bytes_per_token : float
        Bytes of the keys and values of one token, over all devices together.
    usable : float
        Share of the memory that weights and KV may take (vLLM's default is 0.9).
    devices : int
        Number of devices that share the model.
    beside_gib : float
        What else each device holds, in 2**30 bytes.
    """
    given = {"memory_gib": memory_gib, "model_bytes": model_bytes, "usable": usable}
    for name, value in {**given, "bytes_per_token": bytes_per_token, "devices": devices}.items():
        if not 0 < value < math.inf:
            raise InputError(f"{name}: found {value!r}; expected a number > 0")

    if usable > 1:
        raise InputError(f"usable: found {usable!r}; expected a share <= 1")

    memory = (usable * memory_gib - beside_gib) * devices * 2**30
    tokens = (memory - model_bytes) // bytes_per_token
    if not tokens <= MAX_TOKENS:  # NaN is none either
        raise InputError(
            f"memory_gib: found {memory_gib!r}, which holds too many tokens of {bytes_per_token:g} "
            f"bytes; expected at most {MAX_TOKENS}"
        )

    if tokens < 1:
        raise InputError(
            f"model_bytes: found {model_bytes / 2**30:.4g} GiB, which leave no room for KV in "
            f"{memory / 2**30:.4g} GiB; expected more devices or a smaller model"
        )

    return int(tokens)


VLLM_GIB = 1.5
"""What a server of vLLM holds beside weights and KV: its activations and graphs."""
ROOFLINE_TOKENS = 4096
"""Largest batch, in tokens, to which a roofline's linear model of dense operators is fitted."""


def roofline_data(
    shape: Architecture,
    peak: Device,
    tensor_parallel: int = 1,
    usable: float = 0.9,
    beside_gib: float = 0.0,
    apart: bool = False,
    request_tokens: int | None = None,
) -> dict[str, Any]:
    """Return the fields of a roofline's linear model: a fit, or arithmetic and reading apart.

    With experts it is tabulated.
    """
    shape.check_degree(tensor_parallel)
    if apart and shape.experts:
        raise InputError(f"exponent: found one for {shape.name}; expected none for experts")
    if request_tokens is not None and request_tokens < 1:
        raise InputError(f"request_tokens: found {request_tokens}; expected an integer >= 1")
    if not math.isfinite(peak.tflops):
        raise InputError(f"device: found {peak.name}, whose peaks are unknown; expected a GPU")

    weights = [w / tensor_parallel for w in shape.layer_weights.values()]
    read, count = peak.least_ms(0, BYTES * sum(weights)), peak.least_ms(2 * sum(weights), 0)
    tokens = np.unique(np.geomspace(1, ROOFLINE_TOKENS, 200).round())
    dense = _dense_ms(shape, peak, tensor_parallel, tokens)
    # The times are flat at first and rise later, so no coefficient of the fit is negative.
    scaled = np.stack([tokens / ROOFLINE_TOKENS, np.ones_like(tokens)], axis=1) / dense[:, None]
    slope, base = np.linalg.lstsq(scaled, np.ones_like(tokens), rcond=None)[0]
    heads_on = min(tensor_parallel, shape.kv_heads)  # each device reads one KV head at least
    attention = 1 / (tensor_parallel * peak.tflops * 1e9)
    reduced = all_reduce_ms(shape, peak, tensor_parallel)
    values = {
        "token": (count if apart else slope / ROOFLINE_TOKENS) + reduced,
        "base": read if apart else base,
        "decode_kv": shape.layer_kv_bytes / heads_on / peak.bandwidth_gb_s / 1e6,
        "prefill_square": 2 * shape.attention_width * attention,
        "prefill_cross": 4 * shape.attention_width * attention,
    }
    kv_bytes = shape.kv_bytes_on(tensor_parallel, request_tokens)
    held = (peak.memory_gib, shape.weight_bytes, kv_bytes)
    shared: dict[str, Any] = {
        "usable": usable,
        "devices": tensor_parallel,
        "beside_gib": beside_gib,
    }
    of_peaks = (
        f"ROOFLINE: published peaks of {peak.name} ({peak.bandwidth_gb_s:g} GB/s, "
        f"{peak.tflops:g} TFLOP/s), {shape.name}, tensor parallel {tensor_parallel}; a lower "
        "estimate, not a measurement"
    )
    notes, table = list(shape.notes), None
    if request_tokens is not None:
        notes.append(f"the KV capacity is that of requests of {request_tokens} tokens")
    if shape.experts:
        notes.append(shape.routing)
        table = _table(values, tokens, dense + reduced * tokens)

    return {
        "name": f"{shape.name}-tp{tensor_parallel}-{peak.name}-roofline",
        "layers": shape.layers,
        "kv_capacity_tokens": kv_capacity(*held, **shared),
        "kv_window": shape.kv_window if request_tokens is None else None,
        "provenance": "; ".join([of_peaks, *notes]),
        "coefficients": {key: f"{value:.6g}" for key, value in values.items()},
        "valid": {"max_batch_tokens": float(ROOFLINE_TOKENS)},
        "table": table,
    }


def _dense_ms(shape: Architecture, peak: Device, devices: int, tokens: Floats) -> Floats:
    """Return the least milliseconds of a layer's matrices by tokens.

    Of experts those that tokens reach are read, and those that they take are computed.
    """
    found = np.zeros_like(tokens)
    for name, weights in shape.layer_weights.items():
        taken, read = tokens, np.ones_like(tokens)
        if shape.experts and name.startswith("mlp"):
            taken, read = shape.experts_per_token * tokens, shape.experts_reached(tokens)

        own = weights / devices
        each = zip((2 * own * taken).tolist(), (BYTES * own * read).tolist(), strict=True)
        found += [peak.least_ms(*one) for one in each]

    return found


def _table(values: Mapping[str, float], tokens: Floats, dense: Floats) -> CostTable:
    """Return the table of a roofline whose dense time by tokens is no line.

    Under the first minorant a batch takes the dense time of one token, and under the other each
    token as much as in the largest batch or beyond.
    """
    chunk, far = np.append(0.0, 2.0 ** np.arange(4, 18)), np.array([0.0, 2.0**17])
    axes = {"prefill_tokens": chunk, "prefill_kv": far}
    axes |= {"decode_requests": np.array([0.0, 1024.0]), "decode_kv": far}
    c, m, n, kv = np.meshgrid(*axes.values(), indexing="ij", sparse=True)
    ms = values["prefill_square"] * c**2 + values["prefill_cross"] * c * m
    ms = ms + values["decode_kv"] * n * kv
    least = min((dense / tokens).min(), (dense[-1] - dense[-2]) / (tokens[-1] - tokens[-2]))
    attention = {key: values[key] for key in ("prefill_square", "prefill_cross", "decode_kv")}
    forms = [{"base": dense[0], **attention}, {"token": least, **attention}]
    minorants = [{key: f"{x * (1 - 1e-5):.6g}" for key, x in one.items()} for one in forms]
    return CostTable([Grid({"tokens": tokens}, dense), Grid(axes, ms)], minorants)


def all_reduce_ms(shape: Architecture, peak: Device, devices: int) -> float:
    """Return the milliseconds that the two all-reduces of a layer add per token."""
    ring = 2 * 2 * (devices - 1) / devices * BYTES * shape.hidden
    return ring / (peak.link_gb_s / 2) / 1e6


def roofline_from_spec(spec: str) -> dict[str, Any]:
    """Return the arguments of `roofline` from ``roofline:MODEL[,device=NAME][,tp=N][,exponent=P]``.

    ``request_tokens=N`` may stand there, too.
    Peaks of one's own may stand in place of a device: ``memory_gb=48,...``.
    """
    model, *parts = spec.removeprefix("roofline:").split(",")
    where = f"cost model {spec!r}"
    texts = read_pairs(filter(None, parts), where)
    own = {key: texts.pop(key) for key in ("name", *OWN) if key in texts}
    known = {"device": Parameter(str, False, "a100-80gb"), "tp": Parameter(int, False, 1)}
    sharp = texts.get("exponent") == "inf" and texts.pop("exponent")
    known["exponent"] = Parameter(float, False, None)
    known["request_tokens"] = Parameter(int, False, None)
    given = convert_all(texts, known, where)
    if own and "device" in given:
        raise InputError(f"{where}: device: found beside {', '.join(own)}; expected one of both")

    peak = own_device(own, where) if own else device(given.get("device", "a100-80gb"))
    shared = {
        "tensor_parallel": given.get("tp", 1),
        "exponent": math.inf if sharp else given.get("exponent"),
        "request_tokens": given.get("request_tokens"),
    }
    return {"model": architecture(model), "hardware": peak, **shared}
