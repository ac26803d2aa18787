"""Generators: the published distributions, reproducibility, and what is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest

from optsched.problem.errors import InputError
from optsched.workloads.generate import generate, generators, parse_parameters

NAMES = (
    "jaillet-model-1", "jaillet-model-2", "uniform", "lognormal", "infermax-fixed", "infermax-mix",
    "prefix-trees", "agent-sessions",
)  # fmt: skip


def test_the_generators_are_listed_with_documented_parameters():
    assert list(generators()) == sorted(NAMES)
    for spec in generators().values():
        assert spec.summary
        assert all(parameter.doc for parameter in spec.parameters.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_instance(name):
    assert generate(name, seed=7).sha256 == generate(name, seed=7).sha256
    if name != "infermax-fixed":  # which draws nothing
        assert generate(name, seed=7).sha256 != generate(name, seed=8).sha256


@pytest.mark.parametrize("name", NAMES)
def test_the_global_generator_is_left_alone(name):
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    generate(name)
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002


def test_jaillet_model_1_draws_the_paper_s_ranges():
    drawn = [generate("jaillet-model-1", seed=seed) for seed in range(300)]
    capacities = {instance.kv_capacity for instance in drawn}
    # There M is 30 to 50, n 40 to 60 and s 1 to 5.
    assert capacities == set(range(30, 51))
    assert {instance.n for instance in drawn} == set(range(40, 61))
    assert all((instance.arrival == 0).all() for instance in drawn)
    prompts = np.concatenate([instance.prompt_tokens for instance in drawn])
    assert set(prompts.tolist()) == {1, 2, 3, 4, 5}
    room = [i.kv_capacity - i.prompt_tokens - i.output_tokens for i in drawn]
    assert min(map(np.min, room)) == 0  # o reaches M - s
    # o is uniform on 1..M - s: its mean over (1 + M - s) / 2 is 1. Some 300 x 50 draws with a
    # deviation of 0.58 have one of 0.005 in the mean, and 0.02 is four times that.
    shares = [2 * i.output_tokens / (1 + i.kv_capacity - i.prompt_tokens) for i in drawn]
    assert np.concatenate(shares).mean() == pytest.approx(1, abs=0.02)


def test_jaillet_model_2_arrives_as_a_poisson_process_over_1_to_t():
    drawn = [generate("jaillet-model-2", seed=seed) for seed in range(300)]
    assert min(instance.arrival.min() for instance in drawn) == 1
    # T is 60 at most, and near 60 in some of 300.
    assert 55 <= max(instance.arrival.max() for instance in drawn) <= 60
    assert all((np.diff(instance.arrival) >= 0).all() for instance in drawn)
    # lambda and T are independent with means 1 and 50, so n has mean 50; its standard deviation
    # is about sqrt(50 + 14.4^2 + 6^2) = 17, that of the mean of 300 about 1.
    # T is 40 to 60, so its deviation is 20 / sqrt(12) = 6; that of lambda, 0.5 to 1.5, is 1 /
    # sqrt(12), times 50 is 14.4. The mean may be off by four times its deviation of 1.
    assert np.mean([instance.n for instance in drawn]) == pytest.approx(50, abs=4)


def test_jaillet_model_2_with_n_fixed_takes_the_first_n_arrivals():
    drawn = [generate("jaillet-model-2", seed=seed, n=200, rate=2.0) for seed in range(20)]
    assert {instance.n for instance in drawn} == {200}
    # 200 arrivals at 2 a round: the last in round 100 on average, sqrt(200) / 2 = 7 its deviation.
    # That of a mean of 20 is 1.6, and 7 is over four times that.
    assert np.mean([i.arrival[-1] for i in drawn]) == pytest.approx(100, abs=7)
    assert min(i.arrival.min() for i in drawn) >= 1


def test_fixing_one_parameter_keeps_the_other_draws():
    free = generate("jaillet-model-1", seed=3)
    fixed = generate("jaillet-model-1", seed=3, n=12)
    assert (fixed.n, fixed.kv_capacity) == (12, free.kv_capacity)
    assert generate("jaillet-model-1", seed=3, kv_capacity=99).n == free.n


def test_there_is_always_a_request():
    assert generate("jaillet-model-2", horizon=1, rate=1e-5).n == 1


def test_lognormal_has_the_published_means_medians_and_maxima():
    instance = generate("lognormal", seed=1, n=200_000)
    # Published: prompts mean 40.62, median 11, 1..468; outputs mean 85.32, median 45, 1..883. The
    # mean of 200,000 prompts varies by 0.8 % or less: a lognormal of this mean and median has a
    # deviation of 3.6 times its mean, and 3.6 / sqrt(200,000) is 0.008. That of outputs less.
    for column, mean, median, longest in (
        (instance.prompt_tokens, 40.62, 11, 468),
        (instance.output_tokens, 85.32, 45, 883),
    ):
        assert column.mean() == pytest.approx(mean, rel=0.015)
        assert np.median(column) == pytest.approx(median, abs=1)  # a whole token
        assert (column.min(), column.max()) == (1, longest)
    assert instance.kv_capacity == 16492  # the default
    assert instance.kv_accounting == "cached"
    # Poisson arrivals at 50 per second: 200,000 take 4,000 s, with a deviation of 1 / sqrt(200,000)
    # = 0.2 %.
    assert instance.arrival[-1] == pytest.approx(4000, rel=0.02)


def test_a_lognormal_whose_mean_is_its_median_is_constant():
    instance = generate("lognormal", n=9, prompt_mean=11, arrivals="all-at-once")
    assert set(instance.prompt_tokens.tolist()) == {11}  # the default's median
    assert instance.arrival.max() == 0


@pytest.mark.parametrize(("arrivals", "cv"), [("poisson", 1.0), ("gamma", 0.5), ("gamma", 3.0)])
def test_gaps_have_the_rate_and_variation_asked_for(arrivals, cv):
    instance = generate(
        "uniform", n=200_000, arrivals=arrivals, rate=4.0, cv=cv, time_unit="second"
    )
    gaps = np.diff(instance.arrival)
    # 1 / 4 s. The mean of 200,000 gaps varies by cv / sqrt(200,000): by 0.7 % at most.
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_rounds_are_the_floors_of_the_times():
    options = {"n": 100, "arrivals": "poisson", "rate": 3.0}
    rounds = generate("uniform", seed=5, **options)
    seconds = generate("uniform", seed=5, time_unit="second", **options)
    assert rounds.arrival.tolist() == np.floor(seconds.arrival).tolist()
    assert (rounds.kv_accounting, seconds.kv_accounting) == ("generated", "cached")


def test_uniform_reaches_both_ends():
    instance = generate("uniform", n=5000, prompt_min=2, prompt_max=4, output_min=7, output_max=9)
    assert set(instance.prompt_tokens.tolist()) == {2, 3, 4}
    assert set(instance.output_tokens.tolist()) == {7, 8, 9}


@pytest.mark.parametrize(
    ("prompt", "output", "capacity"),
    # M = max(2 I, I + O - 1): max(128, 67) and max(4, 5).
    [(64, 4, 128), (2, 4, 5)],
)
def test_infermax_fixed_has_the_paper_s_memory(prompt, output, capacity):
    instance = generate("infermax-fixed", n=3, prompt=prompt, output=output)
    assert instance.kv_capacity == capacity
    assert instance.prompt_tokens.tolist() == [prompt] * 3
    assert (instance.time_unit, instance.kv_accounting) == ("second", "cached")


def test_infermax_mix_halves_its_classes_and_shuffles_them():
    # Short are 8 and 16 tokens, long 512 and 1024. LILO has long inputs and outputs, SISO short
    # ones.
    instance = generate("infermax-mix", n=1001, mix="LILO+SISO", seed=2)
    long = instance.prompt_tokens >= 512
    assert np.array_equal(long, instance.output_tokens >= 512)
    assert long.sum() == 501  # the first class gets the odd one
    assert set(instance.prompt_tokens[long].tolist()) == {512, 1024}
    assert set(instance.output_tokens[~long].tolist()) == {8, 16}
    # Some 250 of the first 500, where they are shuffled.
    assert 200 < long[:500].sum() < 300
    # Of SILO alone the inputs are short: 16 at most.
    assert generate("infermax-mix", mix="SILO").prompt_tokens.max() == 16


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("nope", {}, "generator 'nope' is unknown; known are agent-sessions"),
        ("uniform", {"m": 1}, "generate uniform: parameter 'm' is unknown; known are n, prompt"),
        ("uniform", {"n": 0}, "generate uniform: n: found 0; expected a number from 1 to 10000000"),
        ("uniform", {"n": 2.5}, "generate uniform: n: found 2.5; expected an integer"),
        ("uniform", {"n": True}, "generate uniform: n: found True; expected an integer"),
        ("uniform", {"n": "3"}, "generate uniform: n: found '3'; expected an integer"),
        ("uniform", {"rate": 0}, "generate uniform: rate: found 0; expected a number above 0"),
        ("uniform", {"rate": float("nan")}, "generate uniform: rate: found nan"),
        ("uniform", {"rate": True}, "generate uniform: rate: found True; expected a number"),
        (
            "uniform",
            {"arrivals": "x"},
            "arrivals: found 'x'; expected one of all-at-once, poisson,",
        ),
        ("uniform", {"prompt_min": 9}, "prompt_min: found 9; expected at most prompt_max 5"),
        (
            "uniform",
            {"kv_capacity": 29},
            "kv_capacity: found 29; expected at least 30 for prompt_max 5",
        ),
        (
            "jaillet-model-1",
            {"kv_capacity": 5},
            "kv_capacity: found 5; expected a number from 6 to",
        ),
        (
            "jaillet-model-2",
            {"rate": 1e6, "horizon": 10**7},
            "rate: found 1e+06 over 10000000 rounds, which makes more than",
        ),
        (
            "lognormal",
            {"prompt_mean": 500},
            "prompt_mean: found 500; expected a mean between the median 11",
        ),
        (
            "lognormal",
            {"prompt_median": 0.5},
            "prompt_median: found 0.5; expected 1 to prompt_max 468",
        ),
        (
            "infermax-mix",
            {"mix": "LILO+X"},
            "mix: mix: found 'LILO+X'; expected one or more of SISO, SILO,",
        ),
        (
            "infermax-mix",
            {"mix": "SISO+SISO"},
            "mix: mix: found 'SISO+SISO'; expected one or more of SISO,",
        ),
        (
            "infermax-fixed",
            {"kv_capacity": 66},
            "kv_capacity: request 0: found 66; expected at least 67, the",
        ),
        ("uniform", {"seed": -1}, "generate uniform: seed: found -1; expected an integer >= 0"),
        ("uniform", {"seed": "x"}, "generate uniform: seed: found 'x'; expected an integer >= 0"),
    ],
)
def test_bad_parameters_are_refused_in_one_line(name, parameters, words):
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        generate(name, **parameters)
    assert "\n" not in str(caught.value)


def test_cached_accounting_needs_one_token_less():
    # 5 + 25 - 1, the defaults' largest.
    assert generate("uniform", kv_capacity=29, kv_accounting="cached").kv_capacity == 29


def test_texts_become_parameters_of_their_type():
    texts = {"n": "12", "rate": "2", "arrivals": "gamma", "kv_accounting": "none"}
    values = parse_parameters("uniform", texts)
    assert values == {"n": 12, "rate": 2.0, "arrivals": "gamma", "kv_accounting": None}
    assert isinstance(values["rate"], float)
    assert generate("uniform", **values).n == 12


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ({"n": "x"}, "generate uniform: parameter n: found 'x'; expected an integer"),
        ({"n": "1e3"}, "generate uniform: parameter n: found '1e3'; expected an integer"),
        ({"n": "9" * 5000}, "generate uniform: parameter n: found"),
        ({"rate": "fast"}, "generate uniform: parameter rate: found 'fast'; expected a number"),
        ({"rate": "inf"}, "generate uniform: parameter rate: found 'inf'; expected a number"),
        ({"speed": "1"}, "generate uniform: parameter 'speed' is unknown; known are n"),
    ],
)
def test_bad_texts_are_refused_in_one_line(texts, words):
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        parse_parameters("uniform", texts)
    assert len(str(caught.value)) < 300  # the 5,000 digits of one case are not all repeated


def test_calls_of_agents_repeat_what_was_said():
    """A session's calls stand one after another. The prompt of each begins with the prompt and
    the answer before it, and is cut at the context."""
    found = generate("agent-sessions", n=50, seed=2, context=50_000)
    sessions, prompt, output = found.sessions, found.prompt_tokens, found.output_tokens
    assert sessions.session.max() == 49  # 50 sessions, from 0
    called = np.flatnonzero(sessions.count)
    assert (sessions.before == called - 1).all()
    said = prompt[called - 1] + output[called - 1]
    assert (found.prefix_tokens[called] == np.minimum(said, prompt[called])).all()
    grown = prompt[called] < 50_000 - output[called]
    assert (prompt[called] > said)[grown].all()
    assert (prompt + output <= 50_000).all()
    # The default of think_s is 10 s.
    assert np.median(found.delay[called]) == pytest.approx(10, rel=0.2)
