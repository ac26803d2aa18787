"""The Lagrangian dual: exact, valid, as large as the linear relaxation, and quick."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from brute_force import brute_force_tel

from optsched.bounds import shadow_prices
from optsched.bounds.dual import Prices, dual_fraction, dual_value, prices_in_rounds
from optsched.bounds.memory_prices import best_prices
from optsched.bounds.timeline import busy_prices, model_of
from optsched.optimize.search.anytime import explore
from optsched.problem.budget import Budget
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance
from optsched.workloads.generate import generate


def random_instance(rng: np.random.Generator, most: int = 6) -> Instance:
    """Return up to six requests that compete for KV, in either accounting."""
    n = int(rng.integers(1, most + 1))
    prompt, output = rng.integers(1, 6, n), rng.integers(1, 5, n)
    return Instance(
        rng.integers(0, rng.choice([1, 5, 12]), n),
        prompt,
        output,
        kv_capacity=int((prompt + output).max() + rng.integers(0, 9)),
        kv_accounting="cached" if rng.random() < 0.5 else "generated",
    )


def random_prices(rng: np.random.Generator, denominator: int | None = None) -> Prices:
    """Return prices in steps that begin before round 30; the last one is 0."""
    pieces = int(rng.integers(1, 7))
    begin = np.sort(rng.choice(np.arange(1, 30), pieces, replace=False))
    price = rng.integers(0, int(rng.choice([3, 40])), pieces)
    price[-1] = 0
    return Prices(begin, price, denominator or int(rng.integers(1, 30)))


def plain_dual(instance: Instance, prices: Prices) -> int:
    """The definition, round by round, with every start that could matter."""
    end = int(instance.arrival.max() + instance.output_tokens.sum()) + 40
    price = [0] * (end + 40)
    for begin, p in zip(prices.from_round.tolist(), prices.price.tolist(), strict=True):
        price[begin:] = [p] * (len(price) - begin)
    total = -instance.kv_capacity * sum(price)
    rows = zip(instance.arrival, instance.prompt_tokens, instance.output_tokens, strict=True)
    for a, s, o in ((int(a), int(s), int(o)) for a, s, o in rows):
        q = s + instance.kv_offset - 1
        total += min(
            prices.denominator * (k + o - a) + sum(price[k + j] * (q + j) for j in range(1, o + 1))
            for k in range(a, end)
        )
    return -(-total // prices.denominator)


def relaxation(instance: Instance) -> float:
    """The value of the linear relaxation of the time-indexed program, by HiGHS."""
    from optsched.optimize.formulations.rounds.integer_program import linear_model, program
    from optsched.optimize.solvers.base import SolveOptions
    from optsched.optimize.solvers.highs import solve_linear_model

    model = linear_model(program(instance, windows=False))
    model = replace(model, integrality=np.zeros_like(model.integrality), integral_objective=False)
    value = solve_linear_model(model, SolveOptions()).objective
    assert value is not None
    return value


def test_exact_value_equals_the_definition() -> None:
    # `plain_dual` sums the definition round by round over every start, in Python's integers.
    rng = np.random.default_rng(1)
    for _ in range(1500):
        instance, prices = random_instance(rng), random_prices(rng)
        value = dual_value(instance, prices)
        assert value == plain_dual(instance, prices), (instance.to_dict(), prices)
        # The same prices over a denominator that needs more than 64 bits.
        huge = Prices(prices.from_round, prices.price * 10**15, prices.denominator * 10**15)
        assert dual_value(instance, huge) == value


def test_any_prices_bound_the_optimum_from_below() -> None:
    rng = np.random.default_rng(2)
    reached = 0
    for _ in range(600):
        instance = random_instance(rng, 5)
        optimum, _ = brute_force_tel(instance)
        for _ in range(3):
            assert dual_value(instance, random_prices(rng)) <= optimum
        start = prices_in_rounds(model_of(instance), busy_prices(model_of(instance)))
        value = dual_value(instance, start)
        reached += value == optimum
        assert value <= optimum
    assert reached > 100  # for a sixth it is the optimum itself


@pytest.mark.parametrize("seed", range(8))
def test_dual_reaches_the_linear_relaxation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(8, 25))
    prompt, output = rng.integers(1, 6, n), rng.integers(1, 12, n)
    instance = Instance(
        rng.integers(0, 20, n) if seed % 2 else np.zeros(n, dtype=np.int64),
        prompt,
        output,
        kv_capacity=int((prompt + output).max()) + int(rng.integers(0, 30)),
    )
    best = relaxation(instance)
    prices, value = best_prices(instance, time_limit_s=10)
    assert value <= np.ceil(best - 1e-6)
    numerator, denominator = dual_fraction(instance, prices)
    assert value == -(-numerator // denominator)  # rounded up, as optima are whole
    # The ascent comes within 3 parts in 10,000 of it. HiGHS is exact to some 1e-6.
    assert best * (1 - 3e-4) <= numerator / denominator <= best + 1e-6


def test_shadow_price_is_what_the_relaxation_saves_with_more_memory() -> None:
    rng = np.random.default_rng(5)
    for _ in range(4):
        n = 14
        prompt, output = rng.integers(1, 6, n), rng.integers(2, 10, n)
        instance = Instance(rng.integers(0, 10, n), prompt, output, kv_capacity=40)
        larger = replace(instance, kv_capacity=41)
        value = relaxation(instance)
        saved = value - relaxation(larger)

        def total(one: Instance) -> float:
            rows = shadow_prices(one, time_limit_s=10)
            return float((np.diff(rows[:, 0]) * rows[:-1, 1]).sum())

        # The relaxation's value is convex in M, so its slopes at M and M + 1 enclose the
        # saving; prices within 1e-3 of the optimum have slopes that far off at most.
        # Twice that and a tenth of the saving are allowed.
        slack = 0.1 * saved + 2e-3 * value
        assert total(larger) - slack <= saved <= total(instance) + slack


def test_more_memory_saves_no_more_than_the_prices_say() -> None:
    rng = np.random.default_rng(6)
    for _ in range(150):
        instance = random_instance(rng, 5)
        optimum, _ = brute_force_tel(instance)
        prices, value = best_prices(instance, time_limit_s=0.05)
        for more in (1, 3):
            larger = replace(instance, kv_capacity=instance.kv_capacity + more)
            paid = int((np.diff(prices.from_round) * prices.price[:-1]).sum())
            # The value was rounded up, by less than 1; each token more of KV saves the sum of
            # prices at most.
            least = value - 1 - more * paid / prices.denominator
            assert brute_force_tel(larger)[0] >= least
        assert value <= optimum


def test_gaps_of_a_billion_rounds_cost_nothing() -> None:
    far = 10**9
    near = Instance([0, 0, 0, 100, 100], [3] * 5, [7] * 5, kv_capacity=10)
    apart = Instance([0, 0, 0, far, far], [3] * 5, [7] * 5, kv_capacity=10)
    # Far less than the limit: the ascent ends by itself.
    values = [best_prices(one, time_limit_s=60)[1] for one in (near, apart)]
    assert values[0] == values[1]
    # Three at 0 with 7 rounds each, one at a time: 7 + 14 + 21, and 7 + 14.
    assert explore(apart, Budget(2)).objective == 63
    model = model_of(Instance(np.arange(200) * far, [3] * 200, [7] * 200, kv_capacity=10))
    # The gaps are cut out, and 200 requests of 7 rounds are left.
    assert model.blocks.end[-1] == 1400


def test_prices_of_a_long_axis_are_kept_on_a_coarse_one() -> None:
    long = 2**30
    instance = Instance([0, 0, 5], [1, 2, 3], [long, long, 7], kv_capacity=long + 2)
    model = model_of(instance)
    assert model.unit > 1
    prices, value = best_prices(instance, time_limit_s=1)
    # MAX_UNITS = 2^21 steps at most. Each request takes as many rounds as it has tokens of output.
    assert len(prices.price) <= 2**21
    assert 2 * long + 7 <= value


@pytest.mark.parametrize(
    ("instance", "optimum"),
    [
        (Instance([7], [3], [4], kv_capacity=7), 4),  # one request that fills M
        (Instance([0, 0], [1, 1], [1, 1], kv_capacity=2**62), 2),
        (Instance([0] * 9, [1] * 9, [1] * 9, kv_capacity=2), 45),  # 1 + ... + 9
        (Instance([0, 0], [4, 3], [1, 2], kv_capacity=5), 4),  # each fills M: 1 + 3
    ],
)
def test_corner_cases(instance: Instance, optimum: int) -> None:
    found = explore(instance, Budget(1))
    assert found.bound <= optimum == found.objective
    assert found.proved <= optimum


def test_a_bound_exists_whatever_the_time_limit() -> None:
    instance = generate("lognormal", n=10_000, rate=2.0, time_unit="round")
    for limit in (0.0, 0.1):
        found = explore(instance, Budget(limit))
        assert found.bound >= instance.output_tokens.sum()
        assert found.objective is not None


def test_prices_need_rounds() -> None:
    instance = Instance([0.0], [1], [1], kv_capacity=2, time_unit="second")
    with pytest.raises(UsageError, match="rounds"):
        dual_value(instance, Prices(np.array([1]), np.array([0]), 1))
    with pytest.raises(UsageError, match="rounds"):
        shadow_prices(instance)
    with pytest.raises(UsageError, match="rounds"):
        explore(instance)


def test_plot_of_shadow_prices_returns_its_axes() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from optsched.show.plot import plot_shadow_prices

    ax = plot_shadow_prices([[1, 0.5], [9, 0.0]])
    assert "KV token" in ax.get_ylabel()
    assert plot_shadow_prices(np.array([[1, 0.0]]), ax=ax) is ax
