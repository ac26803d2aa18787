"""Lower bounds on total latency in rounds from sorting alone: O(n log n), exact arithmetic.

Both relax the KV cache to a machine that works off token-rounds at speed M: a request is
a job of volume vol_i (`Instance.volume`, the token-rounds of an uninterrupted run) that is
released at a_i. Times are integers in units of 1/M round, so that no rounding can make a bound
invalid. The time that a bound takes does not depend on how far apart arrivals are.

Notes
-----
Limits on batches and KV in blocks only rule schedules out, so every bound stays valid under them.
"""

import numpy as np

from optsched.bounds.base import IN_ROUNDS, Bound, BoundTask, Proof
from optsched.bounds.checker.requests import shortest_first, srpt_completions
from optsched.problem.budget import Budget

# Bits after the binary point in `mean_busy_time`; the error is below n / 2**80 rounds.
_FRACTION_BITS = 80


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
    instance = task.instance
    capacity = instance.kv_capacity
    earliest = sorted((instance.release_times + instance.output_tokens).tolist())
    total = 0
    release = [a * capacity for a in instance.release_times.tolist()]
    completions = srpt_completions(release, instance.volume.tolist())
    # The k-th smallest completion of any schedule is at least either of these.
    for completion, floor in zip(completions, earliest, strict=True):
        total += max(-(-completion // capacity), floor)

    return Proof(total - int(instance.release_times.sum()))


def mean_busy_time(task: BoundTask, budget: Budget) -> Proof:
    """Return the mean-busy-time bound on total latency in rounds.

    The proof is in docs/formulations.md, "Mean busy times": TEL >= sum_i (B*_i + o_i - A_i / vol_i)
    less the arrivals, with the mean busy times B*_i of the preemptive list schedule by largest
    1/vol_i (Goemans 1996) and A_i as there. A piece [x, y) in units of 1/M round adds (y^2 - x^2) /
    (2 M vol_i) to B*_i. Each request's terms are rounded down to a multiple of 2**-80, and the sum
    is rounded up.
    """
    instance = task.instance
    capacity = instance.kv_capacity
    order = np.argsort(instance.release_times, kind="stable")
    release = [a * capacity for a in instance.release_times[order].tolist()]
    volume = instance.volume[order].tolist()
    # Twice the first moment of each job's work, in units of 1/M round: sum of y^2 - x^2.
    moment = [0] * instance.n
    for begin, end, job in shortest_first(release, volume):
        moment[job] += end * end - begin * begin

    total = 0
    prompt = instance.prompt_tokens[order].tolist()
    output = instance.output_tokens[order].tolist()

    for job in range(instance.n):
        q, o, vol = prompt[job] + instance.kv_offset - 1, output[job], volume[job]
        a12 = 6 * q * o * o + 2 * o * (o + 1) * (2 * o + 1) - 3 * o * (o + 1)
        # moment / (2 M vol) + o - a12 / (12 vol), over the common denominator 12 M vol.
        numerator = 6 * moment[job] + 12 * capacity * vol * o - capacity * a12
        total += (numerator << _FRACTION_BITS) // (12 * capacity * vol)

    return Proof(-(-total // (1 << _FRACTION_BITS)) - int(instance.release_times.sum()))


_SRPT, _MEAN = "KV volume as work on one preemptive machine", "mean busy times of the KV volume"
SRPT = Bound("srpt", _SRPT, "round", ("tel",), srpt, IN_ROUNDS)
MEAN_BUSY_TIME = Bound("mean-busy-time", _MEAN, "round", ("tel",), mean_busy_time, IN_ROUNDS)
