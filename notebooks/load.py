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
# # How far is a scheduler from the best one, at my load?
#
# **Is it worth changing the scheduler?** On an idle machine hardly: every scheduler is within a few
# percent of the optimum, and that is proved. Where requests queue, the order decides: first come
# first served takes about twice the time of the best schedule known.
#
# *Stop 6 of 10 on the [tour](../docs/notebooks/index.md). Before:
# [what is a token of memory worth?](price_of_memory.ipynb). Next:
# [how many GPUs do I need?](how_many_gpus.ipynb)*
#
# The notebook draws one picture: the mean latency of some schedulers over the load, the best
# schedule that a search finds, and the region that *no* scheduler can reach. The requests are made
# up here. (If the environment variable `OPTSCHED_DATA` names a folder with
# `azure/AzureLLMInferenceTrace_conv.csv`, the first requests of Azure's conversation trace are
# used, and the numbers are other ones. The whole trace is in
# [the laboratory](../docs/lab/batch-bounds.md).)

# %%
import os
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import optsched
from optsched.show.plot import plot_load

warnings.filterwarnings("ignore", message="cost model .* is used outside its range")
model = optsched.load_cost_model("llama2-7b-a100-infermax")

# %% [markdown]
# ## Requests, and how dense they come
#
# A trace is read with a factor for the rate of its arrivals. At 1 it is the trace itself, at 2 the
# same requests come in half the time.

# %%
azure = Path(os.environ.get("OPTSCHED_DATA", "")) / "azure" / "AzureLLMInferenceTrace_conv.csv"
if azure.is_file():
    source = {"format": "azure", "path": azure, "limit": 400}
else:
    generator = np.random.default_rng(3)
    made_up = Path(tempfile.mkdtemp()) / "requests.csv"
    pd.DataFrame(
        {
            "arrival": np.cumsum(generator.exponential(0.18, 200)),
            "prompt_tokens": generator.lognormal(6.3, 1.0, 200).clip(8, 4000).astype(int),
            "output_tokens": generator.lognormal(4.9, 0.8, 200).clip(4, 1000).astype(int),
        }
    ).to_csv(made_up, index=False)
    source = {"format": "csv", "path": made_up}


def at_rate(scale):
    return optsched.read_trace(
        **source, rate_scale=scale, kv_capacity=30_000, kv_accounting="cached"
    )


at_rate(1)

# %% [markdown]
# ## One load: schedulers, the best schedule known, and a bound
#
# `compare` simulates every scheduler, searches for a better schedule, and proves a bound on the
# mean latency of *every* schedule, of those that know the future too. A ratio says how many times
# the bound a scheduler takes.
#
# Each load gets three seconds. So how good the best schedule is, and how high the bound, depends on how
# fast the machine is and what else it does. With more time the two come closer.

# %%
schedulers = ["vllm-v1", "sarathi", "fcfs", "mc-sf", "least-work"]
compared = {
    scale: optsched.compare(optsched.Problem(at_rate(scale), model), schedulers, time_limit_s=3)
    for scale in (0.1, 0.25, 0.5, 0.75, 1, 2)
}
compared[1]

# %% [markdown]
# ## The picture
#
# Points are schedulers, the black line is the best schedule that was found, and no schedule on one GPU
# is in the grey region. What lies between the black line and the grey region is not known. A kink in
# the grey region tells where the time for the bound ran out, and nothing about the load.

# %%
means = {
    name: [(scale, one.rows[k].metrics["mean_latency"]) for scale, one in compared.items()]
    for k, name in enumerate(schedulers)
}
requests = at_rate(1).n
bound = [(scale, one.bound / requests) for scale, one in compared.items()]
best = [(scale, one.value / requests) for scale, one in compared.items()]
_, ax = plt.subplots(figsize=(8, 4.8), layout="constrained")
plot_load(means, bound, best, ax=ax);

# %%
for (scale, low), (_, high) in zip(bound, best, strict=True):
    found = {name: dict(points)[scale] / low for name, points in means.items()}
    worst = max(found, key=found.get)
    print(
        f"x{scale}: the best schedule known takes at most {high / low:.2f} times the optimum, "
        f"{worst} at most {found[worst]:.2f} times"
    )
assert all(high >= low for (_, low), (_, high) in zip(bound, best, strict=True))
assert best[0][1] < 1.15 * bound[0][1]  # an idle machine: nobody can do much better
assert dict(means["fcfs"])[2] > 1.5 * dict(best)[2]  # a queue: the order decides
assert min(means, key=lambda name: dict(means[name])[2]) == "least-work"
if "limit" not in source:  # the requests that are made up here
    assert 1.2 < dict(means["least-work"])[2] / dict(best)[2] < 1.45

# %% [markdown]
# ## What to remember
#
# - A point's distance from the black line can be won in hindsight: that schedule exists, but it knows
#   who will come. A server does not, and may win less.
# - Its distance from the grey region is the most that anybody could win.
# - On an idle machine both are small. No scheduler will help there, and a faster machine will.
# - Where requests queue, the order decides. Of these schedulers `least-work` is nearest to the best
#   schedule known; at twice the load it still takes 1.3 times as long, and the others 1.5 to 2 times.
#
# *Next stop: [how many GPUs do I need?](how_many_gpus.ipynb)*
