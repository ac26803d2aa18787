"""A profile is what its files say that it is, and is refused as anything else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from command_line import answer, invoke, one_line_error
from test_fit import attention_frame, dense_frame, splitwise_frame
from test_profile import shapes, write as write_steps
from test_table import write_profile

from optsched.costs.fit import fit
from optsched.costs.profiles import read_profile
from optsched.problem.errors import InputError

H100 = "NVIDIA H100 80GB HBM3"
Frames = dict[str, pd.DataFrame]


def aiconfigurator(device: str | None = H100, *, width: int = 4096, heads: int = 32) -> Frames:
    """Return tables whose rows take two to three times what an H100 needs at least.

    A layer takes (3e-12 m + 1e-9) n k ms, a decode 4e-6 ms per KV token, and a prefill
    4 x 4096 x c^2 / 2 operations at 200 TFLOP/s.
    """
    base = {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "window_size": 0}
    base |= {"head_dim": 128, "num_heads": heads, "num_key_value_heads": 8, "beam_width": 1}
    sizes = (1024, width, 6144, 14336, 28672)
    tables = {
        "gemm": [
            {"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k,
             "latency": (3e-12 * m + 1e-9) * n * k}
            for m in (1, 4, 16, 64, 256, 1024, 2048, 4096) for n in sizes for k in sizes
        ],
        "generation_attention": [
            {**base, "batch_size": n, "isl": 1, "step": m - 1, "latency": 4e-6 * n * m + 0.02}
            for n in (1, 4, 16, 64) for m in (64, 256, 1024, 4096)
        ],
        "context_attention": [
            {**base, "batch_size": n, "isl": c, "step": 0, "latency": 4.1e-8 * n * c * c + 0.01}
            for n in (1, 2, 4, 8) for c in (64, 256, 1024, 4096)
        ],
    }  # fmt: skip
    about = {"framework": "VLLM", "version": "0.24.0"} | ({"device": device} if device else {})
    return {kind: pd.DataFrame(rows).assign(op_name=kind, **about) for kind, rows in tables.items()}


def put(folder: Path, frames: Frames, place: str = "{kind}_perf.csv") -> Path:
    """Write tables of AIConfigurator to their places in a folder."""
    for kind, frame in frames.items():
        family = "gemm" if kind == "gemm" else "attention"
        file = folder / place.format(kind=kind, family=family)
        file.parent.mkdir(parents=True, exist_ok=True)
        frame.to_csv(file, index=False)
    return folder


def with_others(frames: Frames, kind: str, **values: Any) -> Frames:
    """Return tables with a second set of rows of one kind, a third as long, that are other rows."""
    frame = frames[kind]
    others = frame.assign(latency=frame["latency"] / 3, **values)
    return {**frames, kind: pd.concat([frame, others], ignore_index=True)}


def test_rows_of_windows_and_other_types_are_left_out_and_counted(tmp_path: Path) -> None:
    plain = fit(put(tmp_path / "plain", aiconfigurator()), model="llama3-8b").cost_model
    frames = with_others(aiconfigurator(), "context_attention", window_size=128)
    frames = with_others(frames, "generation_attention", kv_cache_dtype="fp8")
    frames = with_others(frames, "gemm", gemm_dtype="fp8_block")
    mixed = fit(put(tmp_path / "mixed", frames), model="llama3-8b")
    assert mixed.cost_model.coefficients == plain.coefficients
    # Four batches by four chunks; four by four again; eight by five by five.
    for words in (
        "context_attention_perf.csv: 16 of 32 rows are used; left out are 16 with window_size 128",
        "generation_attention_perf.csv: 16 of 32 rows are used; left out are 16 with "
        "kv_cache_dtype fp8",
        "gemm_perf.csv: 200 of 400 rows are used; left out are 200 with gemm_dtype fp8_block",
    ):
        assert words in mixed.profile.notes
        assert words in mixed.cost_model.provenance


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("context_attention", {"window_size": 1024}, "window_size: found 1024; expected 0"),
        (
            "generation_attention",
            {"kv_cache_dtype": "fp8"},
            "kv_cache_dtype: found 'fp8'; expected",
        ),
        ("gemm", {"gemm_dtype": "nvfp4"}, "gemm_dtype: found 'nvfp4'; expected bfloat16"),
        ("gemm", {"op_name": "moe"}, "op_name: found 'moe'; expected 'gemm'"),
        ("gemm", {"num_experts": 128}, "num_experts: found 128; expected dense layers"),
        ("context_attention", {"beam_width": 4}, "beam_width: found 4; expected 1"),
        ("generation_attention", {"head_dim": 64}, "head_dim: found 64; expected 128"),
        ("context_attention", {"step": 512}, "step: found 512; expected 0"),
    ],
)
def test_a_table_of_nothing_but_other_rows_is_refused(
    tmp_path: Path, kind: str, values: dict, words: str
) -> None:
    """The table, what all of its rows say, and words of the error."""
    frames = aiconfigurator()
    put(tmp_path, {**frames, kind: frames[kind].assign(**values)})
    error = one_line_error(invoke("fit", tmp_path, "--model", "llama3-8b"))
    assert words in error
    assert f"{kind}_perf.csv" in error


def test_choosing_rows_does_not_make_them_full_attention(tmp_path: Path) -> None:
    """Half of the rows are of a window of 128 tokens. Choosing them by name is refused, too."""
    frames = with_others(aiconfigurator(), "context_attention", window_size=128)
    folder = put(tmp_path, with_others(frames, "generation_attention", window_size=128))
    with pytest.raises(InputError, match="window_size: found 128; expected 0"):
        fit(folder, model="llama3-8b", only={"window_size": "128"})
    with pytest.raises(InputError, match=r"version:.*'0.24.0'.*'9'"):
        fit(folder, model="llama3-8b", only={"version": "9"})


def test_float16_stands_in_where_there_is_no_bfloat16(tmp_path: Path) -> None:
    frames = aiconfigurator()
    for kind, frame in frames.items():
        column = "gemm_dtype" if kind == "gemm" else "attn_dtype"
        frames[kind] = frame.assign(**{column: "float16"})
    assert fit(put(tmp_path, frames), model="llama3-8b").cost_model["decode_kv"] > 0


# The device.


def splitwise(folder: Path, device: str) -> Path:
    """Write Splitwise's table as of one device."""
    folder.mkdir(exist_ok=True)
    frame = splitwise_frame().assign(hardware=device)
    frame.to_csv(folder / "perf_model.csv", index=False)
    return folder


