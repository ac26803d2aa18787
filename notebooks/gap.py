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
# Jaillet et al. (*Online Scheduling for LLM Inference with KV Cache Constraints*, 002) propose
# MC-SF: shortest output first, as long as memory suffices to the end. They report that on synthetic
# instances of about 50 requests its total latency is 1.005 times the optimum when all requests come
# at once, with 114 of 200 instances optimal, and 1.047 times with Poisson arrivals.
#
# We draw instances as the paper describes, measure the same ratio with **certified** optima, and
# then ask what the remaining distance consists of.

# %%
import matplotlib.pyplot as plt
import numpy as np

import optsched
from optsched.analysis.ratio import competitive_ratio, gap_breakdown
from optsched.show.plot import plot_ratios

# %% [markdown]
# ## Small instances, exact ratios
#
# A dozen requests are solved to proved optimality in well under a second. Prompts are 1 to 5
# tokens, outputs as long as memory allows, M between 30 and 50.

# %%
at_once = [optsched.generate("jaillet-model-1", seed=seed, n=12) for seed in range(10)]
arriving = [optsched.generate("jaillet-model-2", seed=seed, n=10) for seed in range(10)]

policies = ["mc-sf", "mc-benchmark", "least-work"]
first = competitive_ratio(policies, at_once, reference="optimum", time_limit_s=10)
second = competitive_ratio(policies, arriving, reference="optimum", time_limit_s=10)
print("all at 0\n" + first.table())
print("Poisson arrivals\n" + second.table())

# %%
ratios = [row.low for row in first.rows if row.policy == "mc-sf"]
assert all(row.low == row.high for row in first.rows)  # every optimum is proved
plot_ratios(ratios, published={"002: mean": 1.005});

# %% [markdown]
# MC-SF is not within half a percent of the optimum here, and hardly ever optimal. Smaller instances
# might be harder for a greedy policy, so this alone does not contradict the paper.

# %%
print("mean", np.mean(ratios), "optimal on", sum(r == 1 for r in ratios), "of", len(ratios))
assert np.mean(ratios) > 1.02

# %% [markdown]
# ## The paper's size, certified intervals
#
# At 50 requests a proof takes longer than a notebook should. But the truth can be enclosed: a
# schedule that somebody found is an upper bound on the optimum, a certificate a lower one, and the
# ratio lies between. Five seconds for each of two instances of 40 to 60 requests (a minute on a
# quiet machine closes the interval to about 2 %):

# %%
rows = []
for seed in (1, 2):
    instance = optsched.generate("jaillet-model-1", seed=seed)
    answer = optsched.solve(instance, method="ramp", time_limit_s=5)
    tel = optsched.evaluate(instance, optsched.simulate(instance, "mc-sf")).metrics["tel"]
    rows.append((tel / answer.objective, tel / answer.bound))
    print(f"n = {instance.n}: MC-SF / optimum is between {rows[-1][0]:.3f} and {rows[-1][1]:.3f}")

assert all(1.005 < low <= high for low, high in rows)

# %% [markdown]
# The lower end alone is a fact that needs no solver: a schedule of that value exists, and the judge
# accepted it. MC-SF is some percent from the optimum on both, and `optsched experiment
# jaillet-model-1` asks the same of as many instances as one likes. The published 1.005 does not
# follow from the text: either the optima behind it were not optimal, or the instances were drawn in
# a way that the text leaves out.

# %% [markdown]
# ## What the gap is made of
#
# `gap_breakdown` splits a policy's loss, request by request and exactly:
#
# - **predictions**: the policy as it is, less the same with true lengths (nothing here);
# - **foresight**: that, less the same *order* when all arrivals are known;
# - **order**: the rest: what the order itself, and what is admitted in it, cost.

