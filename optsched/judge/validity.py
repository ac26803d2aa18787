"""Whether a schedule stays within the range of validity of its cost models."""

import sys
import warnings
from collections.abc import Sequence
from typing import Any

from optsched.costs.cost import BatchCost
from optsched.costs.machine import Machine

WORDS = {
    "max_batch_tokens": "batches of more than {} tokens",
    "min_prefill_chunk_tokens": "prefills of fewer than {} tokens",
    "max_prefill_chunk_tokens": "prefills of more than {} tokens",
    "min_decode_requests": "batches that decode fewer than {} requests",
    "max_decode_requests": "batches that decode more than {} requests",
    "max_request_kv_tokens": "requests that hold more than {} KV tokens",
    "max_kv_tokens": "batches that read more than {} KV tokens",
}
"""Limits of validity by name, with the words for a schedule that leaves them."""


def warn_outside(machines: Sequence[Machine], extremes: Any) -> None:
    """Warn of each cost model whose range of validity a schedule leaves.

    ``extremes`` has a record for each worker (`optsched.judge.replay.EXTREMES`). The warning names
    the line that called this package, so Python shows a text once for each such line.
    """
    # The first frame outside this package.
    caller = sys._getframe()
    while caller.f_back is not None and caller.f_globals["__name__"].startswith("optsched."):
        caller = caller.f_back

    # The cost model of each worker, since one machine may stand for all of them.
    costs = [one.cost for one in machines] * (len(extremes) if len(machines) == 1 else 1)
    for cost in dict.fromkeys(costs):
        if not isinstance(cost, BatchCost) or not cost.valid:
            continue

        of_cost = extremes[[of_worker is cost for of_worker in costs]]
        outside = []
        for key, words in WORDS.items():
            # 0 stands for a worker without such a batch.
            limit, values = cost.valid.get(key), of_cost[key][of_cost[key] > 0]
            if limit is None or not values.size:
                continue
            beyond = values.min() < limit if key.startswith("min_") else values.max() > limit
            if beyond:
                outside.append(words.format(int(limit)))

        if outside:
            warnings.warn_explicit(
                f"cost model {cost.name!r} is used outside its range of validity: "
                + ", ".join(outside),
                UserWarning,
                filename=caller.f_code.co_filename,
                lineno=caller.f_lineno,
                module=caller.f_globals["__name__"],
                registry=caller.f_globals.setdefault("__warningregistry__", {}),
            )
