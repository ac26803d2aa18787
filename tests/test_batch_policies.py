"""Policies of batches: Sorted-F, and the geometric slices of GSA and GBA."""

from __future__ import annotations

from itertools import combinations
from random import Random

import numpy as np
import pytest
from sweeps import seeds

from optsched import Instance, run
from optsched.policies import sorted_f
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import InputError
from optsched.problem.forecast import Forecast


def finish(instance: Instance, policy: str) -> list[int]:
    return run(instance, policy).evaluation.finish.tolist()


# --- Sorted-F ---------------------------------------------------------------------------------


def test_a_large_batch_of_longer_outputs_goes_before_a_wide_request_of_shorter_output() -> None:
    # Peaks: the wide request 9 + 1 = 10, the narrow ones 1 + 2 = 3 each; capacity 10.
    # F of the wide one alone is 1 / 1, of the three narrow ones 6 / 9, of two of them 4 / 4.
    # Sorted-F: the narrow ones end at 2, the wide one at 3: 2 + 2 + 2 + 3 = 9.
    # MC-SF, shortest output first: the wide one ends at 1, the narrow ones at 3: 10.
    instance = Instance([0] * 4, [9, 1, 1, 1], [1, 2, 2, 2], kv_capacity=10)
    assert finish(instance, "sorted-f") == [3, 2, 2, 2]
    assert finish(instance, "mc-sf") == [1, 3, 3, 3]


def test_a_batch_enters_as_soon_as_it_fits_and_not_when_the_one_before_ends() -> None:
    # Sets that fit in 8 tokens: all of output 3 hold 1 + 3 at the end, so two of them: F 6 / 4.
    # Request 0 alone has F 1, and with one of the others (1 + 3) / 4 = 1, which is larger, at
    # 1 + 3 <= 8 when the longer ends. With both it would be (1 + 6) / 9, and at its own end all
    # hold 3 * 2 = 6, but the two others 8 at theirs: it fits, and is first.
    instance = Instance([0] * 4, [1] * 4, [1, 3, 3, 3], kv_capacity=8)
    # Rounds: 0, 1 and 2 start at 0. The fourth waits until two rounds later, when 1 and 2 hold 8.
    assert finish(instance, "sorted-f") == [1, 3, 3, 6]


def test_a_request_whose_forecast_is_longer_than_kv_capacity_is_served_by_itself() -> None:
    # Request 0 is forecast to need 50 tokens in a KV of 9 and needs 3; request 1 fits as told.
    # Renewed every 10 tokens, so each request has one forecast: 50 and 2 tokens. Request 1 ends at
    # 2, and request 0 runs its 3 rounds after it: 2 + 3 = 5.
    forecast = Forecast(10, [0, 1, 2], [50.0, 2.0])
    instance = Instance([0, 0], [2, 2], [3, 2], kv_capacity=9, forecast=forecast)
    assert finish(instance, "sorted-f") == [5, 2]


@pytest.mark.parametrize("seed", seeds(40, 400))
def test_the_set_of_smallest_f_is_that_of_all_sets(seed: int) -> None:
    """F is the sum of outputs over the square of their number. The exact method finds the least
    of all sets that fit, the quick one a set that fits, and with equal prompts the least,
    too."""
    rng = Random(seed)
    n, capacity = rng.randint(1, 8), rng.randint(6, 25)
    output = np.array([rng.randint(1, capacity - 2) for _ in range(n)])
    size = np.array([rng.randint(0, capacity - o) for o in output.tolist()])

    def fits(which: tuple[int, ...]) -> bool:
        ends = {int(output[i]) for i in which}
        return all(sum(size[i] + t for i in which if output[i] >= t) <= capacity for t in ends)

    def f(which: tuple[int, ...]) -> float:
        return output[list(which)].sum() / len(which) ** 2

    sets = [s for k in range(1, n + 1) for s in combinations(range(n), k) if fits(s)]
    descending = np.argsort(-output, kind="stable")
    exact = tuple(sorted(sorted_f._by_dynamic_program(size, output, capacity, descending).tolist()))
    quick = tuple(sorted(sorted_f._by_prefixes(size, output, capacity, descending).tolist()))
    assert exact in sets
    assert quick in sets
    assert f(exact) == min(map(f, sets))
    if len(set(size.tolist())) == 1:  # equal prompts: the shortest outputs
        assert f(quick) == f(exact)


