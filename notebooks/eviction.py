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
# A server admits requests while their KV fits. KV grows with every token, and at some point does
# not fit any more. Then a request is *evicted*: its KV is dropped, and its prompt with all tokens
# produced so far is prefilled again later. Is that a failure, to be avoided by reserving memory, or
# a tool?
#
# Kim et al. ask an optimizer (*The Effect of Scheduling and Preemption on the Efficiency of LLM
# Inference Serving*, 2024, which introduces InferMax). We do the same with proofs, and then look at
# what the answer depends on.

# %%
import warnings

import matplotlib.pyplot as plt

import optsched
from optsched.show.plot import plot_gantt, plot_kv, plot_lines

warnings.filterwarnings("ignore", message="cost model .* is used outside its range")

# %% [markdown]
# ## Four requests, proved
#
# The paper's case has four equal requests of I prompt tokens and 4 output tokens, which arrive
# together. Memory suffices for the prompts of two requests, or for one request until its end. The
# published coefficients for an A100 say how long batches take. An exact search over states finds
# the optimal order of batches, evictions included.

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
best = optsched.solve(small, cost_model=paper)
reserved = optsched.solve(small, cost_model=paper, eviction_free=True)
print("free to evict:", 1e3 * best.objective, "ms,", best.metrics["evictions"], "evictions")
print("eviction-free:", 1e3 * reserved.objective, "ms")
assert best.status == reserved.status == "optimal"
assert best.objective < reserved.objective

# %%
figure, axes = plt.subplots(2, 2, figsize=(10, 5), sharex=True, layout="constrained")
for column, (title, result) in zip(
    axes.T, (("optimal", best), ("optimal without evictions", reserved)), strict=True
):
    line = optsched.timeline(small, result.schedule, paper)
    plot_gantt(line, ax=column[0])
    plot_kv(line, ax=column[1])
    column[0].set_title(title)

# %% [markdown]
# With 16 tokens of prompt, the optimum evicts twice. The reason is the cost of a batch. It has a
# fixed part, whether one request decodes or four. Evicting a request lets another prompt in, so
# that more requests share each batch. The price is the refill.
#
# ## Where it stops paying
#
# The cost of a refill grows with I, faster than linearly. The gain, which is fewer batches, does
# not grow. So there is a crossover:

# %%
prompts = (1, 4, 16, 32, 64, 128, 512)
rows = []
for prompt in prompts:
    instance = case(prompt)
    free = optsched.solve(instance, cost_model=paper)
    kept = optsched.solve(instance, cost_model=paper, eviction_free=True)
    assert free.status == kept.status == "optimal"
    rows.append(
        {
            "prompt": prompt,
            "eviction-free over optimal": kept.objective / free.objective,
            "evictions": free.metrics["evictions"],
        }
    )
    print(rows[-1])

ax = plot_lines(rows, "prompt", "eviction-free over optimal", reference={"equal": 1.0})
ax.set(xlabel="prompt I [tokens]", ylabel="time, eviction-free over optimal")
ax.set_xscale("log", base=2);

# %% [markdown]
# Evicting saves a quarter of the time at I = 1 and nothing from I = 64 on. The paper puts the
# crossover at 128. With the paper's own coefficients it can be computed by hand. Recomputing a
# request of I + 1 tokens must cost less than one more decode batch:
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


crossover = max(prompt for prompt in range(1, 1000) if pays(prompt, cost))
print("evicting pays up to I =", crossover)
assert 32 < crossover < 64
assert [row["evictions"] > 0 for row in rows] == [prompt <= crossover for prompt in prompts]

# %% [markdown]
# ## What the answer depends on
#
# The answer depends on the fixed part of a batch, and there the published coefficients are
# doubtful. They say 0.065 ms per layer. But reading the weights of a layer alone takes 0.2 ms, and
# no profile shows a layer below 0.28 ms. With a model fitted to the public profiles, evicting pays
# for longer prompts:

# %%
measured = "llama2-7b-a100-vidur-fit"
for prompt in (64, 128):
    free = optsched.solve(case(prompt), cost_model=measured)
    print(
        f"I = {prompt}: under the fitted model the optimum evicts {free.metrics['evictions']} times"
    )
    assert (free.metrics["evictions"] > 0) == (prompt == 64)

# %% [markdown]
# ## A server's worth of requests
#
# The optimum for 512 requests is out of reach, but schedulers are quick to run. vLLM evicts the
# latest arrival when memory is short. Its eviction-free variant admits a request only if the peaks
# of all requests fit. We run both on 512 requests of 32 + 32 tokens, with memory from a hundred
# tokens to a hundred thousand:

# %%
policies = {"evicting": "vllm", "eviction-free": "vllm:eviction_free=true"}
table = []
for model in (paper, measured):
    for capacity in (100, 200, 500, 1000, 3000, 10_000, 30_000, 100_000):
        crowd = optsched.Instance(
            [0.0] * 512, [32] * 512, [32] * 512,
            kv_capacity=capacity, time_unit="second", kv_accounting="cached",
        )  # fmt: skip
        seen = {
            name: optsched.evaluate(crowd, optsched.simulate(crowd, spec, model), model).metrics
            for name, spec in policies.items()
        }
        table.append(
            {
                "KV capacity [tokens]": capacity,
                "model": model,
                "tokens per second, eviction-free over evicting": seen["eviction-free"]["tps"]
                / seen["evicting"]["tps"],
                "evictions": seen["evicting"]["evictions"],
            }
        )

ax = plot_lines(
    table,
    "KV capacity [tokens]",
    "tokens per second, eviction-free over evicting",
    series="model",
    labels={paper: "published coefficients", measured: "fitted to profiles"},
    reference={"equal": 1.0},
)
ax.set(xlabel="KV capacity [tokens]", ylabel="tokens per second, eviction-free over evicting")
ax.set_xscale("log");

# %% [markdown]
# There are three regimes. With memory for a handful of requests, reserving leaves most of it empty
# most of the time, and evicting wins. With memory for dozens of requests, there are hundreds of
# evictions, each of which wastes a prefill, and reserving wins by up to half. With memory for all
# requests there is nothing to decide. Where the regimes meet depends, again, on the fixed part of a
# batch.

# %%
ratio = {
    (row["model"], row["KV capacity [tokens]"]): row[
        "tokens per second, eviction-free over evicting"
    ]
    for row in table
}
for model in (paper, measured):
    assert ratio[model, 100] < 0.9
    assert ratio[model, 3000] > 1.2
    assert abs(ratio[model, 100_000] - 1) < 1e-9

# %% [markdown]
# ## What is best for those who wait
#
# Throughput is not everything. Reserving makes requests wait for their first token, and spares them
# pauses afterwards:

# %%
crowd = optsched.Instance(
    [0.0] * 512, [32] * 512, [32] * 512,
    kv_capacity=3000, time_unit="second", kv_accounting="cached",
)  # fmt: skip
for name, spec in policies.items():
    m = optsched.evaluate(crowd, optsched.simulate(crowd, spec, measured), measured).metrics
    print(
        f"{name:14} mean TTFT {m['mean_ttft']:.2f} s, mean TPOT {1e3 * m['mean_tpot']:.0f} ms, "
        f"mean latency {m['mean_latency']:.2f} s, {m['evictions']} evictions"
    )

# %% [markdown]
# So when should a request be evicted? It should if refilling it costs less than the batches that
# its memory saves. That is the case for short inputs, little memory and a large fixed cost per
# batch. A scheduler could compute this from its own cost model, by one comparison per eviction.
# None of the published schedulers does.
