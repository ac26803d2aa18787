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
# # Where does the gap come from?
#
# **Why is a scheduler worse than the optimum?** Mostly because of the order in which it starts
# requests, and of when it admits them in that order. A smaller part comes from not knowing the
# future. Where prompts differ in length, a better order closes two fifths of the gap.
#
# *Stop 2 of 10 on the [tour](../docs/notebooks/index.md). Before:
# [a first hour](first_hour.ipynb). Next: [when should a request be evicted?](eviction.ipynb)*
#
# We look at MC-SF (Jaillet et al. 2025, *Online Scheduling for LLM Inference with KV Cache
# Constraints*). MC-SF starts the request with the shortest output first, as long as the memory
# suffices until all running requests have ended. Its paper reports a total latency of 1.005 times
# the optimum when all requests come at once, and of 1.047 times with Poisson arrivals. We draw
# instances as the paper describes, and measure the same ratio with **proved** optima.

# %%
import matplotlib.pyplot as plt
import numpy as np

import optsched
from optsched import ratios
from optsched.show.plot import plot_comparison, plot_gantt

# %% [markdown]
# ## Small instances, exact ratios
#
# An optimum of ten requests is proved in a fraction of a second. Prompts have 1 to 5 tokens,
# outputs are as long as memory allows, and there is memory for 30 to 50 tokens.
#
# In the picture every dot is an instance, and the red bar is their mean. The dashed line is the
# paper's mean for MC-SF.

# %%
at_once = [optsched.generate("jaillet-model-1", seed=seed, n=10) for seed in range(8)]
arriving = [optsched.generate("jaillet-model-2", seed=seed, n=9) for seed in range(8)]
policies = ["mc-sf", "least-work", "mc-benchmark"]
first = ratios(policies, at_once, "optimum")
second = ratios(policies, arriving, "optimum")

figure, axes = plt.subplots(2, 1, figsize=(8, 4.5), sharex=True, layout="constrained")
panels = zip(
    axes,
    (first, second),
    ("all requests come at once", "Poisson arrivals"),
    (1.005, 1.047),
    strict=True,
)
for ax, study, title, published in panels:
    for k, policy in enumerate(policies):
        ratios = [row.low for row in study.of(policy)]
        ax.plot(ratios, [k] * len(ratios), "o", alpha=0.5, color="#0072B2")
        ax.plot(np.mean(ratios), k, "|", ms=22, mew=3, color="#D55E00")
    ax.vlines(published, -0.45, 0.45, ls="--", color="#222222", lw=1)
    ax.set_yticks(range(3), policies)
    ax.set(title=title, ylim=(2.6, -0.6))
axes[1].set_xlabel("total latency over the optimum's");

# %% [markdown]
# MC-Benchmark takes requests in order of arrival, and is far off. The other two are within 8 %
# of the optimum when all come at once, and on most instances with arrivals, but three of these eight
# are 10 to 32 % above it. MC-SF is within half a percent on single instances only, and never optimal here.

# %%
from IPython.display import Markdown

tables = [study.to_markdown() for study in (first, second)]
Markdown("All requests come at once:\n\n{}\n\nPoisson arrivals:\n\n{}".format(*tables))

# %%
assert all(row.low == row.high for study in (first, second) for row in study.rows)  # all proved
ratios = [row.low for row in first.of("mc-sf")]
assert np.mean(ratios) > 1.02
assert min(ratios) > 1
assert sum(ratio <= 1.005 for ratio in ratios) <= 2
above = [row.low for row in second.of("mc-sf") if row.low > 1.1]
assert 1 <= len(above) <= 4
assert max(above) < 1.35

# %% [markdown]
# These instances are smaller than the paper's, and might be harder for a greedy scheduler. So this
# alone does not contradict the paper.
#
# ## The paper's size, proved intervals
#
# At 50 requests a proof takes longer than a notebook should. But the ratio can be enclosed. Any
# schedule gives an upper limit for the optimum, and a certificate proves a lower one. We stop as soon
# as the two are within 5 %. (A minute on a quiet machine brings them to about 2 %.)

