"""Cost models: the arithmetic of a batch, the shipped files, and what is refused."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest

from optsched.costs.batch import (
    COEFFICIENTS,
    EMPTY,
    Sums,
    add_decode,
    add_prefill,
    alone_ms,
    batch_time,
    decode_ms,
    fixed_ms,
    prefill_ms,
)
from optsched.costs.cost import BatchCost, UnitCost, models_folder, shipped_models
from optsched.costs.load import cost_for, load_cost_model
from optsched.problem.errors import InputError, UsageError
from optsched.problem.instance import Instance

SHIPPED = (
    "llama-3.1-8b-h100-torch",
    "llama-3.1-8b-h200-vllm",
    "llama-70b-tp4-a100-infermax", "llama2-70b-tp2-a100-derived", "llama2-70b-tp2-a100-splitwise",
    "llama2-7b-a100-fit", "llama2-7b-a100-infermax", "llama2-7b-a100-infermax-paper",
    "llama2-7b-a100-vidur-fit", "llama2-7b-a800-fit", "llama2-70b-tp2-a100-splitwise-fit",
)  # fmt: skip

GOOD = """
format = "optsched-cost-model"
version = 1
unit = "ms_per_layer"
layers = 2
[coefficients]
token = 0.5
base = 1
"""


def test_the_shipped_models_are_listed():
    assert shipped_models() == sorted(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_models_state_units_provenance_and_validity(name):
    model = load_cost_model(name)
    assert model.name == name
    assert len(model.provenance) > 20  # a sentence, and not a word
    assert model.valid["max_batch_tokens"] >= 2048  # the default of vLLM, whose steps one times
    text = (models_folder() / f"{name}.toml").read_text(encoding="utf-8")
    for key in model.coefficients:
        assert re.search(rf"^{key} = \S+ # ms per ", text, re.MULTILINE), key


POWERS = {
    "token": "1", "base": "2", "decode_kv": "4", "decode_request": "8", "decode_base": "16",
    "prefill_square": "32", "prefill_cross": "64", "prefill_kv": "128", "prefill_token": "256",
    "prefill_request": "512", "prefill_base": "1024",
}  # fmt: skip
"""Every coefficient is another power of 2 ms, so that a term left out anywhere shows."""


def test_batch_time_of_a_mixed_batch():
    # Chunks of 3 and 5 tokens (KV 2 and 0) and two decodes (KV 7 and 4): 10 tokens.
    ms = (
        1 * 10 + 2  # token, base
        + 4 * (7 + 4) + 8 * 2 + 16  # decode: kv, request, base
        + 32 * (9 + 25) + 64 * (3 * 2 + 5 * 0) + 128 * (2 + 0)  # prefill: square, cross, kv
        + 256 * (3 + 5) + 512 * 2 + 1024  # prefill: token, request, base
    )  # fmt: skip
    cost = BatchCost("x", 3, POWERS).array
    sums = add_decode(add_decode(EMPTY, 7), 4)
    sums = add_prefill(add_prefill(sums, 3, 2), 5, 0)
    # Tokens; decodes: requests, KV, most KV; prefills: requests, tokens, square, cross, KV.
    assert sums[:9] == (10, 2, 11, 7, 2, 8, 34, 6, 2)
    time = batch_time(cost, sums)
    assert time == pytest.approx(3 * ms / 1000, rel=1e-15)


def test_terms_of_a_phase_count_only_where_the_phase_is():
    cost = BatchCost("x", 1, dict.fromkeys(POWERS, "1")).array
    # One decode of KV 5: 1 token + base 1 + kv 5 + request 1 + decode base 1 = 9 ms.
    assert batch_time(cost, add_decode(EMPTY, 5)) == 0.009
    # One prefill of 2 tokens: 2 + 1 + square 4 + cross 0 + kv 0 + token 2 + request 1 + base 1.
    assert batch_time(cost, add_prefill(EMPTY, 2, 0)) == 0.011
    assert batch_time(cost, EMPTY) == 0.0


def test_the_prices_of_one_request_are_those_of_batches_that_hold_it():
    cost = BatchCost("x", 1, POWERS).array
    # A decode over 7 tokens: token 1 + kv 4 * 7 + request 8; its batch also base 2 + 16.
    assert decode_ms(cost, 7) == 37
    assert fixed_ms(cost, True, False) == 18
    # 3 tokens over 2: (1 + 256) * 3 + 32 * 9 + 64 * 6 + 128 * 2 + 512; base 2 + 1024.
    assert prefill_ms(cost, 3, 2) == 2211
    assert fixed_ms(cost, False, True) == 1026
    # The same holds of every coefficient, those that are added later included.
    cost = BatchCost("x", 1, {name: str(2**k) for k, name in enumerate(COEFFICIENTS)}).array

    def ms(sums: Sums) -> float:
        return batch_time(cost, sums) * 1000

    decode, prefill = add_decode(EMPTY, 7), add_prefill(EMPTY, 3, 2)
    assert ms(decode) == pytest.approx(decode_ms(cost, 7) + fixed_ms(cost, True, False))
    assert ms(prefill) == pytest.approx(prefill_ms(cost, 3, 2) + fixed_ms(cost, False, True))
    both = decode_ms(cost, 7) + prefill_ms(cost, 3, 2) + fixed_ms(cost, True, True)
    assert ms(add_prefill(decode, 3, 2)) == pytest.approx(both)
    # Alone: a prompt of 3 tokens in one batch, then decodes over 3, 4 and 5.
    batches = [add_prefill(EMPTY, 3, 0), *(add_decode(EMPTY, m) for m in (3, 4, 5))]
    assert alone_ms(cost, 3, 4, fixed=True) == pytest.approx(sum(map(ms, batches)))
    own = prefill_ms(cost, 3) + sum(decode_ms(cost, m) for m in (3, 4, 5))
    assert alone_ms(cost, 3, 4, fixed=False) == pytest.approx(own)


def test_exact_integers_and_columns_are_priced_by_the_same_functions():
    cost = [0, *range(1, 1 + len(COEFFICIENTS))]  # token 1, base 2, decode_kv 3, ...
    # A decode over m tokens costs token 1 + decode_kv 3 m + decode_request 4: 5 at 0, 20 at 5.
    assert decode_ms(cost, 10**30) == 1 + 4 + 3 * 10**30
    assert decode_ms(cost, np.array([0, 5])).tolist() == [5, 20]
    # With one token of output the prefill of 2 tokens is all there is.
    assert alone_ms(cost, np.array([2]), np.array([1]), fixed=False).tolist() == [
        prefill_ms(cost, 2)
    ]


def test_a_round_takes_one_and_an_empty_batch_none():
    cost = UnitCost().array
    assert batch_time(cost, add_prefill(add_decode(EMPTY, 5), 8, 0)) == 1.0
    assert batch_time(cost, EMPTY) == 0.0


def test_the_paper_s_prefill_of_one_request():
    # InferMax, section 3.2: 32 layers x (0.00191 x 64 + 0.06486 + 1.6773e-7 x 4096 + 0.0926) ms.
    model = load_cost_model("llama2-7b-a100-infermax-paper")
    expected = 32 * (0.00191 * 64 + 0.06486 + 1.6773e-7 * 4096 + 0.0926) / 1000
    time = batch_time(model.array, add_prefill(EMPTY, 64, 0))
    assert time == pytest.approx(expected, rel=1e-14)


def test_coefficients_keep_their_decimal_text():
    model = load_cost_model("llama2-7b-a100-infermax")
    assert model.coefficients["decode_kv"] == "8.513e-6"
    assert Fraction(model.coefficients["decode_kv"]) == Fraction(8513, 10**9)
    assert model["decode_kv"] == 8.513e-6
    assert model["prefill_token"] == 0.0


def test_the_digest_covers_what_times_depend_on():
    base = BatchCost("a", 2, {"token": "0.5", "base": "1"})
    assert base.sha256 == BatchCost("b", 2, {"base": "1", "token": "0.5"}, provenance="p").sha256
    assert base.sha256 != BatchCost("a", 3, {"token": "0.5", "base": "1"}).sha256
    assert base.sha256 != BatchCost("a", 2, {"token": "0.5", "base": "2"}).sha256


def test_a_file_is_named_after_itself(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(GOOD)
    model = load_cost_model(file)
    assert (model.name, model.layers, model["token"]) == ("mine", 2, 0.5)
    # Layers 2, token 0.5, base 1.
    assert np.array_equal(model.array[:3], [2.0, 0.5, 1.0])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('unit = "ms_per_layer"\n', "", "unit: found nothing; expected 'ms_per_layer'"),
        ("ms_per_layer", "seconds", "unit: found 'seconds'; expected 'ms_per_layer'"),
        ("optsched-cost-model", "other", "format: found 'other'; expected 'optsched-cost-model'"),
        ("version = 1", "version = 2", "version: found 2; expected 1"),
        ("layers = 2", "", "layers: found nothing; expected the number"),
        ("layers = 2", "layers = 0", "layers: found 0; expected an integer from 1 to 10000"),
        ("layers = 2", "layers = true", "layers: found True; expected an integer from 1 to 10000"),
        ("layers = 2", f"layers = {10**400}", "... (401 characters); expected an integer from 1"),
        ("layers = 2", f"layers = {10**4000}0", "layers: found 1"),
        ("layers = 2", "layers = 1" + "0" * 5000, "not a readable TOML file"),
        ("layers = 2", "layers = 0x1" + "0" * 5000, "thousands of digits; expected an integer"),
        (
            "base = 1",
            "base = 0x1" + "0" * 5000,
            "coefficients.base: found 'a number of thousands of",
        ),
        (
            "base = 1",
            f"base = 1\n[valid]\nmax_kv_tokens = {10**400}",
            "valid.max_kv_tokens: found 1",
        ),
        (
            "token = 0.5",
            "token = 1e308",
            "coefficients.token: found '1e308'; expected a number from 0 to",
        ),
        ("base = 1", "base = 1000001", "coefficients.base: found '1000001'; expected a number"),
        ("token = 0.5\nbase = 1", "token = 1e-300", "a batch of one token take 2e-303 s"),
        ("layers = 2", "layers = 2\nlayer = 3", "layer: unknown field; known are"),
        ("token = 0.5", "tokens = 0.5", "coefficients.tokens: unknown; known are token"),
        (
            "token = 0.5",
            "token = -0.5",
            "coefficients.token: found '-0.5'; expected a number from 0 to 1e+06",
        ),
        (
            "token = 0.5",
            "token = nan",
            "coefficients.token: found 'nan'; expected a number from 0 to 1e+06",
        ),
        (
            "token = 0.5",
            "token = inf",
            "coefficients.token: found 'inf'; expected a number from 0 to 1e+06",
        ),
        ("token = 0.5", "token = true", "coefficients.token: found 'True'; expected a number"),
        ("token = 0.5\nbase = 1", "", "coefficients: found none"),
        (
            "token = 0.5\nbase = 1",
            "token = 0\nbase = 0",
            "token take 0 s; expected at least 1e-12 s",
        ),
        ("layers = 2", "layers = 2\nvalid = 3", "valid: found 3; expected a table of limits"),
        (
            "base = 1",
            "base = 1\n[valid]\nmax_kv_tokens = 'x'",
            "valid.max_kv_tokens: found 'x'; expected",
        ),
        ("layers = 2", "layers = ", "not a readable TOML file"),
        (
            "layers = 2",
            "kv_capacity_tokens = 'x'\nlayers = 2",
            "kv_capacity_tokens: found 'x'; expected",
        ),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, old, new, words):
    file = tmp_path / "mine.toml"
    file.write_text(GOOD.replace(old, new))
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        load_cost_model(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_the_smallest_and_largest_models_give_positive_finite_times() -> None:
    # One token of 10^-9 ms takes 10^-12 s. The largest prompt, 2^31 - 1 tokens, squared, times
    # 10^6 ms and 10^4 layers: 4.6e18 x 1e10 / 1e3 s.
    least = BatchCost("least", 1, {"token": "1e-9"}).array
    assert batch_time(least, add_decode(EMPTY, 5)) == pytest.approx(1e-12)
    most = BatchCost("most", 10_000, dict.fromkeys(COEFFICIENTS, "1e6")).array
    c = 2**31 - 1
    time = batch_time(most, add_prefill(EMPTY, c, 0))
    assert time == pytest.approx(c * c * 1e7, rel=1e-6)
    with pytest.raises(InputError, match="at least 1e-12 s"):
        BatchCost("less", 1, {"token": "0.9e-9"})


def test_unknown_models_and_missing_files_say_what_there_is(tmp_path):
    with pytest.raises(InputError, match="'nope'"):
        load_cost_model("nope")
    with pytest.raises(InputError, match="no such file"):
        load_cost_model(tmp_path / "nope.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(InputError, match="found a directory; expected a cost model in TOML"):
        load_cost_model(tmp_path / "folder.toml")


def test_a_cost_model_goes_with_seconds_and_none_with_rounds():
    rounds = Instance([0], [1], [1], kv_capacity=2)
    seconds = Instance([0], [1], [1], kv_capacity=2, time_unit="second")
    assert isinstance(cost_for(rounds, None), UnitCost)
    assert isinstance(cost_for(seconds, "llama2-7b-a100-fit"), BatchCost)
    with pytest.raises(UsageError, match="in rounds"):
        cost_for(rounds, "llama2-7b-a100-fit")
    with pytest.raises(UsageError, match="shipped are llama"):
        cost_for(seconds, None)