def vidur(folder: Path, **columns: Any) -> Path:
    """Write Vidur's two tables with more columns, and return their folder, llama2-7b."""
    inside = folder / "llama2-7b"
    inside.mkdir(parents=True)
    dense_frame().assign(**columns).to_csv(inside / "mlp.csv", index=False)
    attention_frame().assign(**columns).to_csv(inside / "attention.csv", index=False)
    return inside


def steps(folder: Path, device: str) -> Path:
    """Write a profile of whole batches, measured on a device."""
    write_steps(folder, shapes(512, 16, 1024))
    (folder / "device.json").write_text(json.dumps({"device": device}))
    return folder


def simulator(folder: Path, device: str) -> Path:
    """Write a profile of LLMServingSim of Llama 3 8B on a device."""
    write_profile(folder)
    (folder / "meta.yaml").write_text(f"gpu: {device}\nmodel: meta-llama/Llama-3-8B\n")
    return folder


# By format: what writes a profile of a device, and the options to read it with.
SOURCES: dict[str, tuple[Callable[[Path, str], Path], dict[str, Any]]] = {
    "aiconfigurator": (lambda p, d: put(p, aiconfigurator(d)), {"model": "llama3-8b"}),
    "splitwise": (splitwise, {}),
    "vidur": (lambda p, d: vidur(p, device=d), {}),
    "steps": (steps, {}),
    "llmservingsim": (simulator, {}),
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_device_is_the_file_s(tmp_path: Path, source: str) -> None:
    make, options = SOURCES[source]
    folder = make(tmp_path / "p", "NVIDIA H200")
    found = read_profile(folder, **options)
    assert found.hardware.name == "h200"
    assert read_profile(folder, hardware="H200-SXM5-141GB", **options).hardware.name == "h200"
    with pytest.raises(InputError, match=r"'NVIDIA H200'.*'a100-80gb'"):
        read_profile(folder, hardware="a100-80gb", **options)


@pytest.mark.parametrize("source", SOURCES)
def test_a_device_that_is_not_known_is_never_taken_for_another(tmp_path: Path, source: str) -> None:
    make, options = SOURCES[source]
    folder = make(tmp_path / "p", "Tensor Machine 9")
    with pytest.raises(InputError, match="'Tensor Machine 9'") as caught:
        read_profile(folder, **options)
    assert str(caught.value).count("\n") == 0
    # So fast that no measured time is too short for it.
    own = "name=machine,memory_gb=48,bandwidth_gb_s=9000,bf16_tflops=9000"
    profile = read_profile(folder, hardware=own, **options)
    assert (profile.hardware.name, profile.hardware.memory_gib) == ("machine", 48)


def test_of_several_devices_in_a_file_one_is_chosen_or_the_default_is_told(tmp_path: Path) -> None:
    both = [splitwise_frame().assign(hardware=name) for name in ("h100-80gb", "h200")]
    pd.concat(both).to_csv(tmp_path / "perf_model.csv", index=False)
    with pytest.raises(InputError, match=r"'h100-80gb'.*'h200'.*--gpu"):
        fit(tmp_path)
    found = fit(tmp_path, hardware="h200")
    # `splitwise_frame` has 36 rows: 6 numbers of requests by 6 prompts.
    assert "perf_model.csv: 36 of 72 rows are used; left out are 36 with hardware h100-80gb" in (
        found.profile.notes
    )
    # A capped H100 is no H100.
    capped = [splitwise_frame().assign(hardware=name) for name in ("a100-80gb", "h100-80gb-pcap")]
    pd.concat(capped).to_csv(tmp_path / "perf_model.csv", index=False)
    assert fit(tmp_path).profile.hardware.name == "a100-80gb"
    with pytest.raises(InputError, match="h100-80gb-pcap"):
        fit(tmp_path, hardware="h100-80gb")


@pytest.mark.parametrize(
    ("asked", "named", "own"),
    [
        ("a100", "NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("h100", "NVIDIA H100 NVL", "h100-nvl"),
        ("h100", "NVIDIA H100", "h100-80gb"),
    ],
)
def test_a_name_of_several_devices_is_the_one_of_the_file(
    tmp_path: Path, asked: str, named: str, own: str
) -> None:
    # Four times as long as those of an H100, so that a slower device can have them, too.
    slow = {k: f.assign(latency=4 * f["latency"]) for k, f in aiconfigurator(named).items()}
    folder = put(tmp_path, slow)
    assert read_profile(folder, model="llama3-8b", hardware=asked).hardware.name == own
    with pytest.raises(InputError, match=r"device:.*'; expected '"):
        read_profile(folder, model="llama3-8b", hardware="V100")
    with pytest.raises(InputError, match="'a100'"):
        read_profile(vidur(tmp_path / "v"), hardware="a100")


def test_folders_name_the_device_where_no_file_does(tmp_path: Path) -> None:
    """A folder h100 is believed, but not over what is asked for; without any there is a default."""
    found = read_profile(vidur(tmp_path / "h100"))
    assert found.hardware.name == "h100-80gb"
    assert "the device is h100-80gb, as the folder h100 says" in found.notes
    found = read_profile(tmp_path / "h100", model="llama2-7b", hardware="a100-80gb")
    assert "the folder h100 names another device" in found.notes
    found = read_profile(vidur(tmp_path / "mine"))
    assert "no file names the device, which is taken to be a100-80gb" in found.notes


# The model, the degree, the engine.


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"n_embd": 8192}, "n_embd: found 8192; expected 4096"),
        ({"n_kv_head": 8}, "n_kv_head: found 8; expected 32"),
        ({"use_gated_mlp": False}, "use_gated_mlp: found False; expected True"),
        ({"model": "Llama-2-70b-hf"}, "model: found 'Llama-2-70b-hf'; expected 'llama2-7b'"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype: found 'fp8_e4m3'"),
        ({"is_moe": True}, "is_moe: found True; expected dense layers"),
        ({"sliding_window": 4096}, "sliding_window: found 4096; expected 0"),
        # However a column is written.
        ({"GPU_name": "Tensor Machine 9"}, "GPU_name: 'Tensor Machine 9' is unknown"),
        ({"Model Path": "/m/Llama-2-70b-hf"}, "Model Path: found '/m/Llama-2-70b-hf'; expected"),
        ({"TP": 2}, "TP: found 2; expected 1"),
        ({"tensorParallelSize": 2}, "tensorParallelSize: found 2; expected 1"),
        ({"kvCacheDtype": "fp8"}, "kvCacheDtype: found 'fp8'"),
        ({"quant_method": "awq"}, "quant_method: found 'awq'"),
        ({"window_left": 127}, "window_left: found 127; expected 0"),
        ({"n_routed_experts": 8}, "n_routed_experts: found 8; expected dense layers"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: found 2; expected 1"),
        ({"time_unit": "us"}, "time_unit: found 'us'; expected ms"),
    ],
)
def test_a_profile_of_another_model_is_refused(tmp_path: Path, columns: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        fit(vidur(tmp_path, **columns))


def test_columns_that_tell_nothing_else_are_no_hindrance(tmp_path: Path) -> None:
    # The number of a GPU in its machine names none, and what is switched off is not there.
    plain = {"gpu": 0, "device_type": "cuda", "quantization": "None", "kv_dtype": "auto"}
    plain |= {"sliding_window": False, "is_moe": "no", "tp": 1.0, "pp": 1, "unit": "ms"}
    found = read_profile(vidur(tmp_path, **plain))
    assert found.hardware.name == "a100-80gb"
    assert not any("left out" in note for note in found.notes)


def test_the_degree_is_the_file_s_or_must_agree(tmp_path: Path) -> None:
    splitwise_frame().to_csv(tmp_path / "perf_model.csv", index=False)
    assert fit(tmp_path).profile.tensor_parallel == 2  # its only one
    with pytest.raises(InputError, match="tensor_parallel: found 2; expected 4"):
        fit(tmp_path, tensor_parallel=4)
    both = [splitwise_frame().assign(tensor_parallel=degree) for degree in (2, 4)]
    pd.concat(both).to_csv(tmp_path / "perf_model.csv", index=False)
    with pytest.raises(InputError, match=r"tensor_parallel.*2.*4.*--tensor-parallel"):
        fit(tmp_path)
    both[0].assign(tensor_parallel=0).to_csv(tmp_path / "perf_model.csv", index=False)
    with pytest.raises(InputError, match="tensor_parallel: found 0; expected 1"):
        fit(tmp_path)


def test_rows_of_two_engines_are_one_profile_only_when_chosen(tmp_path: Path) -> None:
    """Matrix products have rows of version 0.19.0 beside those of 0.24.0."""
    frames = with_others(aiconfigurator(), "gemm", version="0.19.0")
    folder = put(tmp_path, frames)
    error = one_line_error(invoke("fit", folder, "--model", "llama3-8b"))
    assert "version: found '0.19.0', '0.24.0'; expected one of them, as in --only version=" in error
    found = fit(folder, model="llama3-8b", only={"version": "0.24.0"})
    assert found.cost_model["base"] > 0
    with pytest.raises(InputError, match=r"only:.*column.*'flavour'"):
        fit(folder, model="llama3-8b", only={"version": "0.24.0", "flavour": "1"})


def test_unknown_columns_of_few_values_are_reported(tmp_path: Path) -> None:
    frames = aiconfigurator()
    frame = frames["gemm"]
    frames["gemm"] = frame.assign(clock=["boost", "base"] * (len(frame) // 2))
    notes = fit(put(tmp_path, frames), model="llama3-8b").profile.notes
    assert any("clock is base, boost, and rows of all of them are used" in note for note in notes)
    assert not any("latency" in note for note in notes)


def test_a_model_of_experts_is_refused_with_the_reason(tmp_path: Path) -> None:
    config = tmp_path / "moe" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"num_experts": 64}))
    with pytest.raises(InputError, match=r"num_experts.*64"):
        fit(vidur(tmp_path / "v"), model=str(config))
    folder = simulator(tmp_path / "p", "RTX 4090")
    (folder / "meta.yaml").write_text("model: Qwen/Qwen3-30B-A3B\n")
    with pytest.raises(InputError, match=r"meta\.yaml.*128"):
        fit(folder)
    # Times of whole batches are right for any model; only its KV capacity is not derived.
    batches = steps(tmp_path / "s", "H200")
    known = json.loads((batches / "config.json").read_text())
    assert fit(batches).cost_model.kv_capacity_tokens is not None
    (batches / "config.json").write_text(json.dumps({**known, "num_experts": 64}))
    found = fit(batches)
    assert found.cost_model.kv_capacity_tokens is None
    assert any("num_experts: found 64" in note for note in found.profile.notes)


