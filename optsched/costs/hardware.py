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
    """Return the fields of a roofline's linear model; with experts it is tabulated.

    With `apart`, ``token`` is the arithmetic and ``base`` the reading of weights, each alone. Else
    both are a fit to the longer of the two. The other arguments are those of `roofline`.
    """
    shape.check_degree(tensor_parallel)
    if apart and shape.experts:
        raise InputError(f"exponent: found one for {shape.name}; expected none for experts")
    if request_tokens is not None and request_tokens < 1:
        raise InputError(f"request_tokens: found {request_tokens}; expected an integer >= 1")
    if not math.isfinite(peak.tflops):
        raise InputError(f"device: found {peak.name}, whose peaks are unknown; expected a GPU")

    tokens = np.unique(np.geomspace(1, ROOFLINE_TOKENS, 200).round())
    dense = _dense_ms(shape, peak, tensor_parallel, tokens)
    # `least_ms` takes operations and bytes.
    if apart:  # `token` is the arithmetic of one token, and `base` reads all weights of a layer
        weights = sum(w / tensor_parallel for w in shape.layer_weights.values())
        token, base = peak.least_ms(2 * weights, 0), peak.least_ms(0, BYTES * weights)
    else:
        # The times are flat at first and rise later, so no coefficient of the fit is negative.
        # Tokens are fractions of `ROOFLINE_TOKENS` here, so that both columns are of like size.
        scaled = np.stack([tokens / ROOFLINE_TOKENS, np.ones_like(tokens)], axis=1) / dense[:, None]
        slope, base = np.linalg.lstsq(scaled, np.ones_like(tokens), rcond=None)[0]
        token = slope / ROOFLINE_TOKENS

    readers = min(tensor_parallel, shape.kv_heads)  # each device reads one KV head at least
    ms_per_flop = 1 / (tensor_parallel * peak.tflops * 1e9)
    reduce_ms = all_reduce_ms(shape, peak, tensor_parallel)
    # For each unit of the width a pair of tokens takes two products and two sums: 4 operations.
    # There are c m pairs with cached tokens, and c^2 / 2 among the c tokens themselves.
    values = {
        "token": token + reduce_ms,
        "base": base,
        "decode_kv": shape.layer_kv_bytes / readers / peak.bandwidth_gb_s / 1e6,
        "prefill_square": 2 * shape.attention_width * ms_per_flop,
        "prefill_cross": 4 * shape.attention_width * ms_per_flop,
    }
    capacity = kv_capacity(
        peak.memory_gib,
        shape.weight_bytes,
        shape.kv_bytes_on(tensor_parallel, request_tokens),
        usable=usable,
        devices=tensor_parallel,
        beside_gib=beside_gib,
    )
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
        table = _table(values, tokens, dense + reduce_ms * tokens)

    # For requests of a known length the capacity counts what windows save already (`kv_bytes_on`),
    # so the model has no window then.
    return {
        "name": f"{shape.name}-tp{tensor_parallel}-{peak.name}-roofline",
        "layers": shape.layers,
        "kv_capacity_tokens": capacity,
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
    ms = np.zeros_like(tokens)
    for name, weights in shape.layer_weights.items():
        # How many tokens the matrices are multiplied by, and how often their weights are read.
        multiplied, reads = tokens, np.ones_like(tokens)
        if shape.experts and name.startswith("mlp"):
            multiplied, reads = shape.experts_per_token * tokens, shape.experts_reached(tokens)

        on_device = weights / devices
        flops, memory_bytes = 2 * on_device * multiplied, BYTES * on_device * reads
        ms += list(map(peak.least_ms, flops.tolist(), memory_bytes.tolist()))

    return ms


def _table(values: Mapping[str, float], tokens: Floats, dense: Floats) -> CostTable:
    """Return the table of a roofline whose dense time by tokens is no line.

    Under the first minorant a batch takes the dense time of one token, and under the other each
    token as much as in the largest batch or beyond.
    """
    # The grid of attention: its time is linear in all but the tokens of a prefill. So two values of
    # each of the others suffice, whichever they are: beyond the last one a line goes on.
    chunk, far = np.append(0.0, 2.0 ** np.arange(4, 18)), np.array([0.0, 2.0**17])
    axes = {"prefill_tokens": chunk, "prefill_kv": far}
    axes |= {"decode_requests": np.array([0.0, 1024.0]), "decode_kv": far}
    c, m, n, kv = np.meshgrid(*axes.values(), indexing="ij", sparse=True)
    ms = values["prefill_square"] * c**2 + values["prefill_cross"] * c * m
    ms = ms + values["decode_kv"] * n * kv

    per_token = min((dense / tokens).min(), (dense[-1] - dense[-2]) / (tokens[-1] - tokens[-2]))
    attention = {key: values[key] for key in ("prefill_square", "prefill_cross", "decode_kv")}
    linear = [{"base": dense[0], **attention}, {"token": per_token, **attention}]
    # Six digits change a number by 5e-6 of it at most, so what is printed is no larger than it.
    minorants = [{key: f"{x * (1 - 1e-5):.6g}" for key, x in form.items()} for form in linear]
    return CostTable([Grid({"tokens": tokens}, dense), Grid(axes, ms)], minorants)


def all_reduce_ms(shape: Architecture, peak: Device, devices: int) -> float:
    """Return the milliseconds that the two all-reduces of a layer add per token.

    An all-reduce in a ring of d devices sends 2 (d - 1) / d of the data from each of them, in one
    direction of its link.
    """
    sent_bytes = 2 * 2 * (devices - 1) / devices * BYTES * shape.hidden
    return sent_bytes / (peak.link_gb_s / 2) / 1e6


def roofline_from_spec(spec: str) -> dict[str, Any]:
    """Return the arguments of `roofline` from ``roofline:MODEL[,device=NAME][,tp=N][,exponent=P]``.

    ``request_tokens=N`` may stand there, too.
    Peaks of one's own may stand in place of a device: ``memory_gb=48,...``.
    """
    model, *parts = spec.removeprefix("roofline:").split(",")
    where = f"cost model {spec!r}"
    texts = read_pairs(filter(None, parts), where)
    peaks = {key: texts.pop(key) for key in ("name", *OWN) if key in texts}
    is_sharp = texts.get("exponent") == "inf"  # which is not a number to `convert_all`
    if is_sharp:
        del texts["exponent"]

    # A `Parameter` is its type, whether it may be None, and its default.
    known = {"device": Parameter(str, False, "a100-80gb"), "tp": Parameter(int, False, 1)}
    known["exponent"] = Parameter(float, False, None)
    known["request_tokens"] = Parameter(int, False, None)
    values = convert_all(texts, known, where)
    if peaks and "device" in values:
        raise InputError(f"{where}: device: found beside {', '.join(peaks)}; expected one of both")

    peak = own_device(peaks, where) if peaks else device(values.get("device", "a100-80gb"))
    return {
        "model": architecture(model),
        "hardware": peak,
        "tensor_parallel": values.get("tp", 1),
        "exponent": math.inf if is_sharp else values.get("exponent"),
        "request_tokens": values.get("request_tokens"),
    }
