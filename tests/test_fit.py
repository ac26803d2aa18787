"""Cost models from profiles: known coefficients come back, bad tables are named."""

from __future__ import annotations

import importlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from optsched import Problem, run
from optsched.cli import app
from optsched.costs.architectures import ARCHITECTURES
from optsched.costs.cost import BatchCost, roofline
from optsched.costs.devices import DEVICES, devices_named
from optsched.costs.fit import Fit, errors_of, fit
from optsched.costs.hardware import kv_capacity
from optsched.costs.load import load_cost_model
from optsched.costs.model_file import to_toml
from optsched.costs.profiles import read_profile
from optsched.costs.profiles.vidur import LAYER_OPERATORS
from optsched.costs.table import CostTable, Grid
from optsched.costs.tabulate import non_negative
from optsched.judge.evaluate import evaluate
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import InputError, UsageError
from optsched.problem.instance import Instance
from optsched.show.plot import plot_fit

DATA = os.environ.get("OPTSCHED_DATA")
real = pytest.mark.skipif(DATA is None, reason="OPTSCHED_DATA names no folder of public profiles")

TRUTH = {
    "token": 0.002, "base": 0.3, "decode_kv": 9e-6, "decode_request": 8e-4, "decode_base": 0.02,
    "prefill_square": 1.4e-7, "prefill_cross": 1.1e-7, "prefill_kv": 1e-5, "prefill_token": 9e-5,
    "prefill_base": 0.01,
}  # fmt: skip


def dense_frame() -> pd.DataFrame:
    """Return a profile of a layer's operators, 1 to 4096 tokens, by token and base of TRUTH."""
    tokens = np.unique(np.geomspace(1, 4096, 80).round())
    total = TRUTH["token"] * tokens + TRUTH["base"]
    # Shares of a layer's time; the four products take most of it.
    share = {"attn_pre_proj": 0.25, "attn_post_proj": 0.1, "mlp_up_proj": 0.4, "mlp_down_proj": 0.2}
    frame = pd.DataFrame({"num_tokens": tokens.astype(int), "num_tensor_parallel_workers": 1})
    for name in LAYER_OPERATORS:
        frame[f"time_stats.{name}.median"] = total * share.get(name, 0.01)
    frame["time_stats.emb.median"] = 5.0  # once per batch, not per layer: must not count
    return frame


def attention_frame() -> pd.DataFrame:
    """Return 7 x 5 rows of decodes and 7 x 5 of prefills, whose times are those of TRUTH."""
    rows = []
    for n in (1, 2, 4, 8, 16, 64, 128):
        for m in (32, 128, 512, 1024, 4000):
            ms = TRUTH["decode_kv"] * n * m + TRUTH["decode_request"] * n + TRUTH["decode_base"]
            rows.append((n, 0, m, False, np.nan, ms))
    for c in (64, 128, 256, 512, 1024, 2048, 4096):
        for m in (0, 64, 512, 1024, 2048):
            ms = (
                TRUTH["prefill_square"] * c**2 + TRUTH["prefill_cross"] * c * m
                + TRUTH["prefill_kv"] * m + TRUTH["prefill_token"] * c + TRUTH["prefill_base"]
            )  # fmt: skip
            rows.append((1, c, m, True, ms, np.nan))
    names = ["batch_size", "prefill_chunk_size", "kv_cache_size", "is_prefill"]
    times = ["time_stats.attn_prefill.median", "time_stats.attn_decode.median"]
    frame = pd.DataFrame(rows, columns=[*names, *times])
    return frame.assign(num_tensor_parallel_workers=1)


