"""Who runs when: the one place where `solve`, `bound` and `compare` choose among methods.

`docs/lab` has the measurements behind the sizes: small-scale.md and trace-scale.md for rounds,
infermax.md for seconds.
"""

import numpy as np

from optsched.optimize.formulations.base import LIMITS, Task, demands
from optsched.optimize.formulations.batches.cpsat_model import entries_at_most as terms_at_most
from optsched.optimize.formulations.batches.labels import COUNTS, why_not_by_labels
from optsched.optimize.formulations.batches.offline import SEARCHED
from optsched.optimize.formulations.rounds.goals import LATENCY
from optsched.optimize.formulations.rounds.horizon import MAX_ROUNDS, round_data
from optsched.optimize.formulations.rounds.integer_program import ENTRY_BYTES, entries_at_most
from optsched.optimize.ramp.bound import suits_ramp
from optsched.optimize.ramp.jobs import periods, refusal
from optsched.problem.instance import Instance
from optsched.problem.memory import LARGEST, MAX_BYTES

# Up to which sizes methods are chosen, in rounds:
CPSAT_PROVES = 10  # requests that CP-SAT proves at once
CPSAT_REQUESTS = 32  # and for which it beats the search
CPSAT_INTERVALS = 20_000  # output tokens in its model
CPSAT_PAIRS = 50_000  # and pairs of a block
HIGHS_ON_WORKERS = 12  # requests on several workers

# In seconds:
SPLIT = 6  # requests on several workers
EXACT = 100_000  # requests times output tokens
TERMS = 20_000_000  # of a CP-SAT model; a million take a second to build


def method_in_rounds(task: Task) -> str:
    """Return the hindsight method with the best bound in the time.

    Up to 10 requests CP-SAT proves at once. Up to 100 with little KV, as in the synthetic models of
    Jaillet et al. 2025, the ramp relaxation is by far better. With more KV it is CP-SAT up to 32
    requests, and then the dual and the large-neighbourhood search. Only CP-SAT and HiGHS honour
    limits.
    """
    instance, data = task.instance, round_data(task.instance)
    limited = bool(demands(instance) & LIMITS)
    # HiGHS has floats, in which larger numbers of tokens are confused (`check_tokens`).
    exact_in_floats = int(instance.peak_tokens.max()) <= LARGEST
    # The search has no limits, and of objectives those that the total latency decides.
    if task.workers > 1:
        small = instance.n <= HIGHS_ON_WORKERS or task.names[0] not in LATENCY
        return "highs" if limited or (small and exact_in_floats) else "lns"

    # Above the sizes that CP-SAT proves: the ramp relaxation if it suits, else the search, which
    # needs an array of all rounds.
    if task.names[0] in LATENCY and not limited:
        few_states = suits_ramp(instance) and not any(map(refusal, periods(instance)))
        if instance.n > CPSAT_PROVES and few_states:
            return "ramp"
        if instance.n > CPSAT_REQUESTS:
            return "lns" if data.end <= MAX_ROUNDS else "placement"

    # CP-SAT as long as its model is small, then HiGHS as long as its own fits into memory.
    blocks = np.bincount(data.block)
    pairs = int((blocks * (blocks - 1)).sum()) // 2
    if int(data.output.sum()) <= CPSAT_INTERVALS and pairs <= CPSAT_PAIRS:
        return "cpsat"

    entries = entries_at_most(data, data.deadline - data.output)
    fits = exact_in_floats and entries * ENTRY_BYTES <= MAX_BYTES
    return "highs" if fits else "placement"


def method_in_seconds(task: Task) -> str:
    """Return labels if they can do the task, else CP-SAT, else the offline search.

    The search takes over where the instance, or the model of CP-SAT, is too large, if it has the
    one objective that is asked for. Of several workers all ways to split few requests are tried.
    """
    instance = task.instance
    if task.workers > 1:
        return "split" if instance.n <= SPLIT else "search"

    single = task.names[0] if len(task.names) == 1 else None
    if single in SEARCHED and is_large(instance):
        return "search"

    if single in COUNTS and not why_not_by_labels(task):
        return "labels"

    return "search" if single in SEARCHED and terms_at_most(instance) > TERMS else "cpsat"


def is_large(instance: Instance) -> bool:
    """Whether an instance in seconds is left to the offline search."""
    return instance.n * int(instance.output_tokens.sum()) > EXACT


def is_limited(instance: Instance) -> bool:
    """Whether limits, or blocks or windows of KV, matter, which the search in rounds ignores."""
    limits = demands(instance) - {"arrivals", "chunked_prefill"}
    return bool(limits) or not instance.kv_by_token
