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
# Shortest first is a good rule, but a server cannot follow it: the length of an answer is known
# only when it is finished. Three papers take three ways out. **TRAIL** (Shahout et al. 2024)
# predicts after every token how much of the answer is left. **ELIS** (Choi et al. 2025) predicts
# again once per window of tokens. Chen, Ye and Zhou (2025) need only an interval for each length,
# and prove what can be done with it.
#
# We run all three on the same requests. We ask how much it is worth to know lengths, and how much
# error in predictions the policies tolerate.

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
# GPU is a cost model fitted to profiles of an A100 with a 7B model. There are 16 places in a batch,
# and 4,000 tokens of KV.

# %%
gpu = "llama2-7b-a100-vidur-fit"
chats = optsched.generate(
    "lognormal", seed=3, n=600, kv_capacity=4000, time_unit="second", rate=20.0
)
outputs = chats.output_tokens
print("outputs: mean", outputs.mean(), "median", np.median(outputs), "longest", outputs.max())


def serve(policy: str, predictor: str | None = None, seed: int = 0) -> optsched.Evaluation:
    """Return what a policy does on the chats, judged."""
    plan = optsched.simulate(chats, policy, gpu, predictor=predictor, seed=seed)
    return optsched.evaluate(chats, plan, gpu)


# %% [markdown]
# ## What knowing is worth
#
# First the policies see the true lengths. `vllm-fcfs` does not look at them. `vllm-sjf` takes the
# shortest of the waiting requests. `trail` also preempts a running request for a shorter one,
# during the first 80 % of its run. `isrtf` is ELIS, which sorts the requests again every 50 tokens.

# %%
places = "max_running=16"
policies = {
    "first come": f"vllm-fcfs:{places}",
    "shortest first": f"vllm-sjf:{places}",
    "TRAIL": f"trail:{places}",
    "ELIS": "isrtf:batch_size=16",
}
known = {name: serve(policy) for name, policy in policies.items()}
for name, judged in known.items():
    m = judged.metrics
    print(
        f"{name:15} latency: mean {m['mean_latency']:.2f} s, 99 % below {m['p99_latency']:.1f} s; "
        f"mean TTFT {m['mean_ttft']:.2f} s; {m['evictions']} evictions"
    )

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
plot_distribution(known, "latency", ax=left)
plot_distribution(known, "ttft", ax=right);
# %% [markdown]
# Knowing lengths helps the mean and hurts the tail: a request has to be last, and with known
# lengths it is the longest. Preempting shortens the time to the first token further. But each
# preemption costs a refill, and on this workload preemptions cost more latency than they save.

# %%
mean = {name: judged.metrics["mean_latency"] for name, judged in known.items()}
assert mean["shortest first"] < mean["first come"]
assert known["TRAIL"].metrics["mean_ttft"] < known["shortest first"].metrics["mean_ttft"]
assert known["first come"].metrics["p99_latency"] < known["shortest first"].metrics["p99_latency"]

# %% [markdown]
# C is the share of a run during which TRAIL may preempt. It trades mean latency against time to
# first token. With C = 0 a shorter request never preempts a running one, and with C = 1 it always
# may (SRPT):

# %%
rows = []
for c in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
    m = serve(f"trail:c={c},{places}").metrics
    rows.append({"C": c, "mean latency": m["mean_latency"], "mean TTFT": m["mean_ttft"]})
    print(rows[-1], m["evictions"], "evictions")

assert rows[0]["mean latency"] < rows[-1]["mean latency"]
ax = plot_lines(rows, "C", ["mean latency", "mean TTFT"])
ax.set(xlabel="C", ylabel="[s]", ylim=(0, None));
# %% [markdown]
# Here C = 0.2 has the best of both: the latency of C = 0, and less than half of its time to the
# first token.

# %%
assert rows[1]["mean latency"] < 1.05 * rows[0]["mean latency"]
assert rows[1]["mean TTFT"] < 0.5 * rows[0]["mean TTFT"]

# %% [markdown]
# ## How much error it bears
#
# Now the policies see predictions, which are the truth plus a normal error of a given mean size.
# The median output is a few dozen tokens. For half of the requests an error of 60 is therefore more
# noise than signal. We add MC-SF, which does more than order by predictions. It *relies* on them,
# since it admits requests whose predicted peaks just fit.

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
ax.set_yscale("log");
# %% [markdown]
# The policies that only *order* by a prediction hardly suffer, since even a poor prediction tells
# short from long. MC-SF is the best of all with the truth, but it breaks down with errors. If a
# prediction is too short by a few tokens, memory overflows, and MC-SF then evicts all requests.

# %%
at = {(row["error"], row["policy"]): row["mean latency"] for row in noise}
assert at[0, "MC-SF"] < at[0, "shortest first"]
assert at[30, "MC-SF"] > 2 * at[0, "MC-SF"]
for name in ("shortest first", "TRAIL", "ELIS"):
    assert at[30, name] < 1.25 * at[0, name]

# %% [markdown]
# The cure is not a better predictor but a margin. MC-SF plans with more tokens than predicted, by
# about twice the mean error. Jaillet et al. (2025) suggest such a margin in section 6.

