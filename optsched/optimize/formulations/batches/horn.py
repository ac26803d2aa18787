"""Prefills that share prefixes, all there at once: Horn's algorithm, without a solver.

**What is solved.** Every output is one token and all requests arrive together, so a request ends
with its prefill. KV that is shared may be claimed as `optsched.judge` allows, for any KV capacity.

**Bound.** Write a for the seconds per token, g for those per square with g (b^2 - a^2) for the
tokens from a to b, k <= a for those per claimed token (`price_of`), and f for the fixed cost of a
batch with prefills. Let S be the requests that have ended at a moment. Each has a last life: it
claimed some blocks and computed the rest. A block v of w_v seconds that u of them have costs u k B
if all claimed it, and then somebody else has computed it for w_v; else at least w_v for one and the
smaller of w_v and k B for each other. As w_v >= k B, both are at least u k B + (w_v - k B). What
is behind the blocks that a prompt shares only this request computes, once at least. So the machine
has worked at least the sum, over S, of the latter and of the claims, and of
w_v - k B over the different blocks of S: the time of a set of jobs that is closed in the tree of
`jobs_of`. The order of completions is therefore an order of these jobs, in which each ends no
later, and Horn's order has the least sum. A prompt that ends with a block v computes v itself,
since one token at least is never claimed; then v is behind what it shares, and others may find it
there: it is no job of theirs. With R seats the j-th completion needs ceil(j / R) batches, and f
each, beside this work.

**Schedule.** The policy `horn`, one request after another. It meets the bound if chunks do not
matter (``prefill_cross`` is twice ``prefill_square``), k is all of ``prefill_kv``, no prompt ends
with a shared block, its blocks fit, and either f = 0 or there is one seat. Else the two are the
ends of an interval.
"""

import math
import time

import numpy as np

from optsched.bounds.base import WHOLE_BLOCKS
from optsched.bounds.checker.fields import PREFIX_FIELDS
from optsched.costs.batch import fixed_ms
from optsched.costs.cost import BatchCost
from optsched.judge.evaluate import evaluate
from optsched.optimize.formulations.base import Answer, Method, Task
from optsched.optimize.formulations.batches.problem import CHUNKS, MODELLED
from optsched.optimize.solvers.base import SolveOptions, Status
from optsched.policies.base import Job
from optsched.policies.one_by_one import (
    Cache,
    Chains,
    OneByOne,
    horn,
    jobs_of,
    lacks_room,
    price_of,
)
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance


def horn_bound(task: Task) -> float:
    """Return seconds that the sum of latencies is at least, for every schedule (see the module)."""
    instance, cost = task.instance, task.cost_model
    assert isinstance(cost, BatchCost)
    cache = Cache(instance)
    chains = Chains(
        cache,
        frozenset(
            cache.name(i, s // cache.block)
            for i, s in enumerate(cache.prompt)
            if s % cache.block == 0
        ),
    )
    _, total = horn(jobs_of(cache, chains, range(instance.n), price_of(cost)))
    seats = instance.limits.max_running or instance.n
    batches = np.arange(1, instance.n + 1)
    fixed = fixed_ms(cost.array, decodes=False, prefills=True) * cost.layers / 1000.0

    return total + fixed * float((-(-batches // seats)).sum())


def check_prefills(instance: Instance) -> None:
    """Refuse requests that do more than prefill."""
    if (instance.output_tokens > 1).any():
        i = int(np.argmax(instance.output_tokens > 1))
        raise UsageError(
            f"method: horn: request {i}: found output_tokens {instance.output_tokens[i]}; expected "
            "1, since it orders prefills alone"
        )


def solve_horn(task: Task, options: SolveOptions) -> Answer:
    """Return Horn's order and the bound; the schedule is left out where its blocks do not fit."""
    check_prefills(task.instance)
    begin = time.perf_counter()
    goal, instance = task.objective[0], task.instance
    bound = horn_bound(task) / (1 if goal.name == "tel" else instance.n)
    reason = lacks_room(instance)
    if reason is not None:
        status, spent = Status.NO_INCUMBENT, time.perf_counter() - begin
        return Answer(status, bound=bound, native_status=reason, solve_s=spent)

    job = Job(instance, instance, task.cost_model, name="horn", budget=options.budget())
    schedule = OneByOne().run(job)
    value = goal.of(evaluate(task, schedule))
    assert value is not None
    met = math.isclose(value, bound, rel_tol=1e-12)
    status = Status.OPTIMAL if met else Status.FEASIBLE
    return Answer(status, schedule, value, bound, "", time.perf_counter() - begin)


_HORN = Method(
    "prefills that share prefixes, all there at once: exact in n log n (Horn 1972)",
    solve_horn,
    ("tel", "mean_ttft"),
    CHUNKS,
    features=MODELLED | PREFIX_FIELDS | WHOLE_BLOCKS,
)
METHODS = {"infermax": {"horn": _HORN}}