def test_experts_are_not_taken_for_dense_layers(tmp_path: Path) -> None:
    folder = write_profile(tmp_path / "p")
    frame = pd.read_csv(folder / "dense.csv")
    expert = frame.assign(layer=frame["layer"].replace("gate_up_proj", "moe_experts"))
    expert.to_csv(folder / "dense.csv", index=False)
    with pytest.raises(InputError, match=r"layer:.*moe_experts"):
        fit(folder)
    frame[frame["layer"] != "gate_up_proj"].to_csv(folder / "dense.csv", index=False)
    with pytest.raises(InputError, match=r"gate_up_proj.*down_proj"):
        fit(folder)
    (folder / "moe.csv").write_text("ep,tokens,activated_experts,time_us\n1,1,8,50\n")
    with pytest.raises(InputError, match=r"experts:.*8.*0"):
        fit(folder)


# Where aiconfigurator's tables lie.


@pytest.mark.parametrize(
    "place",
    [
        "{family}/vllm/0.24.0/{kind}_perf.csv",
        "vllm/0.24.0/{kind}_perf.txt",
        "{family}/{kind}_perf.csv",
        "vllm/0.24.0/{family}/x_{kind}_perf.csv",
    ],
)
def test_tables_are_found_in_the_folders_of_a_device(tmp_path: Path, place: str) -> None:
    frames = aiconfigurator()
    folder = put(tmp_path / "h100_sxm", frames, place)
    # Tables of experts beside them are something else.
    frames["gemm"].assign(latency=1e-9).to_csv(folder / "moe_gemm_perf.csv", index=False)
    # The coefficient is that of `aiconfigurator`.
    assert fit(folder, model="llama3-8b").cost_model["decode_kv"] == pytest.approx(4e-6, rel=1e-3)


