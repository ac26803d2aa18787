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
    has, and it did not claim, is lost to eviction. Of a schedule that has no column of workers, and
    so one worker, both losses are given as 0.
    """
    judged, instance = done.evaluation, done.problem.instance
    worker = done.schedule.worker
    if judged.reuse is None:
        return 0, 0, 0

    reused = judged.reuse.reused
    if instance.prefixes is None or worker is None:
        # One worker: routing loses nothing, and what eviction loses is not computed.
        return int(reused.sum()), 0, 0

    offsets, request, *_ = check_columns(done.schedule)
    home = np.zeros(instance.n, dtype=np.int64)
    # The worker of a request's first batch: in reverse order, the first is written last.
    home[request[::-1]] = np.repeat(worker, np.diff(offsets))[::-1]
    computed = instance.prompt_tokens + instance.output_tokens - 1  # the last token has no KV
    ended_at = defaultdict[int, Shares](lambda: Shares(instance, computed))  # by worker
    ended = Shares(instance, computed)
    block = instance.prefixes.block
    routed = evicted = 0
    # Events 0 to n - 1 are ends, and the others beginnings, so that ends come first in a tie.
    times = np.concatenate([judged.clock.finish, judged.clock.first_start])
    for event in np.argsort(times, kind="stable").tolist():
        i = event % instance.n
        at_home = ended_at[int(home[i])]
        if event < instance.n:
            at_home.add(i, i)  # the second is its place, which is not used here
            ended.add(i, i)
            continue

        claimed = int(reused[i])
        # `best_of` begins with the tokens that a request shares with one of those that have ended.
        # At least the last token of a prompt is computed, for the first output token.
        longest = int(instance.prompt_tokens[i]) - 1
        here, anywhere = (
            min(shares.best_of(i)[0], longest) // block * block for shares in (at_home, ended)
        )
        routed += max(anywhere - max(here, claimed), 0)
        evicted += max(here - claimed, 0)

    return int(reused.sum()), routed, evicted
