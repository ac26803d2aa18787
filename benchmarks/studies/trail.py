"""TRAIL against vLLM: the choice of C, request rates, a burst, and the predictor.

Source: Shahout et al. 2024. The Alpaca prompts, Llama-3-8B's answers and its batch times are not at
hand. Answers are lognormal instead. They range from 1 to 512 tokens as the paper's bins do, with an
assumed mean of 200 and an assumed median of 170. Prompts have an assumed mean of 44 tokens, the
size of the prompt that section 3.1 shows. Batch times are those of Llama-2-7B. With them an A100 is
not busy at the paper's 14 requests/s. The rates are therefore around the saturation of this cost
model, where requests queue for seats, for KV, or for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.experiments.base import Claim, Experiment, Row
from optsched.problem.instance import Instance
from optsched.workloads.generate import generate
from optsched.workloads.predict import predict

from .drawing import Figure
from .parts import (
    Count,
    claim,
    distinct,
    judged,
    measured,
    picked,
    quiet,
    select,
    sweep,
)
from .queueing.simulation import Estimate, estimate

PAPER = "Shahout et al. 2024 (TRAIL)"
SETTINGS = {"seats": 100_000, "both": 50_000, "memory": 20_000}
"""KV capacities in tokens. With 100,000, requests queue for the 256 seats of a batch, which is the
default number of vLLM. With 50,000, both seats and KV are short. With 20,000, about a sixth of the
card, only KV is short."""
ALPACA = {
    "output_mean": 200.0,
    "output_median": 170.0,
    "output_max": 512,
    "prompt_mean": 44.0,
    "prompt_median": 40.0,
    "prompt_max": 200,
}
POLICIES = {
    "vllm": "vllm",
    "vllm-fcfs": "vllm-fcfs",
    "vllm-sjf": "vllm-sjf",
    "trail": "trail",
    "trail-bert": "trail:refine=false",
    "trail-keep": "trail:keep=true",
    "trail-bert-keep": "trail:refine=false,keep=true",
}
"""The policies that run at every rate: vLLM without and with chunked prefill, and TRAIL with the KV
of preempted requests discarded at once, or kept until the memory is needed."""
BURST = {"srpt": "srpt", "srpt-keep": "srpt:keep=true"}
"""The policies that run in the burst too."""
METRICS = {
    "mean_latency_s": "mean_latency",
    "p50_latency_s": "p50_latency",
    "mean_ttft_s": "mean_ttft",
    "p50_ttft_s": "p50_ttft",
    "mean_kv": "mean_kv",
    "peak_kv": "peak_kv",
    "evictions": "evictions",
    "makespan_s": "makespan",
}


def workload(requests: int, rate: float | None, kv_capacity: int, seed: int) -> Instance:
    """Return requests like Alpaca's. They arrive as Poisson at a rate, or all at once if None."""
    arrivals: dict[str, Any] = {"arrivals": "all-at-once"} if rate is None else {"rate": rate}
    return generate(
        "lognormal", seed=seed, n=requests, kv_capacity=kv_capacity, **ALPACA, **arrivals
    )


@measured
def run(trial: Row) -> Row:
    """Run one policy. All policies of a draw serve the same requests with the same predictions."""
    seed = 1000 * trial["seed"] + trial["draw"]
    instance = workload(trial["requests"], trial["rate"], trial["kv_capacity"], seed)
    spec = trial["policy"]
    policy = f"{spec}{',' if ':' in spec else ':'}max_running={trial['max_running']}"
    told = {"seed": seed, "predictor": trial["predictor"]}
    with quiet():
        return picked(judged(instance, policy, trial["cost_model"], **told).metrics, METRICS)


def mean(rows: Sequence[Row], column: str, **where: Any) -> Estimate | None:
    """Return the mean of a column over draws with its 95 % interval, or None below two draws."""
    return over_draws(by_draw(rows, column, where))


def ratio(
    rows: Sequence[Row], column: str, over: Mapping[str, Any], under: Mapping[str, Any]
) -> Estimate | None:
    """Return the mean over draws of one run's value over another's of the same draw."""
    one, two = by_draw(rows, column, over), by_draw(rows, column, under)
    return over_draws({k: one[k] / two[k] for k in one if two.get(k)})


