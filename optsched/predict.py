"""Length predictors: what an online policy is told about outputs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from optsched.instance import Instance


def estimates(instance: Instance) -> tuple[NDArray[np.int64], str]:
    """Return predicted output tokens as policies see them, and where they are from.

    An instance's ``predicted`` (rounded up), else its ``predicted_upper``, else the truth (the
    oracle). Capped so that the request's peak fits the KV capacity.

    Returns
    -------
    predicted : ndarray of int64, shape (n,)
    source : {"predicted", "predicted_upper", "oracle"}
    """
    if instance.predicted is not None:
        values, source = np.ceil(instance.predicted).astype(np.int64), "predicted"
    elif instance.predicted_upper is not None:
        values, source = instance.predicted_upper, "predicted_upper"
    else:
        return instance.output_tokens, "oracle"
    most = instance.kv_capacity - instance.prompt_tokens + 1 - instance.kv_offset
    return np.minimum(values, most), source