def write(folder: Path, dense: pd.DataFrame, attention: pd.DataFrame) -> Path:
    """Write a profile as files in a folder named after its model, and return it."""
    inside = folder / "llama2-7b"
    inside.mkdir()
    dense.to_csv(inside / "mlp.csv", index=False)
    attention.to_csv(inside / "attention.csv", index=False)
    return inside


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A profile of which TRUTH is exactly true."""
    return write(tmp_path, dense_frame(), attention_frame())


def test_known_coefficients_are_recovered(good: Path) -> None:
    """All of TRUTH, with no error left, in the range of the profile, and no row is rejected."""
    found = fit(good)
    for key, value in TRUTH.items():
        assert found.cost_model[key] == pytest.approx(value, rel=1e-4), key
    # TRUTH is exactly true of the profile, so no error is left.
    assert all(o.mean < 1e-6 and o.reached and o.r2 > 0.999999 for o in found.operators)
    assert found.cost_model.layers == 32
    # The largest of the profile: 4,096 tokens, and 128 decodes over 4,000 each.
    assert found.cost_model.valid["max_batch_tokens"] == 4096
    assert found.cost_model.valid["max_kv_tokens"] == 128 * 4000
    assert not found.rejected


def test_coefficients_survive_noise_and_the_split_is_seeded(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    attention = attention_frame()
    # Columns 4 and 5 are the times of prefills and of decodes.
    for column in attention.columns[4:6]:
        attention[column] *= generator.uniform(0.97, 1.03, len(attention))
    folder = write(tmp_path, dense_frame(), attention)
    found, again, other = fit(folder), fit(folder), fit(folder, seed=1)
    # The noise is 3 % at most, of each row by itself. Coefficients and mean errors stay near that.
    assert found.cost_model["decode_kv"] == pytest.approx(TRUTH["decode_kv"], rel=0.03)
    assert found.cost_model["prefill_square"] == pytest.approx(TRUTH["prefill_square"], rel=0.05)
    assert all(0 < o.mean < 0.03 for o in found.operators if o.operator != "layer")
    assert found.to_toml() == again.to_toml()
    assert found.cost_model.coefficients != other.cost_model.coefficients


def test_the_file_written_is_the_model(good: Path, tmp_path: Path) -> None:
    found = fit(good, name='with "quotes"')
    file = tmp_path / "model.toml"
    file.write_text(found.to_toml(), encoding="utf-8")
    read = load_cost_model(file)
    assert read.name == 'with "quotes"'
    # TOML has floats, so a whole number is written with ".0".
    assert read.coefficients == {
        key: text if "." in text or "e" in text else f"{text}.0"
        for key, text in found.cost_model.coefficients.items()
    }
    assert read.valid == found.cost_model.valid
    # 0.9 x 80 GiB less 13,476,298,752 bytes of weights, at 2^19 bytes a token: 121,752.
    assert read.kv_capacity_tokens == found.cost_model.kv_capacity_tokens == 121752
    np.testing.assert_array_equal(read.array, found.cost_model.array)


def test_the_range_starts_where_a_linear_model_holds(tmp_path: Path) -> None:
    # Batches below 16 take twice the linear time: those rows cannot be met, and are left out.
    attention = attention_frame()
    small = (attention["batch_size"] < 16) & ~attention["is_prefill"]
    attention.loc[small, "time_stats.attn_decode.median"] *= 2
    found = fit(write(tmp_path, dense_frame(), attention))
    decode = next(o for o in found.operators if o.operator == "decode")
    assert found.cost_model.valid["min_decode_requests"] == 16
    # Batches of 1, 2, 4 and 8, each over five lengths of KV.
    assert decode.outside == 4 * 5
    assert decode.mean < 1e-6
    assert found.cost_model["decode_kv"] == pytest.approx(TRUTH["decode_kv"], rel=1e-4)


def test_a_model_that_misses_the_target_says_so(tmp_path: Path) -> None:
    attention = attention_frame()
    decode = ~attention["is_prefill"]
    jumps = np.where(np.arange(decode.sum()) % 2, 3.0, 1.0)
    attention.loc[decode, "time_stats.attn_decode.median"] *= jumps
    found = fit(write(tmp_path, dense_frame(), attention))
    assert not next(o for o in found.operators if o.operator == "decode").reached
    assert "MORE than the target" in found.to_toml()


def test_an_operator_outside_the_range_has_no_error(
    good: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module("optsched.costs.fit")
    report = module._report

    # As if the range of validity, which is fitted, left out all rows of decodes.
    def outside(name: str, mine: np.ndarray, inside: np.ndarray, *rest: Any) -> Any:
        return report(name, mine, inside & (not name.startswith("decode")), *rest)

    monkeypatch.setattr(module, "_report", outside)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fit(good)
    row = next(r for r in found.rows() if r["operator"] == "decode")
    assert [row[key] for key in ("rows", "mean_error", "p95_error", "r2")] == [0, None, None, None]
    # Seven sizes of batches over five lengths of KV.
    assert "decode: none of its 35 rows is within the range of validity" in found.to_toml()
    assert command("fit", good) == 0
    assert "nan" not in capsys.readouterr().out


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, dense_frame().drop(columns="num_tokens"), attention_frame())
    with pytest.raises(InputError, match=r"mlp\.csv.*column.*'num_tokens'"):
        fit(folder)


def test_seconds_for_milliseconds_are_detected(tmp_path: Path) -> None:
    dense = dense_frame()
    times = [name for name in dense if name.startswith("time_stats")]
    dense[times] /= 1000
    folder = write(tmp_path, dense, attention_frame())
    with pytest.raises(InputError, match="look like seconds"):
        fit(folder)


def test_microseconds_for_milliseconds_are_detected(tmp_path: Path) -> None:
    dense = dense_frame()
    times = [name for name in dense if name.startswith("time_stats")]
    dense[times] *= 1000
    folder = write(tmp_path, dense, attention_frame())
    with pytest.raises(InputError, match="look like microseconds"):
        fit(folder)


def test_a_negative_time_is_named(tmp_path: Path) -> None:
    dense = dense_frame()
    dense.loc[6, "time_stats.mlp_act.median"] = -0.1  # header is line 1, so this is line 8
    with pytest.raises(InputError, match=r"mlp\.csv.*line 8.*mlp_act.*-0\.1"):
        fit(write(tmp_path, dense, attention_frame()))


def test_a_row_above_the_peak_is_rejected_and_named(tmp_path: Path) -> None:
    # 128 requests x 4000 KV tokens x 16 KiB are 8.4 GB: 4.1 ms at 2,039 GB/s, not 1 ms.
    attention = attention_frame()
    row = int(attention.index[(attention.batch_size == 128) & (attention.kv_cache_size == 4000)][0])
    attention.loc[row, "time_stats.attn_decode.median"] = 1.0
    found = fit(write(tmp_path, dense_frame(), attention))
    (rejected,) = found.rejected
    assert (rejected.file, rejected.line) == ("attention.csv", row + 2)
    assert "8389 GB/s; the peak is 2039" in rejected.reason
    assert found.cost_model["decode_kv"] == pytest.approx(TRUTH["decode_kv"], rel=1e-4)


def test_a_table_of_another_device_is_refused(tmp_path: Path) -> None:
    attention = attention_frame()
    attention["time_stats.attn_decode.median"] /= 30  # so fast that the device cannot read the KV
    with pytest.raises(InputError, match="a profile of this device"):
        fit(write(tmp_path, dense_frame(), attention))


def test_too_few_rows_are_refused(tmp_path: Path) -> None:
    attention = attention_frame()
    few = attention[attention["is_prefill"]].head(5)
    folder = write(tmp_path, dense_frame(), pd.concat([attention[~attention["is_prefill"]], few]))
    with pytest.raises(InputError, match=r"profile of prefill:.*5"):
        fit(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "gpt-9"}, "model: 'gpt-9' is unknown; known are"),
        ({"tensor_parallel": 4}, "found 1; expected 4"),
        ({"hardware": "tpu"}, "device: 'tpu' is unknown"),
        ({"held_out": 1.5}, "held_out: found 1.5; expected a share between 0 and 1"),
    ],
)
def test_bad_options_are_named(good: Path, options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit(good, **options)


def test_a_folder_without_profiles_says_what_is_right(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"mlp\.csv"):
        fit(tmp_path)
    with pytest.raises(InputError, match="no such file or folder"):
        fit(tmp_path / "none")


def test_other_models_are_judged_on_the_same_rows(good: Path) -> None:
    found = fit(good)
    rows = errors_of(found, [found.cost_model])
    assert {r["operator"] for r in rows} >= {"layer", "decode", "prefill"}
    assert max(r["mean_error"] for r in rows) < 1e-4  # the profile is exactly TRUTH's
    doubled = BatchCost(
        "x", 32, {k: str(2 * float(v)) for k, v in found.cost_model.coefficients.items()}
    )
    # Times twice as long are off by 1, or 100 %.
    assert all(r["bias"] == pytest.approx(1, abs=1e-4) for r in errors_of(found, [doubled]))


def splitwise_frame() -> pd.DataFrame:
    """Return times of whole batches: 0.37 ms a token, 20 a batch, 34 more and KV with decodes."""
    rows = []
    for n in (1, 2, 4, 8, 16, 32):
        for s in (128, 256, 512, 1024, 2048, 4096):
            prompt = 0.37 * n * s + 20
            token = 20 + 0.37 * n + 1.6e-4 * n * (s + 63.5) + 0.1 * n + 34
            rows.append(("llama2-70b", "a100-80gb", s, n, 128, prompt, token))
    names = ["model", "hardware", "prompt_size", "batch_size", "token_size"]
    frame = pd.DataFrame(rows, columns=[*names, "prompt_time", "token_time"])
    return frame.assign(
        tensor_parallel=2, e2e_time=frame["prompt_time"] + 127 * frame["token_time"]
    )


def test_whole_batch_times_of_splitwise_are_recovered(tmp_path: Path) -> None:
    splitwise_frame().to_csv(tmp_path / "perf_model.csv", index=False)
    model = fit(tmp_path, model="llama2-70b", tensor_parallel=2).cost_model
    assert model.layers == 1
    # What `splitwise_frame` is made of: 0.37 ms a token, 20 a batch, 34 more with decodes.
    for key, value in (("token", 0.37), ("base", 20), ("decode_base", 34), ("decode_kv", 1.6e-4)):
        assert model[key] == pytest.approx(value, rel=1e-3), key
    with pytest.raises(InputError, match=r"hardware:.*'a100-80gb'.*'h100-80gb'"):
        fit(tmp_path, model="llama2-70b", tensor_parallel=2, hardware="h100-80gb")


def test_parquet_of_aiconfigurator_is_read(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="reading Parquet needs pyarrow")
    base = {"attn_dtype": "bfloat16", "head_dim": 128, "num_heads": 32, "num_key_value_heads": 8}
    decode = [
        {**base, "batch_size": n, "isl": 1, "step": m - 1, "latency": 3e-6 * n * m + 0.02}
        for n in (1, 4, 16, 64) for m in (64, 256, 1024, 4096)
    ]  # fmt: skip
    prefill = [
        {**base, "batch_size": n, "isl": c, "step": 0, "latency": 5e-8 * n * c * c + 0.01}
        for n in (1, 2, 4, 8) for c in (64, 256, 1024, 4096)
    ]  # fmt: skip
    sizes = (1024, 4096, 6144, 14336, 28672)
    gemm = [
        {"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k,
         "latency": (1e-11 * m + 1.2e-9) * n * k}
        for m in (1, 4, 16, 64, 256, 1024, 2048, 4096) for n in sizes for k in sizes
    ]  # fmt: skip
    for name, rows in (
        ("generation_attention_perf", decode), ("context_attention_perf", prefill),
        ("gemm_perf", gemm),
    ):  # fmt: skip
        pd.DataFrame(rows).to_parquet(tmp_path / f"{name}.parquet")
    model = fit(tmp_path, model="llama3-8b").cost_model
    # In ms, and summed over the n k of a layer's products: 1e-11 a token and 1.2e-9 a batch.
    weights = sum(ARCHITECTURES["llama3-8b"].layer_weights.values())
    assert model["token"] == pytest.approx(1e-11 * weights, rel=1e-3)
    assert model["base"] == pytest.approx(1.2e-9 * weights, rel=1e-3)
    assert model["decode_kv"] == pytest.approx(3e-6, rel=1e-3)
    assert model["prefill_cross"] == pytest.approx(2 * model["prefill_square"], rel=1e-4)
    with pytest.raises(InputError, match="num_key_value_heads: found 8; expected 32"):
        fit(tmp_path, model="llama2-7b")


def test_plot_draws_every_operator(good: Path) -> None:
    axes = plot_fit(fit(good), Figure().subplots())
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert any(text.startswith("prefill with cached KV (mean error") for text in labels)


def test_non_negative_least_squares_meet_the_optimality_conditions() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        matrix = generator.normal(size=(20, 6)) * 10.0 ** generator.integers(-6, 6, 6)
        target = generator.normal(size=20)
        x = non_negative(matrix, target)
        # Where x is 0 a larger x may not help (gradient <= 0), and where x > 0 no change does (0).
        gradient = matrix.T @ (target - matrix @ x) / np.abs(matrix).max(axis=0)
        assert (x >= 0).all()
        assert (gradient <= 1e-8).all()
        assert np.abs(gradient[x > 0]).max(initial=0) < 1e-8


def test_roofline_of_an_a100() -> None:
    # K and V of 2 bytes, 32 heads of 128: a decode reads 2 x 2 x 32 x 128 = 16,384 bytes per KV
    # token and layer, at 2,039 GB/s, which are 2039e6 bytes a ms.
    model = roofline("llama2-7b")
    assert model["decode_kv"] == pytest.approx(16384 / 2039e6, rel=1e-5)
    # Causal prefill: 4 x 4096 x c^2 / 2 operations at 312 TFLOP/s, which are 312e9 a ms.
    assert model["prefill_square"] == pytest.approx(2 * 4096 / 312e9, rel=1e-5)
    # To read a layer's 202,375,168 weights of 2 bytes takes 0.1985 ms at 2,039 GB/s. The linear
    # model is a fit over batches of all sizes, for one token below that, but not by half.
    weights = sum(ARCHITECTURES["llama2-7b"].layer_weights.values())
    assert weights == 202_375_168
    assert 0.5 * 0.1985 < model["token"] + model["base"] < 0.1985
    assert load_cost_model("roofline:llama2-7b").sha256 == model.sha256
    half = load_cost_model("roofline:llama2-7b,device=a100-80gb,tp=2")
    assert half["decode_kv"] == pytest.approx(model["decode_kv"] / 2, rel=1e-5)
    assert load_cost_model_text(model) == model.coefficients


def load_cost_model_text(model: BatchCost) -> dict[str, str]:
    import tomllib

    return tomllib.loads(to_toml(model), parse_float=str)["coefficients"]


@pytest.mark.parametrize(
    "spec", ["roofline:gpt", "roofline:llama2-7b,tp=x", "roofline:llama2-7b,tp=3", "roofline:a,b"]
)
def test_bad_rooflines_are_refused(spec: str) -> None:
    with pytest.raises(InputError):
        load_cost_model(spec)


def test_kv_capacity_from_memory_weights_and_bytes_per_token() -> None:
    # (0.9 x 80 GiB - 12 GiB) / 0.5 MiB = 60 x 2048
    assert kv_capacity(80, 12 * 2**30, 2**19) == 60 * 2048
    assert kv_capacity(80, 24 * 2**30, 2**19, devices=2) == 120 * 2048  # (0.9 x 160 - 24) GiB
    shape, peak = ARCHITECTURES["llama2-7b"], DEVICES["a100-80gb"]
    assert shape.kv_bytes == 32 * 16384
    # 121,752, see the roofline above.
    assert kv_capacity(peak.memory_gib, shape.weight_bytes, shape.kv_bytes) > 100_000
    # 140 GB of weights on 40 GiB, and 1.2 of the memory.
    with pytest.raises(InputError, match="leave no room"):
        kv_capacity(40, 140e9, 2**19)
    with pytest.raises(InputError, match="usable"):
        kv_capacity(80, 1e9, 1, usable=1.2)


def test_leaving_the_range_of_validity_warns_once_and_names_it() -> None:
    cost = BatchCost(
        "narrow", 1, {"token": "1"},
        valid={"max_batch_tokens": 8, "min_prefill_chunk_tokens": 4, "max_kv_tokens": 6},
    )  # fmt: skip
    instance = Instance(
        arrival=[0, 0], prompt_tokens=[5, 4], output_tokens=[2, 1], kv_capacity=20,
        time_unit="second",
    )  # fmt: skip
    # One batch has both prompts, 5 + 4 = 9 tokens, over no KV. The decode reads 5 tokens of KV.
    schedule = simulate(Problem(instance, cost), "fcfs")
    with pytest.warns(UserWarning, match=r"'narrow'.*8.*tokens") as caught:
        evaluate(Problem(instance, cost), schedule)
    assert len(caught) == 1
    assert "fewer than" not in str(caught[0].message)
    assert "KV" not in str(caught[0].message)
    wide = BatchCost("wide", 1, {"token": "1"}, valid={"max_batch_tokens": 9})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(Problem(instance, wide), "fcfs")


@real
@pytest.mark.parametrize(
    ("folder", "options"),
    [
        ("frontier-a800", {"model": "llama2-7b", "hardware": "a800-80gb"}),
        ("vidur-a100/Llama-2-7b-hf", {}),
    ],
)
def test_attention_of_the_real_profiles_is_met_within_8_percent(folder: str, options: dict) -> None:
    found = fit(Path(str(DATA)) / folder, **options)
    means = {o.operator: o.mean for o in found.operators}
    assert means["decode"] <= 0.08
    assert means["prefill with cached KV"] <= 0.08
    assert means["layer"] <= 0.08


@real
@pytest.mark.parametrize(
    ("name", "folder", "options"),
    [
        ("llama2-7b-a800-fit", "frontier-a800", {"model": "llama2-7b", "hardware": "a800-80gb"}),
        ("llama2-7b-a100-vidur-fit", "vidur-a100/Llama-2-7b-hf", {}),
        (
            "llama2-70b-tp2-a100-splitwise-fit",
            "splitwise",
            {"model": "llama2-70b", "tensor_parallel": 2},
        ),
    ],
)
def test_the_shipped_fits_are_what_the_profiles_give(name: str, folder: str, options: dict) -> None:
    found: Fit = fit(Path(str(DATA)) / folder, **options)
    np.testing.assert_allclose(found.cost_model.array, load_cost_model(name).array, rtol=1e-5)


@real
def test_the_impossible_rows_of_splitwise_are_rejected() -> None:
    # 64 prompts of 512 tokens in 0.8 s would be 2,832 TFLOP/s on two GPUs of 312.
    profile = read_profile(Path(str(DATA)) / "splitwise", model="llama2-70b", tensor_parallel=2)
    assert [r.line for r in profile.rejected] == [62, 63, 64, 65, 66]  # lines of the file


def command(*words: object) -> int:
    """Run the command line, and return its exit status."""
    with pytest.raises(SystemExit) as ended:
        app([str(word) for word in words])
    return int(ended.value.code or 0)


def test_command_writes_model_plot_and_report(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model with TRUTH's coefficient, a picture, a table with another model beside, and JSON."""
    model, figure = tmp_path / "m.toml", tmp_path / "m.png"
    words = ("fit", good, "-o", model, "--plot-out", figure, "--beside", "llama2-7b-a100-infermax")
    assert command(*words) == 0
    out = capsys.readouterr().out
    assert "prefill with cached KV" in out
    assert "llama2-7b-a100-infermax" in out
    assert load_cost_model(model)["decode_kv"] == pytest.approx(9e-6, rel=1e-4)
    assert figure.stat().st_size > 1000  # a picture, and no empty file
    assert command("fit", good, "--json", "-") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["format"] == "optsched-fit"
    assert [o["reached"] for o in data["operators"]] == [True] * len(data["operators"])


