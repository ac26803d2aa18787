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
# # A first hour with optsched
#
# A server that answers with a language model keeps the keys and values (KV) of every token of every
# running request in GPU memory. That memory decides how many requests run at once, and a
# *scheduler* decides which. Schedulers are compared with each other all the time. This notebook
# asks the other question: **how good could the schedule have been?**
#
# It takes eight requests from a table to a proved optimum. Then it shows where a scheduler loses
# time, writes a new scheduler, and ends with seconds on a GPU.

# %%
import matplotlib.pyplot as plt

import optsched
from optsched.show.plot import plot_comparison, plot_gantt, plot_kv

# %% [markdown]
# ## Eight requests
#
# An instance is a table of columns. Here time passes in **rounds**: a batch takes one round and
# gives every request in it one token. While a request runs, it holds its prompt and all tokens that
# it has produced. So it grows by one token per round, and frees all its memory when it completes.
# There is room for 30 tokens.

# %%
instance = optsched.Instance(
    arrival=[0, 0, 1, 2, 2, 5, 6, 8],
    prompt_tokens=[6, 3, 10, 2, 8, 4, 3, 5],
    output_tokens=[12, 4, 6, 9, 3, 8, 2, 5],
    kv_capacity=30,
    name="morning",
)
instance

# %% [markdown]
# ## A scheduler at work
#
# MC-SF (Jaillet et al. 2025) goes through the waiting requests from the shortest output to the
# longest, and starts those that fit *until they complete*. `simulate` runs it, and returns its
# decisions. Times and memory come from `evaluate`, the judge, which replays every batch and checks
# every limit.

# %%
schedule = optsched.simulate(instance, "mc-sf")
greedy = optsched.evaluate(instance, schedule)
greedy.table()

# %%
print("total latency:", greedy.metrics["tel"], "rounds; largest KV:", greedy.metrics["peak_kv"])
assert greedy.metrics["tel"] == 73

# %% [markdown]
# We compare total latency: the time from arrival to last token, summed over requests. The figure
# shows the schedule, with a row for each request, and the memory that it fills:

# %%
line = optsched.timeline(instance, schedule)
figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 6), sharex=True, layout="constrained")
plot_gantt(line, ax=top)
plot_kv(line, ax=bottom);

# %% [markdown]
# ## The best there is
#
# `solve` finds the optimum *in hindsight*, when all arrivals and lengths are known. A scheduler may
# be unable to reach it, but none can beat it, and that is proved.

# %%
best = optsched.solve(instance)
best

# %%
assert best.status == "optimal"
line = optsched.timeline(instance, best.schedule)
figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 6), sharex=True, layout="constrained")
plot_gantt(line, ax=top)
plot_kv(line, ax=bottom);

# %% [markdown]
# Request 0 is the first to arrive and the last to start, in round 13. It is the largest request:
# while it ran, nearly all others would have to wait for its memory. It waits for 13 rounds, and
# most of the other seven requests do not wait at all.

# %%
assert best.schedule.starts[0] == 13
assert (best.schedule.starts == instance.arrival).sum() >= 4
assert best.objective == 67

# %% [markdown]
# ## Schedulers side by side
#
# `compare` runs any number of schedulers and compares them with the optimum. Ratios are to the best
# schedule known and to the bound. With a proved optimum they are equal. vLLM's schedule pauses
# running requests, which schedules of the round model may not do. So it gets no ratio.

# %%
comparison = optsched.compare(instance, ["mc-sf", "mc-benchmark", "sarathi", "vllm"])
comparison

# %%
plot_comparison(
    [(row.policy, row.metrics["tel"]) for row in comparison.rows if row.inside],
    best_known=comparison.best_known,
    bound=comparison.bound,
    clairvoyant=[row.policy for row in comparison.rows if row.clairvoyant],
);

# %% [markdown]
# MC-SF is 9 % off the optimum. MC-Benchmark, which takes requests in order of arrival, is 25 % off.
# The reasons differ:

