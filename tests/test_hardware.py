"""Devices by any of their names, models by their configuration, and attention's true width.

Numbers of models are computed by hand from their cards, and not by the formulas of the package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import answer, invoke, one_line_error, run
from test_fit import attention_frame, dense_frame
from test_profile_identity import aiconfigurator, put

from optsched.costs.architectures import architecture
from optsched.costs.batch import EMPTY, add_decode, add_prefill, batch_time
from optsched.costs.cost import roofline
from optsched.costs.devices import DEVICES, device, devices_named
from optsched.costs.fit import fit
from optsched.costs.load import load_cost_model
from optsched.costs.profiles.tables import attention_flops
from optsched.problem.errors import InputError

# Names of drivers, clouds and public profiles.
NAMES = {
    "a100-80gb": ("NVIDIA A100-SXM4-80GB", "a100_80gb", "A100 80GB PCIe", "NVIDIA A100-SXM-80GB"),
    "a100-40gb": ("NVIDIA A100-SXM4-40GB", "A100-PCIE-40GB"),
    "h100-80gb": ("NVIDIA H100 80GB HBM3", "h100", "h100_sxm", "H100-SXM5-80GB", "H100SXM"),
    "h100-pcie": ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
    "h100-nvl": ("NVIDIA H100 NVL", "H100-NVL-94GB"),
    "h200": ("NVIDIA H200", "h200_sxm", "H200 141GB"),
    "b200": ("NVIDIA B200", "b200_sxm", "B200-192GB"),
    "gb200": ("NVIDIA GB200", "GB200 NVL72"),
    "l40s": ("NVIDIA L40S", "L40S-48GB"),
    "l4": ("NVIDIA L4", "l4-24gb"),
    "a10": ("NVIDIA A10",),
    "a10g": ("NVIDIA A10G", "A10G-24GB"),
    "a40": ("NVIDIA A40",),
    "v100-16gb": ("Tesla V100-SXM2-16GB",),
    "mi300x": ("AMD Instinct MI300X OAM", "MI300X-192GB"),
    "mi325x": ("AMD Instinct MI325X",),
    "rtx4090": ("NVIDIA GeForce RTX 4090", "RTX_4090", "4090"),
    "rtx5090": ("NVIDIA GeForce RTX 5090",),
    "rtx6000-ada": ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
    "rtx-a6000": ("NVIDIA RTX A6000", "A6000"),
    "rtxpro6000": (
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "rtx_pro_6000_server",
        "RTXPRO6000",
    ),
    "arc-pro-b60": ("Intel(R) Arc(TM) Pro B60 Graphics",),
}


@pytest.mark.parametrize(("own", "name"), [(own, n) for own, names in NAMES.items() for n in names])
def test_a_device_is_known_by_any_of_its_names(own: str, name: str) -> None:
    assert device(name) == DEVICES[own]


@pytest.mark.parametrize("own", DEVICES)
def test_every_device_is_found_by_its_own_name_and_no_other_is(own: str) -> None:
    assert devices_named(own) == [DEVICES[own]]
    assert DEVICES[own] in devices_named(f"NVIDIA {own.upper().replace('-', ' ')}")


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "Quadro RTX 6000",
        "h100-80gb-pcap",
        "NVIDIA GH200 480GB",
        "NVIDIA A100X",
        "NVIDIA RTX A1000",
        "A100-160GB",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "H200 PCIe",
        "",
    ],
)
def test_a_name_with_an_unknown_word_or_size_is_another_device(name: str) -> None:
    with pytest.raises(InputError, match=r"is unknown; .*known are a100-80gb"):
        device(name)


def test_a_name_of_several_devices_lists_them() -> None:
    """A name that several devices share is refused where one is meant; the message has them all."""
    with pytest.raises(InputError, match="'a100'"):
        device("a100")
    assert devices_named("A100") == [DEVICES["a100-80gb"], DEVICES["a100-40gb"]]
    error = one_line_error(invoke("gpu", "roofline", "llama2-7b", "--gpu", "V100"))
    assert "expected v100-16gb or v100-32gb" in error


def test_a_device_of_ones_own_is_given_by_its_peaks(tmp_path: Path) -> None:
    # The peaks of an L40S, so that the result is that of the device which is known by name. A name,
    # a file and a cost model's name may give them.
    peaks = {"memory_gb": 44.99, "bandwidth_gb_s": 864, "bf16_tflops": 362.05}
    spec = ",".join(f"{key}={value}" for key, value in peaks.items())
    file = tmp_path / "mine.toml"
    file.write_text("\n".join(f"{key} = {value}" for key, value in peaks.items()))
    known = roofline("llama3-8b", "l40s")
    for name in (spec, str(file)):
        assert roofline("llama3-8b", name).coefficients == known.coefficients
    for own in (f"roofline:llama3-8b,{spec}", f"roofline:llama3-8b,device={file}"):
        assert load_cost_model(own).coefficients == known.coefficients
    assert load_cost_model(f"roofline:llama3-8b,device={file}").name == (
        "llama3-8b-tp1-mine-roofline"
    )
    assert roofline("llama3-8b", spec).kv_capacity_tokens == known.kv_capacity_tokens


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("memory_gb=44.99,bandwidth_gb_s=864", "bf16_tflops: found nothing; expected a number > 0"),
        ("memory_gb=44.99,bandwidth_gb_s=864,bf16_tflops=0", "bf16_tflops: found 0.0; expected"),
        ("memory_gb=44.99,cores=3", "parameter 'cores' is unknown"),
        ("memory_gb=inf,bandwidth_gb_s=864,bf16_tflops=1", "found 'inf'; expected a number"),
        ("memory_gb=1e308,bandwidth_gb_s=1,bf16_tflops=1", "memory_gb: found 1e+308; expected"),
        ("memory_gb=44.99,bandwidth_gb_s=1e-99,bf16_tflops=1", "bandwidth_gb_s: found 1e-99; exp"),
        ("memory_gb=1e12,bandwidth_gb_s=1,bf16_tflops=1", "memory_gib: found 1000000000000"),
        ("nowhere.toml", "nowhere.toml: no such file"),
    ],
)
def test_peaks_that_are_missing_or_wrong_are_named(spec: str, words: str) -> None:
    assert words in one_line_error(invoke("gpu", "roofline", "llama2-7b", "--gpu", spec))


# Models by their configuration. The sizes are those of the models' cards.

QWEN3_32B = {
    "model_type": "qwen3",
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "use_sliding_window": False,
}
GEMMA_7B = {
    "model_type": "gemma",
    "num_hidden_layers": 28,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "vocab_size": 256000,
}
LLAMA3_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def folder_of(folder: Path, config: dict[str, Any], name: str = "model") -> Path:
    """Write a model's folder, which is a config.json alone."""
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("config", "parameters", "kv_bytes"),
    [
        # Card: 32.8 B parameters: 64 layers of 487,587,840 and two embeddings of 151,936 x 5,120.
        # KV: 64 layers x 2 x 8 heads x 128 x 2 bytes = 262,144.
        (QWEN3_32B, 32.76e9, 262_144),
        # 8.54 B: 28 layers of 276,824,064 and one (tied) embedding of 256,000 x 3,072.
        # KV: 28 x 2 x 16 x 256 x 2 = 458,752.
        (GEMMA_7B, 8.54e9, 458_752),
        # 8.03 B: 32 layers of 218,103,808 and two embeddings of 128,256 x 4,096.
        # KV: 32 x 2 x 8 x 128 x 2 = 131,072.
        (LLAMA3_8B, 8.03e9, 131_072),
    ],
)
def test_weights_and_kv_are_those_of_the_model_s_card(
    tmp_path: Path, config: dict, parameters: float, kv_bytes: int
) -> None:
    folder = folder_of(tmp_path, config, "own-name")
    for name in (folder, folder / "config.json"):
        shape = architecture(str(name))
        assert shape.name == "own-name"
        # Cards are rounded, and have norms besides.
        assert shape.weight_bytes / 2 == pytest.approx(parameters, rel=2e-3)
        assert shape.kv_bytes == kv_bytes


