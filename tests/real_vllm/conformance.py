"""The comparison of the twin and vLLM's scheduler. As a script it prints the table of the docs."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import NamedTuple

from real_scheduler import TESTED, RealScheduler, version
from settings import AZURE, CACHED, COST, SETTINGS, Setting

from optsched import Problem, Schedule, evaluate
from optsched.costs.load import cost_for
from optsched.policies import make_policy
from optsched.policies.engine.simulate import simulate
from optsched.policies.runner import waiting_rank


class Compared(NamedTuple):
    """How the two schedules of a setting compare."""

    batches: int
    equal: int  # batches before the first that differs
    preemptions: int
    chunks: int  # parts of prefills, beyond one for each
    hits: int  # tokens found in the cache
    difference: str
    twin_s: float
    real_s: float


def decisions(schedule: Schedule) -> list[tuple[dict, list[int], float]]:
    """Return of each batch the tokens by request, who was preempted, and when it starts.

    The tokens are those processed and, where prefixes are cached, those found before.

    vLLM names those that a step preempts as a set, so they are sorted.
    """
    offsets, evicted = schedule.batch_offsets.tolist(), schedule.evicted_offsets.tolist()
    request, tokens = schedule.request.tolist(), schedule.tokens.tolist()
    if schedule.reused is not None:
        tokens = list(zip(tokens, schedule.reused.tolist(), strict=True))
    start = [0.0] * schedule.batches if schedule.start is None else schedule.start.tolist()
    return [
        (dict(zip(request[a:b], tokens[a:b], strict=True)), sorted(schedule.evicted[c:d]), at)
        for (a, b), (c, d), at in zip(pairwise(offsets), pairwise(evicted), start, strict=True)
    ]


def compare(setting: Setting) -> Compared:
    """Run both schedulers on a setting, and compare them batch by batch."""
    instance, cost = setting.instance(), cost_for(setting.instance(), COST)
    twin = make_policy(setting.spec)[0]
    known = twin.priority, instance, instance.output_tokens, cost
    rank = waiting_rank(*known) if twin.policy == "priority" else None
    begin = time.perf_counter()
    mine = simulate(Problem(instance, cost), twin)
    middle = time.perf_counter()
    theirs = simulate(Problem(instance, cost), RealScheduler(instance, twin, rank))
    end = time.perf_counter()
    evaluate(Problem(instance, cost), mine)
    judged = evaluate(
        Problem(instance, cost), theirs
    )  # vLLM's schedule keeps every rule of the judge
    a, b = decisions(mine), decisions(theirs)
    equal = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    difference = ""
    if equal is None:
        equal = min(len(a), len(b))
        difference = "" if len(a) == len(b) else f"{len(a)} batches here, {len(b)} in vLLM"
    else:
        difference = f"batch {equal}: {a[equal]} here, {b[equal]} in vLLM"
    entries = len(theirs.request)
    decodes = int((instance.output_tokens - 1).sum())
    preemptions = int(judged.metrics["evictions"])
    chunks = entries - decodes - instance.n
    hits = int(judged.metrics.get("prefix_hit_tokens") or 0)
    spent = (middle - begin, end - middle)
    return Compared(len(b), equal, preemptions, chunks, hits, difference, *spent)


def table() -> str:
    """Return the table of all settings whose requests are at hand, as Markdown."""
    head = ("requests", "KV tokens", "block", "parameters", "batches", "equal", "preemptions",
            "found")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for setting in (*SETTINGS, *CACHED):
        if setting.requests.startswith("Azure") and not AZURE.is_file():
            continue
        found = compare(setting)
        options = ", ".join(f"`{option}`" for option in setting.options.split(",") if option)
        cells = (
            setting.requests, f"{setting.kv_capacity:,}", setting.kv_block_tokens, options,
            f"{found.batches:,}", f"{found.equal:,}", f"{found.preemptions:,}",
            f"{found.hits:,}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
        if found.difference:
            lines.append(f"\n{found.difference}\n")
    return "\n".join(lines)


if __name__ == "__main__":
    known = "" if version() in TESTED else f", NOT one of those compared: {', '.join(TESTED)}"
    print(f"vLLM {version()}{known}\n")
    print(table())
