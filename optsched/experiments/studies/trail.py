"""TRAIL (000) against vLLM: the choice of C, request rates and a burst.

The Alpaca prompts, Llama-3-8B's answers and its batch times are not at hand. Answers are lognormal
with the range of the paper's bins, 1 to 512 tokens, an assumed mean of 200 and median of 170;
prompts have an assumed mean of 44 tokens, the size of the one that section 3.1 shows. Batch times
are Llama-2-7B's. Under them an A100 is not busy at the paper's 14 requests/s: rates are around the
saturation of ours, where requests queue for seats, for KV, or for both.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from optsched.analysis.queueing.simulation import Estimate, estimate
from optsched.experiments import Claim, Experiment, Figure, Row
from optsched.experiments.base import measured
from optsched.judge.evaluate import evaluate
from optsched.policies.engine.simulate import simulate
from optsched.problem.instance import Instance
from optsched.workloads.generate import generate

MODEL = "llama2-7b-a100-vidur-fit"
SETTINGS = {"seats": 100_000, "both": 50_000, "memory": 20_000}
"""KV capacity in tokens. With 100,000 the 256 seats of a batch are what requests queue for (vLLM's
default number), with 50,000 both seats and KV are short, with 20,000, about a sixth of the card, KV
alone is."""
SEATS = 256
ALPACA = {
    "output_mean": 200.0, "output_median": 170.0, "output_max": 512,
    "prompt_mean": 44.0, "prompt_median": 40.0, "prompt_max": 200,
}  # fmt: skip
POLICIES = {
    "vllm": "vllm",
    "vllm-fcfs": "vllm-fcfs",
    "vllm-sjf": "vllm-sjf",
    "trail": "trail",
    "trail-bert": "trail:refine=false",
    "trail-keep": "trail:keep=true",
    "trail-bert-keep": "trail:refine=false,keep=true",
}
"""What runs at every rate: vLLM without and with chunked prefill, and TRAIL with preempted KV
discarded at once, or kept until the memory is needed."""
BURST = {"srpt": "srpt", "srpt-keep": "srpt:keep=true"}
"""What runs in the burst, too."""


def workload(requests: int, rate: float | None, kv_capacity: int, seed: int) -> Instance:
    """Return requests like Alpaca's, Poisson at a rate, or all at once where it is None."""
    arrivals: dict[str, Any] = {"arrivals": "all-at-once"} if rate is None else {"rate": rate}
    return generate(
        "lognormal", seed=seed, n=requests, kv_capacity=kv_capacity, **ALPACA, **arrivals
    )


def run(trial: Row) -> Row:
    """Run one policy; all policies of a draw serve the same requests under the same predictions."""
    return measured(lambda: _run(trial))


def _run(trial: Row) -> Row:
    seed = 1000 * trial["seed"] + trial["draw"]
    instance = workload(trial["requests"], trial["rate"], trial["kv_capacity"], seed)
    spec, cost = trial["policy"], trial["cost_model"]
    policy = f"{spec}{',' if ':' in spec else ':'}max_running={trial['max_running']}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # batches beyond the profiles' range
        schedule = simulate(instance, policy, cost, seed=seed, predictor=trial["predictor"])
        metrics = evaluate(instance, schedule, cost).metrics
    return {
        "mean_latency_s": metrics["mean_latency"],
        "p50_latency_s": metrics["p50_latency"],
        "mean_ttft_s": metrics["mean_ttft"],
        "p50_ttft_s": metrics["p50_ttft"],
        "mean_kv": metrics["mean_kv"],
        "peak_kv": metrics["peak_kv"],
        "evictions": metrics["evictions"],
        "makespan_s": metrics["makespan"],
    }


def mean(rows: Sequence[Row], column: str, **where: Any) -> Estimate | None:
    """Return the mean of a column over draws with its 95 % interval, None below two draws."""
    return over_draws(by_draw(rows, column, where))


def ratio(
    rows: Sequence[Row], column: str, over: Mapping[str, Any], under: Mapping[str, Any]
) -> Estimate | None:
    """Return the mean over draws of one run's value over another's of the same draw."""
    one, two = by_draw(rows, column, over), by_draw(rows, column, under)
    return over_draws({k: one[k] / two[k] for k in one if two.get(k)})


def by_draw(rows: Sequence[Row], column: str, where: Mapping[str, Any]) -> dict[int, float]:
    """Return a column's value by draw, of the rows that have these values."""
    return {
        row["draw"]: float(row[column])
        for row in rows
        if row.get(column) is not None and all(row[k] == v for k, v in where.items())
    }


def over_draws(values: Mapping[int, float]) -> Estimate | None:
    """Return the mean of values by draw, None below two."""
    return estimate(np.array(list(values.values()))) if len(values) > 1 else None


def text(value: Estimate | None) -> str | None:
    """Return a mean and half of its 95 % interval."""
    return None if value is None else f"{value.mean:.3f} ± {value.half_width:.3f}"


