"""A cost model from published peaks alone, for hardware without profiles."""

from __future__ import annotations

import math

import numpy as np

from optsched.costs.architectures import BYTES, Architecture, architecture
from optsched.costs.cost import BatchCost
from optsched.costs.devices import OWN, Device, device, own_device
from optsched.costs.hardware import kv_capacity
from optsched.problem.errors import InputError
from optsched.problem.specs import Parameter, convert_all, read_pairs

ROOFLINE_TOKENS = 4096
"""Largest batch, in tokens, to which a roofline's linear model of dense operators is fitted."""


def roofline(
    model: str | Architecture,
    hardware: str | Device = "a100-80gb",
    *,
    tensor_parallel: int = 1,
    usable: float = 0.9,
) -> BatchCost:
    """Return the cost model of a machine that runs at its published peaks.

    Every operator takes the larger of its arithmetic time and its memory time, and nothing else
    costs anything (Yuan et al. 2024, LLM-Viewer). This is a lower estimate: measured times are
    longer. By name: ``load_cost_model("roofline:llama2-7b,device=a100-80gb,tp=1")``.

    Parameters
    ----------
    model : str or Architecture
        A name in `optsched.costs.architectures.ARCHITECTURES`, or an architecture.
    hardware : str or Device
        A name in `optsched.costs.devices.DEVICES`, or a device.
    tensor_parallel : int
        Number of devices that share every layer, with two all-reduces per layer.
    usable : float
        Share of the memory that weights and KV may take; it decides the KV capacity.

    Returns
    -------
    BatchCost

    Raises
    ------
    InputError
        An unknown name, a degree that does not divide the heads, or weights that do not fit into
        the memory.

    Notes
    -----
    The time of the dense operators, the maximum of arithmetic and reading weights, is not linear
    in the tokens. ``token`` and ``base`` are its relative least squares fit over batches of 1 to
    4096 tokens. Decode attention is taken as memory-bound and prefill attention as compute-bound,
    which holds except in the smallest chunks. Causal prefill attention counts half of c^2 and all
    of c m.
    """
    shape = architecture(model) if isinstance(model, str) else model
    peak = device(hardware) if isinstance(hardware, str) else hardware
    shape.check_degree(tensor_parallel)
    if not math.isfinite(peak.tflops):
        raise InputError(f"device: found {peak.name}, whose peaks are unknown; expected a GPU")
    tokens = np.unique(np.geomspace(1, ROOFLINE_TOKENS, 200).round())
    weights = [w / tensor_parallel for w in shape.layer_weights.values()]
    dense = np.array([sum(peak.least_ms(2 * w * t, BYTES * w) for w in weights) for t in tokens])
    # The times are flat at first and rise later, so no coefficient of the fit is negative.
    scaled = np.stack([tokens / ROOFLINE_TOKENS, np.ones_like(tokens)], axis=1) / dense[:, None]
    slope, base = np.linalg.lstsq(scaled, np.ones_like(tokens), rcond=None)[0]
    token = slope / ROOFLINE_TOKENS
    token += all_reduce_ms(shape, peak, tensor_parallel)
    heads_on = min(tensor_parallel, shape.kv_heads)  # each device reads one KV head at least
    attention = 1 / (tensor_parallel * peak.tflops * 1e9)
    values = {
        "token": token,
        "base": base,
        "decode_kv": shape.layer_kv_bytes / heads_on / peak.bandwidth_gb_s / 1e6,
        "prefill_square": 2 * shape.attention_width * attention,
        "prefill_cross": 4 * shape.attention_width * attention,
    }
    provenance = (
        f"ROOFLINE: published peaks of {peak.name} ({peak.bandwidth_gb_s:g} GB/s, "
        f"{peak.tflops:g} TFLOP/s), {shape.name}, tensor parallel {tensor_parallel}; a "
        "lower estimate, not a measurement"
    )
    return BatchCost(
        name=f"{shape.name}-tp{tensor_parallel}-{peak.name}-roofline",
        layers=shape.layers,
        coefficients={key: f"{value:.6g}" for key, value in values.items()},
        kv_capacity_tokens=kv_capacity(
            peak.memory_gib,
            shape.weight_bytes,
            shape.kv_bytes_on(tensor_parallel),
            usable=usable,
            devices=tensor_parallel,
        ),
        provenance="; ".join([provenance, *shape.notes]),
        valid={"max_batch_tokens": ROOFLINE_TOKENS},
    )


def all_reduce_ms(shape: Architecture, peak: Device, devices: int) -> float:
    """Return the milliseconds that the two all-reduces of a layer add per token.

    One by a ring sends 2 (g - 1) / g of the data, and each direction has half the link.
    """
    ring = 2 * 2 * (devices - 1) / devices * BYTES * shape.hidden
    return ring / (peak.link_gb_s / 2) / 1e6


def roofline_from_spec(spec: str) -> BatchCost:
    """Return the roofline of a specification.

    Parameters
    ----------
    spec : str
        ``roofline:MODEL[,device=NAME][,tp=N]``. MODEL and NAME are what `architecture` and `device`
        take. Peaks of one's own may stand in place of a device: ``memory_gb=48,...``.

    Returns
    -------
    BatchCost

    Raises
    ------
    InputError
        A model, device or parameter is unknown; or as for `roofline`.
    """
    model, *parts = spec.removeprefix("roofline:").split(",")
    where = f"cost model {spec!r}"
    texts = read_pairs(filter(None, parts), where)
    own = {key: texts.pop(key) for key in ("name", *OWN) if key in texts}
    known = {"device": Parameter(str, False, "a100-80gb"), "tp": Parameter(int, False, 1)}
    given = convert_all(texts, known, where)
    if own and "device" in given:
        raise InputError(f"{where}: device: found beside {', '.join(own)}; expected one of both")
    peak = own_device(own, where) if own else device(given.get("device", "a100-80gb"))
    return roofline(model, peak, tensor_parallel=given.get("tp", 1))
