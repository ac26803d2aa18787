"""Are evictions always evil? The optimum of four requests over I (003, section 4.5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optsched.costs.cost import load_cost_model
from optsched.experiments import Claim, Experiment, Figure, Row
from optsched.experiments.base import measured
from optsched.experiments.studies.offline import MODEL, POWERS, quiet
from optsched.judge.evaluate import evaluate
from optsched.optimize.solve import solve
from optsched.policies.engine.simulate import simulate
from optsched.workloads.generate import generate

SCHEDULERS = {"vllm_ms": "vllm", "vllm_ef_ms": "vllm:eviction_free=true", "sarathi_ms": "sarathi"}

EXTRAS: dict[str, dict[str, Any]] = {"": {}, "ef_": {"eviction_free": True}}


def trials(parameters: Mapping[str, Any], seed: int) -> Iterable[Row]:
    """Yield one trial per I; M = max(2 I, I + O - 1)."""
    for prompt in parameters["prompt"]:
        yield {
            "requests": parameters["requests"],
            "output": parameters["output"],
            "prompt": prompt,
            "kv_capacity": max(2 * prompt, prompt + parameters["output"] - 1),
            "method": parameters["method"],
            "time_limit_s": parameters["time_limit_s"],
            "cost_model": parameters["cost_model"],
        }


def run(trial: Row) -> Row:
    """Solve with and without evictions, and run the schedulers."""

    def results() -> Row:
        instance = generate(
            "infermax-fixed",
            n=trial["requests"],
            prompt=trial["prompt"],
            output=trial["output"],
            kv_capacity=trial["kv_capacity"],
        )
        cost = load_cost_model(trial["cost_model"])
        row: Row = {}
        for label, extras in EXTRAS.items():
            result = solve(
                instance,
                formulation="infermax",
                method=trial["method"],
                cost_model=cost,
                objective="makespan",
                time_limit_s=trial["time_limit_s"],
                threads=1,
                **extras,
            )
            row[f"{label}status"] = result.status
            row[f"{label}optimum_ms"] = _ms(result.objective)
            row[f"{label}bound_ms"] = _ms(result.bound)
            if not label and result.evaluation is not None:
                row["evictions"] = result.evaluation.metrics["evictions"]
        for column, spec in SCHEDULERS.items():
            judged = evaluate(instance, simulate(instance, spec, cost), cost)
            row[column] = _ms(judged.metrics["makespan"])
        return row

    with quiet():
        return measured(results)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def summarize(rows: Sequence[Row]) -> list[Claim]:
    """Return the statements of section 4.5."""
    solved = [r for r in rows if r.get("optimum_ms") and r.get("ef_optimum_ms")]
    if not solved:
        return []
    proved = all(r["status"] == r["ef_status"] == "optimal" for r in solved)
    evicting = [r["prompt"] for r in solved if r["evictions"]]
    gain = max(r["ef_optimum_ms"] / r["optimum_ms"] - 1 for r in solved)
    loss = [1 - r["vllm_ef_ms"] / r["vllm_ms"] for r in solved if r["prompt"] >= 128]
    close = [min(r["vllm_ms"], r["vllm_ef_ms"]) / r["optimum_ms"] for r in solved]
    claims = [
        Claim("every case proved optimal", "yes", "yes" if proved else "no", proved),
        Claim(
            "the optimum evicts for I",
            "< 128",
            f"<= {max(evicting)} (of powers of 2)" if evicting else "never",
            max(evicting, default=0) == 64,
        ),
        Claim("most latency of the eviction-free optimum over the optimum, less 1", 0.352, gain),
        Claim(
            "vLLM, the better of the two, over the optimum: most",
            "close to the optimum",
            f"{max(close):.3f}",
            max(close) <= 1.15,
        ),
    ]
    if loss:
        claims.append(
            Claim("most latency saved by eviction-free vLLM over vLLM, I >= 128", 0.275, max(loss))
        )
    return claims


EXPERIMENT = Experiment(
    name="infermax-csp",
    summary="the optimum of four equal requests, with and without evictions, over I",
    paper="003, section 4.5",
    parameters={
        "requests": 4,
        "output": 4,
        "prompt": POWERS,
        "method": "astar",
        "time_limit_s": 60.0,
        "cost_model": MODEL,
    },
    trials=trials,
    run=run,
    summarize=summarize,
    columns={
        "optimum_ms": "least makespan found; likewise ef_optimum_ms without evictions",
        "bound_ms": "no schedule is faster; equal to the optimum when proved",
        "evictions": "of the optimum",
        "vllm_ms": "makespan of vLLM; likewise eviction-free and Sarathi",
    },
    figures=[
        Figure(
            "makespan", "prompt", ("optimum_ms", "ef_optimum_ms", *SCHEDULERS), log="xy",
            labels={"optimum_ms": "optimum", "ef_optimum_ms": "optimum without evictions",
                    "vllm_ms": "vLLM", "vllm_ef_ms": "vLLM without evictions",
                    "sarathi_ms": "Sarathi"},
            x_label="prompt I [tokens]", y_label="makespan [ms]",
        )
    ],
)  # fmt: skip