def above(what: str, value: Estimate | None, paper: str = "above 1") -> Claim:
    """Return the claim that a ratio exceeds 1, which holds where its interval does."""
    holds = None if value is None else value.mean - value.half_width > 1
    return Claim(what, paper, text(value), holds)


def _common(parameters: Mapping[str, Any], seed: int, setting: str, draw: int) -> Row:
    return {
        "setting": setting, "kv_capacity": SETTINGS[setting], "draw": draw,
        "requests": parameters["requests"], "max_running": parameters["max_running"],
        "predictor": parameters["predictor"], "cost_model": parameters["cost_model"], "seed": seed,
    }  # fmt: skip


SHARED = {
    "draws": 10,
    "requests": 3000,
    "max_running": SEATS,
    "predictor": "trail",
    "cost_model": MODEL,
}
COLUMNS = {
    "setting": "what requests queue for",
    "kv_capacity": "M, tokens",
    "draw": "which draw of requests and predictions",
    "rate": "requests per second, Poisson; none: all at once",
    "policy": "specification, with max_running",
    "max_running": "seats: requests of a batch",
    "keep": "whether preempted KV stays until the memory is needed",
    "c": "C: requests are preempted in their first floor(C r) tokens",
    "predictor": "what policies are told",
    "mean_latency_s": "mean end-to-end latency, s",
    "p50_latency_s": "median, s",
    "mean_ttft_s": "mean time to first token, s",
    "p50_ttft_s": "median, s",
    "mean_kv": "mean KV held, tokens",
    "peak_kv": "most KV held, tokens",
    "evictions": "times that a request lost its KV",
    "makespan_s": "end of the last request, s",
    "error": "why there is no schedule",
}


# --- C ------------------------------------------------------------------------------------------


def c_trials(parameters: Mapping[str, Any], seed: int) -> Iterable[Row]:
    """Yield one trial per setting, draw, fate of preempted KV, and C."""
    for setting in SETTINGS:
        for draw in range(parameters["draws"]):
            for keep in (False, True):
                for c in parameters["c"]:
                    yield {
                        **_common(parameters, seed, setting, draw),
                        "rate": parameters[f"{setting}_rate"],
                        "policy": f"trail:c={c:g},keep={str(keep).lower()}",
                        "keep": keep,
                        "c": c,
                    }


def summarize_c(rows: Sequence[Row]) -> list[Claim]:
    """Return section 4.2's and Appendix D's statements about C."""
    claims = []
    for setting in SETTINGS:
        for keep in (False, True):
            name = f"{setting}, {'kept' if keep else 'discarded'} KV"
            here: dict[str, Any] = {"setting": setting, "keep": keep}
            found = {
                c: mean(rows, "mean_latency_s", c=c, **here)
                for c in dict.fromkeys(row["c"] for row in rows)
            }
            best = [c for c, value in found.items() if value is not None and c > 0]
            best.sort(key=lambda c: found[c].mean)  # type: ignore[union-attr]
            order = " < ".join(f"{c:g}" for c in best) or None
            worse = [
                ratio(rows, "mean_latency_s", {"c": c, **here}, {"c": 0.8, **here})
                for c in best
                if c != 0.8
            ]
            holds = (
                None
                if order is None
                else all(value is not None and value.mean - value.half_width > 1 for value in worse)
            )
            claims.append(Claim(f"{name}: C by mean latency", "0.8 < 0.5 < 0.2, 1", order, holds))
            for column, words in (("mean_latency_s", "mean latency"), ("mean_ttft_s", "mean TTFT")):
                for c in (1.0, 0.2):
                    value = ratio(rows, column, {"c": c, **here}, {"c": 0.8, **here})
                    claims.append(above(f"{name}: {words}, C = {c:g} over 0.8", value))
            for column, words in (("mean_kv", "mean KV"), ("peak_kv", "peak KV")):
                value = ratio(rows, column, {"c": 1.0, **here}, {"c": 0.2, **here})
                claims.append(above(f"{name}: {words}, C = 1 over 0.2", value))
    return claims


C = Experiment(
    name="trail-c",
    summary="TRAIL's limit on preemption: latency, KV and evictions by C",
    paper="000, section 4.2 (Figure 5) and Appendix D",
    parameters={
        **SHARED,
        "c": [0.0, 0.2, 0.5, 0.8, 1.0],
        "seats_rate": 34.0,
        "both_rate": 34.0,
        "memory_rate": 24.0,
    },
    trials=c_trials,
    run=run,
    summarize=summarize_c,
    columns=COLUMNS,
    figures=[
        Figure(
            name, "c", column, series="keep", panel="setting", y_label=label, x_label="C",
            labels={False: "discarded", True: "kept"}, title=title,
        )
        for name, column, label, title in (
            ("latency", "mean_latency_s", "s", "mean latency by C"),
            ("ttft", "mean_ttft_s", "s", "mean time to first token by C"),
            ("memory", "mean_kv", "tokens", "mean KV by C"),
        )
    ],
)  # fmt: skip


