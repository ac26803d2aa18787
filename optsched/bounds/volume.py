"""Lower bounds in rounds from sorting alone: O(n log n), exact arithmetic.

It relaxes the KV cache to a machine that works off token-rounds at speed M: a request is
a job of volume vol_i (`Instance.volume`, the token-rounds of an uninterrupted run) that is
released at a_i. Times are integers in units of 1/M round, so that no rounding can make the bound
invalid. The time that it takes does not depend on how far apart arrivals are.

Notes
-----
Limits on batches and KV in blocks only rule schedules out, so the bound stays valid under them.
"""

from optsched.bounds.base import IN_ROUNDS, Bound, BoundTask, Proof
from optsched.bounds.checker.lengths import least_ends
from optsched.bounds.checker.parts import columns_of
from optsched.problem.budget import Budget


def srpt(task: BoundTask, budget: Budget) -> Proof:
    """Return the SRPT volume bound, sharpened to whole rounds and earliest completions.

    Proof. In a schedule, take the KV tokens that request i holds at each moment as its processing
    rate. The rates sum to at most M, and i has received vol_i by its completion C_i. The jobs can
    then be run one at a time on a preemptive machine of speed M so that each completes by C_i,
    because earliest due date first meets any due dates that shared rates meet. On that machine
    the rule of shortest remaining processing time (SRPT) has, at every moment, completed the
    largest number of jobs that any rule can have (Schrage 1968). So the k-th smallest completion
    time of the schedule is at least T_k, the k-th of SRPT. It is a whole number, and therefore at
    least ceil(T_k). It is also at least E_k, the k-th smallest a_i + o_i, since C_i >= a_i + o_i
    holds for each i. Hence TEL >= sum_k max(ceil(T_k), E_k) - sum_i a_i.

    The bound is at least as large as the sum of outputs (E_k alone), and as the sum of SRPT's
    completion times rounded up.
    """
    columns = columns_of(task.instance)
    return Proof(sum(least_ends(columns)) - sum(columns.arrival))


_WORDS = "KV volume as work on one preemptive machine"
SRPT = Bound("srpt", _WORDS, "round", ("tel",), srpt, IN_ROUNDS)


def last_completion(task: BoundTask, budget: Budget) -> Proof:
    """Return the last completion that KV volume allows, at least each request's own.

    Proof. Request i completes no earlier than a_i + o_i. What arrives at t or later has the volume
    V_t, none of which is worked off before t, and at most M of it in a round. So a schedule does
    not end before t + V_t / M, which is rounded up.
    """
    instance = task.instance
    best = int((instance.release_times + instance.output_tokens).max())
    volume = 0  # V_t, from the last arrival back
    for i in (-instance.release_times).argsort(kind="stable").tolist():
        volume += int(instance.volume[i])
        rounds = -(-volume // instance.kv_capacity)
        best = max(best, int(instance.release_times[i]) + rounds)

    return Proof(best)


MAKESPAN = Bound(
    "volume-makespan", "KV volume that arrives from t on", "round", ("makespan",), last_completion,
    IN_ROUNDS,
)  # fmt: skip
