"""How large graphs of the ramp relaxation become before the prover goes about it in another way."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """Sizes and gaps that were measured to be good. All others give the same bounds in the end."""

    first_nodes: int = 1_000_000
    """The max nodes of a graph that is built without smaller graphs before it."""
    large_nodes: int = 4_000_000
    """A graph with more nodes is pruned before its multipliers are improved, and its time predicts
    that of larger graphs."""
    divided_nodes: int = 2_000_000
    """With more nodes, multipliers are improved on a part of them first."""
    budget: int = 48_000_000
    """The initial max nodes of a graph before the target is lowered."""
    close_gap: float = 0.025
    """Below this gap to the target schedules are enumerated, until there are too many labels."""
    whole_clock: int = 600
    """A clock is not shortened if it has at most so many (t, m) pairs."""
    clocked_nodes: int = 100_000
    """If the first graphs with a clock have at most so many nodes, it is not shortened any more."""
    lost: float = 0.0025
    """The max share of the value by which the bound of a coarse graph may fall for a shorter
    clock."""
    orders: int = 600_000
    """The max number of orders that the first thread tries at a time."""


MEASURED = Tuning()
"""What the prover takes unless it is given another one."""