# --- rates and a burst --------------------------------------------------------------------------


def rate_trials(parameters: Mapping[str, Any], seed: int) -> Iterable[Row]:
    """Yield one trial per setting, draw, rate (the burst last) and policy."""
    for setting in ("seats", "memory"):
        for draw in range(parameters["draws"]):
            for rate in [*parameters[f"{setting}_rates"], None]:
                for spec in [*POLICIES.values(), *(BURST.values() if rate is None else ())]:
                    yield {
                        **_common(parameters, seed, setting, draw),
                        "requests": parameters["burst" if rate is None else "requests"],
                        "rate": rate,
                        "policy": spec,
                    }


def _over_rates(
    rows: Sequence[Row], column: str, setting: str, over: str, under: str
) -> list[Estimate]:
    rates = dict.fromkeys(row["rate"] for row in rows if row["setting"] == setting)
    found = [
        ratio(
            rows,
            column,
            {"setting": setting, "rate": rate, "policy": POLICIES[over]},
            {"setting": setting, "rate": rate, "policy": POLICIES[under]},
        )
        for rate in rates
        if rate is not None
    ]
    return [value for value in found if value is not None]


def summarize_rates(rows: Sequence[Row]) -> list[Claim]:
    """Return section 4.2's statements about request rates (Figure 6) and a burst (Figure 7)."""
    claims = []

    def span(what: str, paper: str, found: list[Estimate], low: float, high: float) -> None:
        """State the range of a ratio over rates; the largest is to lie between two values."""
        if not found:
            claims.append(Claim(what, paper, None))
            return
        values = [value.mean for value in found]
        holds = low <= max(values) <= high
        claims.append(Claim(what, paper, f"{min(values):.2f} to {max(values):.2f}", holds))

    for setting in ("seats", "memory"):
        for trail in ("trail", "trail-keep"):
            name = f"{setting}, {trail}"
            for column, words, paper, least in (
                ("mean_latency_s", "mean latency", "1.66 to 2.01", 1.66),
                ("mean_ttft_s", "mean TTFT", "1.76 to 24.07", 1.76),
                ("p50_latency_s", "median latency", "above 1", 1.01),
                ("p50_ttft_s", "median TTFT", "above 1", 1.01),
            ):
                found = _over_rates(rows, column, setting, "vllm-fcfs", trail)
                span(f"{name}: {words} of vllm-fcfs over it", paper, found, least, np.inf)
            bert = trail.replace("trail", "trail-bert")
            found = _over_rates(rows, "mean_latency_s", setting, bert, trail)
            what = f"{name}: mean latency of first predictions over it"
            span(what, "above 1", found, 1.01, np.inf)
        found = _over_rates(rows, "mean_latency_s", setting, "vllm-fcfs", "vllm-sjf")
        span(f"{setting}: mean latency of vllm-fcfs over vllm-sjf", "about 1", found, 0.9, 1.1)
        for keep in ("", "-keep"):
            here: dict[str, Any] = {"setting": setting, "rate": None}
            ours = {"policy": POLICIES[f"trail{keep}"], **here}
            value = ratio(rows, "mean_latency_s", {"policy": BURST[f"srpt{keep}"], **here}, ours)
            alike = None if value is None else abs(value.mean - 1) <= 0.02
            what = f"{setting}, burst, trail{keep}: mean latency of C = 1 over it"
            claims.append(Claim(what, "about 1", text(value), alike))
            for column, words in (("mean_latency_s", "mean latency"), ("mean_ttft_s", "mean TTFT")):
                value = ratio(rows, column, {"policy": "vllm-fcfs", **here}, ours)
                what = f"{setting}, burst, trail{keep}: {words} of vllm-fcfs over it"
                claims.append(above(what, value))
    return claims


RATES = Experiment(
    name="trail-rates",
    summary="TRAIL against vLLM, first come and shortest first, over request rates and in a burst",
    paper="000, section 4.2 (Figures 6 and 7)",
    parameters={
        **SHARED,
        "seats_rates": [20.0, 24.0, 28.0, 32.0, 36.0, 40.0],
        "memory_rates": [14.0, 16.0, 18.0, 20.0, 22.0, 24.0, 26.0],
        "burst": 1000,
    },
    trials=rate_trials,
    run=run,
    summarize=summarize_rates,
    columns=COLUMNS,
    figures=[
        Figure(
            name, "rate", column, series="policy", panel="setting", x_label="requests/s",
            y_label="s", title=title, log="y",
        )
        for name, column, title in (
            ("mean-latency", "mean_latency_s", "mean latency by request rate"),
            ("mean-ttft", "mean_ttft_s", "mean time to first token by request rate"),
            ("median-latency", "p50_latency_s", "median latency by request rate"),
            ("median-ttft", "p50_ttft_s", "median time to first token by request rate"),
        )
    ],
)  # fmt: skip
