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
# # Scheduling without knowing lengths
#
# **How well can one schedule without knowing how long answers will be?** Nearly as well as with the
# true lengths, as long as predictions are only used to *order* requests. A scheduler that *plans
# memory* by predictions breaks down when they are wrong, unless it keeps a margin. If only an
# interval is known, start with its lower end.
#
# *Stop 4 of 10 on the [tour](../docs/notebooks/index.md). Before:
# [when should a request be evicted?](eviction.ipynb) Next:
# [what is a token of memory worth?](price_of_memory.ipynb)*
#
# Shortest first is a good rule, but the length of an answer is known only when it is finished.
# Three papers take three ways out:
#
# - **TRAIL** (Shahout et al. 2024) predicts after every token how much of the answer is left.
# - **ELIS** (Choi et al. 2025) predicts again once per window of tokens.
# - **Chen, Ye and Zhou (2025)** need only an interval for each length, and prove what can be done
#   with it.
#
# We run all three on the same requests.

# %%
import warnings

import matplotlib.pyplot as plt
import numpy as np

import optsched
from optsched.show.plot import plot_distribution, plot_lines

warnings.filterwarnings("ignore", message="cost model .* is used outside its range")

# %% [markdown]
# ## The workload
#
# The requests are 600 chats with the published statistics of LMSYS-Chat-1M, at 20 per second. The
# cost model was fitted to profiles of an A100 with a 7B model. A batch has 16 places, and there is
# memory for 4,000 tokens of KV. Most answers are short, and a few are long:

# %%
gpu = "llama2-7b-a100-vidur-fit"
chats = optsched.generate(
    "lognormal", seed=3, n=600, kv_capacity=4000, time_unit="second", rate=20.0
)
outputs = chats.output_tokens
figure, ax = plt.subplots(figsize=(8, 2.4), layout="constrained")
ax.hist(outputs, bins=range(0, 901, 20), color="#0072B2")
ax.axvline(np.median(outputs), color="#D55E00", label=f"median: {np.median(outputs):.0f} tokens")
ax.axvline(outputs.mean(), color="#D55E00", ls="--", label=f"mean: {outputs.mean():.0f} tokens")
ax.set(xlabel="output tokens", ylabel="chats")
ax.legend();

# %% [markdown]
# ## What knowing is worth
#
# First the policies see the true lengths.
#
# - *First come* does not look at them.
# - *Shortest first* takes the shortest of the waiting requests.
# - *TRAIL* also preempts a running request for a shorter one, during the first 80 % of its run.
# - *ELIS* sorts the requests again every 50 tokens.
#
# The pictures show how many requests have their last and their first token within a given time.
# Further left is better.

# %%
places = "max_running=16"
policies = {
    "first come": f"vllm-fcfs:{places}",
    "shortest first": f"vllm-sjf:{places}",
    "TRAIL": f"trail:{places}",
    "ELIS": "isrtf:batch_size=16",
}


def serve(policy: str, predictor: str | None = None, seed: int = 0) -> optsched.Evaluation:
    """Return what a policy does on the chats, judged."""
    problem = optsched.Problem(chats, gpu)
    return optsched.run(problem, policy, predictor=predictor, seed=seed).evaluation


known = {name: serve(policy) for name, policy in policies.items()}
figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 7), layout="constrained")
plot_distribution(known, "latency", ax=top)
plot_distribution(known, "ttft", ax=bottom);

# %% [markdown]
# Knowing lengths helps the mean and hurts the slowest. Some request has to be last, and with known
# lengths it is the longest one.
#
# Preempting shortens the time to the first token (TTFT) further. But each preemption costs a
# refill. On this workload preemptions cost more latency than they save.

# %%
for name, judged in known.items():
    m = judged.metrics
    print(
        f"{name:15} latency: mean {m['mean_latency']:.2f} s, 99 % below {m['p99_latency']:4.1f} s; "
        f"mean TTFT {m['mean_ttft']:.2f} s; {m['evictions']:3} evictions"
    )

mean = {name: judged.metrics["mean_latency"] for name, judged in known.items()}
assert mean["shortest first"] < mean["TRAIL"] < mean["first come"]
assert known["TRAIL"].metrics["mean_ttft"] < known["shortest first"].metrics["mean_ttft"]
assert known["first come"].metrics["p99_latency"] < known["shortest first"].metrics["p99_latency"]

# %% [markdown]
# ## How long may a request be preempted?
#
# TRAIL may preempt a request during a share C of its run. With C = 0 a shorter request never
# preempts a running one. With C = 1 it always may, which is the rule SRPT.

