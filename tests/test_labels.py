"""The label-setting method: against exhaustive search by feature, and rules that are wrong."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from exhaustive_batches import NAMES, Exhaustive
from sweeps import parts

from optsched import Instance, Problem, solve
from optsched.costs.cost import BatchCost, load_cost_model
from optsched.judge.evaluate import evaluate
from optsched.optimize.formulations import Task, check_method, get
from optsched.optimize.formulations.batches import labels
from optsched.optimize.solvers.base import SolveOptions, Status
from optsched.problem.errors import UsageError
from optsched.problem.instance import Limits

A100 = load_cost_model("llama2-7b-a100-infermax")
KINDS = ("ample", "evictions", "blocks", "limits", "apart", "kept", "equal")
"""Much KV, little KV, KV in blocks, limits, no hybrid batches, no evictions, equal requests."""


def drawn_cost(rng):
    """Return a shipped cost model, or a random one in which some coefficients are 0."""
    if rng.random() < 0.2:
        return A100

    sizes = dict.fromkeys(NAMES, 3.0) | {"base": 60.0, "decode_base": 25.0, "prefill_base": 40.0}
    sizes["decode_base"] *= float(rng.choice([0.0, 0.1, 1.0]))  # refills pay if it is large
    sizes |= {"prefill_square": 0.5, "prefill_cross": 0.5, "prefill_kv": 0.5, "decode_kv": 1.0}
    drawn = {
        name: str(round(float(rng.random()) * size / 1000, 5))
        for name, size in sizes.items()
        if rng.random() < 0.7
    }
    return BatchCost("drawn", 1, {"token": "0.005", **drawn})


def drawn(rng, kind, most=4):
    """Return a random tiny instance with its cost model, and what is asked besides."""
    cost, n = drawn_cost(rng), int(rng.integers(2, most + 1))
    small = 3 if n > 3 else 4
    prompt, output = rng.integers(1, 9, n), rng.integers(1, small + 1, n)
    if kind == "equal" or rng.random() < 0.3:
        prompt[:], output[:] = prompt[0], output[0]

    batch_s = cost.layers * (cost["base"] + cost["token"] * 4) / 1000
    arrival = np.round(rng.random(n) * batch_s * int(rng.integers(1, 8)), 6)
    arrival[rng.random(n) < 0.5] = 0.0
    if kind == "equal":
        arrival = rng.choice(arrival[:2], n)

    accounting = "cached" if rng.random() < 0.5 else "generated"
    block = int(rng.integers(2, 5)) if kind == "blocks" else 1
    peaks = -(-(prompt + output - (accounting == "cached")) // block) * block
    most_kv = peaks.sum() if kind == "evictions" else peaks.sum() + 3
    room = int(rng.integers(peaks.max(), most_kv + 1))
    if kind == "ample":
        room = int(peaks.sum()) + int(rng.integers(0, 2))

    limits, hybrid = {}, kind != "apart"
    if kind in ("limits", "blocks", "apart"):
        if rng.random() < 0.4:
            limits["max_batch_tokens"] = int(rng.integers(prompt.max(), prompt.sum() + 3))
        if rng.random() < 0.4:
            limits["max_prefill_tokens"] = int(rng.integers(prompt.max(), prompt.sum() + 2))
        if rng.random() < 0.4:
            limits["max_running"] = int(rng.integers(1, n + 1))

    instance = Instance(
        arrival, prompt, output, room, time_unit="second", kv_accounting=accounting,
        kv_block_tokens=block, limits=Limits(**limits), hybrid_batching=hybrid,
        chunked_prefill=None if rng.random() < 0.5 else False,
    )  # fmt: skip
    return instance, cost, {"eviction_free": True} if kind == "kept" else {}


def run(instance, cost, limit=600.0, **extras):
    """Return the method's answer."""
    task = Task(instance, cost, ("tel",), extras=extras)
    return check_method(get("infermax"), "labels", task).run(task, SolveOptions(limit))


def agrees(instance, cost, extras, what):
    """Hold the method against exhaustive search."""
    (best,) = Exhaustive(instance, cost, split=False, **extras).best("tel")
    answer = run(instance, cost, **extras)
    what = f"{what}: {instance.to_dict()} {dict(cost.coefficients)}"
    assert answer.status == Status.OPTIMAL, what
    assert answer.bound == pytest.approx(best, rel=1e-12, abs=1e-13), what
    judged = evaluate(Problem(instance, cost), answer.schedule)
    assert judged.metrics["tel"] == pytest.approx(best, rel=1e-9), what
    assert not (extras and judged.metrics["evictions"]), what


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draws", parts(30, 300))
def test_labels_agree_with_exhaustive_search(kind, draws):
    for seed in draws:
        rng = np.random.default_rng([48, KINDS.index(kind), seed])
        agrees(*drawn(rng, kind, most=5 if seed >= 30 else 4), f"{kind} {seed}")