# %%
for margin in (0, 30, 60, 120):
    m = serve(f"mc-sf:margin={margin}", "noisy:mae=30", seed=1).metrics
    at["margin", margin] = m["mean_latency"]
    print(f"margin {margin:3}: mean latency {m['mean_latency']:.2f} s, {m['evictions']} evictions")

assert at["margin", 60] < 1.1 * at[0, "MC-SF"]
assert at["margin", 60] < at["margin", 120] < at["margin", 0]

# %% [markdown]
# ## Predicting again
#
# TRAIL reads a prediction off the model's own embeddings after every token, and refines it with a
# Bayesian filter over ten bins. The predictor `trail` does that with a synthetic classifier. The
# figure shows the predictions for four requests while they run:

# %%
from optsched.workloads.predict import forecast_of, predict

told = predict(chats, "trail", seed=1)
forecast = forecast_of(told)
figure, ax = plt.subplots(figsize=(8, 4), layout="constrained")
for share, color in zip(
    (0.6, 0.8, 0.9, 0.97), ("#0072B2", "#E69F00", "#009E73", "#CC79A7"), strict=True
):
    i = int(np.argsort(outputs)[int(share * len(outputs))])
    left = forecast.remaining[forecast.offsets[i] : forecast.offsets[i + 1]]
    done = np.arange(len(left)) * forecast.every
    ax.plot(done, left, color=color)
    ax.plot([0, outputs[i]], [outputs[i], 0], color=color, linestyle=":")
ax.set(xlabel="tokens produced", ylabel="tokens left: predicted, and true (dotted)");
# %%
informed = {
    "TRAIL, refined": serve(f"trail:{places}", "trail", seed=1),
    "TRAIL, first prediction only": serve(f"trail:refine=false,{places}", "trail", seed=1),
    "ELIS": serve("isrtf:batch_size=16", "elis", seed=1),
    "first come": known["first come"],
}
for name, judged in informed.items():
    print(f"{name:30} mean latency {judged.metrics['mean_latency']:.2f} s")
assert informed["TRAIL, refined"].metrics["mean_latency"] < mean["first come"]

# %% [markdown]
# Predictions this good order requests nearly as well as the truth. Refined predictions are no
# better here than first ones. This does not contradict the paper: the order depends on which
# requests are short, and that is mostly known at the start.
#
# ELIS decides once per window of K tokens. Shorter windows follow the predictions more closely. In
# longer windows a new request waits for the end of the window. On this workload both effects are
# small:

# %%
for tokens in (10, 50, 200):
    m = serve(f"isrtf:window={tokens},batch_size=16", "elis", seed=1).metrics
    print(f"window {tokens:3}: mean latency {m['mean_latency']:.2f} s, TTFT {m['mean_ttft']:.3f} s")

# %% [markdown]
# ## Only an interval
#
# Suppose that an output is known only to lie between l and u. Chen, Ye and Zhou (2025) propose two
# policies. **A_max** takes every output to be u, and never overflows. **A_min** takes every output
# to be l, admits more requests, and evicts those that grow too long. If all outputs are either l or
# u, there is a third one: **A_l** lets every request try l tokens first. The yardstick is H-SF,
# which knows the true lengths.

# %%
from optsched.analysis.ratio.families import two_point
from optsched.analysis.theory import a_l_bound, a_min_two_point_bound

long = 24
curves = []
for short in (2, 4, 6, 9, 12, 16, 20):
    instance = two_point(short, long, 0.8, 400, kv_capacity=400)
    total = {
        policy: np.mean(
            [
                optsched.evaluate(instance, optsched.simulate(instance, policy, seed=s)).metrics[
                    "tel"
                ]
                for s in range(2)
            ]
        )
        for policy in ("a-max", "a-min", "a-l", "h-sf")
    }
    for policy in ("a-max", "a-min", "a-l"):
        curves.append(
            {"alpha": short / long, "policy": policy, "ratio": total[policy] / total["h-sf"]}
        )

ax = plot_lines(curves, "alpha", "ratio", series="policy", reference={"H-SF": 1.0})
alpha = np.linspace(0.08, 0.85, 100)
ax.plot(alpha, [a_min_two_point_bound(x) for x in alpha], color="#999999", label="A_min: bound")
ax.plot(alpha, [a_l_bound(x) for x in alpha], color="#999999", linestyle=":", label="A_l: bound")
ax.set(xlabel="alpha = l / u", ylabel="total latency over H-SF's", ylim=(0.9, 2.8))
ax.legend();
# %%
ratio = {(round(row["alpha"], 3), row["policy"]): row["ratio"] for row in curves}
assert ratio[round(2 / 24, 3), "a-l"] < 1.1  # trying costs nothing where l is small
assert ratio[round(2 / 24, 3), "a-max"] > 2  # reserving costs most there
assert ratio[round(20 / 24, 3), "a-l"] > ratio[round(20 / 24, 3), "a-min"]

# %% [markdown]
# Reserving for the worst case costs most wherever the interval is wide. Trying and evicting is
# cheap when the try is short. (A ratio below 1 is no mistake: H-SF knows the true lengths, but is
# not optimal.) The two bounds cross at alpha = 0.38, where the policy `a-switch` changes from one
# policy to the other.
#
# In short: order by whatever prediction there is, and plan memory with a margin. If only an
# interval is known, start with its lower end.
