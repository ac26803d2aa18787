"""Devices and model architectures: published peaks, weights, KV capacity and the roofline."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from optsched.problem.errors import InputError
from optsched.problem.specs import Parameter, convert_all, read_pairs

BYTES = 2
"""Bytes of a number in weights and KV, which are 16-bit floats."""


@dataclass(frozen=True)
class Device:
    """Published peaks of an accelerator.

    Parameters
    ----------
    name : str
    bandwidth_gb_s : float
        Memory bandwidth, in 1e9 bytes per second.
    tflops : float
        Dense 16-bit matrix arithmetic, in 1e12 operations per second.
    memory_gib : float
        Memory, in 2**30 bytes.
    link_gb_s : float
        Bandwidth to the other devices, both directions together, in 1e9 bytes per second.
    """

    name: str
    bandwidth_gb_s: float
    tflops: float
    memory_gib: float
    link_gb_s: float

    def least_ms(self, flops: float, memory_bytes: float) -> float:
        """Return the minimum time for some arithmetic and memory traffic, by the roofline.

        Parameters
        ----------
        flops : float
            Arithmetic operations.
        memory_bytes : float
            Bytes read from and written to memory.

        Returns
        -------
        float
            Milliseconds: the larger of the two times, as if both overlapped perfectly.
        """
        return max(flops / self.tflops / 1e9, memory_bytes / self.bandwidth_gb_s / 1e6)


@dataclass(frozen=True)
class Architecture:
    """Shape of a decoder-only transformer with a gated feed-forward network.

    Parameters
    ----------
    name : str
    layers : int
        Number of layers.
    hidden, ffn : int
        Width of the hidden state and of the feed-forward network.
    heads, kv_heads : int
        Attention heads, and heads of keys and values.
    vocab : int
        Tokens of the vocabulary.
    head_size : int
        Width of an attention head; 0: ``hidden / heads``.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_size: int = 0

    def __post_init__(self) -> None:
        if not self.head_size:
            object.__setattr__(self, "head_size", self.hidden // self.heads)

    @property
    def layer_weights(self) -> dict[str, int]:
        """Number of weights in a layer's matrices, by operator."""
        heads, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        return {
            "attn_pre_proj": self.hidden * (heads + 2 * kv),
            "attn_post_proj": self.hidden * heads,
            "mlp_up_proj": 2 * self.hidden * self.ffn,
            "mlp_down_proj": self.hidden * self.ffn,
        }

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights: the layers, the embedding and the output projection."""
        inside = self.layers * sum(self.layer_weights.values())
        return BYTES * (inside + 2 * self.vocab * self.hidden)

    @property
    def layer_kv_bytes(self) -> int:
        """Bytes of the keys and values of one token in one layer."""
        return 2 * BYTES * self.kv_heads * self.head_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return self.layers * self.layer_kv_bytes


DEVICES = {
    device.name: device
    for device in (
        Device("a100-80gb", 2039, 312, 80, 600),
        Device("a800-80gb", 2039, 312, 80, 400),
        Device("a100-40gb", 1555, 312, 40, 600),
        Device("h100-80gb", 3350, 989, 80, 900),
        Device("cpu", math.inf, math.inf, 0, math.inf),  # its peaks are not known: none is checked
        Device("rtx4090", 1008, 165.2, 24, 64),
        Device("rtxpro6000", 1792, 503.8, 96, 128),
    )
}
"""Known devices by name, with the peaks of the makers' data sheets; data centre cards are SXM."""

ARCHITECTURES = {
    shape.name: shape
    for shape in (
        Architecture("llama2-7b", 32, 4096, 32, 32, 11008, 32000),
        Architecture("llama2-13b", 40, 5120, 40, 40, 13824, 32000),
        Architecture("llama2-70b", 80, 8192, 64, 8, 28672, 32000),
        Architecture("llama3-8b", 32, 4096, 32, 8, 14336, 128256),
        Architecture("llama3-70b", 80, 8192, 64, 8, 28672, 128256),
        Architecture("qwen3-32b", 64, 5120, 64, 8, 25600, 151936, head_size=128),
    )
}
"""Known model architectures by name."""


def device(name: str) -> Device:
    """Return a known device.

    Parameters
    ----------
    name : str
        One of `DEVICES`.

    Returns
    -------
    Device

    Raises
    ------
    InputError
        The name is unknown.
    """
    if name not in DEVICES:
        raise InputError(f"device: {name!r} is unknown; known are {', '.join(DEVICES)}")
    return DEVICES[name]


def same_device(name: str, other: str) -> bool:
    """Return whether a maker's name of a device holds that of a known one, in whole words.

    Parameters
    ----------
    name : str
        For example ``NVIDIA GeForce RTX 4090``, which holds ``rtx4090``. An ``RTX A1000`` is no
        ``a100-80gb``.
    other : str
        One of `DEVICES`, for example ``rtx4090``.

    Returns
    -------
    bool
    """
    words = re.findall("[a-z0-9]+", name.lower())
    ends = range(len(words) + 1)
    return other.split("-")[0] in {"".join(words[a:b]) for b in ends for a in range(b)}


def architecture(name: str) -> Architecture:
    """Return a known model architecture.

    Parameters
    ----------
    name : str
        One of `ARCHITECTURES`, or the name on Hugging Face: ``Llama-2-7b-hf`` and ``llama2-7b``
        are the same.

    Returns
    -------
    Architecture

    Raises
    ------
    InputError
        The name is unknown.
    """
    plain = name.lower().rpartition("/")[2].replace("meta-", "").replace("llama-", "llama")
    plain = plain.removesuffix("-hf").replace("llama3.1-", "llama3-")
    if plain not in ARCHITECTURES:
        raise InputError(f"model: {name!r} is unknown; known are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[plain]


def same_architecture(name: str, other: str) -> bool:
    """Return whether two names mean the same model.

    Parameters
    ----------
    name, other : str
        Unknown names are the same if they are equal.

    Returns
    -------
    bool
    """
    try:
        return architecture(name) == architecture(other)
    except InputError:
        return name == other


def kv_capacity(
    memory_gib: float,
    model_bytes: float,
    bytes_per_token: float,
    *,
    usable: float = 0.9,
    devices: int = 1,
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

    Returns
    -------
    int
        Tokens, >= 1.

    Raises
    ------
    InputError
        A number is not > 0, ``usable`` is more than 1, or the weights leave no room for a token.
    """
    for name, value in (
        ("memory_gib", memory_gib), ("model_bytes", model_bytes),
        ("bytes_per_token", bytes_per_token), ("usable", usable), ("devices", devices),
    ):  # fmt: skip
        if not 0 < value < float("inf"):
            raise InputError(f"{name}: found {value!r}; expected a number > 0")
    if usable > 1:
        raise InputError(f"usable: found {usable!r}; expected a share <= 1")
    memory = usable * devices * memory_gib * 2**30
    tokens = int((memory - model_bytes) // bytes_per_token)
    if tokens < 1:
        raise InputError(
            f"model_bytes: found {model_bytes / 2**30:.4g} GiB, which leave no room for KV in "
            f"{memory / 2**30:.4g} GiB; expected more devices or a smaller model"
        )
    return tokens


ROOFLINE_TOKENS = 4096
"""Largest batch, in tokens, to which a roofline's linear model of dense operators is fitted."""


def roofline_data(
    shape: Architecture, peak: Device, tensor_parallel: int = 1, usable: float = 0.9
) -> dict[str, Any]:
    """Return the content of a roofline's cost model file.

    Parameters
    ----------
    shape : Architecture
    peak : Device
    tensor_parallel : int
        Number of devices that share every layer.
    usable : float
        Share of the memory that weights and KV may take.

    Returns
    -------
    dict
        For `optsched.costs.cost.cost_model_from_dict`; `optsched.costs.roofline.roofline` says
        how the coefficients come about.

    Raises
    ------
    InputError
        A degree that does not divide the heads, weights that do not fit into the memory, or a
        device whose peaks are unknown.
    """
    if tensor_parallel < 1 or shape.heads % tensor_parallel:
        raise InputError(
            f"tensor_parallel: found {tensor_parallel!r}; expected a divisor of {shape.name}'s "
            f"{shape.heads} heads"
        )
    if not math.isfinite(peak.tflops):
        raise InputError(f"device: found {peak.name}, whose peaks are unknown; expected a GPU")
    tokens = np.unique(np.geomspace(1, ROOFLINE_TOKENS, 200).round())
    weights = [w / tensor_parallel for w in shape.layer_weights.values()]
    dense = np.array([sum(peak.least_ms(2 * w * t, BYTES * w) for w in weights) for t in tokens])
    # The times are flat at first and rise later, so no coefficient of the fit is negative.
    scaled = np.stack([tokens / ROOFLINE_TOKENS, np.ones_like(tokens)], axis=1) / dense[:, None]
    slope, base = np.linalg.lstsq(scaled, np.ones_like(tokens), rcond=None)[0]
    token = slope / ROOFLINE_TOKENS
    # An all-reduce by a ring sends 2 (g - 1) / g of the data. There are two per layer, and each
    # direction has half the link's bandwidth.
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
    """Return the content of a roofline's cost model file from its specification.

    Parameters
    ----------
    spec : str
        ``roofline:MODEL[,device=NAME][,tp=N]``.

    Returns
    -------
    dict
        See `roofline_data`.

    Raises
    ------
    InputError
        A model, device or parameter is unknown; or as for `roofline_data`.
    """
    model, *parts = spec.removeprefix("roofline:").split(",")
    where = f"cost model {spec!r}"
    known = {"device": Parameter(str, False, "a100-80gb"), "tp": Parameter(int, False, 1)}
    given = convert_all(read_pairs(filter(None, parts), where), known, where)
    values = {key: given.get(key, parameter.default) for key, parameter in known.items()}
    return roofline_data(architecture(model), device(values["device"]), values["tp"])
