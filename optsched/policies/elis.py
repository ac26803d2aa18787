"""Policies of Choi et al. 2025 (ELIS): a worker decides once per window of tokens what it runs."""

from optsched.policies import policy
from optsched.policies.base import Windows


@policy(
    "isrtf",
    "per window of tokens, fewest predicted tokens left first; several workers",
    clairvoyant=True,
    paper="Choi et al. 2025, Algorithm 1",
)
def isrtf(
    *, window: int = 50, batch_size: int = 4, workers: int = 1, aging: float = 0.0
) -> Windows:
    """Return the rules of iterative shortest remaining time first."""
    return Windows("remaining", window, batch_size, workers, aging)


@policy(
    "elis-fcfs",
    "per window of tokens, first come first served; several workers",
    paper="Choi et al. 2025, section 6.1",
)
def elis_fcfs(*, window: int = 50, batch_size: int = 4, workers: int = 1) -> Windows:
    """Return the rules of the paper's baseline, first come first served until done."""
    return Windows("arrival", window, batch_size, workers)


@policy(
    "elis-sjf",
    "per window of tokens, shortest output first; several workers",
    clairvoyant=True,
    paper="Choi et al. 2025, section 6.1",
)
def elis_sjf(
    *, window: int = 50, batch_size: int = 4, workers: int = 1, aging: float = 0.0
) -> Windows:
    """Return the rules of the paper's ideal: by the whole output, true or predicted."""
    return Windows("total", window, batch_size, workers, aging)
