# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # When should a request be evicted?
#
# **Is an eviction a failure or a tool?** It is a tool where refilling a request costs less than the
# batches that its memory saves. That is so for short prompts, little memory, and a large fixed cost
# per batch. Elsewhere evictions waste time, and a scheduler should reserve memory instead.
#
# *Stop 3 of 10 on the [tour](../docs/notebooks/index.md). Before:
# [where does the gap come from?](gap.ipynb) Next:
# [scheduling without knowing lengths](unknown_lengths.ipynb)*
#
# A server starts requests while their KV fits. KV grows with every token, and at some point it does
# not fit any more. Then a request is *evicted*. Its KV is dropped. Later its prompt, with all
# tokens produced so far, is computed again, which is called a *refill*.
#
# Kim et al. (2024, *The Effect of Scheduling and Preemption on the Efficiency of LLM Inference
# Serving*) ask an optimizer when that is worth it. We do the same with proofs. Then we look at what
# the answer depends on.

# %%
import warnings

import matplotlib.pyplot as plt

import optsched
from optsched.show.plot import plot_gantt, plot_kv, plot_lines

warnings.filterwarnings("ignore", message="cost model .* is used outside its range")

# %% [markdown]
# ## Four requests, proved
#
# The paper's case has four equal requests, which arrive together. Each has a prompt of I tokens and
# an output of 4 tokens. There is memory for two prompts, or for one request until its end. The
# published coefficients for an A100 say how long a batch takes.
#
# `solve` finds the best order of batches, evictions included. With `eviction_free=True` it finds
# the best order without evictions. Here is I = 16:

# %%
paper = "llama2-7b-a100-infermax-paper"


def case(prompt: int, output: int = 4, n: int = 4) -> optsched.Instance:
    """Return n equal requests and memory for two prompts, or for one request to its end."""
    return optsched.Instance(
        [0.0] * n,
        [prompt] * n,
        [output] * n,
        kv_capacity=max(2 * prompt, prompt + output - 1),
        time_unit="second",
        kv_accounting="cached",
    )


small = case(16)
problem = optsched.Problem(small, paper, "makespan")
best = optsched.solve(problem)
reserved = optsched.solve(problem, eviction_free=True)

figure, axes = plt.subplots(4, 1, figsize=(8, 9), sharex=True, layout="constrained")
for (upper, lower), title, result in zip(
    (axes[:2], axes[2:]),
    ("the best schedule", "the best schedule without evictions"),
    (best, reserved),
    strict=True,
):
    line = optsched.timeline(problem, result.schedule)
    plot_gantt(line, ax=upper)
    plot_kv(line, ax=lower)
    upper.set(title=f"{title}: {1e3 * result.value:.1f} ms", xlabel="")
    lower.set_xlim(0, 0.058)

# %% [markdown]
# The best schedule evicts twice, and takes 3 ms less. The reason is the cost of a batch. A batch
# has a fixed cost, whether one request decodes in it or four. Evicting a request lets another
# prompt in. So more requests share a batch, and fewer batches are needed. The price is the refill.

# %%
print(f"free to evict: {1e3 * best.value:.1f} ms, {best.metrics['evictions']} evictions")
print(f"eviction-free: {1e3 * reserved.value:.1f} ms")
assert best.status == reserved.status == "optimal"
assert best.value < reserved.value
assert best.metrics["evictions"] == 2

# %% [markdown]
# ## Where it stops paying
#
# A refill costs more the longer the prompt is. What it saves does not grow. So from some length on
# evicting does not pay:

# %%
prompts = (1, 4, 16, 32, 64, 128, 512)
rows = []
for prompt in prompts:
    instance = case(prompt)
    problem = optsched.Problem(instance, paper, "makespan")
    free = optsched.solve(problem)
    kept = optsched.solve(problem, eviction_free=True)
    assert free.status == kept.status == "optimal"
    ratio = kept.value / free.value
    rows.append({"prompt": prompt, "ratio": ratio, "evictions": free.metrics["evictions"]})

ax = plot_lines(rows, "prompt", "ratio")
ax.get_legend().remove()
ax.set(xlabel="prompt I [tokens]", ylabel="time without evictions\nover the best time")
ax.set_xscale("log", base=2)
ax.set_xticks(prompts, prompts)
ax.axhline(1, ls="--", color="#222222", lw=1);

# %%
for row in rows:
    print(
        "I = {prompt:3}: {ratio:.3f} times the best, which has {evictions} evictions".format(**row)
    )

# %% [markdown]
# Evicting saves a quarter of the time at I = 1, and nothing from I = 64 on. The paper says that it
# stops paying at 128.
#
# With the paper's own coefficients the length can be computed by hand. To recompute a request of
# I + 1 tokens must cost less than one more decode batch:
#
# $$(\text{token} - \text{decode kv})\, I + \text{prefill square}\,(I + 1)^2
# < \text{base} + \text{decode base}$$

# %%
cost = optsched.load_cost_model(paper)


def pays(prompt: int, model: optsched.BatchCost) -> bool:
    """Whether recomputing a request costs less than one more decode batch."""
    refill = (model["token"] - model["decode_kv"]) * prompt
    refill += model["prefill_square"] * (prompt + 1) ** 2
    return refill < model["base"] + model["decode_base"]


