"""Devices and model shapes: published peaks, weights, KV capacity, and the roofline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from optsched.costs.least_squares import nnls
from optsched.problem.errors import InputError
from optsched.problem.specs import Parameter, convert_all, read_pairs

BYTES = 2
"""Bytes of a weight or KV number (16-bit floats)."""


@dataclass(frozen=True)
class Device:
    """Published peaks of an accelerator.

    Parameters
    ----------
    name : str
    bandwidth_gb_s : float
        Memory bandwidth, 1e9 bytes a second.
    tflops : float
        Dense 16-bit matrix arithmetic, 1e12 operations a second.
    memory_gib : float
        Memory, 2**30 bytes.
    link_gb_s : float
        Bandwidth to the other devices, both directions together, 1e9 bytes a second.
    """

    name: str
    bandwidth_gb_s: float
    tflops: float
    memory_gib: float
    link_gb_s: float

    def least_ms(self, flops: float, memory_bytes: float) -> float:
        """Return the least milliseconds for arithmetic and memory traffic: the roofline."""
        return max(flops / self.tflops / 1e9, memory_bytes / self.bandwidth_gb_s / 1e6)


@dataclass(frozen=True)
class Architecture:
    """Shape of a decoder-only transformer with a gated feed-forward network.

    Parameters
    ----------
    name : str
    layers, hidden, heads, kv_heads, ffn, vocab : int
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int

    @property
    def head_size(self) -> int:
        """Numbers per head."""
        return self.hidden // self.heads

    @property
    def layer_weights(self) -> dict[str, int]:
        """Weights of a layer's matrices, by operator."""
        kv = self.kv_heads * self.head_size
        return {
            "attn_pre_proj": self.hidden * (self.hidden + 2 * kv),
            "attn_post_proj": self.hidden * self.hidden,
            "mlp_up_proj": 2 * self.hidden * self.ffn,
            "mlp_down_proj": self.hidden * self.ffn,
        }

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights: layers, embedding and output projection."""
        inside = self.layers * sum(self.layer_weights.values())
        return BYTES * (inside + 2 * self.vocab * self.hidden)

    @property
    def layer_kv_bytes(self) -> int:
        """Bytes of keys and values of one token in one layer."""
        return 2 * BYTES * self.kv_heads * self.head_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return self.layers * self.layer_kv_bytes


DEVICES = {
    device.name: device
    for device in (
        Device("a100-80gb", 2039, 312, 80, 600),
        Device("a800-80gb", 2039, 312, 80, 400),
        Device("a100-40gb", 1555, 312, 40, 600),
        Device("h100-80gb", 3350, 989, 80, 900),
    )
}
"""Known devices (SXM variants, makers' data sheets) by name."""

ARCHITECTURES = {
    shape.name: shape
    for shape in (
        Architecture("llama2-7b", 32, 4096, 32, 32, 11008, 32000),
        Architecture("llama2-13b", 40, 5120, 40, 40, 13824, 32000),
        Architecture("llama2-70b", 80, 8192, 64, 8, 28672, 32000),
        Architecture("llama3-8b", 32, 4096, 32, 8, 14336, 128256),
        Architecture("llama3-70b", 80, 8192, 64, 8, 28672, 128256),
    )
}
"""Known model shapes by name."""


def device(name: str) -> Device:
    """Return a known device.

    Raises
    ------
    InputError
        An unknown name.
    """
    if name not in DEVICES:
        raise InputError(f"device: {name!r} is unknown; known are {', '.join(DEVICES)}")
    return DEVICES[name]


def architecture(name: str) -> Architecture:
    """Return a known model shape; ``Llama-2-7b-hf`` and ``llama2-7b`` are the same.

    Raises
    ------
    InputError
        An unknown name.
    """
    plain = name.lower().replace("meta-", "").replace("llama-", "llama").removesuffix("-hf")
    if plain not in ARCHITECTURES:
        raise InputError(f"model: {name!r} is unknown; known are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[plain]


def kv_capacity(
    memory_gib: float,
    model_bytes: float,
    bytes_per_token: float,
    *,
    usable: float = 0.9,
    devices: int = 1,
) -> int:
    """Return how many tokens of KV fit beside the weights (003, section 2.2).

    Parameters
    ----------
    memory_gib : float
        Memory of one device, 2**30 bytes.
    model_bytes, bytes_per_token : float
        Weights, and keys and values of one token, over all devices together.
    usable : float
        Share of the memory that weights and KV may take (vLLM's default is 0.9).
    devices : int
        Devices that share the model.

    Raises
    ------
    InputError
        A size that is not positive, or weights that leave no room for a token.
    """
    for name, value in (
        ("memory_gib", memory_gib), ("model_bytes", model_bytes),
        ("bytes_per_token", bytes_per_token), ("usable", usable), ("devices", devices),
    ):  # fmt: skip
        if not 0 < value < float("inf"):
            raise InputError(f"{name}: {value!r} is not a number > 0")
    if usable > 1:
        raise InputError(f"usable: {usable!r}; a share <= 1 is right")
    memory = usable * devices * memory_gib * 2**30
    tokens = int((memory - model_bytes) // bytes_per_token)
    if tokens < 1:
        raise InputError(
            f"model_bytes: {model_bytes / 2**30:.4g} GiB leave no room for KV in "
            f"{memory / 2**30:.4g} GiB; more devices or a smaller model is right"
        )
    return tokens


ROOFLINE_TOKENS = 4096
"""Largest batch to which the linear model of a roofline's dense operators is fitted."""


def roofline_data(
    shape: Architecture, peak: Device, tensor_parallel: int = 1, usable: float = 0.9
) -> dict[str, Any]:
    """Return the content of a cost model file; see `optsched.costs.roofline.roofline`."""
    if tensor_parallel < 1 or shape.heads % tensor_parallel:
        raise InputError(
            f"tensor_parallel: {tensor_parallel!r} does not divide {shape.name}'s "
            f"{shape.heads} heads"
        )
    tokens = np.unique(np.geomspace(1, ROOFLINE_TOKENS, 200).round())
    weights = [w / tensor_parallel for w in shape.layer_weights.values()]
    dense = np.array([sum(peak.least_ms(2 * w * t, BYTES * w) for w in weights) for t in tokens])
    token, base = nnls(np.stack([tokens, np.ones_like(tokens)], axis=1) / dense[:, None])
    # A ring sends 2 (g - 1) / g of the data each way; two rings per layer, half the link each way.
    ring = 2 * 2 * (tensor_parallel - 1) / tensor_parallel * BYTES * shape.hidden
    token += ring / (peak.link_gb_s / 2) / 1e6
    attention = 1 / (tensor_parallel * peak.tflops * 1e9)
    values = {
        "token": token,
        "base": base,
        "decode_kv": shape.layer_kv_bytes / tensor_parallel / peak.bandwidth_gb_s / 1e6,
        "prefill_square": 2 * shape.hidden * attention,
        "prefill_cross": 4 * shape.hidden * attention,
    }
    return {
        "format": "optsched-cost-model",
        "version": 1,
        "name": f"{shape.name}-tp{tensor_parallel}-{peak.name}-roofline",
        "unit": "ms_per_layer",
        "layers": shape.layers,
        "kv_capacity_tokens": kv_capacity(
            peak.memory_gib,
            shape.weight_bytes,
            shape.kv_bytes,
            usable=usable,
            devices=tensor_parallel,
        ),
        "provenance": (
            f"ROOFLINE: published peaks of {peak.name} ({peak.bandwidth_gb_s:g} GB/s, "
            f"{peak.tflops:g} TFLOP/s), {shape.name}, tensor parallel {tensor_parallel}; a lower "
            "estimate, not a measurement"
        ),
        "coefficients": {key: f"{value:.6g}" for key, value in values.items()},
        "valid": {"max_batch_tokens": ROOFLINE_TOKENS},
    }


def roofline_from_spec(spec: str) -> dict[str, Any]:
    """Return the content of the cost model ``roofline:MODEL[,device=NAME][,tp=N]``.

    Raises
    ------
    InputError
        An unknown model, device or parameter.
    """
    model, *parts = spec.removeprefix("roofline:").split(",")
    where = f"cost model {spec!r}"
    known = {"device": Parameter(str, False, "a100-80gb"), "tp": Parameter(int, False, 1)}
    given = convert_all(read_pairs(filter(None, parts), where), known, where)
    values = {key: given.get(key, parameter.default) for key, parameter in known.items()}
    return roofline_data(architecture(model), device(values["device"]), values["tp"])
