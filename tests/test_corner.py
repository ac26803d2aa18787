"""Models with a corner: the p-norm of reading and arithmetic, as a table that everybody takes."""

from __future__ import annotations

import numpy as np
import pytest

from optsched import Instance, Problem, evaluate, run
from optsched.bounds import lower_bound
from optsched.costs.batch import EMPTY, Sums, add_decode, add_prefill, batch_time
from optsched.costs.cost import corner, roofline
from optsched.costs.load import load_cost_model
from optsched.costs.model_file import to_toml
from optsched.problem.errors import InputError, UsageError

LINEAR = roofline("llama3-8b", "l40s", exponent=1)


def batches(count: int) -> list[Sums]:
    rng = np.random.default_rng(2)
    found = []
    for _ in range(count):
        sums = EMPTY
        for _ in range(int(rng.integers(0, 60))):
            sums = add_decode(sums, int(rng.integers(1, 4000)))
        for _ in range(int(rng.integers(sums.tokens == 0, 3))):
            sums = add_prefill(sums, int(rng.integers(1, 2000)), int(rng.integers(0, 500)))
        found.append(sums)
    return found


@pytest.mark.parametrize("kv", [False, True])
@pytest.mark.parametrize("exponent", [1.5, 2.0, 3.0, np.inf])
def test_a_step_takes_the_norm_of_reading_and_arithmetic(exponent: float, kv: bool) -> None:
    model = corner(LINEAR, exponent, kv=kv)
    for sums in batches(100):
        read, count = LINEAR["base"], LINEAR["token"] * sums.tokens
        rest = LINEAR["decode_kv"] * sums.decode_kv
        more = LINEAR["prefill_square"] * sums.prefill_square
        more += LINEAR["prefill_cross"] * sums.prefill_cross
        if kv:
            read, count, rest, more = read + rest, count + more, 0.0, 0.0
        # 32 layers, and milliseconds.
        true = 32 / 1000 * (float(np.linalg.norm([read, count], exponent)) + rest + more)
        # Five tangents of a curve are up to 4 % below it, and the corner itself has but two.
        assert true * (0.96 if np.isfinite(exponent) else 1 - 1e-6) <= batch_time(model.array, sums)
        assert batch_time(model.array, sums) <= true * (1 + 1e-6)
        for one in model.minorants:
            assert batch_time(one.array, sums) <= batch_time(model.array, sums) * (1 + 1e-9)


def test_a_roofline_has_its_corner_where_arithmetic_outlasts_reading() -> None:
    # 362.05 TFLOP/s and 864 GB/s: 2 operations and 2 bytes for each weight, so 419 tokens.
    model = load_cost_model("roofline:llama3-8b,device=l40s,exponent=inf")
    # 838 tokens are twice 419, so that arithmetic takes twice as long as reading. The model has 32
    # layers and milliseconds. One token's attention is within the 1e-3.
    few, many = (batch_time(model.array, add_prefill(EMPTY, n, 0)) for n in (1, 838))
    assert pytest.approx(419, abs=0.1) == 362.05e12 / 864e9
    reading = 32 * LINEAR["base"] / 1000
    assert few == pytest.approx(reading, rel=1e-3)
    attention = 32 * LINEAR["prefill_square"] * 838**2 / 1000
    assert many == pytest.approx(2 * reading + attention, rel=1e-3)


def test_files_bounds_and_the_judge_take_it(tmp_path: object) -> None:
    rng = np.random.default_rng(0)
    columns = (
        np.cumsum(rng.exponential(0.5, 12)),
        rng.integers(20, 900, 12),
        rng.integers(2, 30, 12),
    )
    instance = Instance(*columns, 20_000, "second")
    model = corner(LINEAR, np.inf)
    file = tmp_path / "corner.toml"  # type: ignore[operator]
    file.write_text(to_toml(model))
    assert load_cost_model(file).sha256 == model.sha256
    problem = Problem(instance, load_cost_model(file))
    done = run(problem, "vllm-v1")
    bound, _ = lower_bound(problem, time_limit_s=1.0)
    linear, _ = lower_bound(Problem(instance, model.minorants[0]), time_limit_s=1.0)
    tel = evaluate(problem, done.schedule).metrics["tel"]
    # Each minorant gets but its part of the time, so 1 % may be lost.
    assert 0.99 * linear <= bound <= tel


def test_what_has_no_corner_is_refused() -> None:
    assert corner(LINEAR, 1.0) is LINEAR
    with pytest.raises(UsageError, match="expected a linear model"):
        corner(corner(LINEAR, 2.0), 2.0)
    with pytest.raises(InputError, match=r"exponent: found 0\.5"):
        corner(LINEAR, 0.5)