longest = max(prompt for prompt in range(1, 1000) if pays(prompt, cost))
print("evicting pays up to I =", longest)
assert 32 < longest < 64
assert rows[0]["ratio"] > 1 / 0.76  # a quarter of the time is saved
assert [row["evictions"] > 0 for row in rows] == [prompt <= longest for prompt in prompts]

# %% [markdown]
# ## What the answer depends on
#
# It depends on the fixed cost of a batch, and there the published coefficients are doubtful. They
# say 0.065 ms per layer. But reading the weights of a layer alone takes 0.2 ms, and no profile
# shows a layer below 0.28 ms. With a model fitted to the public profiles, evicting pays for longer
# prompts:

# %%
measured = "llama2-7b-a100-vidur-fit"
for prompt in (64, 128):
    best = optsched.solve(optsched.Problem(case(prompt), measured, "makespan"))
    evictions = best.metrics["evictions"]
    print(f"I = {prompt:3}: under the fitted model the best schedule evicts {evictions} times")
    assert (evictions > 0) == (prompt == 64)

# %% [markdown]
# ## A server's worth of requests
#
# The best schedule of 512 requests is out of reach. But schedulers are quick to run. vLLM starts a
# request when its prompt fits, and evicts the latest arrival when memory is short. Its
# eviction-free variant starts a request only if the memory suffices to the end of all. We run both
# on 512 requests of 32 + 32 tokens, with memory for a hundred to a hundred thousand tokens.

# %%
policies = {"evicting": "vllm", "eviction-free": "vllm:eviction_free=true"}


def crowd(capacity: int) -> optsched.Instance:
    """Return 512 requests that arrive together, and a server with memory for so many tokens."""
    n = 512
    return optsched.Instance(
        [0.0] * n,
        [32] * n,
        [32] * n,
        kv_capacity=capacity,
        time_unit="second",
        kv_accounting="cached",
    )


def serve(capacity: int, policy: str, model: str) -> dict[str, float]:
    """Return the metrics of one of the two policies."""
    instance = crowd(capacity)
    return optsched.run(optsched.Problem(instance, model), policies[policy]).metrics


table = []
for model in (paper, measured):
    for capacity in (100, 200, 500, 1000, 3000, 10_000, 30_000, 100_000):
        speed = {policy: serve(capacity, policy, model)["tps"] for policy in policies}
        ratio = speed["eviction-free"] / speed["evicting"]
        table.append({"KV capacity": capacity, "model": model, "ratio": ratio})

words = {paper: "published coefficients", measured: "fitted to profiles"}
ax = plot_lines(table, "KV capacity", "ratio", series="model", labels=words)
ax.set(xlabel="KV capacity [tokens]", ylabel="tokens per second,\neviction-free over evicting")
ax.set_xscale("log")
ax.set_xticks([100, 1000, 10_000, 100_000], ["100", "1,000", "10,000", "100,000"])
ax.axhline(1, ls="--", color="#222222", lw=1)
ax.text(100, 1.4, "above the line\nreserving is faster")
ax.text(2000, 0.75, "below the line\nevicting is faster");

# %% [markdown]
# There are three cases.
#
# - **Memory for a handful of requests.** Reserving leaves most of the memory empty most of the
#   time. Evicting wins.
# - **Memory for dozens of requests.** There are hundreds of evictions, and each wastes a prefill.
#   Reserving wins by up to half.
# - **Memory for all requests.** There is nothing to decide.
#
# Where one case turns into the next depends, again, on the fixed cost of a batch.

# %%
at = {(row["model"], row["KV capacity"]): row["ratio"] for row in table}
for model in (paper, measured):
    assert at[model, 100] < 0.9
    assert at[model, 3000] > 1.2
    assert abs(at[model, 100_000] - 1) < 1e-9

# %% [markdown]
# ## What is best for those who wait
#
# Throughput is not everything. Reserving makes requests wait for their first token, and spares them
# pauses afterwards. This is the server with memory for 3,000 tokens:

# %%
seen = {policy: serve(3000, policy, measured) for policy in policies}
for policy, m in seen.items():
    print(
        f"{policy:14} mean TTFT {m['mean_ttft']:.2f} s, mean TPOT {1e3 * m['mean_tpot']:.0f} ms, "
        f"mean latency {m['mean_latency']:.2f} s, {m['evictions']} evictions"
    )
assert seen["eviction-free"]["mean_ttft"] > seen["evicting"]["mean_ttft"]
assert seen["eviction-free"]["mean_tpot"] < seen["evicting"]["mean_tpot"]

# %% [markdown]
# ## What to remember
#
# - Evict a request if refilling it costs less than the batches that its memory saves.
# - That holds for short prompts, little memory and a large fixed cost per batch.
# - A scheduler could compute this from its own cost model, by one comparison per eviction. None of
#   the published schedulers does.
#
# *Next stop: [scheduling without knowing lengths](unknown_lengths.ipynb). So far the schedulers
# knew how long every answer would be.*
