"""`optsched diagnose`: runs whose best change is known, made by the twin with noise."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import answer, invoke, one_line_error, run
from known_servers import Server, corner as corner_step

import optsched
from optsched import Limits, Problem
from optsched.analysis.changes import Change, first_change
from optsched.analysis.diagnose import diagnose
from optsched.analysis.twin import Twin, scale_cost
from optsched.costs.batch import EMPTY, add_decode, add_prefill, batch_time
from optsched.costs.cost import BatchCost, roofline
from optsched.costs.load import load_cost_model
from optsched.costs.table import CostTable, Grid
from optsched.files.measured import Measured, read_measured, write_measured
from optsched.problem.budget import Budget
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance

# A first token within 1 s, and 50 ms a token after it.
SLOS = {"slo_ttft": 1.0, "slo_tpot": 0.05}


ROOFLINE = roofline("llama3-8b", "h100-80gb")


def served(
    instance: Instance, seqs: int, tokens: int, noise: float = 0.05, slow: BatchCost | None = None
) -> Measured:
    """Return the times of the twin on a machine 1.5 and 1.3 times as slow as the roofline."""
    slow = slow or scale_cost(ROOFLINE, (1.5, 1.3, 1.3))
    spec = f"vllm-v1:max_num_seqs={seqs},max_num_batched_tokens={tokens}"
    judged = optsched.run(optsched.Problem(instance, slow), spec).evaluation
    rng = np.random.default_rng(5)
    factor = rng.lognormal(0, noise, instance.n)
    return Measured(judged.latency * factor, judged.ttft * factor)


def requests(n: int, rate: float, prompt: float, output: float, kv: int = 400_000) -> Instance:
    """Return Poisson arrivals with lognormal prompts and outputs of these medians."""
    rng = np.random.default_rng(3)
    sizes = [
        np.clip(rng.lognormal(np.log(m), 0.6, n), 8, 4000).astype(int) for m in (prompt, output)
    ]
    return Instance(np.cumsum(rng.exponential(1 / rate, n)), *sizes, kv, "second")


def few_seats() -> tuple[Instance, int, int, str]:
    """Return an instance, 8 seats, which are too few, tokens a batch, and what to change."""
    return requests(70, 20.0, 200, 150), 8, 2048, "max_num_seqs"


def little_memory() -> tuple[Instance, int, int, str]:
    """Return the same where 9,000 tokens of KV are too few."""
    return requests(150, 10.0, 600, 200, kv=9000), 256, 2048, "kv_capacity"


def blocking_prompts() -> tuple[Instance, int, int, str]:
    """Return the same where long prompts stop decodes, so that fewer tokens a batch help."""
    base = requests(80, 4.0, 100, 60)
    prompt = base.prompt_tokens.copy()
    prompt[::4] = 12_000  # one step of all of it stops every decode for half a second
    columns = base.arrival, prompt, base.output_tokens, base.kv_capacity, "second"
    return Instance(*columns), 256, 16_384, "token"


@pytest.mark.parametrize(
    "made",
    [
        blocking_prompts,
        *(pytest.param(m, marks=pytest.mark.whole) for m in (few_seats, little_memory)),
    ],
)
def test_the_known_best_change_is_the_first(made: Any) -> None:
    instance, seqs, tokens, expected = made()
    measured = served(instance, seqs, tokens)
    # Prompts of 12,000 tokens stop decodes, which shows in gaps.
    slos = SLOS if expected != "token" else {"slo_ttft": 2.0, "slo_gap": 0.1}
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    found = diagnose(Problem(instance, ROOFLINE, **slos), measured=measured, **limits)
    assert found.error is not None
    assert found.error < 0.1  # the noise is 5 %
    # Settings come first, and memory stands beside them, as what is beyond settings.
    first = found.beyond if expected == "kv_capacity" else found.first
    assert first is not None
    assert expected in first.what
    assert first.low <= first.gain <= first.high
    assert found.gap is not None
    assert found.gap >= 0


def tables() -> BatchCost:
    """Return tables near the roofline: flat up to 200 tokens, and decodes by their KV."""
    dense = Grid({"tokens": [1, 200, 4000]}, [0.14, 0.16, 1.8])
    decodes = Grid({"decode_requests": [0, 256], "decode_kv": [0, 4000]}, [0, 0, 0.04, 1.4])
    table = CostTable([dense, decodes], [{"base": "0.1", "token": "0.0003"}])
    return BatchCost("tables", 32, {"base": "0.14", "token": "0.0004"}, table=table)


def test_a_tabulated_model_is_calibrated_by_a_factor_and_an_offset() -> None:
    """The twin repeats the run and says what to change; without measured times nothing is
    calibrated."""
    instance, seqs, tokens, _ = few_seats()
    measured = served(instance, seqs, tokens, slow=scale_cost(tables(), (1.6, 1.2, 1.2)))
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    found = diagnose(Problem(instance, tables(), **SLOS), measured=measured, **limits)
    assert found.error is not None
    assert found.error < 0.05  # less than the noise of 5 %
    assert found.cost_model.table is not None
    assert found.first is not None
    assert found.first.what.startswith("max_num_seqs")

    alone = diagnose(
        Problem(instance, tables(), **SLOS), **limits
    )  # a profile, and no measured times
    assert alone.error is None
    assert alone.cost_model is not found.cost_model


@pytest.mark.parametrize("factors", [(1.6, 1.2), (0.7, 1.5), (2.0, 0.3)])
def test_scaled_tables_keep_their_minorants_below_every_time(factors: tuple[float, float]) -> None:
    plain, slower = tables(), scale_cost(tables(), (*factors, 1.0))
    rng = np.random.default_rng(1)
    for _ in range(300):
        sums = EMPTY
        for _ in range(rng.integers(0, 40)):
            sums = add_decode(sums, int(rng.integers(1, 9000)))
        for _ in range(rng.integers(sums.decode_requests == 0, 3)):
            sums = add_prefill(sums, int(rng.integers(1, 5000)), 0)

        time, before = batch_time(slower.array, sums), batch_time(plain.array, sums)
        lower, upper = sorted(factors)
        assert lower * before <= time * (1 + 1e-9)
        assert time <= upper * before * (1 + 1e-9)
        for one in slower.minorants:
            assert batch_time(one.array, sums) <= time * (1 + 1e-9)

    # One token takes the shortest batch's time, and only the offset is in it.
    one = add_prefill(EMPTY, 1, 0)
    ratio = batch_time(slower.array, one) / batch_time(plain.array, one)
    assert ratio == pytest.approx(factors[1])


@pytest.mark.parametrize(
    "factors", [(3.0, 1.0), pytest.param((1.0, 12.0), marks=pytest.mark.whole)]
)
def test_the_interval_holds_the_true_gain_beyond_the_seats_of_the_run(
    factors: tuple[float, float],
) -> None:
    # A run whose batches are all alike does not show which part of them is slow, and that decides
    # what more seats bring: nearly half of the latency on one of these machines, and on the other
    # nothing.
    instance = requests(80, 30.0, 1500, 150)
    machine = scale_cost(ROOFLINE, (1.2, *factors))
    measured = served(instance, 16, 2048, 0.01, machine)
    found = diagnose(Problem(instance, ROOFLINE), measured=measured, max_num_seqs=16)
    changes = {one.what: one for one in found.changes}

    def latency(seqs: int) -> float:
        schedule = optsched.run(
            optsched.Problem(instance, machine), f"vllm-v1:max_num_seqs={seqs}"
        ).schedule
        return float(
            optsched.evaluate(optsched.Problem(instance, machine), schedule).metrics["mean_latency"]
            or 0
        )

    for seqs in (20, 24, 32, 64):
        one, true = changes[f"max_num_seqs={seqs}"], 1 - latency(seqs) / latency(16)
        # The run has noise of 1 %, and each end may be off by twice that. The interval is wide, as
        # the run does not tell the machines apart.
        assert one.low - 0.02 <= true <= one.high + 0.02
        assert one.high - one.low > 0.08
        assert one.extrapolated

    assert not changes["max_num_seqs=8"].extrapolated
    assert found.measured is not None
    assert found.measured["mean_latency"] == pytest.approx(float(measured.latency.mean()))


def change(what: str, kind: str, gain: float, low: float) -> Change:
    """Return a change that gains ``gain`` under the first cost model, and ``low`` or more."""
    return Change(what, kind, gain, low, gain, 1.0, False, {"mean_latency": 1.0})


def test_first_is_the_cheapest_of_what_gains_nearly_as_much_under_every_cost_model() -> None:
    bold, sure = change("bold", "settings", 0.6, -0.1), change("sure", "settings", 0.4, 0.35)
    memory = change("memory", "memory", 0.42, 0.4)
    second, eight = change("2", "workers", 0.5, 0.45), change("8", "further workers", 1.0, 1.0)
    assert first_change([bold, sure]) is sure
    assert first_change([bold]) is bold  # nothing is certain, so the largest gain counts
    assert (
        first_change([sure, memory, eight]) is sure
    )  # settings cost nothing, and eight come later
    assert (
        first_change([bold, memory, second]) is memory
    )  # 0.4 is over 80 % of 0.45, and bold is not sure
    assert first_change([bold, change("more", "memory", 0.3, 0.3), second]) is second  # 0.3 < 0.36
    # Less than 0.05 is worth nothing, and eight servers are never the first.
    assert first_change([change("none", "settings", 0.04, 0.0), eight]) is None


def test_a_run_that_the_twin_does_not_repeat_is_refused() -> None:
    instance, seqs, tokens, _ = few_seats()
    measured = served(instance, seqs, tokens)
    rng = np.random.default_rng(0)
    # Latencies of other requests, times a noise of e^1.5 one way or the other.
    strange = Measured(rng.permutation(measured.latency) * rng.lognormal(0, 1.5, instance.n))
    with pytest.raises(InputError, match="expected at most 30%"):
        diagnose(Problem(instance, ROOFLINE, **SLOS), measured=strange)


def test_the_command_goes_from_a_benchmark_to_a_verdict(tmp_path: Path) -> None:
    """The verdict in words and in JSON; curves, plots and a page of it; the instance alone,
    without times, and a file of no format."""
    instance, seqs, tokens, _ = few_seats()
    measured = served(instance, seqs, tokens)
    assert measured.ttft is not None
    bench = {
        "input_lens": instance.prompt_tokens.tolist(),
        "output_lens": instance.output_tokens.tolist(),
        "start_times": (100 + instance.release_times).tolist(),
        "ttfts": measured.ttft.tolist(),
        "latencies": measured.latency.tolist(),
    }
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    words = ("diagnose", tmp_path / "bench.json", "--gpu", "h100-80gb", "--model",
             "meta-llama/Llama-3.1-8B", "--slo-ttft", "1s", "--slo-tpot", "50ms",
             "--max-num-seqs", seqs)  # fmt: skip
    text = run(*words, "--json", tmp_path / "found.json")
    assert "first: max_num_seqs=" in text
    assert "vllm serve ... --max-num-seqs" in text
    assert "repeats the run" in text
    data = json.loads((tmp_path / "found.json").read_text())
    assert data["first"]["what"].startswith("max_num_seqs")
    assert data["error"] < 0.1  # the noise is 5 %

    # Measured curves stand beside predicted ones, of the server as it is and as it should be.
    then = f"{data['first']['what']} (twin)"
    assert list(data["curves"]["ttft"]) == ["measured", "as it is (twin)", then]
    assert data["curves"]["latency"]["measured"][50] == pytest.approx(np.median(measured.latency))
    for kind in ("changes", "ttft"):
        run("plot", tmp_path / "found.json", "--kind", kind, "-o", tmp_path / f"{kind}.svg")
    assert "max_num_seqs=" in (tmp_path / "changes.svg").read_text()
    run("report", tmp_path / "found.json", "-o", tmp_path / "found.html")
    page = (tmp_path / "found.html").read_text()
    assert "What to change (found.json)" in page
    assert page.count("<svg") == 4  # changes, and curves of latency, TTFT and TPOT

    instance_file = tmp_path / "alone.json"
    optsched.write_instance(instance, instance_file)
    alone = run("diagnose", instance_file, *words[2:])
    assert "no measured times" in alone
    assert "no format" in run("diagnose", __file__, *words[2:], status=2)


WORDS = ("--gpu", "h100-80gb", "--model", "llama3-8b")


def test_a_twin_that_is_far_off_comes_with_a_warning_and_no_times_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A noise of 20 % is warned of, with its usual causes. Both answers name their settings and
    a command that runs as it stands, and a file of times alone is refused."""
    instance, seqs, tokens, _ = few_seats()
    limits = Limits(max_running=seqs, max_batch_tokens=tokens)
    own = replace(instance, kv_capacity=90_000, limits=limits)
    optsched.write_instance(own, tmp_path / "own.json")
    times = replace(served(instance, seqs, tokens, 0.2), instance_sha256=own.sha256)
    write_measured(times, tmp_path / "own.measured.json")
    monkeypatch.chdir(tmp_path)

    # The KV may be corrected here, and the seats are those of the instance but not in the way.
    with_times = (*WORDS, "--measured", "own.measured.json", "--kv-capacity", 400_000)
    text = run("diagnose", "own.json", *with_times, "--twin-out", "twin")
    assert text.startswith("warning: the twin is ")
    assert "usual causes are the KV capacity, the seats (max_num_seqs), and whether" in text
    assert "(given), max_num_seqs=8, max_num_batched_tokens=2048" in text
    assert "spf:max_running=8,max_batch_tokens=2048" in text
    assert "how far: the run has a mean latency of " in text
    policy = "vllm-v1:max_num_seqs=8,max_num_batched_tokens=2048"
    assert f"twin/instance.json twin/cost-model.toml --policy {policy} --objective mean" in text

    alone = run("diagnose", "own.json", *WORDS)
    assert alone.startswith("about: a server as fast as llama-3.1-8b-h100-torch, not yours")
    assert "--measured" in alone.splitlines()[0]
    assert "KV capacity 90000 tokens (of the instance), max_num_seqs=8" in alone
    assert "--policy vllm-v1:max_num_seqs=8" in alone

    (command,) = [line for line in alone.splitlines() if "optsched compare" in line]
    answered = command.partition("optsched ")[2].replace("DIR", "twin").split()
    assert "best known" in run(*answered, "--no-bound")
    error = run("diagnose", "own.measured.json", *WORDS, status=2)
    assert "found measured times; expected their instance, with `--measured" in error


