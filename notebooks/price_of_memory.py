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
# # My trace, my GPU: what is a token of memory worth?
#
# **Would more memory for the KV cache help, or a better scheduler, or neither?** Memory is worth
# something only while requests wait for it. On the trace below, half as much memory again brings
# first come first served from 4.3 s of mean latency down to 3.3 s. A better order of requests
# brings it down to 2.3 s, and needs no purchase.
#
# *Stop 5 of 10 on the [tour](../docs/notebooks/index.md). Before:
# [scheduling without knowing lengths](unknown_lengths.ipynb). Next:
# [how far is a scheduler from the best one?](load.ipynb)*
#
# This notebook starts from two CSV files, a trace and a profile. It ends with a price: what one
# more token of KV would save, second by second. Both files are made up here, so that the notebook
# runs anywhere. Put your own files in their place. (If the environment variable `OPTSCHED_DATA`
# names a folder with `azure/AzureLLMInferenceTrace_conv.csv`, the first 700 requests of Azure's
# conversation trace are used, and the numbers are other ones.)

# %%
import os
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import optsched
from optsched.show.plot import plot_distribution, plot_fit, plot_kv, plot_lines, plot_shadow_prices

warnings.filterwarnings("ignore", message="cost model .* is used outside its range")
folder = Path(tempfile.mkdtemp())
generator = np.random.default_rng(7)

# %% [markdown]
# ## How much memory is there?
#
# The card is shared. 20 GiB are ours, of which 90 % are usable. The weights of the model take
# 12.6 GiB. A token of KV takes 512 KiB. What is left is room for some 11,000 tokens.

# %%
from optsched.costs.architectures import architecture
from optsched.costs.hardware import kv_capacity

shape = architecture("llama2-7b")
capacity = kv_capacity(
    memory_gib=20, model_bytes=shape.weight_bytes, bytes_per_token=shape.kv_bytes, usable=0.9
)
print(f"{capacity:,} tokens of KV")

# %% [markdown]
# ## A trace
#
# A trace has three columns: when a request came, its prompt tokens, and its output tokens. Ours has
# two minutes of chats at about four per second, and a rush in the middle.

# %%
seconds = np.concatenate([generator.uniform(0, 120, 450), generator.uniform(50, 65, 250)])
pd.DataFrame(
    {
        "when": np.sort(seconds).round(3),
        "input": generator.lognormal(5.3, 1.0, len(seconds)).clip(8, 3000).astype(int),
        "output": generator.lognormal(4.6, 0.8, len(seconds)).clip(4, 1000).astype(int),
    }
).to_csv(folder / "requests.csv", index=False)

azure = Path(os.environ.get("OPTSCHED_DATA", "")) / "azure/AzureLLMInferenceTrace_conv.csv"
if azure.is_file():
    source = {"format": "azure", "path": azure, "limit": 700}
else:
    source = {
        "format": "csv",
        "path": folder / "requests.csv",
        "columns": {"arrival": "when", "prompt_tokens": "input", "output_tokens": "output"},
    }
trace = optsched.read_trace(**source, kv_capacity=capacity)
figure, ax = plt.subplots(figsize=(8, 2.4), layout="constrained")
ax.hist(trace.arrival, bins=60, color="#0072B2")
ax.set(xlabel="time [s]", ylabel="requests that come");

# %%
trace

# %% [markdown]
# ## A profile
#
# How long does a batch take on this GPU? Run some batches. Write down the prompt size, the batch
# size, the time of the prefill, and the time per token afterwards. Here a shipped cost model with
# 3 % of noise stands in for the GPU.

# %%
stand_in = "llama2-7b-a100-vidur-fit"
profile = []
for prompt in (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072):
    for batch in (1, 2, 4, 8, 16, 32):
        if prompt * batch > 4096:  # what one prefill batch takes
            continue
        run = optsched.Instance(
            [0.0] * batch, [prompt] * batch, [128] * batch,
            kv_capacity=200_000, time_unit="second", kv_accounting="cached",
        )  # fmt: skip
        took = optsched.run(optsched.Problem(run, stand_in), "vllm").evaluation
        for noise in generator.normal(1, 0.03, (3, 2)):
            first = 1e3 * took.first_token.mean() * noise[0]
            step = 1e3 * (took.finish - took.first_token).mean() / 127 * noise[1]
            sizes = {"prompt_size": prompt, "batch_size": batch, "token_size": 128}
            times = {"prompt_time": first, "token_time": step, "e2e_time": first + 127 * step}
            profile.append({**sizes, **times})

table = pd.DataFrame(profile)
table = table.assign(model="llama2-7b", hardware="a100-80gb", tensor_parallel=1)
table.to_csv(folder / "perf_model.csv", index=False)

# %% [markdown]
# `fit` turns the table into a cost model. It leaves out a fifth of the rows, and predicts them. In
# the picture they would lie on the line if the predictions were perfect.

# %%
from optsched.costs.fit import fit

fitted = fit(folder, model="llama2-7b", tensor_parallel=1, hardware="a100-80gb")
gpu = fitted.cost_model
plot_fit(fitted);

