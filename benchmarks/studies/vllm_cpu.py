"""vLLM on this machine's CPU: measured, and beside its twin, the best schedule known and a bound.

A small model with made-up weights is profiled, a cost model is fitted to the profile, and the same
requests are served at several loads under three schedulers: vLLM's own, vLLM's own with priorities
by predicted work, and a policy of optsched inside vLLM. Load 1 is the number of requests over the
time that the twin needs for all of them when they come at once.

A machine is not equally fast at all times. So each repetition measures a profile of its own and
then every scheduler at every load. What is computed uses the cost model of all profiles together;
loads, and orders by work inside vLLM, that of the first.

Everything measured stays as files in a folder: the model, its profiles, the cost models, an
instance per load, and the times of each replay. What is there is not measured again, and is what
the commands ``profile``, ``fit``, ``replay`` and ``compare`` write and read. vLLM runs in
processes of its own. Each serves the requests of the highest load once before it is measured.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from optsched.bounds import lower_bound
from optsched.costs.cost import BatchCost, load_cost_model
from optsched.costs.fit import fit
from optsched.experiments.base import Claim, Experiment, Row
from optsched.experiments.figures import Figure
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

from .parts import distinct, judged, mean, measured, over, picked, quiet, select
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
    "max_position_embeddings": 1024,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENS, SEATS, LONGEST, BLOCK = 512, 16, 1024, 32
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
SCHEDULERS = {
    "fcfs": "vllm-v1",
    "priority": "vllm-v1:policy=priority,priority=work",
    "least-work": "least-work",
}
"""The schedulers that are measured, and what simulates them."""
METRICS = ("mean_latency", "mean_ttft", "mean_tpot", "makespan")


def trials(parameters: Mapping[str, Any], seed: int) -> Iterator[Row]:
    """Yield the measured runs, a repetition after the other, and then what is computed."""
    loads = [float(load) for load in parameters["loads"]]
    same = {k: parameters[k] for k in ("folder", "requests", "kv_blocks", "search_s", "bound_s")}
    same |= {"loads": ",".join(f"{load:g}" for load in loads), "seed": seed}

    for repetition in range(parameters["repetitions"]):
        for scheduler in SCHEDULERS:
            for load in loads:
                yield {
                    "source": "measured",
                    "scheduler": scheduler,
                    "load": load,
                    "repetition": repetition,
                    **same,
                }

    for scheduler in (*SCHEDULERS, "search", "bound"):
        for load in loads:
            yield {
                "source": "model",
                "scheduler": scheduler,
                "load": load,
                "repetition": None,
                **same,
            }


@measured
@quiet()
def run(trial: Row) -> Row:
    """Return the metrics of one run, measured or computed."""
    folder, scheduler = Path(trial["folder"]), trial["scheduler"]
    _profile(folder, trial["repetition"] or 0)
    instance = instance_of(trial, _cost(folder, "first"))

    if trial["source"] == "measured":
        out = _out(folder, scheduler, trial["repetition"], trial["load"])
        if not out.is_file():
            _replay(trial)

        times = read_measured(out)
        times.check(instance)
        return of_measured(instance, times)

    cost = _cost(folder, "all")
    if scheduler == "bound":
        total, origin = lower_bound(
            instance, cost_model=cost, time_limit_s=trial["bound_s"], completions=completions
        )
        return {"mean_latency": None if total is None else total / instance.n, "origin": origin}

    if scheduler == "search":
        schedule, _ = improve(instance, cost, Budget(trial["search_s"]), seed=trial["seed"])
        judgement = evaluate(instance, schedule, cost)
    else:
        judgement = judged(instance, SCHEDULERS[scheduler], cost, seed=trial["seed"])

    return picked(judgement.metrics, {name: name for name in (*METRICS, "evictions")})


def instance_of(trial: Row, cost: BatchCost) -> Instance:
    """Return the requests at a load: the same at each, with the same gaps, stretched."""
    drawn = generate(
        "lognormal",
        seed=trial["seed"],
        n=trial["requests"],
        arrivals="poisson",
        rate=1.0,
        kv_capacity=trial["kv_blocks"] * BLOCK,
        **LENGTHS,
    )
    base = replace(
        predict(drawn, PREDICTOR, seed=trial["seed"]),
        kv_accounting="cached",
        kv_block_tokens=BLOCK,
        limits=Limits(TOKENS, None, SEATS),
        chunked_prefill=True,
    )
    at_once = replace(base, arrival=np.zeros(base.n))
    busy_s = judged(at_once, SCHEDULERS["fcfs"], cost).metrics["makespan"]
    # One request a second would need busy_s / n of each second.
    arrival = base.release_times * busy_s / base.n / trial["load"]

    return replace(base, arrival=arrival.round(6), name=f"load-{trial['load']:g}")


def _profile(folder: Path, repetition: int) -> None:
    """Measure the profile of a repetition, unless it is there."""
    out, model = folder / "profiles" / str(repetition), folder / "model"
    if (out / "done").is_file():
        return

    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    _optsched(
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
    folder, scheduler = Path(trial["folder"]), trial["scheduler"]
    cost, known = _cost(folder, "first"), folder / "cost-first.toml"
    options: dict[str, Any] = {
        **ALWAYS,
        "max_num_batched_tokens": TOKENS,
        "max_num_seqs": SEATS,
        "max_model_len": LONGEST,
        "async_scheduling": False,
        "num_gpu_blocks_override": trial["kv_blocks"] + 1,  # vLLM keeps one empty
    }
    words: list[Any] = []

    if scheduler == "priority":
        options["scheduling_policy"] = "priority"
        words = ["--priority", "work", "--cost-model", known]
    elif scheduler != "fcfs":
        own = {"policy": SCHEDULERS[scheduler], "cost_model": str(known)}
        options |= {
            "scheduler_cls": "optsched.engines.vllm.PolicyScheduler",
            "additional_config": {"optsched": own},
        }

    files, outs = [], []
    loads = [float(load) for load in trial["loads"].split(",")]
    for load in loads:
        file = folder / f"load-{load:g}.json"
        write_instance(instance_of({**trial, "load": load}, cost), file)
        files.append(file)
        outs.append(_out(folder, scheduler, trial["repetition"], load))

    outs[0].parent.mkdir(exist_ok=True)
    # One run more, since kernels of every size are slower when they run first.
    files.insert(0, files[int(np.argmax(loads))])
    outs.insert(0, outs[0].with_name(f"{scheduler}-{trial['repetition']}-warm-up.json"))
    _optsched(
        "replay",
        *files,
        *(word for out in outs for word in ("-o", out)),
        "--engine",
        f"vllm:{folder / 'model'}",
        "--vocabulary",
        MODEL["vocab_size"],
        "--seed",
        trial["repetition"],
        *words,
        *_settings(options),
    )


def _out(folder: Path, scheduler: str, repetition: int, load: float) -> Path:
    return folder / "measured" / f"{scheduler}-{repetition}-load-{load:g}.json"


def _settings(options: Mapping[str, Any]) -> list[str]:
    return [word for k, v in options.items() for word in ("--set", f"{k}={json.dumps(v)}")]


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
            f"optsched {words[0]}: found exit status {done.returncode} ({why}); expected 0"
        )


def summarize(rows: Sequence[Row]) -> list[Claim]:
    """Return how near the twin is, what order changes, and where measured / optimum lies."""
    good = [row for row in rows if not row.get("error")]
    claims = []
    for load in distinct(good, "load"):
        here = select(good, load=load)
        real, model = select(here, source="measured"), select(here, source="model")
        for scheduler in SCHEDULERS:
            for metric in METRICS[:3]:
                told = mean(model, metric, scheduler=scheduler)
                ratio = over(told, mean(real, metric, scheduler=scheduler))
                near = None if ratio is None else abs(ratio - 1) <= 0.1
                what = f"load {load:g}: {metric} of {scheduler}: twin over measured"
                claims.append(Claim(what, "within 10 %", ratio, near))

        for scheduler in [name for name in SCHEDULERS if name != "fcfs"]:
            what = f"load {load:g}: mean latency of {scheduler} over fcfs"
            predicted = _ratio(model, scheduler)
            claims += [
                Claim(f"{what}, predicted", "not in the paper", predicted),
                Claim(f"{what}, measured", "not in the paper", _spread(real, scheduler)),
            ]

        known = [row["mean_latency"] for row in model if row["scheduler"] != "bound"]
        bound = mean(model, "mean_latency", scheduler="bound")
        for scheduler in SCHEDULERS:
            value = mean(real, "mean_latency", scheduler=scheduler)
            for name, least in (("best known", min(known, default=None)), ("bound", bound)):
                what = f"load {load:g}: mean latency, {scheduler} measured over the {name}"
                claims.append(Claim(what, "not in the paper", over(value, least)))

    return claims


def _ratio(rows: Sequence[Row], scheduler: str) -> float | None:
    first = mean(rows, "mean_latency", scheduler=scheduler)
    return over(first, mean(rows, "mean_latency", scheduler="fcfs"))


def _spread(rows: Sequence[Row], scheduler: str) -> str | None:
    """Return the mean ratio to fcfs, and the lowest and highest of a repetition."""
    each = [
        ratio
        for repetition in distinct(rows, "repetition")
        if (ratio := _ratio(select(rows, repetition=repetition), scheduler)) is not None
    ]
    if not each:
        return None

    return f"{np.mean(each):.3f} ({min(each):.3f} to {max(each):.3f}, {len(each)} repetitions)"


EXPERIMENT = Experiment(
    name="vllm-cpu",
    summary="vLLM measured on this CPU, beside its twin, the best schedule known and a bound",
    paper="ours",
    parameters={
        "folder": "vllm-cpu",
        "requests": 150,
        "loads": [0.5, 1.0, 1.5, 2.0],
        "repetitions": 5,
        "kv_blocks": 64,
        "search_s": 20.0,
        "bound_s": 20.0,
    },
    trials=trials,
    run=run,
    summarize=summarize,
    columns={
        "source": "measured: vLLM ran; model: computed with the fitted cost model",
        "scheduler": "what decided; search: the offline search; bound: what no schedule beats",
        "load": "arriving work over what vLLM's scheduler can do by the cost model",
        "repetition": "number of the measured run",
        "folder": "where the model, its profile and all runs are; what is there stays",
        "requests": "number of requests",
        "kv_blocks": f"KV blocks of {BLOCK} tokens",
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