# %%
intervals = []
for seed in (1, 2):
    instance = optsched.generate("jaillet-model-1", seed=seed)
    answer = optsched.solve(instance, method="ramp", mip_rel_gap=0.05)
    tel = optsched.run(instance, "mc-sf").metrics["tel"]
    intervals.append((f"{instance.n} requests", tel / answer.value, tel / answer.bound))

names, low, high = zip(*intervals, strict=True)
figure, ax = plt.subplots(figsize=(8, 1.8), layout="constrained")
ax.hlines(names, low, high, lw=10, color="#0072B2", label="the ratio lies here")
ax.axvline(1.005, ls="--", color="#222222", label="mean that the paper reports")
ax.set(xlabel="total latency of MC-SF over the optimum's", xlim=(1, None), ylim=(-0.6, 1.6))
ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small");

# %%
for name, lower, upper in intervals:
    print(f"{name}: MC-SF takes between {lower:.3f} and {upper:.3f} times the optimum")
    assert 1.005 < lower <= upper
    assert lower > np.mean([row.low for row in first.of("mc-sf")])

# %% [markdown]
# MC-SF is further from the optimum here than on the mean of the small instances above. So they are not
# harder for it, but easier.
#
# The lower end of an interval needs no solver's word. A schedule of that value exists, and the
# judge has accepted it. So MC-SF is some percent above the optimum on both instances.
# `optsched experiment jaillet-model-1` measures as many instances as you like.
#
# The published 1.005 does not follow from the paper's text. Either the optima behind it were not
# optimal, or the instances were drawn in a way that the text leaves out.
#
# ## What the gap is made of
#
# `why` says what stood in each request's way, batch by batch, and what of it an optimum does
# otherwise. Two causes are left here:
#
# - **memory**: the request did not fit beside those that were running.
# - **order**: it would have fitted, and another was served, or nobody.

# %%
parts = ("memory", "order")
shares = {}
for label, instances in (("all at once", at_once), ("Poisson", arriving)):
    optima = [optsched.solve(instance) for instance in instances]
    best = sum(optimum.value for optimum in optima)
    for policy in ("mc-sf", "mc-benchmark"):
        lost = dict.fromkeys(parts, 0.0)
        for instance, optimum in zip(instances, optima, strict=True):
            plan = optsched.run(instance, policy).schedule
            totals = optsched.why(instance, plan, against=optimum.schedule).totals()
            for part in parts:
                lost[part] += 100 * totals[part] / best
        shares[f"{policy}, {label}"] = lost

figure, ax = plt.subplots(figsize=(8, 2.8), layout="constrained")
for k, (part, color) in enumerate(zip(parts, ("#56B4E9", "#E69F00"), strict=True)):
    values = [share[part] for share in shares.values()]
    ax.barh(np.arange(len(shares)) + 0.4 * k, values, height=0.4, color=color, label=part)
ax.set_yticks(np.arange(len(shares)) + 0.2, list(shares))
ax.invert_yaxis()
ax.set_xlabel("loss [% of the optimum]")
ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small");

# %%
for case, share in shares.items():
    print(f"{case:25}", ", ".join(f"{part} {value:4.1f} %" for part, value in share.items()))

assert all(share["order"] > abs(share["memory"]) for share in shares.values())
assert shares["mc-sf, Poisson"]["order"] > shares["mc-sf, all at once"]["order"]
assert shares["mc-benchmark, Poisson"]["order"] > 5 * shares["mc-sf, Poisson"]["order"]