def test_a_configuration_gives_what_the_known_name_gives(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, QWEN3_32B)
    for words in (("--gpu", "h100", "--tensor-parallel", 2), ("--gpu", "h200")):
        own, known = (answer("roofline", m, *words) for m in (folder, "qwen3-32b"))
        assert own["coefficients_ms_per_layer"] == known["coefficients_ms_per_layer"]
        named = answer("gpu", "roofline", "Qwen/Qwen3-32B", *words)
        assert own["kv_capacity_tokens"] == named["kv_capacity_tokens"]
        assert known["kv_capacity_tokens"] == named["kv_capacity_tokens"]
    assert load_cost_model(f"roofline:{folder},device=h100,tp=2").name == (
        "model-tp2-h100-80gb-roofline"
    )
    # The language model of one that also sees.
    seeing = folder_of(tmp_path, {"model_type": "x", "text_config": QWEN3_32B}, "seeing")
    assert architecture(str(seeing)).attention_width == 8192  # 64 heads x 128


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": 128}, "num_experts: found 128; expected a model of dense layers"),
        ({"num_local_experts": 8}, "num_local_experts: found 8; expected a model of dense"),
        ({"n_routed_experts": 256}, "n_routed_experts: found 256; expected"),
        ({"model_type": "qwen3_moe"}, "model_type: found 'qwen3_moe'; expected"),
        ({"kv_lora_rank": 512}, "kv_lora_rank: found 512; expected keys and values of heads"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "found linear_attention; exp"),
        ({"lru_width": 2560}, "lru_width: found 2560; expected attention in every"),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers: found 10; expected own keys"),
        ({"cross_attention_layers": [3, 8]}, "cross_attention_layers: found [3, 8]; expected own"),
        ({"model_type": "bert"}, "model_type: found 'bert'; expected a gated"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder: found True"),
        ({"model_type": "opt"}, "model_type: found 'opt'; expected a gated"),
        ({"hidden_size": 0}, "hidden_size: found '0'; expected an integer >= 1"),
        ({"vocab_size": "many"}, "vocab_size: found 'many'; expected an integer"),
        ({"num_hidden_layers": None}, "found no 'num_hidden_layers'"),
        ({"head_dim": None, "hidden_size": 5000}, "head_dim: found none for 64 heads"),
        ({"num_key_value_heads": 7}, "num_key_value_heads: found 7; expected a divisor"),
    ],
)
def test_a_model_that_is_not_priced_right_is_refused(
    tmp_path: Path, change: dict, words: str
) -> None:
    folder = folder_of(tmp_path, {**QWEN3_32B, **change})
    error = one_line_error(invoke("gpu", "roofline", folder))
    assert words in error
    assert "config.json" in error