# %%
from optsched.analysis.ratio import gap_breakdown

for policy in ("mc-sf", "mc-benchmark"):
    print(policy, gap_breakdown(instance, policy).parts())

assert gap_breakdown(instance, "mc-sf").parts()["foresight"] == 73 - 67
assert gap_breakdown(instance, "mc-benchmark").parts()["order"] == 84 - 67

# %% [markdown]
# MC-SF loses 6 rounds for lack of *foresight*: its order is right, but it cannot know which
# requests will come. MC-Benchmark loses 17 rounds by its *order*, and knowing the future would not
# help it. So the first loss is the price of being online, and the second is a mistake.
#
# ## A proof that one can hand over
#
# "No schedule is better" is a claim about all schedules. A certificate has all that an independent
# checker needs to confirm the claim in exact integers, without any solver.

# %%
from optsched.bounds.certificate import verify_certificate

proved = optsched.solve(instance, method="ramp")
print("the checker confirms:", verify_certificate(instance, proved.certificate))


# %% [markdown]
# ## A scheduler of one's own
#
# Before each batch a policy sees what a server sees, and answers which requests to run. This policy
# is MC-SF with one more rule: a request that has waited for six rounds goes first.

# %%
from optsched.policies import fits_to_the_end


class Patient:
    """Shortest predicted output first, but nobody waits beyond six rounds if it can be helped."""

    def batch(self, view: optsched.View) -> optsched.Batch:
        """Run everybody who runs, and start those who fit until they complete."""

        def rank(i: int) -> tuple[bool, float]:
            return view.now - view.arrival[i] < 6, view.predicted[i]

        running = list(view.running)
        for i in sorted(view.waiting, key=rank):
            if not fits_to_the_end(view, [*running, i]):
                break
            running.append(i)
        return optsched.Batch({i: view.rest(i) for i in running})


mine = optsched.evaluate(instance, optsched.simulate(instance, Patient()))
for name, judged in (("mc-sf", greedy), ("mine", mine)):
    latency = judged.finish - instance.arrival
    print(f"{name}: total {latency.sum()} rounds, longest {latency.max()}")
assert 67 <= mine.metrics["tel"] < greedy.metrics["tel"]

# %% [markdown]
# On these eight requests the new policy is better in both. One example proves nothing, and the
# notebook `gap` looks at many. If the policy had broken a limit, the judge would have stopped it
# with an error that names the batch and the request.
#
# ## Seconds
#
# On a GPU, batches differ in how long they take. A cost model, fitted to published profiles of an
# A100, says how long. Schedulers then do what servers do: hybrid batches, chunked prefills and
# evictions.

# %%
gpu = "llama2-7b-a100-infermax"
chat = optsched.generate(
    "lognormal", seed=1, n=150, kv_capacity=2000, time_unit="second", rate=100.0
)
served = optsched.compare(
    chat, ["vllm", "sarathi", "fcfs", "mc-sf", "least-work"], cost_model=gpu, time_limit_s=2
)
served

# %%
from optsched.show.plot import plot_distribution

evaluations = {row.policy: optsched.evaluate(chat, row.schedule, gpu) for row in served.rows}
plot_distribution(evaluations, "latency");

# %% [markdown]
# Here the optimum is not proved, so that ratios are intervals. The total latency of each scheduler
# is between `ratio_to_best_known` and `ratio_to_bound` times the optimum.

# %%
for row in served.rows:
    print(f"{row.policy:12} {row.ratio_to_best_known:.3f} to {row.ratio_to_bound:.3f}")
    assert 1 <= row.ratio_to_best_known <= row.ratio_to_bound

# %% [markdown]
# ## From here
#
# - `gap`: where does the gap come from, over many instances?
# - `eviction`: when should a request be evicted?
# - `unknown_lengths`: what can be done when the lengths of answers are not known?
# - `price_of_memory`: what is memory worth for your trace on your GPU?
