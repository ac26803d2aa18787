"""Profiles of whole batches: what is measured, and the cost model that it gives."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import invoke, one_line_error

from optsched.costs.cost import BatchCost
from optsched.costs.fit import errors_of, fit
from optsched.engines import profiling
from optsched.engines.profiling import COLUMNS, Shape, profile, shapes
from optsched.problem.errors import InputError

# A model of four small layers.
CONFIG = {
    "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4,
    "intermediate_size": 512, "vocab_size": 1000,
}  # fmt: skip
# The milliseconds of batches in the profiles that are written here: a fit must find them again.
TRUTH = {"token": 0.02, "base": 3.0, "decode_kv": 1e-4, "decode_request": 0.05,
         "prefill_square": 1e-5, "prefill_cross": 2e-5, "prefill_base": 1.0}  # fmt: skip


def batch_ms(s: Shape) -> float:
    """Return what a batch takes by `TRUTH`."""
    ms = TRUTH["token"] * (s.prefills * s.chunk + s.decodes) + TRUTH["base"]
    ms += TRUTH["decode_kv"] * s.decodes * s.kv + TRUTH["decode_request"] * s.decodes
    ms += s.prefills * TRUTH["prefill_square"] * s.chunk**2
    ms += s.prefills * TRUTH["prefill_cross"] * s.chunk * s.cached
    return ms + TRUTH["prefill_base"] * (s.chunk > 0)


def write(folder: Path, wanted: list[Shape]) -> Path:
    """Write a profile as it is measured, with the exact times of `batch_ms` for each shape."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (folder / "settings.json").write_text("{}", encoding="utf-8")
    with (folder / "steps.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["shape", *COLUMNS])
        for s in wanted:
            name, p = f"{s.prefills}*{s.chunk}/{s.cached}+{s.decodes}x{s.kv}", bool(s.chunk)
            row = [p * s.prefills, s.chunk, s.cached, s.decodes, s.kv, 1000 * batch_ms(s), 1.0, 5]
            writer.writerow([name, *row])
    return folder


def test_the_batches_of_a_profile_fit_into_the_engine() -> None:
    """An engine of 512 tokens and 16 requests a batch, and 2,048 tokens of KV."""
    found = shapes(512, 16, 2048)
    assert len(found) == len(set(found))
    for s in found:
        assert s.prefills * s.chunk + s.decodes <= 512
        assert s.decodes + s.prefills * (s.chunk > 0) <= 16
        assert max(s.cached + s.chunk, s.kv) < 2048
        assert s.cached % 512 == 0  # a prompt is split where the batch is full
    # All three kinds, and a chunk over cached KV.
    assert Shape(512, 0, 0, 0) in found
    assert Shape(0, 0, 16, 512) in found
    assert Shape(16, 1024, 0, 0) in found
    assert any(s.chunk and s.decodes for s in found)
    assert any(s.prefills > 1 and s.decodes for s in found)


def test_a_profile_gives_the_cost_model_of_its_batches(tmp_path: Path) -> None:
    """`write` has exact times by `TRUTH`, which the fit must find again to a thousandth."""
    found = fit(write(tmp_path / "small", shapes(2048, 64, 4096)), hardware="cpu")
    cost = found.cost_model
    assert (cost.name, cost.layers) == ("small-tp1-cpu-fit", 1)
    assert cost.kv_capacity_tokens is None
    for name, value in TRUTH.items():
        assert cost[name] == pytest.approx(value, rel=1e-3), name
    assert {row["operator"] for row in found.rows()} == {"prefill", "decode", "both"}
    assert all(row["mean_error"] < 1e-4 for row in found.rows())
    assert cost.valid["max_decode_requests"] == 64  # as asked of `shapes`


@pytest.mark.parametrize("term", ["decode_base", "prefill_kv", "prefill_token", "prefill_request"])
def test_another_model_is_priced_with_terms_that_a_profile_cannot_tell(
    tmp_path: Path, term: str
) -> None:
    found = fit(write(tmp_path / "small", shapes(2048, 64, 4096)), hardware="cpu")
    assert term not in found.cost_model.coefficients
    # A base of 1e-9 ms a batch is next to nothing, and is all that the other phase costs.
    alone = BatchCost("alone", 1, {"base": "1e-9", term: "0.5"})
    bias = {row["operator"]: row["bias"] for row in errors_of(found, [alone])}
    phase = term.partition("_")[0]
    other = {"decode": "prefill", "prefill": "decode"}[phase]
    # It prices nothing else: predicted / measured - 1 is -1 without this phase, and more with it.
    assert bias[other] == pytest.approx(-1, abs=1e-8)
    assert bias[phase] > -0.999


def test_noise_beyond_the_target_is_reported_and_no_range_is_sought_without_end(
    tmp_path: Path,
) -> None:
    """Asserted is that the fit ends, and that not all of its rows are within the target."""
    folder = write(tmp_path / "noisy", shapes(512, 16, 1024))
    lines = (folder / "steps.csv").read_text(encoding="utf-8").splitlines()
    for k, line in enumerate(lines[1:], 1):
        parts = line.split(",")
        parts[6] = str(
            float(parts[6]) * (10 if k % 3 else 1)
        )  # two of three take ten times as long
        lines[k] = ",".join(parts)
    (folder / "steps.csv").write_text("\n".join(lines), encoding="utf-8")
    assert not all(row["reached"] for row in fit(folder, hardware="cpu").rows())


def test_what_is_measured_already_is_not_measured_again(tmp_path: Path) -> None:
    # With every batch there, no engine is started. The profile's own folder has the model's
    # configuration.
    folder = write(tmp_path / "done", shapes(64, 4, 256))
    found = profile(folder, folder, max_tokens=64, max_requests=4, max_kv=256)
    assert found.measured == found.wanted == len(shapes(64, 4, 256))


def test_bad_profiles_are_named(tmp_path: Path) -> None:
    """One folder, of which the configuration and then the table are spoiled in turn."""
    folder = write(tmp_path / "p", shapes(64, 4, 256))
    with pytest.raises(InputError, match=r"repeats:.*0.*1"):
        profile("nowhere", folder, repeats=0)
    with pytest.raises(InputError, match=r"config\.json.*file"):
        profile("nowhere", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match=r"config\.json.*'num_attention_heads'"):
        fit(folder, hardware="cpu")
    (folder / "steps.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"steps\.csv.*table"):
        profile(folder, folder)
    error = one_line_error(invoke("gpu", "profile", "sglang", "m", "-o", tmp_path / "q"))
    assert "found 'sglang'; expected vllm" in error


def test_a_profile_does_not_go_on_with_another_model_or_other_options(tmp_path: Path) -> None:
    """The profile is of four layers (`CONFIG`), and no option is named in it."""
    folder, model = write(tmp_path / "p", shapes(64, 4, 256)), tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 8}))
    words = r"config\.json: num_hidden_layers: found 8 for a profile of 4; expected the same model"
    with pytest.raises(InputError, match=words):
        profile(model, folder, max_tokens=64, max_requests=4, max_kv=256)
    (model / "config.json").write_text(json.dumps(CONFIG))
    words = r"settings\.json: dtype: found 'float32' for a profile of None; expected the same"
    with pytest.raises(InputError, match=words):
        profile(model, folder, max_tokens=64, options={"dtype": "float32"})


