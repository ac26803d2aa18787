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
# # What should my agent server keep?
#
# **Should the KV of a session stay while its tool runs, or is its room worth more to others?** On the
# server below a cache that lets the least recently used blocks go takes 1.5 times a bound that no
# server beats. One that takes the call with the least left to prefill takes 1.14 times, and keeps nothing by
# a timer. Calls of the oldest session first *and* KV kept for 20 seconds take 1.2 times; neither of
# these two does it alone. More memory is no cheaper way.
#
# *Stop 10 of 10 on the [tour](../docs/notebooks/index.md). Before:
# [evolve a scheduler and know when to stop](evolve.ipynb).*
#
# An agent calls the model, runs a tool, and calls again with all that was said so far. If the server
# has kept the KV of the last call, it prefills only what is new. While the tool runs, that KV takes
# room in which another session could run.

# %%
import warnings
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np

import optsched
from optsched.show.plot import plot_lines

warnings.filterwarnings("once", message="cost model .* is used outside its range")
gpu = optsched.load_cost_model("llama2-7b-a100-fit")

# %% [markdown]
# ## Sessions
#
# Two dozen sessions come at about nine a minute. The spreads of their calls, outputs and tools are
# those of real coding agents, with shorter prompts. Your own come from a file: see
# [how to](../docs/howto/agents.md).
#
# Below you will meet a warning: the cost model was fitted to batches and requests of at most 4,096
# tokens, and these prompts are longer. So read ratios of one schedule to another rather than seconds.

# %%
agents = optsched.generate(
    "agent-sessions", seed=3, n=24, rate=0.15, calls=12, first_tokens=15_000, new_tokens=500,
    output_tokens=60, think_s=4, context=32_000, kv_capacity=120_000,
)  # fmt: skip
print(agents)
print(f"{agents.prefix_tokens.sum() / agents.prompt_tokens.sum():.0%} of all prompt tokens repeat")
tools = agents.delay[agents.delay > 0]
print(
    f"{tools.size} tools run: half for at most {np.median(tools):.1f} s, "
    f"{(tools <= 20).mean():.0%} for at most 20 s, the longest for {tools.max():.0f} s"
)

# %% [markdown]
# ## What nothing beats
#
# A session alone takes its *chain*: its tools, its prefills of what is new, its decode steps. And all
# sessions share one GPU. From both follows a bound on the mean completion of sessions, with a
# certificate.

# %%
GOAL = "mean_session_completion"


def proved(instance):
    """Return the bound on the mean session completion, in seconds."""
    problem = optsched.Problem(instance, gpu, GOAL)
    return optsched.bound(problem, method="sessions-work", time_limit_s=0).bound


floor = proved(agents)
print(f"no schedule has a mean session completion below {floor:.0f} s")

# %% [markdown]
# ## Who goes first, and how long KV stays
#
# `priority=session` serves the calls of the oldest session first. `eviction=ttl` keeps the blocks of a
# call for some seconds after it has ended, and lets no call in that does not fit beside them.
# `priority=attained` serves the session first that was served least so far. `program-las` has the same
# order, but no prefix cache: each call prefills its whole prompt again.

# %%
OLDEST = "vllm-v1:policy=priority,priority=session"
KEPT = OLDEST + ",eviction=ttl,ttl={}"
POLICIES = {
    "first come, LRU": "vllm-v1",
    "first come, kept 20 s": "vllm-v1:eviction=ttl,ttl=20",
    "oldest session, LRU": OLDEST,
    "oldest session, kept 20 s": KEPT.format(20),
    "shortest prefill, LRU": "spf",
    "least served, LRU": "vllm-v1:policy=priority,priority=attained",
    "least served, no cache": "program-las",
}


def judged(instance, policy):
    """Return the metrics of a policy."""
    return optsched.run(optsched.Problem(instance, gpu), policy).metrics


metrics = {name: judged(agents, policy) for name, policy in POLICIES.items()}
ratio = {name: found[GOAL] / floor for name, found in metrics.items()}
hits = {name: found["prefix_hit_rate"] for name, found in metrics.items()}
for name, value in ratio.items():
    print(f"{name:26} {value:.2f} times the bound, {hits[name]:3.0%} of prompts from the cache")
assert ratio["oldest session, kept 20 s"] < 1.3 < min(list(ratio.values())[:3])
assert ratio["shortest prefill, LRU"] < 1.2
assert ratio["least served, LRU"] < ratio["first come, LRU"]
assert hits["least served, no cache"] == 0
assert ratio["least served, no cache"] == max(ratio.values())

# %% [markdown]
# To keep KV helps only those who come back soon to a server that lets them in. Served in order of
# arrival, a call waits behind others until its KV is gone. *Shortest prefill* counts only what the
# cache does not have, so a call whose KV is still there goes first, and needs no timer. *Least served*
# with the cache beats first come as well. The last row takes more than any other not because of its
# order, but because it has no cache at all.
#
# How long should it stay? Five seconds are too short for half of the tools, and twenty are enough for
# three quarters. Longer than most tools run, nothing is gained.

# %%
kept = (1, 5, 20, 80)
by_ttl = [judged(agents, KEPT.format(ttl))[GOAL] / floor for ttl in kept]
rows = [
    {"seconds that KV is kept": ttl, "times the bound": value}
    for ttl, value in zip(kept, by_ttl, strict=True)
]
axes = plot_lines(rows, "seconds that KV is kept", "times the bound")
axes.set_xscale("log")
axes.set_xticks(kept, kept)
axes.set_xticks([], minor=True)
plt.show()

# %% [markdown]
# ## The price of a GiB
#
# A token of KV takes 512 KiB, so a GiB holds 2,048 of them. What would more of them save?

# %%
GIB = 2048
memories = (80_000, 120_000, 200_000)
compared = ("first come, LRU", "oldest session, kept 20 s", "shortest prefill, LRU")
reached = {name: [] for name in compared}
for tokens in memories:
    for name, values in reached.items():
        values.append(judged(replace(agents, kv_capacity=tokens), POLICIES[name])[GOAL])

gib = [tokens / GIB for tokens in memories]
rows = [
    {"GiB for KV": g, "mean session completion [s]": v, "policy": name}
    for name, values in reached.items()
    for g, v in zip(gib, values, strict=True)
]
goal = "mean session completion [s]"
plot_lines(rows, "GiB for KV", goal, series="policy", reference={"bound": floor})
plt.show()
for name, values in reached.items():
    saved = (values[0] - values[-1]) / (gib[-1] - gib[0])
    print(f"{name:26} a GiB more takes {saved:.1f} s off the mean session")

# %% [markdown]
# The dashed line is the bound. With either of the better rules 39 GiB do what half as much memory
# again does not do with first come.

# %%
assert all(reached[name][0] < reached["first come, LRU"][1] for name in compared[1:])

# %% [markdown]
# ## What to remember
#
# - Decide who goes first before you buy memory: whoever has the least left to prefill, or else the
#   oldest session.
# - With the oldest session first, keep the KV of a session about as long as most of its tools run.
# - The bound says when to stop: no scheduler can gain more than what is left above it.
#
# *This was the last stop. The [how-tos](../docs/howto/index.md) show how to do each of these things
# with files of your own, and the [laboratory](../docs/lab/index.md) has what was measured.*
