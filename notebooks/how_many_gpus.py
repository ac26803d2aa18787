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
# # How many GPUs do I need?
#
# **How much traffic does one GPU carry if 99 of 100 requests must be served quickly, and would a
# better scheduler save a GPU?** A simulation says what one scheduler reaches. A proof says what no
# scheduler can reach. Together they are an interval, and it tells whether to look for a better
# scheduler or to buy.
#
# *Stop 7 of 10 on the [tour](../docs/notebooks/index.md). Before:
# [how far is a scheduler from the best one?](load.ipynb). Next:
# [is my vLLM any good?](my_vllm.ipynb)*
#
# The trace is made up here, so that the notebook runs anywhere. (If the environment variable
# `OPTSCHED_DATA` names a folder with `azure/AzureLLMInferenceTrace_conv.csv`, the first 1200 requests
# of Azure's conversation trace are used, and the numbers are other ones.)

# %%
import os
import warnings
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import optsched
from optsched.show.plot import plot_capacity

warnings.filterwarnings("ignore", message="cost model .* is used outside its range")
gpu = "llama2-7b-a100-infermax"

# %% [markdown]
# ## The traffic
#
# Conversations have long prompts and shorter answers. They come in bursts: here the rate changes
# every ten seconds.

# %%
azure = Path(os.environ.get("OPTSCHED_DATA", "")) / "azure" / "AzureLLMInferenceTrace_conv.csv"
if azure.is_file():
    traffic = optsched.read_trace("azure", azure, limit=1200)