# %%
names = ("predictions", "foresight", "order")
shares = {}
for label, instances in (("all at 0", at_once), ("Poisson", arriving)):
    for policy in ("mc-sf", "mc-benchmark"):
        gaps = [gap_breakdown(instance, policy) for instance in instances[:6]]
        best = sum(gap.best for gap in gaps)
        shares[f"{policy}, {label}"] = [
            100 * sum(gap.parts()[name] for gap in gaps) / best for name in names
        ]

figure, ax = plt.subplots(figsize=(8, 3), layout="constrained")
left = np.zeros(len(shares))
for name, color, values in zip(
    names, ("#999999", "#56B4E9", "#E69F00"), np.array(list(shares.values())).T, strict=True
):
    ax.barh(list(shares), values, left=left, color=color, label=name)
    left += values
ax.set_xlabel("loss [% of the optimum]")
ax.legend(loc="lower right")
for case, parts in shares.items():
    print(case, dict(zip(names, np.round(parts, 1).tolist(), strict=True)))

# %% [markdown]
# With everything at 0 there is nothing to foresee, and the loss is the order: shortest output
# first, and stopping at the first that does not fit. With arrivals a part of MC-SF's loss is
# foresight, which no online policy can avoid entirely. MC-Benchmark's is its order, nearly all of
# it.

# %%
assert shares["mc-sf, all at 0"][1] == 0 < shares["mc-sf, all at 0"][2]
assert shares["mc-sf, Poisson"][1] > 0
assert shares["mc-benchmark, Poisson"][2] > 5 * shares["mc-sf, Poisson"][2]

# %% [markdown]
# ## A better order
#
# If the order is what is wrong with everything at 0, what is a better one? Over a run a request
# occupies $v = s\,o + o(o+1)/2$ token-rounds of memory. A full machine of capacity M works off M
# token-rounds a round, so it is close to one machine with jobs of length v, for which shortest
# first is optimal. That is the policy `least-work`.

# %%
print(first.paired("least-work", "mc-sf"))

# %% [markdown]
# With prompts of at most 5 tokens, volume and output rank alike, and there is little to win. With
# prompts as in conversations there is a lot:

# %%
chats = optsched.generate("lognormal", seed=0, n=2000, kv_capacity=16492, time_unit="round")
tels = {
    policy: optsched.evaluate(chats, optsched.simulate(chats, policy)).metrics["tel"]
    for policy in ("mc-sf", "least-work", "mc-benchmark")
}
print({policy: f"{tel / tels['least-work']:.2f}" for policy, tel in tels.items()})
assert tels["mc-sf"] > 1.15 * tels["least-work"]

# %% [markdown]
# ## How bad can it get?
#
# 002 proves that no deterministic online policy has a constant ratio: an adversary waits until the
# policy starts a long request, and then sends short ones that do not fit beside it. A search over
# instances of ten requests found one where MC-SF needs nine times the optimum:

# %%
worst = optsched.read_instance("worst-mc-sf-online")
tel = optsched.evaluate(worst, optsched.simulate(worst, "mc-sf")).metrics["tel"]
optimum = optsched.solve(worst)
print(tel, "against", optimum.objective, "=", tel / optimum.objective)
assert optimum.status == "optimal"
assert tel > 9 * optimum.objective

# %%
from optsched.show.plot import plot_gantt

figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 6), layout="constrained")
plot_gantt(optsched.timeline(worst, optsched.simulate(worst, "mc-sf")), ax=top)
top.set_title("MC-SF")
plot_gantt(optsched.timeline(worst, optimum.schedule), ax=bottom)
bottom.set_title("optimum");

# %% [markdown]
# The long request begins at once, since nobody else is there. The optimum in hindsight starts it
# one round later: then request 1, with a prompt of 97 tokens, just fits beside it, and so do all
# the others, whose prompts are smaller by as much as it has grown.
#
# So: most of a gap is the *order* and what is admitted in it, and a better order (memory times time
# instead of time) closes much of it where prompts differ. What is left with arrivals is the
# *future*, and that is not the scheduler's fault.
