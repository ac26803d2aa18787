"""Lower bounds for sessions, whose requests are released when others end.

`optsched.bounds.checker.sessions` has the proof and computes them: the sessions alone, and the work
of all of them with heads and tails.

Notes
-----
Times alone are floating point here, and a relative margin of 1e-9 covers both sides of the judge's
sums.
"""

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.base import AFTER, ANY_INSTANCE, POOLS, WHOLE_BLOCKS, Bound, BoundTask, Proof
from optsched.bounds.batch import PROVED_FOR, unavoidable_work
from optsched.bounds.certificate import cost_model_dict, make_certificate
from optsched.bounds.checker.fields import PREFIX_FIELDS
from optsched.bounds.checker.parts import Rejected, Unlimited
from optsched.bounds.checker.pools import equal_machines
from optsched.bounds.checker.prefixes import charges_of
from optsched.bounds.checker.sessions import OBJECTIVES, sessions_rounds, sessions_ticks
from optsched.bounds.leaves import TICKS_PER_SECOND, sessions_leaf
from optsched.bounds.pools import stated
from optsched.costs.cost import BatchCost, CostModel
from optsched.problem.budget import Budget
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance
from optsched.problem.sessions import Sessions

Floats = NDArray[np.float64]
_MARGIN = 1e-9
# The parts of a request's later tokens. More of them prove little more.
_PARTS = 16


def alone_times(instance: Instance, cost: CostModel) -> Floats:
    """Return the time that must pass from each request's release to its end, shape (n,).

    Parameters
    ----------
    instance : Instance
        One with sessions.
    cost : BatchCost or UnitCost
    """
    # In rounds each output token takes one.
    if not isinstance(cost, BatchCost) or instance.in_rounds:
        return instance.output_tokens.astype(np.float64)

    # Where KV is shared, what a request takes alone depends on precedence only, not on when others
    # end: times alone of 0 will do to compute it.
    charged = None
    if instance.prefixes is not None and instance.sessions is not None:
        earliest = instance.sessions.earliest(instance.given_release.tolist(), [0.0] * instance.n)
        charged = charges_of(instance, earliest, 0)

    # No batch is shorter than under any minorant of a table, so the longest chain counts.
    chains = [unavoidable_work(instance, c, charged).chain for c in cost.minorants]
    return np.asarray(np.max(chains, axis=0))


def chains_of(instance: Instance, sessions: Sessions, alone: Floats) -> Floats:
    """Return by session how long it takes alone: its longest way of delays and times alone.

    Parameters
    ----------
    instance : Instance
    sessions : Sessions
    alone : ndarray of float64, shape (n,)
        As `alone_times` of the instance.
    """
    given = instance.given_release
    head = np.array(sessions.earliest(given.tolist(), alone.tolist()), dtype=np.float64)
    return sessions.over(head + alone, np.maximum) - sessions.over(given, np.minimum)


def sessions_end(task: BoundTask, budget: Budget) -> Proof:
    """Return a bound on the completions of sessions, or on what follows from them."""
    try:
        return _proof_of(task)
    except Rejected as error:  # for example a coefficient with too many digits
        raise UsageError(f"bound: {error}") from None


def _proof_of(task: BoundTask) -> Proof:
    """Return the proof of a bound by sessions; `Rejected` is raised if numbers are too large."""
    instance, name, pools = task.instance, task.goal.name, task.pools
    model = None if instance.in_rounds else cost_model_dict(task.batch_cost)
    # `seen` is the instance as on one of the machines.
    machines, seen = equal_machines(instance, pools and stated(pools), model)
    sessions = instance.sessions
    assert sessions is not None
    # A percentile follows from each session alone. The checker has no leaf of that.
    if name == "p99_session_completion":
        chains = chains_of(instance, sessions, alone_times(seen, task.cost_model))
        return Proof(float(np.percentile(chains, 99)) * (1 - _MARGIN))

    # Leaves prove sums. A mean is a share of them.
    leaf, unlimited = sessions_leaf(_PARTS), Unlimited()
    terms = int(sessions.session.max()) + 1 if name == "mean_session_completion" else 1
    if instance.in_rounds:
        rounds = sessions_rounds(instance, leaf, name, unlimited)
        certificate = make_certificate(instance, leaf, value=rounds, objective=name)
        return Proof(rounds / terms if terms > 1 else rounds, certificate=certificate)

    ticks = sessions_ticks(seen, model, TICKS_PER_SECOND, leaf, name, unlimited, machines)
    # Ticks count from the first arrival, and a makespan from 0. All others are differences.
    begin = float(instance.first_arrival) if name == "makespan" else 0.0
    value = begin + ticks / TICKS_PER_SECOND / terms
    tree = leaf if pools is None else {"leaf": leaf, "pools": pools}
    return Proof(value * (1 - _MARGIN), tree=tree)


_GOALS = (*OBJECTIVES, "p99_session_completion")
_WORDS = "sessions alone, and the work of all with heads and tails"
_ROUNDS = ANY_INSTANCE | WHOLE_BLOCKS | AFTER | PREFIX_FIELDS
_SECONDS = PROVED_FOR | AFTER | PREFIX_FIELDS | POOLS
SESSIONS = Bound(
    "sessions", _WORDS, "round", _GOALS, sessions_end, _ROUNDS, certifies=True, needs=AFTER
)
SESSIONS_WORK = Bound(
    "sessions-work", _WORDS, "second", _GOALS, sessions_end, _SECONDS, certifies=True, needs=AFTER
)
