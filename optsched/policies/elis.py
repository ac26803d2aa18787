"""Policies of ELIS (004): every window of tokens a worker decides anew what it runs."""

from __future__ import annotations

from optsched.policies import policy
from optsched.policies.base import Windows


@policy(
    "isrtf",
    "per window of tokens, least predicted tokens left first; several workers",
    clairvoyant=True,
    paper="004, Algorithm 1",
)
def isrtf(
    *, window: int = 50, batch_size: int = 4, workers: int = 1, aging: float = 0.0
) -> Windows:
    """Iterative shortest remaining time first; see `Windows` for the parameters."""
    return Windows("remaining", window, batch_size, workers, aging)


@policy(
    "elis-fcfs",
    "per window of tokens, first come first served; several workers",
    paper="004, section 6.1",
)
def elis_fcfs(*, window: int = 50, batch_size: int = 4, workers: int = 1) -> Windows:
    """The baseline: a request that has begun stays in the batch until it is done."""
    return Windows("arrival", window, batch_size, workers)


@policy(
    "elis-sjf",
    "per window of tokens, shortest output first; several workers",
    clairvoyant=True,
    paper="004, section 6.1",
)
def elis_sjf(
    *, window: int = 50, batch_size: int = 4, workers: int = 1, aging: float = 0.0
) -> Windows:
    """The paper's ideal: the whole output, known in advance unless something is predicted."""
    return Windows("total", window, batch_size, workers, aging)