# %%
rows = []
for c in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
    m = serve(f"trail:c={c},{places}").metrics
    rows.append({"C": c, "mean latency": m["mean_latency"], "mean TTFT": m["mean_ttft"]})

ax = plot_lines(rows, "C", ["mean latency", "mean TTFT"])
ax.set(xlabel="share C of its run during which a request may be preempted", ylabel="seconds")
ax.set_ylim(0, None);

# %% [markdown]
# Here C = 0.2 is a good choice. It has the latency of C = 0, and less than half of its time to the
# first token.

# %%
for row in rows:
    print("C = {C}: latency {mean latency:.2f} s, TTFT {mean TTFT:.3f} s".format(**row))

assert rows[0]["mean latency"] < rows[-1]["mean latency"]
assert rows[1]["mean latency"] < 1.05 * rows[0]["mean latency"]
assert rows[1]["mean TTFT"] < 0.5 * rows[0]["mean TTFT"]

# %% [markdown]
# ## How wrong may predictions be?
#
# Now the policies see predictions. A prediction is the true length plus a normal error of a given
# mean size. The median output is 47 tokens. For half of the requests an error of 60 is therefore
# larger than the length itself.
#
# We add MC-SF. It does more than order by predictions. It *relies* on them, since it starts
# requests whose predicted peaks just fit.

# %%
contenders = {**policies, "MC-SF": "mc-sf"}
noise = []
for error in (0, 15, 30, 60):
    for name, policy in contenders.items():
        predictor = f"noisy:mae={error}" if error else None
        m = serve(policy, predictor, seed=1).metrics
        noise.append({"error": error, "policy": name, "mean latency": m["mean_latency"]})

ax = plot_lines(noise, "error", "mean latency", series="policy")
ax.set(xlabel="mean absolute error of the prediction [tokens]", ylabel="mean latency [s]")
ax.set_yscale("log")
ax.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
ax.minorticks_off();

# %% [markdown]
# The policies that only *order* by predictions hardly suffer. Even a poor prediction tells short
# from long.
#
# MC-SF is the best of all with the truth, and breaks down with errors. If predictions are too short
# by a few tokens, memory overflows. MC-SF then evicts all requests.

# %%
at = {(row["error"], row["policy"]): row["mean latency"] for row in noise}
assert at[0, "MC-SF"] < at[0, "shortest first"]
assert at[30, "MC-SF"] > 2 * at[0, "MC-SF"]
for name in ("shortest first", "TRAIL", "ELIS"):
    assert at[30, name] < 1.25 * at[0, name]

# %% [markdown]
# The cure is not a better predictor but a margin. MC-SF plans with more tokens than predicted. A
# margin of about twice the mean error is enough. Jaillet et al. (2025) suggest such a margin in
# section 6.

# %%
for margin in (0, 30, 60, 120):
    m = serve(f"mc-sf:margin={margin}", "noisy:mae=30", seed=1).metrics
    at["margin", margin] = m["mean_latency"]
    print(
        f"margin {margin:3}: mean latency {m['mean_latency']:.2f} s, {m['evictions']:4} evictions"
    )

assert at["margin", 60] < 1.1 * at[0, "MC-SF"]
assert at["margin", 60] < at["margin", 120] < at["margin", 0]

# %% [markdown]
# ## Predicting again
#
# TRAIL reads a prediction off the model's own embeddings after every token. A Bayesian filter over
# ten bins refines it. The predictor `trail` does that with a synthetic classifier. The picture
# shows its predictions for four requests while they run. The dotted lines are the truth.

# %%
from optsched.workloads.predict import forecast_of, predict

forecast = forecast_of(predict(chats, "trail", seed=1))
figure, ax = plt.subplots(figsize=(8, 4), layout="constrained")
shares, colors = (0.6, 0.8, 0.9, 0.97), ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
for share, color in zip(shares, colors, strict=True):
    i = int(np.argsort(outputs)[int(share * len(outputs))])
    left = forecast.remaining[forecast.offsets[i] : forecast.offsets[i + 1]]
    done = np.arange(len(left)) * forecast.every
    ax.plot(done, left, color=color, label=f"answer of {outputs[i]} tokens")
    ax.plot([0, outputs[i]], [outputs[i], 0], color=color, linestyle=":")
ax.set(xlabel="tokens produced", ylabel="tokens left")
ax.legend();