@pytest.mark.parametrize("goal", ["mean_latency", "slo_attainment"])
def test_diagnose_compare_solve_and_bound_say_how_far_of_one_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goal: str
) -> None:
    # The run has 2,048 tokens a batch, which bind the best schedule, too.
    instance, seqs, tokens, _ = few_seats()
    monkeypatch.chdir(tmp_path)
    optsched.write_instance(instance, "load.json")
    times = replace(served(instance, seqs, tokens, 0.01), instance_sha256=instance.sha256)
    write_measured(times, "times.json")
    slos = ("--slo-ttft", "1s", "--slo-tpot", "50ms") if goal == "slo_attainment" else ()
    words = ("diagnose", "load.json", *WORDS, *slos, "--measured", "times.json", "--max-num-seqs",
             seqs, "--max-num-batched-tokens", tokens)  # fmt: skip
    found = answer(*words, "--twin-out", "twin")
    again = answer(*words)
    ends = ("objective_name", "served_value", "best_known", "best_origin", "bound")
    assert [found[name] for name in ends] == [again[name] for name in ends]
    assert found["objective_name"] == goal

    twin = optsched.read_instance("twin/instance.json")
    assert twin.limits == Limits(max_running=seqs, max_batch_tokens=tokens)
    one = ("twin/instance.json", "twin/cost-model.toml", "--objective", goal, "--time-limit", 2)
    compared = answer(
        "compare", *one, "--policy", found["server"], "--measured", "twin/measured.json"
    )
    others = [(compared["best_known"], compared["bound"])]
    others += [(r["objective"], r["bound"]) for r in (answer("solve", *one), answer("bound", *one))]

    # More of a latency is worse, and less of a share is: signs make both a thing to minimize.
    sign = 1 if goal == "mean_latency" else -1
    best, bound = sign * found["best_known"], sign * found["bound"]
    for value, proved in others:
        assert bound <= sign * proved + 1e-9
        assert sign * proved <= best + 1e-9
        if value is not None:  # time may end before a schedule is found
            assert bound <= sign * value + 1e-9
            assert max(sign * one for _, one in others) <= sign * value + 1e-9

    (measured,) = [row for row in compared["policies"] if row["policy"] == "measured"]
    assert measured["metrics"][goal] == pytest.approx(found["served_value"])