def test_tables_that_are_missing_are_named_with_their_place(tmp_path: Path) -> None:
    # Matrix products are of one version and attention of another, so neither folder is complete.
    frames = aiconfigurator()
    gemm = {"gemm": frames.pop("gemm")}
    put(tmp_path, gemm, "{family}/vllm/0.24.0/{kind}_perf.csv")
    put(tmp_path, frames, "{family}/vllm/0.22.0/{kind}_perf.csv")
    error = one_line_error(invoke("fit", tmp_path, "--model", "llama3-8b"))
    assert "vllm/0.24.0 without generation_attention, context_attention" in error
    assert "vllm/0.22.0 without gemm" in error
    alone = tmp_path / "gemm"
    assert "found no attention of decodes" in one_line_error(
        invoke("fit", alone, "--model", "llama3-8b")
    )
    data = answer("fit", alone, "--model", "llama3-8b", "--partial")
    assert data["cost_model"]["name"] == "llama3-8b-tp1-h100-80gb-fit-without-attention"
    assert data["missing"] == ["attention of decodes", "attention of prefills"]


def test_of_several_versions_one_is_chosen(tmp_path: Path) -> None:
    """Whole tables of two versions lie in folders of their own."""
    for version in ("0.22.0", "0.24.0"):
        frames = {k: f.assign(version=version) for k, f in aiconfigurator().items()}
        put(tmp_path, frames, "{family}/vllm/" + version + "/{kind}_perf.csv")
    error = one_line_error(invoke("fit", tmp_path, "--model", "llama3-8b"))
    assert "found tables of vllm/0.22.0; vllm/0.24.0; expected gemm, generation_attention" in error
    done = invoke("fit", tmp_path, "--model", "llama3-8b", "--only", "version=0.22.0")
    assert done.exit_code == 0
    assert "fit: version 0.22.0" in done.stderr