# %% [markdown]
# Predictions this good order requests nearly as well as the truth. Refined predictions are no
# better here than first ones. This does not contradict the paper. The order depends on which
# requests are short, and that is mostly known at the start.

# %%
informed = {
    "TRAIL, refined": serve(f"trail:{places}", "trail", seed=1),
    "TRAIL, first prediction only": serve(f"trail:refine=false,{places}", "trail", seed=1),
    "ELIS": serve("isrtf:batch_size=16", "elis", seed=1),
    "first come": known["first come"],
}
for name, judged in informed.items():
    print(f"{name:30} mean latency {judged.metrics['mean_latency']:.2f} s")
assert informed["TRAIL, refined"].metrics["mean_latency"] < 1.05 * mean["TRAIL"]
assert informed["TRAIL, refined"].metrics["mean_latency"] < mean["first come"]

# %% [markdown]
# ELIS decides once per window. Shorter windows follow the predictions more closely. In longer
# windows a new request waits for the end of the window. On this workload both effects are small:

# %%
for tokens in (10, 50, 200):
    m = serve(f"isrtf:window={tokens},batch_size=16", "elis", seed=1).metrics
    print(f"window {tokens:3}: mean latency {m['mean_latency']:.2f} s, TTFT {m['mean_ttft']:.3f} s")

# %% [markdown]
# ## Only an interval
#
# Suppose that an output is known only to lie between l and u. Chen, Ye and Zhou (2025) have three
# policies.
#
# - **A_max** takes every output to be u. It never overflows.
# - **A_min** takes every output to be l. It starts more requests, and evicts those that grow too
#   long.
# - **A_l** is for outputs that are either l or u. It lets every request try l tokens first.
#
# They are compared with H-SF, which is MC-SF with the true lengths.

# %%
from optsched.analysis.ratio.families import two_point


def a_min_two_point_bound(alpha: float) -> float:
    """Return the bound of A_min on outputs l or u, alpha = l / u (Chen et al., Theorem 5.1)."""
    return (3 - alpha) / 2


def a_l_bound(alpha: float) -> float:
    """Return the bound of A_l there (Theorem 5.2)."""
    return 1 + alpha / (2 * (1 - alpha)) if alpha <= 0.5 else 1 + 2 * alpha**2


def total(policy: str, instance: optsched.Instance) -> float:
    """Return the total latency of a policy, as the mean over two seeds."""
    plans = [optsched.run(instance, policy, seed=seed).schedule for seed in range(2)]
    return np.mean([optsched.evaluate(instance, plan).metrics["tel"] for plan in plans])


long = 24
curves = []
for short in (2, 4, 6, 9, 12, 16, 20):
    instance = two_point(short, long, 0.8, 400, kv_capacity=400)
    best = total("h-sf", instance)
    for policy, name in (("a-max", "A_max"), ("a-min", "A_min"), ("a-l", "A_l")):
        ratio = total(policy, instance) / best
        curves.append({"alpha": short / long, "policy": name, "ratio": ratio})

ax = plot_lines(curves, "alpha", "ratio", series="policy")
alpha = np.linspace(0.08, 0.85, 100)
for bound, name, color in (
    (a_min_two_point_bound, "A_min", "#D55E00"),
    (a_l_bound, "A_l", "#009E73"),
):
    ax.plot(alpha, [bound(x) for x in alpha], ":", color=color, label=f"{name}: proved bound")
ax.axhline(1, ls="--", color="#222222", lw=1, label="H-SF")
ax.set(xlabel="l / u", ylabel="total latency over H-SF's", ylim=(0.9, 2.8))
ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small");

# %%
ratio = {(round(row["alpha"], 3), row["policy"]): row["ratio"] for row in curves}
assert ratio[round(2 / 24, 3), "A_l"] < 1.1  # trying costs nothing where l is small
assert ratio[round(2 / 24, 3), "A_max"] > 2  # reserving costs most there
assert ratio[round(20 / 24, 3), "A_l"] > ratio[round(20 / 24, 3), "A_min"]

# %% [markdown]
# To reserve for the worst case costs most where the interval is wide. To try and evict is cheap
# where the try is short. The two bounds cross at l / u = 0.38. There the policy `a-switch` changes
# from one policy to the other.
#
# (A ratio below 1 is no mistake. H-SF knows the true lengths, but it is not optimal.)
#
# ## What to remember
#
# - Order by whatever prediction there is.
# - Plan memory with a margin.
# - If only an interval is known, start with its lower end.
#
# *Next stop: [what is a token of memory worth?](price_of_memory.ipynb) It starts from files of your
# own.*