def by_draw(rows: Sequence[Row], column: str, where: Mapping[str, Any]) -> dict[int, float]:
    """Return a column's value by draw, over the rows that have given values."""
    here = select(rows, **where)
    return {row["draw"]: float(row[column]) for row in here if row.get(column) is not None}


def over_draws(values: Mapping[int, float]) -> Estimate | None:
    """Return the mean of the values by draw, or None below two draws."""
    return estimate(np.array(list(values.values()))) if len(values) > 1 else None


def text(value: Estimate) -> str:
    """Return a mean and half of its 95 % interval."""
    return f"{value.mean:.3f} ± {value.half_width:.3f}"


def exceeds(value: Estimate | None) -> bool:
    """Return whether the interval of a ratio lies above 1."""
    return value is not None and value.mean - value.half_width > 1


def above(what: str, value: Estimate | None) -> Claim:
    """Return the claim that a ratio exceeds 1. It holds if the whole interval is above 1."""
    return claim(what, "above 1", value, exceeds, text)


FIRST: dict[str, Any] = {
    "kv_capacity": lambda row, _: SETTINGS[row["setting"]],
    "draw": Count("draws"),
    "requests": "requests",
    "max_running": "max_running",
    "predictor": "predictor",
    "cost_model": "cost_model",
    "seed": "seed",
}
"""The columns after those of the setting."""
SHARED = {
    "draws": 10,
    "requests": 3000,
    "max_running": 256,
    "predictor": "trail",
    "cost_model": "llama2-7b-a100-vidur-fit",
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
TIMES = (("mean_latency_s", "mean latency"), ("mean_ttft_s", "mean TTFT"))


# --- C --------------------------------------------------------------------------------------------


def summarize_c(rows: Sequence[Row]) -> list[Claim]:
    """Return the statements about C of section 4.2 and Appendix D."""
    claims = []
    for setting in SETTINGS:
        for keep in (False, True):
            name = f"{setting}, {'kept' if keep else 'discarded'} KV"
            here = select(rows, setting=setting, keep=keep)
            found = {c: mean(here, "mean_latency_s", c=c) for c in distinct(rows, "c") if c > 0}
            known = {c: value.mean for c, value in found.items() if value is not None}
            order = " < ".join(f"{c:g}" for c in sorted(known, key=lambda c: known[c]))
            worse = [
                exceeds(ratio(here, "mean_latency_s", {"c": c}, {"c": 0.8}))
                for c in known
                if c != 0.8
            ]
            holds = all(worse) if known else None
            claims.append(
                Claim(f"{name}: C by mean latency", "0.8 < 0.5 < 0.2, 1", order or None, holds)
            )

            for column, words in TIMES:
                for c in (1.0, 0.2):
                    value = ratio(here, column, {"c": c}, {"c": 0.8})
                    claims.append(above(f"{name}: {words}, C = {c:g} over 0.8", value))

            for column, words in (("mean_kv", "mean KV"), ("peak_kv", "peak KV")):
                value = ratio(here, column, {"c": 1.0}, {"c": 0.2})
                claims.append(above(f"{name}: {words}, C = 1 over 0.2", value))

    return claims


C = Experiment(
    name="trail-c",
    summary="TRAIL's limit on preemption: latency, KV and evictions by C",
    paper=f"{PAPER}, section 4.2 (Figure 5) and Appendix D",
    parameters={
        **SHARED,
        "c": [0.0, 0.2, 0.5, 0.8, 1.0],
        "seats_rate": 34.0,
        "both_rate": 34.0,
        "memory_rate": 24.0,
    },
    trials=sweep(
        setting=list(SETTINGS),
        **FIRST,
        rate=lambda row, parameters: parameters[f"{row['setting']}_rate"],
        policy=lambda row, _: f"trail:c={row['c']:g},keep={str(row['keep']).lower()}",
        keep=[False, True],
        c="c",
    ),
    run=run,
    summarize=summarize_c,
    columns=COLUMNS,
    figures=[
        Figure(
            name,
            "c",
            column,
            series="keep",
            panel="setting",
            y_label=label,
            x_label="C",
            labels={False: "discarded", True: "kept"},
            title=title,
        )
        for name, column, label, title in (
            ("latency", "mean_latency_s", "s", "mean latency by C"),
            ("ttft", "mean_ttft_s", "s", "mean time to first token by C"),
            ("memory", "mean_kv", "tokens", "mean KV by C"),
        )
    ],
)


# --- rates and a burst ----------------------------------------------------------------------------


def rate_trials(parameters: Mapping[str, Any], seed: int) -> Iterator[Row]:
    """Yield one trial per setting, draw, rate and policy. The burst comes after the rates."""
    for setting in ("seats", "memory"):
        yield from sweep(
            setting=[setting],
            **{
                **FIRST,
                "requests": lambda row, known: known[
                    "burst" if row["rate"] is None else "requests"
                ],
            },
            rate=[*parameters[f"{setting}_rates"], None],
            policy=[*POLICIES.values(), *BURST.values()],
            where=lambda row: row["rate"] is None or row["policy"] not in BURST.values(),
        )(parameters, seed)


def summarize_rates(rows: Sequence[Row]) -> list[Claim]:
    """Return the statements of section 4.2: rates (Figure 6) and a burst (Figure 7)."""
    claims = []
    for setting in ("seats", "memory"):
        here = select(rows, setting=setting)
        for trail in ("trail", "trail-keep"):
            name = f"{setting}, {trail}"
            for column, words, paper, least in (
                ("mean_latency_s", "mean latency", "1.66 to 2.01", 1.66),
                ("mean_ttft_s", "mean TTFT", "1.76 to 24.07", 1.76),
                ("p50_latency_s", "median latency", "above 1", 1.01),
                ("p50_ttft_s", "median TTFT", "above 1", 1.01),
            ):
                what = f"{name}: {words} of vllm-fcfs over it"
                found = _by_rate(here, column, "vllm-fcfs", trail)
                claims.append(_span(what, paper, found, least))

            what = f"{name}: mean latency of first predictions over it"
            bert = trail.replace("trail", "trail-bert")
            found = _by_rate(here, "mean_latency_s", bert, trail)
            claims.append(_span(what, "above 1", found, 1.01))

        what = f"{setting}: mean latency of vllm-fcfs over vllm-sjf"
        found = _by_rate(here, "mean_latency_s", "vllm-fcfs", "vllm-sjf")
        claims.append(_span(what, "about 1", found, 0.9, 1.1))

        for keep in ("", "-keep"):
            name = f"{setting}, burst, trail{keep}"
            ours = {"policy": POLICIES[f"trail{keep}"]}
            burst = select(here, rate=None)
            value = ratio(burst, "mean_latency_s", {"policy": BURST[f"srpt{keep}"]}, ours)
            what = f"{name}: mean latency of C = 1 over it"
            claims.append(claim(what, "about 1", value, lambda v: abs(v.mean - 1) <= 0.02, text))

            for column, words in TIMES:
                value = ratio(burst, column, {"policy": "vllm-fcfs"}, ours)
                claims.append(above(f"{name}: {words} of vllm-fcfs over it", value))

    return claims


def _by_rate(rows: Sequence[Row], column: str, over: str, under: str) -> list[float]:
    """Return one policy's value over another's at every rate where both are known."""
    pair = {"policy": POLICIES[over]}, {"policy": POLICIES[under]}
    rates = [rate for rate in distinct(rows, "rate") if rate is not None]
    found = [ratio(select(rows, rate=rate), column, *pair) for rate in rates]
    return [value.mean for value in found if value is not None]


def _span(
    what: str, paper: str, values: Sequence[float], least: float, most: float = np.inf
) -> Claim:
    """Return the claim that the largest ratio over the rates lies between two values."""
    return claim(
        what,
        paper,
        values or None,
        lambda v: least <= max(v) <= most,
        lambda v: f"{min(v):.2f} to {max(v):.2f}",
    )


RATES = Experiment(
    name="trail-rates",
    summary="TRAIL against vLLM, first come and shortest first, over request rates and in a burst",
    paper=f"{PAPER}, section 4.2 (Figures 6 and 7)",
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
            f"{fold}-{name}",
            "rate",
            f"{column}_{name}_s",
            series="policy",
            panel="setting",
            x_label="requests/s",
            y_label="s",
            title=f"{fold} {words} by request rate",
            log="y",
        )
        for fold, column in (("mean", "mean"), ("median", "p50"))
        for name, words in (("latency", "latency"), ("ttft", "time to first token"))
    ],
)


