"""How large graphs of the ramp relaxation become before the prover goes about it in another way."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """Sizes and gaps that were measured to be good. All others give the same bounds in the end.

    A graph with up to ``first_nodes`` nodes is built without smaller graphs before it. One with
    more than ``large_nodes`` is pruned before its multipliers are improved, and its time predicts
    that of larger graphs; with more than ``divided_nodes`` they are improved on a part first. From
    ``budget`` nodes on the target is lowered, and below a gap of ``close_gap`` to the target
    schedules are enumerated, until there are too many labels.

    A clock is not shortened if it has at most ``whole_clock`` (t, m) pairs, nor further if the
    first graphs with it have at most ``clocked_nodes``; the bound of a coarse graph may fall by the
    share ``lost`` of the value for a shorter one. The first thread tries ``orders`` orders at a
    time.
    """

    first_nodes: int = 1_000_000
    large_nodes: int = 4_000_000
    divided_nodes: int = 2_000_000
    budget: int = 48_000_000
    close_gap: float = 0.025
    whole_clock: int = 600
    clocked_nodes: int = 100_000
    lost: float = 0.0025
    orders: int = 600_000


MEASURED = Tuning()
"""What the prover takes unless it is given another one."""
