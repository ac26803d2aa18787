"""Cost models from the log of a server's steps, written here by servers whose truth is known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from optsched import Instance, Problem, load_cost_model, run
from optsched.costs.fit import fit
from optsched.problem.errors import InputError
from tests.known_servers import SERVERS, Prefills, Server

# Servers whose time of every step is known, by name.
KNOWN = {server.name: server for server in SERVERS}
Steps = list[tuple[Prefills, Sequence[int], float]]


def served(server: Server) -> tuple[Steps, float]:
    """Return the steps of a run with noise of 3 % and a slow start, and its mean latency."""
    rng, steps = np.random.default_rng(3), Steps()

    def step(prefills: Prefills, decodes: Sequence[int]) -> float:
        time = server.step(prefills, decodes) * rng.lognormal(0, 0.03) + 0.4 * (len(steps) < 5)
        steps.append((prefills, decodes, time))
        return time

    tokens, (arrivals, *_) = replace(server, step=step).run(), server.load()
    return steps, float(np.mean([one[-1] - a for one, a in zip(tokens, arrivals, strict=True)]))


def metrics(steps: Steps) -> str:
    """Return forward pass metrics as JSON lines, with the message of an idle engine."""
    lines = [json.dumps({"version": 1, "wall_time": 0.0, "scheduled_requests": {}})]
    for prefills, decodes, time in steps:
        content = {
            "num_prefill_requests": len(prefills),
            "sum_prefill_tokens": sum(c for c, _ in prefills),
            "sum_prefill_kv_tokens": sum(m for _, m in prefills),
            "num_decode_requests": len(decodes),
            "sum_decode_kv_tokens": sum(decodes),
        }
        lines.append(json.dumps({"wall_time": time, "scheduled_requests": content}))
    return "\n".join(lines)


def vllm_log(steps: Steps, kv: int) -> str:
    """Return the log that vLLM writes of steps, with KV in shares of so many tokens."""
    lines = [f"(EngineCore pid=7) INFO 12-22 21:40:01 GPU KV cache size: {kv:,} tokens"]
    for k, (prefills, decodes, time) in enumerate(steps):
        held = sum(decodes) + sum(c + m for c, m in prefills)
        lines.append(
            f"INFO 12-22 21:44:40 [core.py:349] Iteration({k}): {len(prefills)} context requests, "
            f"{sum(c for c, _ in prefills)} context tokens, {len(decodes)} generation requests, "
            f"{len(decodes)} generation tokens, iteration elapsed time: {1000 * time:.2f} ms, "
            f"GPU KV cache usage: {100 * held / kv:.1f}%"
        )
    lines.append(lines[-1].replace(" ms,", " ms (dummy),"))
    return "\n".join(lines)


@pytest.mark.parametrize("name", ["sum", "corner-3", "host-bound", "seat-starved"])
@pytest.mark.parametrize("kind", ["metrics", "vllm"])
def test_the_twin_of_a_logged_server_has_its_mean_latency_within_8_percent(
    name: str, kind: str, tmp_path: Path
) -> None:
    """`served` runs a server whose times are known and logs its steps with noise of 3 %. The
    twin runs the same load on the cost model that is fitted to the log."""
    server = KNOWN[name]
    steps, true = served(server)
    log = tmp_path / "server.log"
    log.write_text(metrics(steps) if kind == "metrics" else vllm_log(steps, server.kv))
    cost = load_cost_model(f"steps:{log}")
    assert cost.kv_capacity_tokens in (None, server.kv)
    arrivals, prompts, outputs = server.load()
    instance = Instance(arrivals, prompts, outputs, server.kv, "second", kv_block_tokens=16)
    policy = f"vllm-v1:max_num_seqs={server.seats},max_num_batched_tokens={server.tokens}"
    with pytest.warns(UserWarning, match="range of validity"):
        found = run(Problem(instance, cost), policy).metrics["mean_latency"]
    # 8 % is the error that `fit` aims at, and `true` the mean latency of the server itself.
    assert found == pytest.approx(true, rel=0.08)


def test_the_larger_of_host_and_device_comes_back(tmp_path: Path) -> None:
    # Steps of n decodes over k tokens each, and of one prompt of c tokens: the host takes 20 ms,
    # the device 5 ms + 0.1 ms a token + 1e-4 ms for each token of KV that decodes read.
    rows = ["prefill_requests,prefill_tokens,prefill_kv,decode_requests,decode_kv,time_ms"]
    for n in (0, 1, 4, 16, 64, 128, 256):
        for c in (0, 64, 256, 1024):
            for kv in (100 * n, 300 * n, 900 * n)[: 3 if n else 1]:
                device = 5 + 0.1 * (n + c) + 1e-4 * kv
                rows.append(f"{c > 0:d},{c},0,{n},{kv},{max(20.0, device)}")
    file = tmp_path / "steps.csv"
    file.write_text("\n".join(rows))
    cost = fit(file).cost_model
    assert cost.table is not None
    device, host = sorted(cost.table.minorants, key=lambda one: float(one.get("base", 0)))
    assert float(device["token"]) == pytest.approx(0.1, rel=1e-3)  # the log has no noise
    assert float(device["decode_kv"]) == pytest.approx(1e-4, rel=1e-3)
    assert float(host["base"]) == pytest.approx(20.0, rel=1e-3)


def test_a_log_without_kv_is_refused_unless_attention_may_cost_nothing(tmp_path: Path) -> None:
    steps, _ = served(replace(KNOWN["sum"], n=60))
    log = tmp_path / "server.log"
    log.write_text(vllm_log(steps, 90_000).split("\n", 1)[1])  # not how much the cache holds
    with pytest.raises(InputError, match="--partial"):
        fit(log)
    assert fit(log, partial=True).cost_model.name == "server-steps-without-attention-of-decodes"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "found no steps"),
        ("INFO nothing else\n", "line 1"),
        ("Iteration(3): 1 context requests, 5\n", "line 1: found 'Iteration"),
        ('{"wall_time": 1}\n', "line 1: found wall_time; expected .* scheduled_requests"),
        ('{"wall_time": -1, "scheduled_requests": {}}\n', "wall_time: found -1"),
    ],
)
def test_a_file_without_steps_is_refused_by_line(text: str, words: str, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(text)
    with pytest.raises(InputError, match=words):
        fit(log)