# --- GSA and GBA -------------------------------------------------------------------------------


def test_a_request_starts_again_until_its_slice_is_long_enough() -> None:
    # Alone, with 5 tokens: slices of 1, 2 and 4 are lost, and 5 of the slice of 8 are the answer.
    one = Instance([0], [1], [5], kv_capacity=9)
    assert finish(one, "gsa") == [1 + 2 + 4 + 5]
    # By a factor of 3 the slices of 1 and 3 are lost, and 5 of the slice of 9 are the answer.
    assert finish(one, "gsa:factor=3") == [1 + 3 + 5]
    assert finish(one, "gba") == [5]
    # Each of the three lost slices ends with an eviction.
    assert run(one, "gsa").metrics["evictions"] == 3


def test_a_pipeline_holds_more_requests_than_a_batch_of_equal_age() -> None:
    # Six requests 1 + 4 in 14 tokens. Two that start together hold 10 at the end, three 15.
    # In a pipeline of slices of 4 tokens, four hold 1 + 1, 1 + 2, 1 + 3 and 1 + 4 at most: 14.
    # So one starts in every round. Else two start at once, and a third one round later: it
    # holds 1 + 3 when the two hold 10.
    instance = Instance([0] * 6, [1] * 6, [4] * 6, kv_capacity=14)
    assert finish(instance, "gba") == [4, 5, 6, 7, 8, 9]
    assert finish(instance, "gba:staggered=false") == [4, 4, 5, 8, 8, 9]


def test_shorter_classes_go_first() -> None:
    # Classes by output: 3 is in (2, 4], 2 in (1, 2], 1 in (0, 1]. Each fits alone only.
    instance = Instance([0] * 3, [5] * 3, [3, 2, 1], kv_capacity=8)
    # So one after the other: 1, 1 + 2 = 3, 3 + 3 = 6.
    assert finish(instance, "gba") == [6, 3, 1]


def test_slices_do_not_depend_on_lengths() -> None:
    # Until the first of two ends, schedules of instances that differ in its output only are equal.
    short = Instance([0, 0], [1, 1], [3, 4], kv_capacity=7)
    long = Instance([0, 0], [1, 1], [4, 4], kv_capacity=7)
    # Request 0 has one token more in `long`, and no other decision before it ends.
    assert finish(short, "gsa")[0] + 1 == finish(long, "gsa")[0]


@pytest.mark.parametrize("seed", seeds(25, 250))
@pytest.mark.parametrize("policy", ["gsa", "gba", "gba:factor=3"])
def test_with_equal_prompts_a_pipeline_never_overflows(policy: str, seed: int) -> None:
    # The proof in `Geometric`: every eviction is the end of a slice, of 1, 2, 4, ... tokens.
    # So gba evicts nobody, and gsa a request of o tokens ceil(log2 o) times.
    rng = Random(seed)
    prompt, capacity, n = rng.randint(1, 6), rng.randint(10, 60), rng.randint(2, 30)
    outputs = [rng.randint(1, capacity - prompt) for _ in range(n)]
    instance = Instance([0] * n, [prompt] * n, outputs, kv_capacity=capacity)
    evictions = run(instance, policy).metrics["evictions"]
    wanted = sum((o - 1).bit_length() for o in outputs) if policy == "gsa" else 0
    assert evictions == wanted


def test_factor_is_at_least_two() -> None:
    with pytest.raises(InputError, match=r"factor:.*1.*2"):
        simulate(Instance([0], [1], [1], kv_capacity=3), "gsa:factor=1")