# %% [markdown]
# Nearly all is the order: requests that would have fitted wait for others. MC-SF stops at the first
# request that does not fit, although one behind it may. MC-Benchmark serves in order of arrival.
#
# With arrivals over time MC-SF loses twice as much. Part of this no online scheduler can avoid
# entirely, since the optimum knows who will come.
#
# ## A better order
#
# What would be a better order? A request with a prompt of $s$ tokens and an output of $o$ tokens
# occupies $v = s\,o + o(o+1)/2$ token-rounds of memory during its run. A full server with room for
# M tokens works off M token-rounds in each round. So it is close to one machine with jobs of length
# $v$, and there the shortest job first is optimal. The policy `least-work` takes the smallest $v$
# first.
#
# With prompts of at most 5 tokens there is little to gain, since $v$ and $o$ give nearly the same
# order. With prompts as in conversations there is a lot to gain:

# %%
chats = optsched.generate("lognormal", seed=0, n=2000, kv_capacity=16492, time_unit="round")
tels = {policy: optsched.run(chats, policy).metrics["tel"] for policy in policies}
proved = optsched.bound(chats, time_limit_s=5)
means = [(policy, tel / chats.n) for policy, tel in tels.items()]
plot_comparison(means, best_known=proved.value / chats.n, bound=proved.bound / chats.n).set_xlabel(
    "mean latency [rounds]"
);

# %%
pair = first.paired("least-work", "mc-sf")
print(
    f"prompts up to 5 tokens: least-work takes {pair.quotient:.3f} times MC-SF's latency; it is "
    f"better on {pair.wins}, equal on {pair.ties} and worse on {pair.losses} instances"
)
print(f"conversations: least-work takes {tels['least-work'] / tels['mc-sf']:.3f} times MC-SF's")
for policy, tel in tels.items():
    print(f"conversations: {policy} takes {tel / proved.bound:.2f} times what no schedule beats")

closed = (tels["mc-sf"] - tels["least-work"]) / (tels["mc-sf"] - proved.value)
print(f"least-work closes {closed:.0%} of MC-SF's gap to the best schedule known")
assert tels["mc-sf"] > 1.15 * tels["least-work"]
assert 0.38 < closed < 0.45
assert tels["least-work"] > 1.35 * proved.value

# %% [markdown]
# Two fifths of MC-SF's gap are closed. The rest is large: a search in hindsight finds a schedule that is
# within a few percent of the bound, and `least-work` takes 1.4 times as long.
#
# ## How bad can it get?
#
# Jaillet et al. prove that no deterministic online policy has a constant ratio. Their adversary
# waits until the policy starts a long request. Then it sends short requests that do not fit beside
# it. A search over instances of ten requests found one where MC-SF takes nine times the optimum.

# %%
worst = optsched.read_instance("worst-mc-sf-online")
plan = optsched.run(worst, "mc-sf").schedule
optimum = optsched.solve(worst)
figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), layout="constrained")
plot_gantt(optsched.timeline(worst, plan), ax=top)
plot_gantt(optsched.timeline(worst, optimum.schedule), ax=bottom)
top.set_title("MC-SF: nine requests wait for one")
bottom.set_title("optimum: one request waits for one round");

# %%
tel = optsched.evaluate(worst, plan).metrics["tel"]
print(f"{tel} rounds against {optimum.value}: {tel / optimum.value:.2f} times the optimum")
assert optimum.status == "optimal"
assert tel > 9 * optimum.value

# %% [markdown]
# MC-SF starts the long request 0 at once, since no other request is there. The optimum starts it
# one round later. Then request 1, with a prompt of 97 tokens, just fits beside it. So do all the
# others: their prompts are smaller by as much as the long request has grown.
#
# ## What to remember
#
# - Most of a gap comes from the *order*, and from when requests are admitted in it.
# - Order by memory times time instead of time. Where prompts differ it closes two fifths of the gap.
# - The rest comes from the *future*, which a scheduler cannot know, and from orders not yet found.
#
# *Next stop: [when should a request be evicted?](eviction.ipynb) There a scheduler may change its
# mind.*
