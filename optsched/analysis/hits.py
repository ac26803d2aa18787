"""Why prefixes were not found in the cache of a worker: routing, or eviction."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from optsched.policies.run import Run
from optsched.problem.prefixes import Shares
from optsched.problem.schedule import check_columns


def lost_hits(done: Run) -> tuple[int, int, int]:
    """Return the tokens of prefixes that were found, and those lost to routing and to eviction.

    A request could claim whole blocks that a request which had ended before it began has as well.
    What only ended requests of other workers have is lost to routing. What one of its own worker
    has, and it did not claim, is lost to eviction.
    """
    judged, instance = done.evaluation, done.problem.instance
    prefixes, reuse, worker = instance.prefixes, judged.reuse, done.schedule.worker
    if prefixes is None or reuse is None or worker is None:
        return (0 if reuse is None else int(reuse.reused.sum())), 0, 0

    offsets, request, *_ = check_columns(done.schedule)
    home = np.zeros(instance.n, dtype=np.int64)
    home[request[::-1]] = np.repeat(worker, np.diff(offsets))[::-1]  # of its first batch
    kept = instance.prompt_tokens + instance.output_tokens - 1  # the last token is not computed
    shares = defaultdict[int, Shares](lambda: Shares(instance, kept))
    every = Shares(instance, kept)
    times = np.concatenate([judged.clock.finish, judged.clock.first_start])
    routed = evicted = 0
    for event in np.argsort(times, kind="stable").tolist():  # ends stand before beginnings
        i = event % instance.n
        if event < instance.n:
            shares[int(home[i])].add(i, i)
            every.add(i, i)
            continue

        found, most = int(reuse.reused[i]), int(instance.prompt_tokens[i]) - 1
        own, whole = (
            min(one.best_of(i)[0], most) // prefixes.block * prefixes.block
            for one in (shares[int(home[i])], every)
        )
        routed += max(whole - max(own, found), 0)
        evicted += max(own - found, 0)

    return int(reuse.reused.sum()), routed, evicted
