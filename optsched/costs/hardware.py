"""How much KV a machine holds beside a model.

`optsched.costs.devices` has the devices, and `optsched.costs.architectures` the models.
"""

from __future__ import annotations

from optsched.problem.columns import MAX_TOKENS
from optsched.problem.errors import InputError


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
    given = {"memory_gib": memory_gib, "model_bytes": model_bytes}
    given |= {"bytes_per_token": bytes_per_token, "usable": usable, "devices": devices}
    for name, value in given.items():
        if not 0 < value < float("inf"):
            raise InputError(f"{name}: found {value!r}; expected a number > 0")
    if usable > 1:
        raise InputError(f"usable: found {usable!r}; expected a share <= 1")
    memory = usable * devices * memory_gib * 2**30
    tokens = (memory - model_bytes) / bytes_per_token
    if not tokens <= MAX_TOKENS:
        raise InputError(
            f"memory_gib: found {memory_gib!r}, which hold {tokens:.4g} tokens of "
            f"{bytes_per_token:g} bytes; expected at most {MAX_TOKENS}"
        )
    if tokens < 1:
        raise InputError(
            f"model_bytes: found {model_bytes / 2**30:.4g} GiB, which leave no room for KV in "
            f"{memory / 2**30:.4g} GiB; expected more devices or a smaller model"
        )
    return int(tokens)
