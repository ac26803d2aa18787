"""Windows of attention, for proofs about requests that hold all of their KV.

Take an instance whose `kv_window` says that L' of L layers keep the last W tokens alone. A request
that holds m tokens then takes the room of at least g(m) = m - max(m - W, 0) L' / L tokens, and
rounding up and whole blocks only add to it.

*Every schedule of it is one of the instance without window and blocks whose capacity is
floor(M P / g(P)), for the largest peak P of its requests.* Slopes of g fall from 1 to 1 - L' / L,
and g(0) = 0. So g is concave and g(m) / m does not grow with m. Hence m <= g(m) P / g(P) for every
m up to P, which no request exceeds. In every batch the sum of g(m) is at most M, so that of m is at
most M P / g(P), and at most its floor, since it is whole. Nothing else of a schedule depends on
what requests take of the capacity.

So every bound for the second instance is one for the first, whatever the objective.
"""

from dataclasses import replace
from typing import Any

from optsched.bounds.checker import drafts
from optsched.bounds.checker.fields import WINDOW_FIELDS, further_fields
from optsched.bounds.checker.parts import Budget, expect

_MAX_CAPACITY = 2**62  # sums of all tokens are less


def room_without(instance: Any, capacity: int) -> int:
    """Return floor(M P / g(P)), the capacity without a window that does for one with it."""
    window, sliding, layers = instance.kv_window
    peak = int(instance.peak_tokens.max())
    held = layers * peak - sliding * max(peak - window, 0)  # g(P), times the layers
    return min(capacity * peak * layers // held, _MAX_CAPACITY)


def without_window(instance: Any) -> Any:
    """Return the instance whose bounds hold for one with a window and without drafts."""
    capacity = room_without(instance, int(instance.kv_capacity))
    return replace(instance, kv_capacity=capacity, kv_window=None, kv_block_tokens=1, known=None)


def proved_about(instance: Any, certificate: dict[str, Any], budget: Budget) -> Any:
    """Return the instance that a certificate's tree must be about: without drafts and window."""
    instance = drafts.proved_about(instance, certificate, budget)
    if not further_fields(instance) & WINDOW_FIELDS:
        return instance

    # A schedule without the window need not fit with it, so an optimum without it is only a bound.
    # ``pools`` state capacities of their own.
    right = "pools" not in certificate and certificate.get("claim") != "optimal"
    expect(right, "instance: found kv_window; expected none, or a bound of one machine")
    return without_window(instance)