def folder_of_a_run(path: Path) -> Path:
    """Write a run of LLMServingSim with 4,000 tokens of KV: requests.jsonl and meta.json."""
    instance = requests(60, 10.0, 300, 100, kv=4000)
    measured = served(instance, 24, 1024, 0.01)
    assert measured.ttft is not None
    columns = instance.prompt_tokens, instance.output_tokens, instance.release_times
    rows = [
        {
            "input_toks": int(s),
            "output_toks": int(o),
            "arrival_time": 100 + a,
            "queued_ts": 50 + a,
            "first_token_ts": 50 + a + first,
            "last_token_ts": 50 + a + last,
        }
        for s, o, a, first, last in zip(*columns, measured.ttft, measured.latency, strict=True)
    ]
    (path / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    engine = {"max_num_seqs": 24, "max_num_batched_tokens": 1024, "tensor_parallel_size": 1}
    meta = {"engine_kwargs": engine, "kv_cache": {"num_gpu_blocks": 250, "block_size": 16}}
    (path / "meta.json").write_text(json.dumps(meta))
    return path


def test_the_server_is_read_from_meta_json_beside_the_run(tmp_path: Path) -> None:
    folder = folder_of_a_run(tmp_path)
    words = ("--gpu", "h100-80gb", "--model", "llama3-8b", "--slo-ttft", "1s")
    text = run("diagnose", folder, *words)
    # 250 blocks of 16 tokens are 4,000.
    server = (
        "KV capacity 4000 tokens (from meta.json), max_num_seqs=24, max_num_batched_tokens=1024"
    )
    assert server in text
    assert "is the KV capacity right" not in text
    assert "measured " in text
    assert '"arrival"' in run("import", "llmservingsim", folder)
    assert "how far: the run has " in text

    # Without it 467,296 tokens are guessed of the GPU, with which the twin is too fast: 0.9 x 80
    # GiB less 16.06 GB of weights, over 131,072 bytes.
    (folder / "meta.json").write_text("[1]")
    guess = run("diagnose", folder, *words, "--max-num-seqs", 24)
    assert "(an estimate), max_num_seqs=24, max_num_batched_tokens=8192" in guess
    assert "is the KV capacity right" in guess


@pytest.mark.parametrize(
    ("version", "words", "found"),
    [
        ("0.17.1", ("--gpu", "h100-80gb"), "=8192, scheduler_reserve_full_isl=false"),
        ("0.19.0", ("--gpu", "l40s"), "max_num_seqs=256, max_num_batched_tokens=2048, sched"),
        ("v0.32", ("--gpu", "h100-80gb"), "scheduler_reserve_full_isl=true"),
        ("0.18", ("--gpu", "h100-80gb"), "max_num_seqs=1024, max_num_batched_tokens=8192\n"),
    ],
)
def test_the_defaults_are_those_of_the_version(
    tmp_path: Path, version: str, words: tuple[str, ...], found: str
) -> None:
    load = tmp_path / "load.json"
    optsched.write_instance(optsched.Instance([0, 1], [90, 80], [9, 8], 5000, "second"), load)
    words = (*words, "--model", "llama3-8b", "--vllm-version", version)
    assert found in run("diagnose", load, *words)
    error = one_line_error(invoke("diagnose", load, "--gpu", "l40s", *words[2:-1], "0.8.3"))
    assert "found 0.8.3 on l40s, whose defaults are not known" in error


def test_import_takes_the_server_from_meta_json_where_no_machine_is_given(tmp_path: Path) -> None:
    """Limits and KV are those of meta.json; KV or a cost model that is given counts instead; in
    rounds nothing is taken; what meta.json lacks is said, as if there were none."""
    folder, out, times = folder_of_a_run(tmp_path), tmp_path / "run.json", tmp_path / "times.json"
    words = ("import", "llmservingsim", folder, "-o", out, "--measured-out", times)
    said = invoke(*words)
    assert (said.exit_code, said.stderr) == (
        0,
        "note: of the server, from meta.json beside the run: max_batch_tokens 1024, max_running "
        "24, kv_capacity 4000, kv_block_tokens 16\n",
    )
    instance = optsched.read_instance(out)
    assert (instance.kv_capacity, instance.kv_block_tokens) == (4000, 16)
    assert instance.limits == Limits(max_running=24, max_batch_tokens=1024)
    assert read_measured(times).instance_sha256 == instance.sha256
    # So the command that diagnose names needs nothing else.
    text = run("compare", out, "--measured", times, "--policy", "vllm-v1", "--no-bound",
               "--cost-model", "llama2-7b-a100-infermax")  # fmt: skip
    assert "measured" in text

    # What is given of a machine is kept, and the rest is the server's. Rounds are no server's.
    machine = load_cost_model("llama2-7b-a100-infermax")
    for given, held, kv in (
        ("--kv-capacity", 9000, 9000),
        ("--cost-model", machine.name, machine.kv_capacity_tokens),
    ):
        limited = "note: of the server, from meta.json beside the run: max_batch_tokens 1024, "
        assert invoke(*words, given, held).stderr == f"{limited}max_running 24\n"
        other = optsched.read_instance(out)
        assert (other.limits, other.kv_block_tokens) == (instance.limits, 1)
        assert other.kv_capacity == kv

    assert invoke(*words[:5], "--kv-capacity", 9000, "--rounds", 0.1).stderr == ""
    assert optsched.read_instance(out).limits == Limits()

    # A run whose KV is not known has the limits, and the capacity is said to be nobody's.
    engine = {"max_num_seqs": 128, "max_num_batched_tokens": True, "max_model_len": None}
    (folder / "meta.json").write_text(json.dumps({"engine_kwargs": engine}))
    first, second = invoke(*words).stderr.splitlines()
    assert first == "note: of the server, from meta.json beside the run: max_running 128"
    assert "no KV capacity is given, so it is 100000 tokens" in second
    (folder / "meta.json").unlink()
    (note,) = invoke(*words).stderr.splitlines()
    assert note == second


@pytest.mark.whole
@pytest.mark.parametrize("cached", [True, False])
def test_of_sessions_the_machine_and_its_prefix_cache_are_recovered(cached: bool) -> None:
    few = {"n": 8, "calls": 6, "first_tokens": 6000, "context": 30_000, "think_s": 2.0}
    agents = optsched.generate("agent-sessions", seed=1, rate=0.2, kv_capacity=60_000, **few)
    machine = scale_cost(ROOFLINE, (2.5, 1.2, 1.2))
    spec = f"vllm-v1:prefix_caching={str(cached).lower()}"
    judged = optsched.run(optsched.Problem(agents, machine), spec).evaluation
    # A cache serves most of what calls repeat.
    assert (judged.metrics["prefix_hit_rate"] > 0.5) == cached
    factor = np.random.default_rng(5).lognormal(0, 0.02, agents.n)
    measured = Measured(judged.latency * factor, judged.ttft * factor)

    specs = [f"vllm-v1:prefix_caching={on}" for on in ("true", "false")]
    fits, chosen = Twin(agents, measured, Budget()).fits([ROOFLINE], specs)
    assert chosen == specs[not cached]
    # The median of a lognormal noise of 0.02 is 0.6745 * 0.02 = 0.0135.
    assert np.expm1(fits[0].errors["latency"]) == pytest.approx(0.0135, abs=0.01)  # the noise
    linear = next(one.model for one in fits if one.shape.exponent == 1)
    for key in ("token", "base", "prefill_square"):  # of decodes there are few
        true = float(machine.coefficients[key])
        # Within 10 %, where the machine is slower than the roofline by 2.5 and 1.2 times.
        assert float(linear.coefficients[key]) == pytest.approx(true, rel=0.1)


def test_a_server_within_its_slos_is_left_alone_and_has_room(tmp_path: Path) -> None:
    server = Server("idle", corner_step(2.0), n=24, rate=1.0, slos={"slo_ttft": 2.0})
    server.write(tmp_path / "bench.json")
    text = run("diagnose", tmp_path / "bench.json", "--gpu", "l40s", "--model", "llama3-8b",
               "--slo-ttft", "2s", "--kv-capacity", server.kv)  # fmt: skip
    assert "You are within your SLOs (100.0 %). Nothing to change. Room: " in text
    assert "first:" not in text
    assert "max_num_seqs=256, max_num_batched_tokens=2048" in text  # what vLLM takes on an L40S


def test_what_is_interrupted_says_so_and_answers_from_what_was_tried() -> None:
    instance, seqs, _, _ = few_seats()
    stop, told = threading.Event(), list[str]()

    def tell(words: str) -> None:
        told.append(words)
        if words.startswith("change 4"):
            stop.set()

    asked: dict[str, Any] = {"stop": stop, "progress": tell}
    found = diagnose(Problem(instance, ROOFLINE, **SLOS), max_num_seqs=seqs, **asked)
    # The stop comes as the fourth change begins.
    assert len(found.changes) == 3
    assert found.tried > 10  # many more were to be tried
    assert found.bound is None
    assert told[0].startswith("change 1 of")


def test_arrivals_that_are_times_of_ends_are_noticed() -> None:
    # The log has the time at which each request ended in the place of its arrival.
    instance, seqs, tokens, _ = few_seats()
    measured = served(instance, seqs, tokens, 0.01)
    ends = instance.release + measured.latency
    order = np.argsort(ends)
    columns = instance.prompt_tokens[order], instance.output_tokens[order]
    late = Instance(ends[order] - ends.min(), *columns, instance.kv_capacity, "second")
    assert measured.ttft is not None
    times = Measured(measured.latency[order], measured.ttft[order])
    with pytest.raises(InputError, match="arrival:"):
        diagnose(Problem(late, ROOFLINE), measured=times, max_num_seqs=seqs)


def test_each_change_is_the_line_to_paste_or_says_what_it_takes() -> None:
    words = {
        "max_num_seqs=64": "vllm serve ... --max-num-seqs 64",
        "prefix_caching=true": "vllm serve ... --enable-prefix-caching",
        "prefix_caching=false": "vllm serve ... --no-enable-prefix-caching",
        "policy=priority,priority=prompt": "vllm serve ... --scheduling-policy priority and in",
    }
    for what, line in words.items():
        assert change(what, "settings", 0.1, 0.1).how.startswith(line)
    assert change("workers=2", "workers", 0.1, 0.1).how.startswith("2 servers")
    # No share is shown below -100 %: here -37,200 % and -40,000 %.
    assert change("x", "settings", -372.0, -400.0).percents == (-100, -100, -100)
    both = "policy=priority,priority=prompt,long_prefill_token_threshold=256"
    line = change(both, "settings", 0.1, 0.1).how  # what clients send stands behind all flags
    assert "--long-prefill-token-threshold 256 and in each request of clients" in line


def test_fewer_tokens_than_seats_are_tried_with_fewer_seats() -> None:
    # vLLM has at least as many tokens as seats, and on large GPUs 1024 seats by default. A batch
    # with all of a prompt of 12,000 tokens takes longer than 60 ms, and one of 512 tokens does not.
    instance, *_ = blocking_prompts()
    problem = Problem(instance, ROOFLINE, slo_gap=0.06)
    found = diagnose(problem, max_num_seqs=1024, max_num_batched_tokens=16_384)
    changes = {one.what: one for one in found.changes}
    small = changes["max_num_seqs=512,max_num_batched_tokens=512"]
    # With 512 tokens a batch all are in time under every cost model, and with 8192 nothing is
    # gained.
    assert (small.low, changes["max_num_batched_tokens=8192"].gain) == (1, 0)
    assert small.how == "vllm serve ... --max-num-seqs 512 --max-num-batched-tokens 512"
    assert not any("max_num_seqs=32768" in what for what in changes)  # more seats than tokens
    best = [one for one in found.changes if one.kind == "settings" and one.low == 1]
    assert found.first is min(best, key=lambda one: one.metrics["mean_latency"])


def test_settings_are_tried_together_and_the_best_known_is_no_worse() -> None:
    # With four seats requests wait for their first tokens, and batches of 8,192 tokens stop those
    # that sit. So it takes more seats and fewer tokens to be in time.
    instance = requests(80, 16.0, 1500, 60)
    problem = Problem(instance, ROOFLINE, slo_ttft=0.3, slo_gap=0.03)
    found = diagnose(problem, max_num_seqs=4, max_num_batched_tokens=8192)
    changes = {one.what: one for one in found.changes if one.kind == "settings"}
    both = changes.pop("max_num_batched_tokens=512,max_num_seqs=8")
    assert (found.first, both.low) == (both, 1)
    # One setting alone gains less than both's 1.
    assert max(one.gain for one in changes.values()) < 0.9
    fewer = [one for what, one in changes.items() if "max_num_seqs" not in what]
    assert found.value is not None
    assert found.value >= max(one.metrics["slo_attainment"] for one in fewer)


def test_a_gain_of_which_the_run_says_too_little_is_to_be_measured() -> None:
    wide, narrow = change("wide", "settings", 0.9, 0.1), change("narrow", "settings", 0.9, 0.8)
    # A gain from 0.1 to 0.9 is wide: over 0.5. One from 0.8 to 0.9 is not.
    plain = diagnose(Problem(requests(20, 5.0, 300, 20), ROOFLINE), max_num_seqs=8)
    assert replace(plain, changes=(narrow,)).untold is None
    assert replace(plain, changes=(wide, narrow)).untold is wide
    # From -0.2 to 0.3 not even the sign is known, which is in more doubt than a wide gain.
    assert replace(plain, changes=(wide, change("sign", "settings", 0.3, -0.2))).untold is not wide