@pytest.mark.parametrize("text", ["[1]", "{", "null"])
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert "expected a model's configuration" in one_line_error(invoke("roofline", tmp_path))


def test_a_window_and_quantized_weights_are_noted(tmp_path: Path) -> None:
    mistral = {**LLAMA3_8B, "sliding_window": 4096, "max_position_embeddings": 32768}
    folder = folder_of(tmp_path, {**mistral, "quantization_config": {"quant_method": "fp8"}})
    cost = roofline(str(folder), "h100")
    assert "attention slides over 4096 tokens" in cost.provenance
    assert "weights are quantized" in cost.provenance
    assert "attention slides over 4096 tokens" in run("gpu", "roofline", folder, "--gpu", "h100")
    packed = {**LLAMA3_8B, "attention_chunk_size": 8192, "compression_config": {"bits": 8}}
    notes = architecture(str(folder_of(tmp_path, packed, "packed"))).notes
    assert len(notes) == 2  # of attention in chunks, and of packed weights
    # A window that no request leaves, or that is switched off, is none.
    for off in ({"sliding_window": 40960}, {"use_sliding_window": False}):
        name = "-".join(off)
        assert architecture(str(folder_of(tmp_path, {**mistral, **off}, name))).notes == ()


# The width of attention is heads times their size: 64 x 128 = 8,192 in Qwen3-32B, whose hidden
# state has 5,120 numbers; 16 x 256 = 4,096 in Gemma-7B, which has 3,072.


@pytest.mark.parametrize(
    ("config", "width", "layer"),
    [
        # qkv 5120 x (8192 + 2 x 1024) + out 8192 x 5120 + 3 x 5120 x 25600 = 487,587,840
        (QWEN3_32B, 8192, 487_587_840),
        # 3072 x (4096 + 2 x 4096) + 4096 x 3072 + 3 x 3072 x 24576 = 276,824,064
        (GEMMA_7B, 4096, 276_824_064),
        # 4096 x (4096 + 2 x 1024) + 4096 x 4096 + 3 x 4096 x 14336 = 218,103,808
        (LLAMA3_8B, 4096, 218_103_808),
    ],
)
def test_a_roofline_counts_the_width_of_the_heads(
    tmp_path: Path, config: dict, width: int, layer: int
) -> None:
    folder = folder_of(tmp_path, config)
    cost = roofline(str(folder), "h100-80gb")
    # Causal: half of c^2 pairs, two products of 2 operations each, 989e12 operations a second.
    assert cost["prefill_square"] == pytest.approx(2 * width / 989e12 * 1e3, rel=1e-5)
    assert cost["prefill_cross"] == pytest.approx(4 * width / 989e12 * 1e3, rel=1e-5)
    assert sum(architecture(str(folder)).layer_weights.values()) == layer
    # Two bytes a weight, 3,350 GB/s. The linear model is a fit over batches of all sizes. For one
    # token it is below the true time, which is that of reading a layer's weights, but not by half.
    weights_ms = 2 * layer / 3350e9 * 1e3
    assert 0.5 * weights_ms < cost["token"] + cost["base"] < weights_ms