def test_of_two_tables_of_a_kind_none_is_taken(tmp_path: Path) -> None:
    frames = aiconfigurator()
    frames["gemm"].to_csv(put(tmp_path, frames) / "other_gemm_perf.csv", index=False)
    with pytest.raises(InputError, match=r"other_gemm_perf\.csv.*gemm_perf\.csv"):
        fit(tmp_path, model="llama3-8b")


def test_what_the_engine_of_the_simulator_s_profile_was_given_is_read(tmp_path: Path) -> None:
    folder = simulator(tmp_path / "p", "RTX 4090")
    meta = (folder / "meta.yaml").read_text()
    for line, words in (
        ("sliding_window: 4096", "sliding_window: found '4096'; expected 0"),
        ("variant: fp8", "variant: found 'fp8'; expected bfloat16"),
        ("engine_effective:\n  kv_cache_dtype: fp8_e5m2", "kv_cache_dtype: found 'fp8_e5m2'"),
        ("hf_overrides:\n  num_experts: 64", "num_experts: found '64'; expected dense layers"),
        ("hardware: H100", "hardware: found 'H100'; expected 'rtx4090'"),
    ):
        (folder / "meta.yaml").write_text(f"{meta}{line}\n")
        with pytest.raises(InputError, match=words):
            fit(folder)


def test_fields_of_the_simulator_s_profile_that_are_null_say_nothing(tmp_path: Path) -> None:
    folder = simulator(tmp_path / "p", "RTX 4090")
    null = "engine_effective:\n  quantization: null\n  num_experts: ~\n  sliding_window: null\n"
    (folder / "meta.yaml").write_text((folder / "meta.yaml").read_text() + null)
    assert fit(folder).profile.hardware.name == "rtx4090"


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    put(tmp_path, aiconfigurator())
    (tmp_path / "gemm_perf.csv").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
    )
    with pytest.raises(InputError, match="found a pointer of Git LFS"):
        fit(tmp_path, model="llama3-8b")


def test_the_command_says_what_it_took_the_profile_for(tmp_path: Path) -> None:
    done = invoke("fit", put(tmp_path, aiconfigurator()), "--model", "llama3-8b")
    lines = done.stderr.splitlines()
    assert lines[0] == "fit: taken as llama3-8b on h100-80gb, tensor parallel 1, 16-bit"
    assert f"fit: gemm_perf.csv: device: found '{H100}'; the device is h100-80gb" in lines
    # 8 numbers of tokens times 5 x 5 sizes of matrices.
    assert "fit: gemm_perf.csv: 200 of 200 rows are used" in lines
