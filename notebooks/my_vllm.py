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
# # Is my vLLM any good?
#
# **My server took this long. How long would the best schedule have taken?** Nobody can run the best
# schedule on a server to find out. But it lies between a schedule that exists and a bound that is
# proved, and measured times can be put beside both. On the busy server below, a schedule exists
# that takes less than half as long. Most of that is order, and the model's own error is small.
#
# *Stop 8 of 10 on the [tour](../docs/notebooks/index.md). Before:
# [how many GPUs do I need?](how_many_gpus.ipynb) Next:
# [evolve a scheduler and know when to stop](evolve.ipynb)*
#
# There is no GPU here. **The measured run below is made up**: a simulation of vLLM's scheduler on
# batches that take 3 % longer than the cost model says, with 2 % noise on top. (If the environment
# variable `OPTSCHED_DATA` names a folder with `llmservingsim/rtx4090-llama-3.1-8b`, that run of
# vLLM 0.19 on an RTX 4090 is used, which was measured, and the numbers are other ones. Its prefix
# cache was on, for which the bound below does not allow; `optsched experiment vllm-measured` does.)

# %%
import os
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import optsched
from optsched.experiments import load_studies
from optsched.show.plot import plot_comparison

load_studies()
from optsched_studies.vllm_measured import run_of

warnings.filterwarnings("ignore", message="cost model .* is used outside its range")
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## Three things from a server
#
# - **The requests**: when each came, its prompt tokens and its output tokens. And the server's limits: KV
#   tokens, blocks, `max_num_seqs`, `max_num_batched_tokens`.
# - **Their times**: first and last token of each. `optsched gpu replay` measures them on your server.
# - **A cost model**: how long a batch takes there. `optsched gpu profile` and `optsched gpu fit` make it.


# %%
def made_up():
    """Return requests, made-up times and the cost model of a server that was never there."""
    drawn = optsched.generate("lognormal", seed=4, n=220, rate=60.0, kv_capacity=4000)
    limits = optsched.Limits(max_batch_tokens=2048, max_running=64)
    asked = replace(
        drawn, kv_accounting="cached", kv_block_tokens=16, chunked_prefill=True, limits=limits
    )
    model = optsched.load_cost_model("llama2-7b-a100-infermax")
    longer = {name: str(1.03 * float(value)) for name, value in model.coefficients.items()}
    server = replace(model, name="server", coefficients=longer)
    served = optsched.run(optsched.Problem(asked, server), "vllm-v1").evaluation
    noise = 1 + 0.02 * np.random.default_rng(0).standard_normal(asked.n)
    times = optsched.Measured(
        served.latency * noise, served.ttft * noise, "measured", instance_sha256=asked.sha256
    )
    return asked, times, model


data = Path(os.environ.get("OPTSCHED_DATA", "")) / "llmservingsim"
real = (data / "rtx4090-llama-3.1-8b").is_dir()
instance, times, cost = run_of(str(data), "rtx4090-llama-3.1-8b") if real else made_up()
optsched.write_measured(times, folder / "measured.json")  # what `optsched gpu replay` writes
print(
    f"{instance.n} requests, {instance.kv_capacity:,} KV tokens, mean {times.latency.mean():.2f} s"
)

# %% [markdown]
# ## Beside the best schedule
#
# In the picture `measured` is the server, and `vllm-v1` its *twin*: vLLM's scheduler, simulated
# batch by batch with the cost model. The others are what the server could have done. The lines are
# the best schedule known, and a bound: no schedule on one GPU comes below it.

# %%
by_work = "vllm-v1:policy=priority,priority=work"
policies = ["vllm-v1", by_work, "least-work"]
longest = int(instance.prompt_tokens.max())
if longest > instance.limits.max_batch_tokens:  # least-work takes a prompt whole
    policies = policies[:2]
problem, measured = optsched.Problem(instance, cost), folder / "measured.json"
compared = optsched.compare(problem, policies, measured=measured, time_limit_s=2)
rows = {row.policy: row for row in compared.rows}
names = {by_work: "vllm-v1 by own work"}
means = {
    names.get(name, name): row.metrics["mean_latency"]
    for name, row in rows.items()
    if row.metrics is not None
}
best, bound = compared.value / instance.n, compared.bound / instance.n
plot_comparison(list(means.items()), best_known=best, bound=bound, label="mean latency [s]");

# %%
served = means["measured"]
print(f"measured takes between {served / best:.2f} and {served / bound:.2f} times the optimum")
assert served / best > (1.1 if real else 2)
assert bound <= best

# %% [markdown]
# The lower of the two numbers can be won: that schedule exists, if the cost model is right. Nobody can win
# more than the higher.
#
# ## Is the model right?
#
# That is what the twin is for. It decides as vLLM does, so where it differs from the server, the
# cost model is wrong, or the server did something that is not in the model. Each dot is a request.

# %%
twin = optsched.evaluate(problem, rows["vllm-v1"].schedule)
_, panels = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
for ax, what in zip(panels, ("latency", "ttft"), strict=True):
    real_times, computed = getattr(times, what), getattr(twin, what)
    ax.plot(real_times, computed, ".", alpha=0.5, color="#0072B2")
    ax.axline((0, 0), slope=1, color="#222222", lw=1)
    ax.set(xlabel=f"measured {what} [s]", ylabel=f"the twin's {what} [s]")

# %%
errors = {}
for metric in ("mean_latency", "mean_ttft", "mean_tpot"):
    errors[metric] = twin.metrics[metric] / rows[times.name].metrics[metric] - 1
    print(f"{metric}: the twin is {100 * errors[metric]:+.1f} % off")
assert max(map(abs, errors.values())) < 0.15

# %% [markdown]
# An error here is not a small thing at high load: batches that are 3 % longer make a queue that is longer by
# more than that.
#
# ## Where the time goes
#
# The way from the measured mean down to the bound has four parts. What the twin does not explain is
# **model error**. What another order in the same scheduler saves is **order**. What the best
# schedule known saves beyond that is mostly **admission**: whom to admit, and how much at once. The rest is
# **not known**: it lies between a schedule and a proof.

# %%
ordered = means[names[by_work]]
steps = {
    "model error": served - means["vllm-v1"],
    "order": means["vllm-v1"] - ordered,
    "admission": ordered - best,
    "not known": best - bound,
    "bound": bound,
}
_, ax = plt.subplots(figsize=(8, 2.2), layout="constrained")
left = 0.0
colors = ("#222222", "#999999", "#56B4E9", "#E69F00", "#D55E00")
for (part, value), color in zip(reversed(steps.items()), colors, strict=True):
    ax.barh("measured", value, left=left, color=color, label=part)
    left += value
ax.set_xlabel("mean latency [s]")
ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small");

# %%
for part, value in steps.items():
    print(f"{part:12} {value:7.2f} s, {100 * value / served:5.1f} %")
assert abs(sum(steps.values()) - served) < 1e-9
assert steps["order"] > 0

# %% [markdown]
# ## What to remember
#
# - A measured time means something beside a schedule that exists and a bound that is proved.
# - First look at the twin. If it is far off, mend the cost model before you blame the scheduler.
# - Order needs no purchase: vLLM's `--scheduling-policy priority`, with a priority for each request.
#
# With files of your own it is `optsched compare requests.json --cost-model mine.toml --policy vllm-v1
# --measured measured.json` ([how](../docs/howto/server.md)). What was measured on two GPUs and on a
# CPU is in [the laboratory](../docs/lab/vllm-measured.md).
#
# *Next stop: [evolve a scheduler and know when to stop](evolve.ipynb)*