def test_more_devices_than_kv_heads_hold_heads_several_times() -> None:
    # Llama-3-70B has 8 KV heads: 80 x 2 x 8 x 128 x 2 bytes a token on up to 8 devices, and twice
    # that on 16, each of which reads one head of 80 x 2 x 128 x 2 bytes.
    shape = architecture("llama3-70b")
    assert [shape.kv_bytes_on(d) for d in (1, 8, 16)] == [327_680, 327_680, 655_360]
    eight, sixteen = (roofline("llama3-70b", "h100", tensor_parallel=d) for d in (8, 16))
    # One head is 2 x 128 x 2 = 512 bytes a token and layer, at 3,350 GB/s: 3350e6 bytes a ms.
    assert eight["decode_kv"] == sixteen["decode_kv"] == pytest.approx(512 / 3350e6, rel=1e-5)
    # A layer has 8192 x (8192 + 2 x 1024) + 8192 x 8192 + 3 x 8192 x 28672 = 855,638,016 weights of
    # two bytes, and there are two embeddings. 0.9 x 16 x 80 GiB less 141.1 GB, over 655,360 bytes.
    weights = 2 * (80 * 855_638_016 + 2 * 128_256 * 8192)
    assert sixteen.kv_capacity_tokens == (int(0.9 * 16 * 80 * 2**30) - weights) // 655_360


def test_devices_that_cannot_share_the_heads_are_refused() -> None:
    # 32 heads are not shared by 3 devices.
    words = ("gpu", "roofline", "llama3-8b", "--gpu", "h100", "--tensor-parallel", 3)
    error = one_line_error(invoke(*words))
    assert "tensor_parallel: found 3; expected a divisor of llama3-8b's 32 heads" in error


def test_operations_of_attention_are_counted_pair_by_pair() -> None:
    # Three tokens over two cached ones see 3, 4 and 5 keys: 12 pairs. Each pair takes 2 x 128
    # operations for its score and 2 x 128 for its value, in 64 heads; half of them on a device.
    shape = architecture("qwen3-32b")
    assert attention_flops(shape, np.array([3.0]), 2.0, 2)[0] == 12 * 4 * 128 * 64 / 2


def test_rows_are_held_against_the_true_width(tmp_path: Path) -> None:
    # A chunk of 4,096 tokens of Qwen3-32B needs 4 x 8192 x 4096 x 4097 / 2 operations in a layer:
    # 0.278 ms at 989 TFLOP/s, or 1,375 TFLOP/s in 0.2 ms. With 5,120 it would be 0.174 ms, and 0.2
    # ms would pass.
    frames = aiconfigurator(width=8192, heads=64)
    prefill = frames["context_attention"]
    long = (prefill["isl"] == 4096) & (prefill["batch_size"] == 1)
    prefill["latency"] *= 2  # twice the width, so as many FLOP/s as before: all others pass
    prefill.loc[long, "latency"] = 0.2
    found = fit(put(tmp_path, frames), model="qwen3-32b")
    (rejected,) = found.rejected
    assert "0.2 ms is 1375 TFLOP/s; the peak is 989" in rejected.reason


def test_matrix_products_have_the_true_width(tmp_path: Path) -> None:
    # Every table entry takes 3e-12 ms per token and weight and 1e-9 ms per weight, so a layer's
    # four products take that of its 487,587,840 weights.
    # They are 5120 x (8192 + 2 x 1024) + 8192 x 5120 + 3 x 5120 x 25600 (Qwen3-32B).
    frames = aiconfigurator(width=8192, heads=64)
    frames["context_attention"]["latency"] *= 2  # twice the width, so as many FLOP/s as before
    cost = fit(put(tmp_path, frames), model="qwen3-32b").cost_model
    assert cost["token"] == pytest.approx(3e-12 * 487_587_840, rel=1e-3)
    assert cost["base"] == pytest.approx(1e-9 * 487_587_840, rel=1e-3)