class Engine:
    """Runs batches as vLLM does: running requests first, and then prompts while tokens are left."""

    def __init__(self, max_num_batched_tokens: int, max_model_len: int, **_: object) -> None:
        self.left, self.longest = max_num_batched_tokens, max_model_len
        self.model_config = SimpleNamespace(max_model_len=max_model_len, get_vocab_size=lambda: 500)
        blocks = SimpleNamespace(num_gpu_blocks=None, block_size=16)
        self.vllm_config = SimpleNamespace(cache_config=blocks)
        self.requests: dict[str, list[Any]] = {}  # prompt left, prompt, output, tokens
        self.decodes: list[int] = []

    def add_request(
        self, name: str, prompt: dict[str, list[int]], exact: Any, priority: int
    ) -> None:
        tokens = len(prompt["prompt_token_ids"])
        assert tokens + exact.max_tokens <= self.longest
        self.requests[name] = [tokens, tokens, exact.max_tokens, []]

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.requests.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Any]:
        left, found = self.left, []
        self.decodes.append(sum(not r[0] for r in self.requests.values()))
        for name, request in list(self.requests.items()):
            c = min(request[0] or 1, left)
            left -= c
            request[0] = max(0, request[0] - c)
            if c and not request[0]:
                request[3].append(1)
                outputs = [SimpleNamespace(token_ids=list(request[3]))]
                found.append(SimpleNamespace(request_id=name, outputs=outputs))
            if len(request[3]) == request[2]:
                del self.requests[name]
        return found


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Return the engines that are started in place of vLLM's."""
    started: list[Engine] = []

    def start(folder: str, options: dict[str, Any]) -> SimpleNamespace:
        started.append(Engine(**options))
        return SimpleNamespace(llm_engine=started[-1])

    params = SimpleNamespace(SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", params)
    monkeypatch.setattr(profiling, "start", start)
    return started


def test_every_batch_has_the_decodes_that_its_label_says(tmp_path: Path, engines) -> None:
    # 16 prompts of 1,024 tokens take some 342 steps of 64 tokens, 16 of them for decodes. The first
    # request decodes in each of the others, and has only 76 tokens left of 1,100: it would end. 8
    # prompts of 512 take 74 steps.
    model, out = write(tmp_path / "model", []), tmp_path / "p"
    found = profile(model, out, max_tokens=64, max_requests=16, max_kv=1100, repeats=1)
    assert found.measured == found.wanted
    with (out / "steps.csv").open(newline="") as file:
        rows = [(int(row["n_decode"]), int(row["kv_decode"])) for row in csv.DictReader(file)]
    assert len(rows) == found.wanted
    assert any(n == 8 and kv > 512 for n, kv in rows)
    assert all(kv < 1024 for n, kv in rows if n == 16)


def test_the_profile_names_its_device_and_goes_on_with_no_other(
    tmp_path: Path, engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(folder: str, options: dict[str, Any]) -> SimpleNamespace:
        engine = Engine(**options)
        engine.vllm_config.device_config = SimpleNamespace(device_type=kind)
        return SimpleNamespace(llm_engine=engine)

    gpu = SimpleNamespace(cuda=SimpleNamespace(get_device_name=lambda: "NVIDIA H200"))
    monkeypatch.setitem(sys.modules, "torch", gpu)
    monkeypatch.setattr(profiling, "start", start)
    kind, model, out = "cuda", write(tmp_path / "model", []), tmp_path / "p"
    profile(model, out, max_tokens=512, max_requests=8, max_kv=1024, repeats=1)
    assert fit(out).profile.hardware.name == "h200"
    # Without its last five batches the profile has to go on, and then finds itself on a CPU.
    lines = (out / "steps.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    (out / "steps.csv").write_text("".join(lines[:-5]), encoding="utf-8")
    kind = "cpu"
    with pytest.raises(InputError, match=r"device\.json.*device.*'cpu'"):
        profile(model, out, max_tokens=512, max_requests=8, max_kv=1024, repeats=1)


def test_a_row_that_was_cut_off_is_measured_again(tmp_path: Path, engines) -> None:
    wanted = shapes(64, 4, 256)
    folder = write(tmp_path / "p", wanted)
    text = (folder / "steps.csv").read_bytes()
    # Within the last row, twice, and within the header, so that no row is left.
    for cut in (5, 20, len(text) - 10):
        (folder / "steps.csv").write_bytes(text[:-cut])
        found = profile(folder, folder, max_tokens=64, max_requests=4, max_kv=256)
        assert found.measured == found.wanted
        with (folder / "steps.csv").open(newline="") as file:
            times = [float(row["time_us"]) for row in csv.DictReader(file)]
        assert len(times) == len(wanted)
        assert min(times) > 0


def test_the_command_says_when_there_is_too_little_for_a_fit(tmp_path: Path, engines) -> None:
    model = write(tmp_path / "model", [])
    words = [
        "gpu",
        "profile",
        "vllm",
        model,
        "-o",
        tmp_path / "p",
        "--max-tokens",
        "64",
        "--max-kv",
    ]
    # Of one request and 64 tokens of KV there are too few batches for a fit; of 8 and 1,024 enough.
    done = invoke(*words, "64", "--max-requests", "1")
    assert done.exit_code == 0
    assert (
        "batches measured; too few for `optsched gpu fit`: profile of batch: found" in done.stdout
    )
    done = invoke(*words, "1024", "--max-requests", "8")
    assert f"`optsched gpu fit {tmp_path / 'p'}` makes a cost model" in done.stdout


def test_times_in_other_units_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "p", shapes(64, 4, 256))
    text = (folder / "steps.csv").read_text(encoding="utf-8").replace("time_us", "time_s")
    (folder / "steps.csv").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="no column 'time_us'"):
        fit(folder, hardware="cpu")
