"""A cost model from published peaks alone, for hardware without profiles."""

from __future__ import annotations

from optsched.costs.architectures import Architecture, architecture
from optsched.costs.cost import BatchCost, cost_model_from_dict
from optsched.costs.devices import Device, device
from optsched.costs.hardware import roofline_data


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
    return cost_model_from_dict(roofline_data(shape, peak, tensor_parallel, usable))