# %%
for part in fitted.operators:
    print(
        f"{part.operator:8} {part.mean:.1%} mean error on {part.held_out} rows that it did not see"
    )
    assert part.mean < 0.05

# %% [markdown]
# ## What a scheduler would do
#
# We run four schedulers on this trace and this GPU. The first picture shows how many requests are
# done within a given time. The second shows the memory under first come first served (`fcfs`). It
# is full during the rush, and for some time after it.

# %%
policies = ["vllm", "sarathi", "fcfs", "least-work"]
problem = optsched.Problem(trace, gpu)
comparison = optsched.compare(problem, policies, time_limit_s=2)
plans = {row.policy: row.schedule for row in comparison.rows}
evaluations = {policy: optsched.evaluate(problem, plan) for policy, plan in plans.items()}
plot_distribution(evaluations, "latency")

ax = plot_kv(optsched.timeline(problem, plans["fcfs"]))
ax.set_title("first come first served");

# %% [markdown]
# How good could it have been? `compare` has a bound that no schedule beats. So the ratio of each
# scheduler to the optimum lies in an interval.

# %%
for row in comparison.rows:
    print(
        f"{row.policy:10} mean latency {row.metrics['mean_latency']:7.2f} s, "
        f"{row.ratio_to_best_known:.2f} to {row.ratio_to_bound:.2f} times the optimum"
    )
    assert 1 <= row.ratio_to_best_known <= row.ratio_to_bound

# %% [markdown]
# ## More memory, or a better scheduler?
#
# The same trace with three quarters to four times the memory:

# %%
sweep = []
for factor in (0.75, 1, 1.5, 2, 3, 4):
    machine = replace(trace, kv_capacity=int(factor * capacity))
    for policy in policies:
        metrics = optsched.run(optsched.Problem(machine, gpu), policy).metrics
        sweep.append({"factor": factor, "policy": policy, "mean latency": metrics["mean_latency"]})

ax = plot_lines(sweep, "factor", "mean latency", series="policy")
ax.set(xlabel="memory, as a multiple of ours", ylabel="mean latency [s]", ylim=(0, None));

# %% [markdown]
# On the made-up trace `least-work` is slower with four times the memory than with 1.5 times. All
# requests are started at once, and the larger batch slows down each of them. So more memory is not
# always better.

# %%
latency = {(row["factor"], row["policy"]): row["mean latency"] for row in sweep}
print(f"first come first served, our memory:       {latency[1, 'fcfs']:.2f} s")
print(f"first come first served, 1.5 times as much: {latency[1.5, 'fcfs']:.2f} s")
print(f"least work, our memory:                     {latency[1, 'least-work']:.2f} s")
assert latency[1, "least-work"] < latency[1.5, "fcfs"] < latency[1, "fcfs"]
if not azure.is_file():
    assert round(latency[1, "fcfs"] - latency[1.5, "fcfs"]) == 1
    assert latency[4, "least-work"] > latency[1.5, "least-work"]

# %% [markdown]
# ## When is memory scarce?
#
# A sweep says what memory is worth as a whole. A *price* says when it is worth something.
#
# For prices we use rounds of 50 ms: every batch takes 50 ms, whatever is in it. (This server is
# slower than the GPU above, so that its queue lasts longer.) A bound on total latency then comes
# with a price $\lambda_t \ge 0$ for every round $t$. With $d_t$ more tokens of memory in round $t$,
# no schedule saves more than $\sum_t \lambda_t d_t$ against the bound.

# %%
from optsched.bounds.dual import dual_value
from optsched.bounds.memory_prices import best_prices

rounds = optsched.read_trace(**source, kv_capacity=capacity, round_seconds=0.05)
proof, bound = best_prices(rounds, time_limit_s=2)
starts, price = proof.array().T
ax = plot_shadow_prices(np.column_stack([0.05 * starts, price]))
ax.set(xlabel="time [s]", ylabel="rounds of latency that one token saves");

# %% [markdown]
# Where the price is zero, memory is free. More of it would make no request faster. Where requests
# wait, memory has a price. The longer the queue, the more a token is worth.
#
# The sum over all rounds is the price of one more token for the whole time:

# %%
lengths = np.diff(np.append(starts, starts[-1]))
worth = float((price * lengths).sum())
priced = 0.05 * lengths[price > 0].sum()
print(f"one more token of KV takes at most {50 * worth:,.0f} ms off the bound on total latency")
print(f"memory has a price during {priced:.0f} s")
assert (price >= 0).all()

# %% [markdown]
# What could 10 % more memory be worth? The same prices prove a bound for the larger machine. The
# difference is the most that the additional memory can take off the bound.

# %%
larger = replace(rounds, kv_capacity=int(1.1 * capacity))
print(f"no schedule is below {bound:,} rounds with our memory,")
print(f"and none below {dual_value(larger, proof):,} rounds with 10 % more")
assert dual_value(larger, proof) <= bound

# %% [markdown]
# ## What to remember
#
# - Memory and order are two answers to the same queue.
# - The prices say when there is a queue. Where they are zero, neither answer matters.
# - In a rush both matter, and the better order needs no purchase.
#
# *Next stop: [how far is a scheduler from the best one, at my load?](load.ipynb)*