# --- the predictor --------------------------------------------------------------------------------


def errors(told: Instance) -> tuple[float, float]:
    """Return two mean absolute errors over all tokens that requests produce, as in section 4.1.

    The first is that of the forecast. The second is that of the first prediction less the tokens
    produced.
    """
    o, forecast = told.output_tokens, told.forecast
    assert forecast is not None
    left: NDArray[np.int64] = np.repeat(forecast.offsets[1:], o) - np.arange(forecast.offsets[-1])
    late = np.ones(len(left), dtype=bool)
    late[forecast.offsets[:-1]] = False
    once = np.maximum(1.0, np.repeat(forecast.first - o, o) + left)

    return (
        float(np.abs(forecast.remaining - left)[late].mean()),
        float(np.abs(once - left)[late].mean()),
    )


@measured
def run_prediction(trial: Row) -> Row:
    """Return the errors of a classifier without the filter, and with it in both readings."""
    seed = 1000 * trial["seed"] + trial["draw"]
    instance = workload(trial["requests"], None, SETTINGS["seats"], seed)
    spec = f"trail:noise={trial['noise']},bias={trial['bias']}"
    refined, once = errors(predict(instance, spec, seed=seed))

    return {
        "one_off": once,
        "classifier": errors(predict(instance, f"{spec},refine=false", seed=seed))[0],
        "printed": errors(predict(instance, f"{spec},feedback=false", seed=seed))[0],
        "refined": refined,
    }