def test_a_profile_without_attention_is_taken_only_when_asked(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused (status 2) in one line; with --partial the model and its file say what is missing."""
    (good / "attention.csv").unlink()
    assert command("fit", good) == 2
    error = capsys.readouterr().err
    assert "found no attention of decodes and no attention of prefills; expected " in error
    assert error.count("\n") == 1
    file = tmp_path / "x.toml"
    assert command("fit", good, "--partial", "-o", file) == 0
    assert "fit: attention of decodes: MISSING, costs nothing\n" in capsys.readouterr().err
    assert load_cost_model(file).name == "llama2-7b-tp1-a100-80gb-fit-without-attention"
    assert "MISSING: attention of prefills costs nothing" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("lacking", "keep"),
    [("decodes", lambda f: f[f["is_prefill"]]), ("prefills", lambda f: f[~f["is_prefill"]])],
)
def test_a_profile_with_half_of_the_attention_says_which(
    tmp_path: Path, lacking: str, keep
) -> None:
    folder = write(tmp_path, dense_frame(), keep(attention_frame()))
    with pytest.raises(InputError, match=f"found no attention of {lacking}; expected "):
        fit(folder)
    name = f"llama2-7b-tp1-a100-80gb-fit-without-attention-of-{lacking}"
    assert fit(folder, partial=True).cost_model.name == name


def test_a_profile_without_layers_is_refused_always(good: Path) -> None:
    (good / "mlp.csv").unlink()
    for partial in (False, True):
        with pytest.raises(InputError, match=r"found no layers; expected .*mlp\.csv$"):
            fit(good, partial=partial)


@pytest.mark.parametrize("name", ["mlp.csv", "attention.csv"])
def test_a_file_with_a_header_alone_is_one_line(
    good: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    header = (good / name).read_text(encoding="utf-8").splitlines()[0]
    (good / name).write_text(header + "\n", encoding="utf-8")
    assert command("fit", good, "--partial") == 2
    error = capsys.readouterr().err
    assert error == f"error: {good / name}: found a header and no rows; expected at least one\n"


def test_a_tabulated_model_is_not_held_against_rows_of_operators(good: Path) -> None:
    found = fit(good)
    grids = [Grid({"tokens": [1, 8]}, [1.0, 8.0])]
    tabulated = BatchCost("tabulated", 1, {"base": "1"}, table=CostTable(grids, [{"base": "1"}]))
    with pytest.raises(UsageError, match="--beside"):
        errors_of(found, [found.cost_model, tabulated])


def test_command_reports_a_bad_profile_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("fit", tmp_path) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_a_roofline_says_how_much_kv_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.toml"
    assert command("gpu", "roofline", "llama2-7b", "-o", file) == 0
    shown = capsys.readouterr().out
    assert "ROOFLINE" in shown
    # 0.9 x 80 GiB less 13,476,298,752 bytes of weights, at 524,288 bytes a token.
    assert "KV capacity 121752 tokens" in shown
    # 0.9 x 80 GiB less 12 GiB of weights, at 2^19 bytes a token, are 60 x 2048 tokens.
    assert kv_capacity(80, 12 * 2**30, 2**19) == 60 * 2048
    # Place 0 has the layers.
    assert load_cost_model(file).array[0] == 32


def test_a_device_is_known_by_whole_words() -> None:
    for name in ("NVIDIA A100-SXM4-80GB", "A100", "NVIDIA GRID A100D A100 PCIe"):
        assert DEVICES["a100-80gb"] in devices_named(name)
    assert devices_named("NVIDIA GeForce RTX 4090") == [DEVICES["rtx4090"]]
    assert devices_named("NVIDIA RTX PRO 6000 Blackwell") == [DEVICES["rtxpro6000"]]
    for name in ("NVIDIA RTX A1000", "A100X", ""):
        assert not devices_named(name)
