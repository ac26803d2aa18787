"""Profiles of whole batches: what is measured, and the cost model that it gives."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from command_line import invoke, one_line_error

from optsched.costs.fit import fit
from optsched.files.profiling import COLUMNS, Shape, profile, shapes
from optsched.problem.errors import InputError

CONFIG = {
    "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4,
    "intermediate_size": 512, "vocab_size": 1000,
}  # fmt: skip
TRUTH = {"token": 0.02, "base": 3.0, "decode_kv": 1e-4, "decode_request": 0.05,
         "prefill_square": 1e-5, "prefill_cross": 2e-5, "prefill_base": 1.0}  # fmt: skip


def batch_ms(s: Shape) -> float:
    ms = TRUTH["token"] * (s.chunk + s.decodes) + TRUTH["base"]
    ms += TRUTH["decode_kv"] * s.decodes * s.kv + TRUTH["decode_request"] * s.decodes
    ms += TRUTH["prefill_square"] * s.chunk**2 + TRUTH["prefill_cross"] * s.chunk * s.cached
    return ms + TRUTH["prefill_base"] * (s.chunk > 0)


def write(folder: Path, wanted: list[Shape]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    with (folder / "steps.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["shape", *COLUMNS])
        for s in wanted:
            name = f"{s.chunk}/{s.cached}+{s.decodes}x{s.kv}"
            writer.writerow([name, s.chunk, s.cached, s.decodes, s.kv, 1000 * batch_ms(s), 1.0, 5])
    return folder


def test_the_batches_of_a_profile_fit_into_the_engine() -> None:
    found = shapes(512, 16, 2048)
    assert len(found) == len(set(found))
    for s in found:
        assert s.chunk + s.decodes <= 512
        assert s.decodes <= 16
        assert max(s.cached + s.chunk, s.kv) < 2048
        assert s.cached % 512 == 0  # a prompt is split where the batch is full
    # All three kinds, and a chunk over cached KV.
    assert Shape(512, 0, 0, 0) in found
    assert Shape(0, 0, 16, 512) in found
    assert Shape(16, 1024, 0, 0) in found
    assert any(s.chunk and s.decodes for s in found)


def test_a_profile_gives_the_cost_model_of_its_batches(tmp_path: Path) -> None:
    found = fit(write(tmp_path / "small", shapes(2048, 64, 4096)), hardware="cpu")
    cost = found.cost_model
    assert (cost.name, cost.layers) == ("small-tp1-cpu-fit", 1)
    assert cost.kv_capacity_tokens is None
    for name, value in TRUTH.items():
        assert cost[name] == pytest.approx(value, rel=1e-3), name
    assert {row["operator"] for row in found.rows()} == {"prefill", "decode", "both"}
    assert all(row["mean_error"] < 1e-4 for row in found.rows())
    assert cost.valid["max_decode_requests"] == 64


def test_noise_beyond_the_target_is_reported_and_no_range_is_sought_without_end(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path / "noisy", shapes(512, 16, 1024))
    lines = (folder / "steps.csv").read_text(encoding="utf-8").splitlines()
    for k, line in enumerate(lines[1:], 1):
        parts = line.split(",")
        parts[5] = str(
            float(parts[5]) * (10 if k % 3 else 1)
        )  # two of three take ten times as long
        lines[k] = ",".join(parts)
    (folder / "steps.csv").write_text("\n".join(lines), encoding="utf-8")
    assert not all(row["reached"] for row in fit(folder, hardware="cpu").rows())


def test_what_is_measured_already_is_not_measured_again(tmp_path: Path) -> None:
    # With every batch there, no engine is started: the model's folder need not even exist.
    folder = write(tmp_path / "done", shapes(64, 4, 256))
    count = profile("nowhere", folder, max_tokens=64, max_requests=4, max_kv=256)
    assert count == len(shapes(64, 4, 256))


def test_bad_profiles_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "p", shapes(64, 4, 256))
    with pytest.raises(InputError, match=r"repeats: found 0; expected an integer >= 1"):
        profile("nowhere", folder, repeats=0)
    with pytest.raises(InputError, match=r"nowhere/config\.json: expected a model's config"):
        profile("nowhere", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match=r"config\.json: found no 'num_attention_heads'"):
        fit(folder, hardware="cpu")
    (folder / "steps.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"steps\.csv: shape: found another table"):
        profile("nowhere", folder)
    error = one_line_error(invoke("profile", "sglang", "m", "-o", tmp_path / "q"))
    assert "found 'sglang'; expected vllm" in error


def test_times_in_other_units_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "p", shapes(64, 4, 256))
    text = (folder / "steps.csv").read_text(encoding="utf-8").replace("time_us", "time_s")
    (folder / "steps.csv").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="no column 'time_us'"):
        fit(folder, hardware="cpu")
