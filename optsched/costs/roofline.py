"""A cost model from published peaks alone, for hardware without profiles."""

from __future__ import annotations

from optsched.costs.cost import BatchCost, cost_model_from_dict
from optsched.costs.hardware import Architecture, Device, architecture, device, roofline_data


def roofline(
    model: str | Architecture,
    hardware: str | Device = "a100-80gb",
    *,
    tensor_parallel: int = 1,
    usable: float = 0.9,
) -> BatchCost:
    """Return the cost model of a machine that runs at its published peaks.

    As LLM-Viewer: every operator takes the larger of arithmetic and memory time, nothing else
    costs anything. It is a lower estimate; measured times are longer. By name:
    ``load_cost_model("roofline:llama2-7b,device=a100-80gb,tp=1")``.

    Parameters
    ----------
    model : str or Architecture
        `optsched.costs.hardware.ARCHITECTURES`.
    hardware : str or Device
        `optsched.costs.hardware.DEVICES`.
    tensor_parallel : int
        Devices that share every layer, with two all-reduces per layer.
    usable : float
        Share of the memory for weights and KV, for the KV capacity.

    Notes
    -----
    The dense operators' max(arithmetic, weights read) is not linear in the tokens: ``token`` and
    ``base`` are its relative least squares over batches of 1 to 4096 tokens. Decode attention is
    taken as memory-bound and prefill attention as compute-bound (causal: half of c^2, all of
    c m), which they are outside the smallest chunks.

    Raises
    ------
    InputError
        An unknown name, a degree that does not divide the heads, a model that does not fit.
    """
    shape = architecture(model) if isinstance(model, str) else model
    peak = device(hardware) if isinstance(hardware, str) else hardware
    return cost_model_from_dict(roofline_data(shape, peak, tensor_parallel, usable))