else:
    generator = np.random.default_rng(4)
    n = 1200
    busy = np.repeat(generator.gamma(8.0, 1 / 8.0, n // 50), 50)  # one value for 50 requests
    traffic = optsched.Instance(
        np.cumsum(generator.exponential(0.18 / busy)),
        np.clip(generator.lognormal(6.7, 0.8, n), 10, 4000).astype(int),
        np.clip(generator.lognormal(5.0, 0.8, n), 2, 1000).astype(int),
        kv_capacity=100_000,
        time_unit="second",
        name="conversations",
    )

seconds = np.arange(0, traffic.arrival.max() + 5, 5)
tokens = np.histogram(traffic.arrival, seconds, weights=traffic.prompt_tokens)[0] / 5
figure, ax = plt.subplots(figsize=(8, 2.4), layout="constrained")
ax.stairs(tokens, seconds, fill=True, color="#56B4E9")
ax.set(xlabel="time [s]", ylabel="prompt tokens per second");

# %%
lengths = f"{traffic.prompt_tokens.mean():.0f} prompt and {traffic.output_tokens.mean():.0f} output"
print(f"{traffic.n} requests in {traffic.arrival.max():.0f} s, with {lengths} tokens on average")

# %% [markdown]
# ## One GPU, one promise
#
# We promise the first token within a second, and then a token every 50 ms on average. That is two
# *service level objectives* (SLOs). *Attainment* is the share of requests within both.
#
# `capacity` plays the same requests faster or slower, and looks for the largest rate at which a
# scheduler keeps the promise to 99 %. In the shaded region nothing can be, whatever the scheduler.

# %%
promise = {"slo_ttft": 1.0, "slo_tpot": 0.05}
policies = ["fcfs", "vllm", "sarathi", "late-last", "paced"]
promised = optsched.Problem(traffic, gpu, **promise)
one = optsched.capacity(promised, policies, tolerance=0.03)

figure, ax = plt.subplots(figsize=(8, 4), layout="constrained")
plot_capacity(
    {row.policy: row.points for row in one.rows}, one.bound_points,
    attainment=one.question.attainment, impossible=one.bound, ax=ax,
)  # fmt: skip
ax.set_xlim(0, 1.3 * one.bound);

# %%
for row in one.rows:
    print(f"{row.policy:10} keeps the promise up to {row.value:.2f} times this traffic")
print(f"no scheduler keeps it from {one.bound:.2f} times on")
assert one.best.value < one.bound

# %% [markdown]
# The schedulers fall off a cliff: a little more traffic, and half of the requests are late. In a burst
# a queue forms, and all that stand in it are late, one after another.
#
# `paced` and `late-last` know of the promise: who can no longer be in time waits behind all others.
# So they lose fewer requests beyond the edge. `paced` also prefills as much in a batch as the pace of
# 50 ms per token allows.
#
# ## What does the promise cost?
#
# With five seconds to the first token, and 100 ms for each further one, the same GPU carries more:

# %%
relaxed = optsched.Problem(traffic, gpu, slo_ttft=5.0, slo_tpot=0.1)
patient = optsched.capacity(relaxed, ["vllm", "paced"], tolerance=0.03)
figure, ax = plt.subplots(figsize=(8, 1.8), layout="constrained")
for k, found in enumerate((one, patient)):
    ax.barh(k, found.best.value, color="#009E73", label=None if k else "reached by a scheduler")
    ax.barh(
        k, found.bound - found.best.value, left=found.best.value, color="#E5E5E5",
        label=None if k else "unknown",
    )  # fmt: skip
ax.set_yticks([0, 1], ["1 s, 50 ms", "5 s, 100 ms"])
ax.set_xlabel("rate, as a multiple of this traffic")
ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small");

# %%
for found in (one, patient):
    print(f"[{found.best.value:.2f}, {found.bound:.2f}]: {found.best.policy}")
assert one.best.value < patient.best.value < patient.bound

# %% [markdown]
# The green part is what a scheduler reaches without knowing the future. Beyond the grey part nothing
# is possible. What the best schedule reaches lies in the grey part. On a longer trace the grey part
# is smaller ([the numbers for Azure's](../docs/howto/capacity.md)).
#
# ## How many GPUs for four times the traffic?
#
# Several GPUs stand behind a router, which hands each request to one of them. The default router
# chooses the GPU with the fewest requests in it.

# %%
fleet = optsched.capacity(promised, ["vllm", "paced"], rate_scale=4.0, fewest=True)
figure, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
plot_capacity(
    {row.policy: row.points for row in fleet.rows}, fleet.bound_points,
    attainment=fleet.question.attainment, rates=False, ax=ax,
)  # fmt: skip
ax.xaxis.get_major_locator().set_params(integer=True);

# %%
for row in fleet.rows:
    print(f"{row.policy} needs {row.value} GPUs")
print(f"{fleet.bound or 0} GPUs are too few for any scheduler and any router")
assert all(row.value > (fleet.bound or 0) for row in fleet.rows)

# %% [markdown]
# ## Does the router matter?
#
# We take one GPU fewer than `paced` needs, so that the router has something to do, and change the
# router only.

# %%
fast = replace(traffic, arrival=traffic.arrival / 4)
count = max(2, fleet.best.value - 1)
routers = ["round-robin", "power-of-two", "least-requests", "least-tokens"]
problem = optsched.Problem(fast, optsched.Fleet.of(count, gpu), **promise)
share = {
    router: optsched.run(problem, f"paced:router={router}").metrics["slo_attainment"]
    for router in routers
}

figure, ax = plt.subplots(figsize=(8, 2), layout="constrained")
ax.barh(routers, [100 * value for value in share.values()], color="#0072B2")
ax.invert_yaxis()
ax.set(xlabel=f"requests within the SLOs on {count} GPUs [%]", xlim=(0, 100));

# %%
for router, value in share.items():
    print(f"{router:15} {value:.1%}")
assert azure.is_file() or share["least-requests"] > share["round-robin"]

# %% [markdown]
# Round robin deals requests out like cards, however long they are. Routers that look at what each
# GPU still has to do avoid that two long prompts meet. It is a percent or two here, and no
# substitute for the missing GPU.
#
# ## What to remember
#
# - Capacity depends on what is promised. Longer limits bring as much as the best of five schedulers.
# - The interval says what to do. Where the proof is near the scheduler, buy. Where it is far, look for
#   a better scheduler first.
# - Schedulers fall off a cliff. Plan for the rate at which the slope begins.
#
# *[How many GPUs do I need?](../docs/howto/capacity.md) says how to ask this about files of your own.
# Next stop: [is my vLLM any good?](my_vllm.ipynb)*
