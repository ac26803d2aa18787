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
# You have a log of requests and a GPU. Would more memory for the KV cache help, or a better
# scheduler, or neither? This notebook starts from two CSV files, a trace and a profile. It ends
# with a price: what one more token of KV would save, second by second.
#
# Both files are made up here, so that the notebook runs anywhere. Put your own files in their
# place. If the environment variable `OPTSCHED_DATA` names a folder with Azure's conversation trace
# (`azure/AzureLLMInferenceTrace_conv.csv`), the first 700 requests of that trace are used.

# %%
import csv
import os
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import optsched
from optsched.show.plot import plot_distribution, plot_fit, plot_kv, plot_lines, plot_shadow_prices

warnings.filterwarnings("ignore", message="cost model .* is used outside its range")
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## A trace
#
# A trace has three columns: when a request came, and its prompt and output tokens. Ours has two
# minutes of chats at about four per second, and a rush in the middle.

# %%
generator = np.random.default_rng(7)
seconds = np.sort(np.concatenate([generator.uniform(0, 120, 450), generator.uniform(50, 65, 250)]))
with open(folder / "requests.csv", "w", newline="") as file:
    rows = csv.writer(file)
    rows.writerow(["when", "input", "output"])
    for moment in seconds:
        prompt = int(np.clip(generator.lognormal(5.3, 1.0), 8, 3000))
        answer = int(np.clip(generator.lognormal(4.6, 0.8), 4, 1000))
        rows.writerow([f"{moment:.3f}", prompt, answer])

azure = Path(os.environ.get("OPTSCHED_DATA", "")) / "azure/AzureLLMInferenceTrace_conv.csv"
if azure.is_file():
    source = {"format": "azure", "path": azure, "limit": 700}
else:
    source = {
        "format": "csv",
        "path": folder / "requests.csv",
        "columns": {"arrival": "when", "prompt_tokens": "input", "output_tokens": "output"},
    }

# %% [markdown]
# ## A profile
#
# How long does a batch take on this GPU? Run some batches, and write down prompt size, batch size,
# the time of the prefill and the time per token afterwards. (Here a shipped cost model with 3 % of
# noise stands in for the GPU.) `fit` turns the table into a cost model, and says how well it
# predicts the fifth of the rows that it did not see.

# %%
stand_in = "llama2-7b-a100-vidur-fit"
header = (
    "model", "hardware", "tensor_parallel", "prompt_size", "batch_size", "token_size",
    "prompt_time", "token_time", "e2e_time",
)  # fmt: skip
with open(folder / "perf_model.csv", "w", newline="") as file:
    rows = csv.writer(file)
    rows.writerow(header)
    for prompt in (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072):
        for batch in (1, 2, 4, 8, 16, 32):
            if prompt * batch > 4096:  # what one prefill batch takes
                continue
            run = optsched.Instance(
                [0.0] * batch, [prompt] * batch, [128] * batch,
                kv_capacity=200_000, time_unit="second", kv_accounting="cached",
            )  # fmt: skip
            plan = optsched.simulate(run, "vllm", stand_in)
            took = optsched.evaluate(run, plan, stand_in)
            for _ in range(3):
                first, step = generator.normal(1, 0.03, 2)
                first *= 1e3 * took.first_token.mean()
                step *= 1e3 * (took.finish - took.first_token).mean() / 127
                whole = first + 127 * step
                rows.writerow(["llama2-7b", "a100-80gb", 1, prompt, batch, 128, first, step, whole])

# %%
from optsched.costs.fit import fit

fitted = fit(folder, model="llama2-7b", tensor_parallel=1, hardware="a100-80gb")
gpu = fitted.cost_model
for part in fitted.operators:
    print(f"{part.operator}: {part.mean:.1%} mean error on {part.held_out} held-out rows")
plot_fit(fitted);

# %% [markdown]
# How much KV fits? The card is shared, and 20 GiB are ours, of which 90 % are usable. The weights
# take 12.6 GiB, and each token takes 512 KiB.

# %%
from optsched.costs.hardware import architecture, kv_capacity

shape = architecture("llama2-7b")
capacity = kv_capacity(
    memory_gib=20, model_bytes=shape.weight_bytes, bytes_per_token=shape.kv_bytes, usable=0.9
)
trace = optsched.read_trace(**source, kv_capacity=capacity)
print(capacity, "tokens of KV")
trace

