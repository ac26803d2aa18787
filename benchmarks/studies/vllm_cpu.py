"""vLLM on this machine's CPU: measured, and beside its twin, the best schedule known and a bound.

A small model with made-up weights is profiled, a cost model is fitted to the profile, and the same
requests are served at several loads under vLLM's own scheduler, vLLM's own with priorities by
predicted work, and policies of optsched inside vLLM. There are three mixes of requests: ``chat``;
``long``, the same with some prompts of 20 times the median length; and ``sessions``, whose calls
come when those before have ended, with vLLM's prefix cache on and off. Load 1 is the number of
requests, or of sessions, over the time that the twin needs for all of them when they come at once.

A machine is not equally fast at all times. So each repetition measures a profile of its own and
then every scheduler at every load. What is computed uses the cost model of all profiles together;
loads, and orders by work inside vLLM, that of the first.

Everything measured stays as files in a folder: the model, its profiles, the cost models, an
instance per load, and the times of each replay. What is there is not measured again, and is what
the commands ``gpu profile``, ``gpu fit``, ``gpu replay`` and ``compare`` write and read. vLLM runs
in processes of its own. Each serves the requests of the highest load once before it is measured.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from optsched import Problem
from optsched.bounds import lower_bound
from optsched.costs.cost import BatchCost
from optsched.costs.fit import fit
from optsched.costs.load import load_cost_model
from optsched.experiments.base import Claim, Experiment, Row
from optsched.files.measured import read_measured
from optsched.files.read_write import write_bytes, write_instance
from optsched.judge.evaluate import evaluate
from optsched.optimize.search.offline import improve
from optsched.policies.engine.simulate import completions
from optsched.problem.budget import Budget
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance, Limits
from optsched.workloads.generate import generate
from optsched.workloads.predict import predict

from .drawing import Figure
from .parts import check_known, distinct, judged, mean, measured, over, picked, quiet, select
from .vllm_measured import of_measured

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 2000,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENS, SEATS, LONGEST, BLOCK = 512, 16, 2048, 32
"""Max tokens of a batch, max requests of a batch, max tokens of a request, tokens of a block."""
ALWAYS = {"dtype": "float32", "enforce_eager": True, "block_size": BLOCK}
PREDICTOR = "noisy:mae=8"
LENGTHS = {
    "prompt_mean": 90.0,
    "prompt_median": 55.0,
    "prompt_max": 400,
    "output_mean": 40.0,
    "output_median": 26.0,
    "output_max": 160,
}
LONG_SHARE, LONG_TOKENS = 0.04, 20 * 55
"""Share of the long prompts in their mix, and their length: 20 times the median."""
CALLS, CALL_GROWS, DELAY_S = 6, 40, 0.3
"""Mean calls of a session, mean tokens that a call adds to what was said, mean delay of a call."""

SCHEDULERS = {
    "fcfs": "vllm-v1",
    "priority": "vllm-v1:policy=priority,priority=work",
    "least-work": "least-work",
    "spf": "spf",
    "spf-work": "spf-work",
    "patient": "patient",
    "patient-work": "patient-work",
    "no-cache": "vllm-v1:prefix_caching=false",
}
"""The schedulers that are measured, and what simulates them."""


class Mix(NamedTuple):
    """Blocks of KV that a mix of requests has, and the schedulers that serve it."""

    kv_blocks: int
    schedulers: tuple[str, ...]


MIXES = {
    "chat": Mix(64, ("fcfs", "priority", "least-work", "spf-work")),
    "long": Mix(128, ("fcfs", "priority", "spf", "spf-work", "patient", "patient-work")),
    "sessions": Mix(192, ("fcfs", "no-cache")),
}
METRICS = ("mean_latency", "mean_ttft", "mean_tpot", "mean_session_completion")


def trials(parameters: Mapping[str, Any], seed: int) -> Iterator[Row]:
    """Yield the measured runs, a repetition after the other, and then what is computed."""
    loads = [float(load) for load in parameters["loads"]]
    same = {k: parameters[k] for k in ("folder", "requests", "sessions", "search_s", "bound_s")}
    same |= {"loads": ",".join(f"{load:g}" for load in loads), "seed": seed}
    check_known("mixes", parameters["mixes"], MIXES)
    mixes = {mix: MIXES[mix].schedulers for mix in parameters["mixes"]}

    # Schedulers of a mix follow one another in each repetition, so that they are compared at about
    # the same speed of the machine.
    repetitions = range(parameters["repetitions"])
    rows: list[tuple[Any, ...]]
    rows = [("measured", mix, s, k) for k in repetitions for mix in mixes for s in mixes[mix]]
    for mix, schedulers in mixes.items():
        # Neither the search nor a bound takes sessions with shared prefixes.
        further = () if mix == "sessions" else ("search", "bound")
        rows += [("model", mix, s, None) for s in (*schedulers, *further)]

    for row in rows:
        for load in loads:
            head = dict(zip(("source", "mix", "scheduler", "repetition"), row, strict=True))
            yield {**head, "load": load, **same}


@measured
@quiet()
def run(trial: Row) -> Row:
    """Return the metrics of one run, measured or computed."""
    folder, scheduler = Path(trial["folder"]), trial["scheduler"]
    _profile(folder, trial["repetition"] or 0)
    instance = instance_of(trial, _cost(folder, "first"))

    if trial["source"] == "measured":
        out = _out(trial, trial["load"])
        if not out.is_file():
            _replay(trial)

        times = read_measured(out)
        times.check(instance)
        return of_measured(instance, times)

    cost = _cost(folder, "all")
    if scheduler == "bound":
        total, origin = lower_bound(
            Problem(instance, cost), time_limit_s=trial["bound_s"], completions=completions
        )
        return {"mean_latency": None if total is None else total / instance.n, "origin": origin}

    if scheduler == "search":
        schedule, _ = improve(
            Problem(instance, cost), Budget(trial["search_s"]), seed=trial["seed"]
        )
        judgement = evaluate(Problem(instance, cost), schedule)
    else:
        judgement = judged(instance, SCHEDULERS[scheduler], cost, seed=trial["seed"])

    names = (*METRICS, "makespan", "evictions", "prefix_hit_rate")
    return picked(judgement.metrics, {name: name for name in names})


def instance_of(trial: Row, cost: BatchCost) -> Instance:
    """Return the requests at a load: the same at each, with the same gaps, stretched."""
    mix = trial["mix"]
    base = _drawn(mix, trial["sessions" if mix == "sessions" else "requests"], trial["seed"])
    delay = None if base.delay is None else 0 * base.delay
    at_once = replace(base, arrival=np.minimum(base.arrival, 0), delay=delay)
    busy_s = judged(at_once, SCHEDULERS["fcfs"], cost).metrics["makespan"] or 0.0
    # At one arrival a second, requests would need busy_s / arrivals of each second.
    stretch = busy_s / len(base.given_arrivals) / trial["load"]
    arrival = np.where(base.arrival < 0, base.arrival, (base.arrival * stretch).round(6))

    return replace(base, arrival=arrival, name=f"{mix}-load-{trial['load']:g}")


@lru_cache(maxsize=len(MIXES))
def _drawn(mix: str, n: int, seed: int) -> Instance:
    """Return so many requests or sessions of a mix, one a second."""
    drawn = _sessions(n, seed) if mix == "sessions" else _requests(n, seed, mix == "long")
    return replace(
        predict(drawn, PREDICTOR, seed=seed),
        kv_capacity=MIXES[mix].kv_blocks * BLOCK,
        kv_accounting="cached",
        kv_block_tokens=BLOCK,
        limits=Limits(TOKENS, None, SEATS),
        chunked_prefill=True,
    )


def _requests(n: int, seed: int, long: bool) -> Instance:
    """Return requests, some of them with long prompts."""
    drawn = generate("lognormal", seed=seed, n=n, arrivals="poisson", rate=1.0, **LENGTHS)
    if not long:
        return drawn

    which = np.random.default_rng(seed).permutation(n)[: round(LONG_SHARE * n)]
    prompt = drawn.prompt_tokens.copy()
    prompt[which] = LONG_TOKENS
    return replace(drawn, prompt_tokens=prompt)


def _sessions(sessions: int, seed: int) -> Instance:
    """Return sessions whose calls repeat all that was said before."""
    random = np.random.default_rng(seed)
    calls = np.asarray(random.poisson(CALLS - 1, sessions)) + 1
    first = np.cumsum(calls) - calls
    n = int(calls.sum())
    begins = np.repeat(first, calls) == np.arange(n)
    before = np.where(begins, -1, np.arange(n) - 1)
    output = np.clip(random.lognormal(np.log(20), 0.7, n).astype(int), 1, 100)
    prompt = np.asarray(random.integers(150, 350, n))
    shared = np.zeros(n, dtype=int)

    for i in np.flatnonzero(~begins):
        shared[i] = prompt[i - 1] + output[i - 1]
        prompt[i] = min(shared[i] + random.integers(1, 2 * CALL_GROWS), LONGEST - 100)

    arrival = np.full(n, -1.0)
    arrival[begins] = np.cumsum(random.exponential(size=len(calls)))
    arrival[begins] -= arrival[0]
    return Instance(
        *(arrival, prompt, output, 1 << 20, "second"),
        after=tuple(() if i < 0 else (int(i),) for i in before),
        delay=np.where(begins, 0.0, np.asarray(random.exponential(DELAY_S, n)).round(6)),
        prefix_parent=before,
        prefix_tokens=shared,
        prefix_block_tokens=BLOCK,
    )


def _profile(folder: Path, repetition: int) -> None:
    """Measure the profile of a repetition, unless it is there."""
    out, model = folder / "profiles" / str(repetition), folder / "model"
    if (out / "done").is_file():
        return

    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    _optsched(
        "gpu",
        "profile",
        "vllm",
        model,
        "-o",
        out,
        "--max-tokens",
        TOKENS,
        "--max-requests",
        SEATS,
        "--max-kv",
        LONGEST,
        *_settings(ALWAYS),
    )
    (out / "done").touch()


def _cost(folder: Path, which: Literal["first", "all"]) -> BatchCost:
    """Return the cost model of the first profile, or of all together."""
    file = folder / f"cost-{which}.toml"
    tables = sorted((folder / "profiles").glob("[0-9]*/steps.csv"))
    if which == "first":
        tables = tables[:1]
    if not file.is_file() or any(t.stat().st_mtime > file.stat().st_mtime for t in tables):
        merged = folder / "profiles" / which
        merged.mkdir(exist_ok=True)
        shutil.copyfile(tables[0].with_name("config.json"), merged / "config.json")
        head = tables[0].read_text(encoding="utf-8").splitlines()[0]
        rows = [line for t in tables for line in t.read_text(encoding="utf-8").splitlines()[1:]]
        (merged / "steps.csv").write_text("\n".join([head, *rows, ""]), encoding="utf-8")
        found = fit(merged, hardware="cpu", name="cpu")
        write_bytes(found.to_toml().encode(), file)

    return load_cost_model(file)


def _replay(trial: Row) -> None:
    """Measure a scheduler once at every load, with one start of vLLM."""
    folder, scheduler, mix = Path(trial["folder"]), trial["scheduler"], trial["mix"]
    cost, known = _cost(folder, "first"), folder / "cost-first.toml"
    options: dict[str, Any] = {
        **ALWAYS,
        "max_num_batched_tokens": TOKENS,
        "max_num_seqs": SEATS,
        "max_model_len": LONGEST,
        "async_scheduling": False,
        "num_gpu_blocks_override": MIXES[mix].kv_blocks + 1,  # vLLM keeps one empty
        "enable_prefix_caching": mix == "sessions" and scheduler != "no-cache",
    }
    words: list[Any] = []

    if scheduler == "priority":
        options["scheduling_policy"] = "priority"
        words = ["--priority", "work", "--cost-model", known]
    elif not SCHEDULERS[scheduler].startswith("vllm-v1"):
        own = {"policy": SCHEDULERS[scheduler], "cost_model": str(known)}
        options |= {
            "scheduler_cls": "optsched.engines.vllm.PolicyScheduler",
            "additional_config": {"optsched": own},
        }

    files, outs = [], []
    loads = [float(load) for load in trial["loads"].split(",")]
    for load in loads:
        file = folder / f"{mix}-load-{load:g}.json"
        write_instance(instance_of({**trial, "load": load}, cost), file)
        files.append(file)
        outs.append(_out(trial, load))

    outs[0].parent.mkdir(exist_ok=True)
    # One run more, since kernels of every size are slower when they run first.
    files.insert(0, files[int(np.argmax(loads))])
    outs.insert(0, outs[0].with_name(f"{outs[0].stem}-warm-up.json"))
    _optsched(
        "gpu",
        "replay",
        *files,
        *(word for out in outs for word in ("-o", out)),
        "--server",
        f"vllm:{folder / 'model'}",
        "--vocabulary",
        MODEL["vocab_size"],
        "--seed",
        trial["repetition"],
        *words,
        *_settings(options),
    )


def _out(trial: Row, load: float) -> Path:
    name = f"{trial['mix']}-{trial['scheduler']}-{trial['repetition']}-load-{load:g}.json"
    return Path(trial["folder"]) / "measured" / name


def _settings(options: Mapping[str, Any]) -> list[str]:
    return [word for k, v in options.items() for word in ("--vllm", f"{k}={json.dumps(v)}")]


def _optsched(*words: Any) -> None:
    """Run a command in a process of its own, since vLLM does not start beside numba."""
    done = subprocess.run(
        [sys.executable, "-m", "optsched", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        why = said[-1].removeprefix("error: ") if said else done.stderr[-300:]
        raise InputError(
            f"optsched {words[0]} {words[1]}: found exit status {done.returncode} ({why}); "
            "expected 0"
        )


def summarize(rows: Sequence[Row]) -> list[Claim]:
    """Return how near the twin is, what order changes, and where measured / optimum lies.

    What is measured is the median of the repetitions.
    """
    good = [row for row in rows if not row.get("error")]
    claims = []
    for mix, load in dict.fromkeys((row["mix"], row["load"]) for row in good):
        here, where = select(good, mix=mix, load=load), f"{mix}, load {load:g}"
        real, model = select(here, source="measured"), select(here, source="model")
        schedulers = MIXES[mix].schedulers
        for scheduler in schedulers:
            for metric in METRICS:
                told = mean(model, metric, scheduler=scheduler)
                ratio = over(told, _median(real, scheduler, metric))
                if ratio is not None:
                    what = f"{where}: {metric} of {scheduler}: twin over measured"
                    claims.append(Claim(what, "within 10 %", ratio, abs(ratio - 1) <= 0.1))

        for scheduler, metric in product(schedulers[1:], METRICS):
            predicted = _ratio(model, scheduler, metric)
            if predicted is not None:
                what = f"{where}: {metric} of {scheduler} over fcfs"
                spread = _spread(real, scheduler, metric)
                claims.append(Claim(f"{what}, predicted", "not in the paper", predicted))
                claims.append(Claim(f"{what}, measured", "not in the paper", spread))

        known = [row["mean_latency"] for row in model if row["scheduler"] != "bound"]
        bound = mean(model, "mean_latency", scheduler="bound")
        if bound is None:
            continue

        best = min(known, default=None)
        claims.append(
            Claim(f"{where}: best known over the bound", "at most 1.3", over(best, bound))
        )
        for scheduler in schedulers:
            value = _median(real, scheduler, "mean_latency")
            for name, least in (("best known", best), ("bound", bound)):
                what = f"{where}: mean latency, {scheduler} measured over the {name}"
                claims.append(Claim(what, "not in the paper", over(value, least)))

    return claims


def _median(rows: Sequence[Row], scheduler: str, metric: str) -> float | None:
    found = [row[metric] for row in select(rows, scheduler=scheduler) if row.get(metric)]
    return float(np.median(found)) if found else None


def _ratio(rows: Sequence[Row], scheduler: str, metric: str) -> float | None:
    first = mean(rows, metric, scheduler=scheduler)
    return over(first, mean(rows, metric, scheduler="fcfs"))


def _spread(rows: Sequence[Row], scheduler: str, metric: str) -> str | None:
    """Return the median ratio to fcfs in the same repetition, the lowest and the highest."""
    each = [
        ratio
        for repetition in distinct(rows, "repetition")
        if (ratio := _ratio(select(rows, repetition=repetition), scheduler, metric)) is not None
    ]
    if not each:
        return None

    return f"{np.median(each):.3f} ({min(each):.3f} to {max(each):.3f}, {len(each)} repetitions)"


EXPERIMENT = Experiment(
    name="vllm-cpu",
    summary="vLLM measured on this CPU, beside its twin, the best schedule known and a bound",
    paper="ours",
    parameters={
        "folder": "vllm-cpu",
        "mixes": list(MIXES),
        "requests": 150,
        "sessions": 20,
        "loads": [1.0, 2.0],
        "repetitions": 5,
        "search_s": 60.0,
        "bound_s": 60.0,
    },
    trials=trials,
    run=run,
    summarize=summarize,
    columns={
        "source": "measured: vLLM ran; model: computed with the fitted cost model",
        "mix": "chat, long: with some long prompts, or sessions: calls that come after others",
        "scheduler": "what decided; search: the offline search; bound: what no schedule beats",
        "load": "arriving work over what vLLM's scheduler can do by the cost model",
        "repetition": "number of the measured run",
        "folder": "where the model, its profile and all runs are; what is there stays",
        "requests": "number of requests of chat and long",
        "sessions": "number of sessions",
        "loads": "all loads, which one start of vLLM measures",
        "search_s": "seconds of the offline search",
        "bound_s": "seconds of the bounds",
        "mean_latency": "seconds from arrival to last token, as are mean_ttft, mean_tpot, makespan",
        "origin": "name of the largest bound",
        "error": "why there is no result",
    },
    figures=[
        Figure(
            "latency",
            "load",
            ("mean_latency",),
            series="scheduler",
            panel="source",
            y_label="mean latency [s]",
            log="y",
        )
    ],
)