def test_decodes_of_vidur_are_held_against_the_true_width(tmp_path: Path) -> None:
    # 64 heads of 256 are 16,384 wide. 128 requests of 4,000 KV tokens take 4 x 16384 x 512,000
    # operations, 3.355e10: 3.4 ms at 10 TFLOP/s, and 16.78 TFLOP/s in 2 ms. With the hidden size
    # of 4,096 it would be 0.8 ms.
    model = folder_of(tmp_path, {**LLAMA3_8B, "num_attention_heads": 64, "head_dim": 256})
    dense, attention = dense_frame(), attention_frame()
    times = [name for name in dense if name.startswith("time_stats")]
    dense[times] *= 100  # so slow, as is attention below, that one row alone is too fast
    attention["time_stats.attn_prefill.median"] *= 1000
    large = (attention["batch_size"] == 128) & (attention["kv_cache_size"] == 4000)
    attention.loc[large, "time_stats.attn_decode.median"] = 2.0
    dense.to_csv(model / "mlp.csv", index=False)
    attention.to_csv(model / "attention.csv", index=False)
    own = "memory_gb=80,bandwidth_gb_s=20000,bf16_tflops=10"
    (rejected,) = fit(model, model=str(model), hardware=own).rejected
    assert "2 ms is 16.78 TFLOP/s; the peak is 10" in rejected.reason


GPT_OSS_20B = {
    "model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880,
    "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "vocab_size": 201088, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
    "max_position_embeddings": 131072,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip


def test_layers_of_a_window_hold_the_kv_of_its_tokens(tmp_path: Path) -> None:
    # 24 x 2 x 8 x 64 x 2 = 49,152 bytes a token, so 12 GiB for 32 requests of 8,192 tokens. Half
    # of the layers hold 128 tokens of each: 6 + 6 / 64 = 6.09 GiB, 65/128 of it.
    shape = architecture(str(folder_of(tmp_path, GPT_OSS_20B)))
    assert (shape.sliding, shape.window) == (12, 128)
    held = [32 * 8192 * shape.kv_bytes_on(1, m) / 2**30 for m in (None, 8192)]
    assert held == pytest.approx([12, 6.09375])
    assert shape.kv_bytes_on(1, 100) == shape.kv_bytes  # 100 tokens are within the window
    whole, short = (
        answer("roofline", tmp_path / "model", "--gpu", "h100", *words)["kv_capacity_tokens"]
        for words in ((), ("--request-tokens", 8192))
    )
    assert short / whole == pytest.approx(128 / 65, rel=1e-4)
    spec = f"roofline:{tmp_path / 'model'},device=h100,request_tokens=8192"
    assert load_cost_model(spec).kv_capacity_tokens == short


def test_a_roofline_of_experts_reads_those_that_tokens_reach(tmp_path: Path) -> None:
    # Each of 24 layers: 2 x (2880 x (4096 + 2 x 512) + 4096 x 2880) bytes of attention, and experts
    # of 2 x 3 x 2880 x 2880 bytes, at 3,350 GB/s. One token takes 4 of 32, and two reach
    # 32 (1 - (28/32)^2) = 7.5. A millisecond has 3350e6 bytes.
    cost = roofline(str(folder_of(tmp_path, GPT_OSS_20B)), "h100-80gb")
    attention, expert = 2 * 2880 * (4096 + 1024 + 4096), 2 * 3 * 2880 * 2880
    for tokens, reached in ((1, 4), (2, 7.5)):
        sums = EMPTY
        for _ in range(tokens):
            sums = add_decode(sums, 0)

        ms = (attention + reached * expert) / 3350e6
        assert batch_time(cost.array, sums) * 1000 / 24 == pytest.approx(ms, rel=1e-5)

    assert "every token takes 4 of 32, independently and all as often" in cost.provenance
    # A thousand tokens over 8,192 cached ones: 4 x 4096 operations for each pair, 989 TFLOP/s.
    far, near = (batch_time(cost.array, add_prefill(EMPTY, 1024, m)) for m in (8192, 0))
    pairs = 4 * 4096 * 1024 * 8192 / 989e12
    assert far - near == pytest.approx(24 * pairs, rel=1e-4)
    with pytest.raises(InputError, match="expected none for experts"):
        roofline(str(tmp_path / "model"), "h100-80gb", exponent=2)


def test_experts_beside_other_layers_are_refused(tmp_path: Path) -> None:
    for k, change in enumerate(({"n_shared_experts": 1}, {"mlp_only_layers": [0]})):
        folder = folder_of(tmp_path, {**GPT_OSS_20B, **change}, f"m{k}")
        with pytest.raises(InputError, match="expected a model of dense layers, or of experts in"):
            architecture(str(folder))