# %% [markdown]
# ## What a scheduler would do
#
# We run four schedulers on this trace and this GPU, and compare them with a bound that no schedule
# can beat.

# %%
policies = ["vllm", "sarathi", "fcfs", "least-work"]
comparison = optsched.compare(trace, policies, cost_model=gpu, time_limit_s=6)
comparison

# %%
for row in comparison.rows:
    print(
        f"{row.policy:10} mean latency {row.metrics['mean_latency']:7.2f} s, "
        f"{row.ratio_to_best_known:.2f} to {row.ratio_to_bound:.2f} times the optimum"
    )
    assert 1 <= row.ratio_to_best_known <= row.ratio_to_bound

# %%
evaluations = {row.policy: optsched.evaluate(trace, row.schedule, gpu) for row in comparison.rows}
figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
plot_distribution(evaluations, "latency", ax=left)
served = comparison.rows[2]
plot_kv(optsched.timeline(trace, served.schedule, gpu), ax=right)
right.set_title(served.policy);

# %% [markdown]
# ## More memory, or a better scheduler?
#
# The same trace with half to four times the KV:

# %%
from dataclasses import replace

sweep = []
for factor in (0.75, 1, 1.5, 2, 3, 4):
    machine = replace(trace, kv_capacity=int(factor * capacity))
    for policy in policies:
        plan = optsched.simulate(machine, policy, gpu)
        metrics = optsched.evaluate(machine, plan, gpu).metrics
        sweep.append({"factor": factor, "policy": policy, "mean latency": metrics["mean_latency"]})

ax = plot_lines(sweep, "factor", "mean latency", series="policy")
ax.set(xlabel="KV capacity / ours", ylabel="mean latency [s]");

# %%
latency = {(row["factor"], row["policy"]): row["mean latency"] for row in sweep}
assert latency[4, "fcfs"] < latency[0.75, "fcfs"]
print(
    f"first come first served with 1.5 times the memory: {latency[1.5, 'fcfs']:.2f} s; "
    f"least work with ours: {latency[1, 'least-work']:.2f} s"
)

# %% [markdown]
# On the made-up trace least work is even slower with four times the memory than with 1.5 times. All
# requests are admitted at once, and the larger batch slows down each of them. More memory is not
# always better.
#
# ## When is memory scarce?
#
# A sweep says what memory is worth as a whole. A *price* says when it is worth something. In rounds
# of 50 ms, total latency has a dual with a price $\lambda_t$ for every round $t$. If a machine has
# $d_t$ more tokens in round $t$, none of its schedules saves more than $\sum_t \lambda_t d_t$
# against the bound. The bound itself comes with the prices.

# %%
from optsched.bounds import shadow_prices
from optsched.bounds.dual import dual_value
from optsched.bounds.shadow import best_prices

rounds = optsched.read_trace(**source, kv_capacity=capacity, round_seconds=0.05)
prices = shadow_prices(rounds, time_limit_s=5)
ax = plot_shadow_prices(prices)
ax.set_ylabel("rounds of latency saved by one token");

# %% [markdown]
# Where the price is zero, memory is free: more of it would make no request faster. Where there is a
# queue, memory has a price, and the longer the queue, the more a token is worth. The sum is the
# price of one token of KV for the whole trace:

# %%
starts, price = prices.T
lengths = np.diff(np.append(starts, starts[-1]))
worth = float((price * lengths).sum())
print(f"one token of KV for all of the time: {worth:.3f} rounds = {50 * worth:.1f} ms of latency")
print(f"priced above zero in {lengths[price > 0].sum() / lengths.sum():.0%} of the priced rounds")
assert (price >= 0).all()

# %% [markdown]
# What could 10 % more memory be worth? The same prices prove a bound for the larger machine. The
# difference is the most that the additional memory can take off the bound.

# %%
proof, bound = best_prices(rounds, time_limit_s=5)
larger = replace(rounds, kv_capacity=int(1.1 * capacity))
print("no schedule is below", bound, "rounds with our memory,")
print("and none below", dual_value(larger, proof), "with 10 % more")
assert dual_value(larger, proof) <= bound

# %% [markdown]
# So memory and order are two answers to the same queue, and the prices say when there is a queue.
# Where the prices are zero, neither matters. In a rush both matter, and the better order needs no
# purchase.