def summarize_predictions(rows: Sequence[Row]) -> list[Claim]:
    """Return the figure of section 4.1 for the predictor's defaults, and the filter's gain."""
    default = {"noise": 60.0, "bias": 0.21}
    refined = by_draw(rows, "refined", default)
    once, raw, printed = (
        over_draws({k: v / refined[k] for k, v in by_draw(rows, name, default).items()})
        for name in ("one_off", "classifier", "printed")
    )
    what = "error of one-off predictions over refined ones"

    return [
        claim(what, 2.66, once, show=lambda value: round(value.mean, 3)),
        above("the classifier's own error over that of refined predictions", raw),
        claim("the printed equation's over that of refined ones", "not stated", printed, show=text),
    ]


PREDICTIONS = Experiment(
    name="trail-predictions",
    summary="TRAIL's predictor: errors of one-off, classified and refined predictions",
    paper=f"{PAPER}, sections 3.1 and 4.1 (Figures 3 and 4)",
    parameters={
        "draws": 5,
        "requests": 3000,
        "noise": [20.0, 60.0, 120.0],
        "bias": [0.0, 0.1, 0.21, 0.3],
    },
    trials=sweep(noise="noise", bias="bias", draw=Count("draws"), requests="requests", seed="seed"),
    run=run_prediction,
    summarize=summarize_predictions,
    columns={
        "noise": "spread of the classifier's error that changes with every token, tokens",
        "bias": "spread of its relative error that a request keeps",
        "draw": "which draw of requests and predictions",
        "one_off": "mean absolute error of the first prediction less the tokens produced, tokens",
        "classifier": "mean absolute error of the classifier's bins without the filter, tokens",
        "printed": "mean absolute error of the filter by the printed equation, tokens",
        "refined": "mean absolute error of the filter whose posterior is the next prior, tokens",
        "error": "why there are no errors to report",
    },
    figures=[
        Figure(
            "errors",
            "bias",
            ("one_off", "classifier", "printed", "refined"),
            panel="noise",
            y_label="mean absolute error [tokens]",
            title="TRAIL's predictor",
        )
    ],
)
