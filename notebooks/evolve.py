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
# # Evolve a scheduler and know when to stop
#
# **When is a search for a better scheduler done?** When its score is close to a floor that is proved,
# so that nothing is left to find. Programs that write schedulers by trial and error, OpenEvolve and
# its kin, see only that their score still falls, and not how far it can. Below, one search ends for
# a reason, and another is told that there is more to find.
#
# *Stop 9 of 10 on the [tour](../docs/notebooks/index.md). Before:
# [is my vLLM any good?](my_vllm.ipynb). Next:
# [what should my agent server keep?](agent_server.ipynb)*
#
# `optsched.score` runs a policy on instances of [the library](../docs/library.md). The score is the
# geometric mean of its values over those of first come first served: less is better. The *floor* is
# the same of the proved bounds, and *best known* the same of schedules that exist.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import optsched

folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## What evolves
#
# A scheduler here is a file with `Rules`, and a mutation changes one of its choices. A language model
# would rewrite the file instead; the loop would be the same.

# %%
CHOICES = {
    "order": ["arrival", "prompt", "output", "total", "volume", "work"],
    "admission": ["present", "lookahead", "reserve"],
    "groups": [("running", "waiting"), ("running_decode", "prefill")],
    "max_batch_tokens": [None, 512, 1024, 2048, 4096],
    "max_running": [None, 16, 32, 64, 128],
}


def write(genes: dict[str, object]) -> str:
    """Write a scheduler's file, and return its specification."""
    file = folder / "evolved.py"
    given = ", ".join(f"{key}={value!r}" for key, value in genes.items())
    file.write_text(f"from optsched import Rules\n\n\ndef evolved():\n    return Rules({given})\n")
    return f"{file}:evolved"


def evolve(names: list[str], tries: int, close: float, chunked: bool) -> tuple[list, dict, object]:
    """Mutate until the score is within a share of the floor, or no tries are left."""
    rng = np.random.default_rng(0)
    genes = {key: values[0] for key, values in CHOICES.items()} | {"chunked": chunked}
    best = optsched.score(write(genes), names, time_limit_s=2)
    history = [best.value]

    for _ in range(tries):
        if best.value <= best.bound * (1 + close):
            break

        key = str(rng.choice(list(CHOICES)))
        child = genes | {key: CHOICES[key][rng.integers(len(CHOICES[key]))]}
        found = optsched.score(write(child), names, time_limit_s=2)
        if found.value is not None and found.value < best.value:  # None: it failed somewhere
            genes, best = child, found

        history.append(best.value)

    return history, genes, best


# %% [markdown]
# ## A search that ends for a reason
#
# Three instances in rounds of Jaillet et al. 2025, of which nearly all is proved. The loop may stop
# once at most 10 % can be gained.

# %%
rounds = ["jaillet-1-a", "jaillet-2-a", "jaillet-2-b"]
history, genes, best = evolve(rounds, 60, close=0.10, chunked=False)
print(genes)
print(f"score {best.value:.3f} after {len(history) - 1} tries")
print(f"best known {best.best_known:.3f}, floor {best.bound:.3f}")
assert best.value <= 1.10 * best.bound
assert len(history) <= 60

# %% [markdown]
# It stopped because it was done, and not because its patience was over. No scheduler whatsoever, not
# even one that knows the future, is more than 10 % better on these instances.
#
# ## A search that should go on
#
# Conversations and code at twice the rate of Azure's traces, in seconds. Batches now cost time, and a
# prefill delays those who decode.

# %%
seconds = ["chat-x2", "code-x2"]
more, genes, last = evolve(seconds, 40, close=0.10, chunked=True)
print(genes)
print(f"score {last.value:.3f} after {len(more) - 1} tries")
print(f"best known {last.best_known:.3f}, floor {last.bound:.3f}")
assert len(more) == 41  # it did not come close
assert last.bound < last.best_known < last.value < 0.8


# %%
figure, pair = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
for axes, scores, found, title in zip(
    pair, (history, more), (best, last), ("in rounds", "in seconds"), strict=True
):
    axes.step(range(len(scores)), scores, where="post", label="best so far")
    axes.axhline(found.best_known, color="C2", linestyle="--", label="best known schedule")
    axes.axhspan(0, found.bound, color="0.8", label="proved impossible")
    axes.set(title=title, xlabel="tries", ylim=(0, 1.2))

pair[0].set_ylabel("score (fcfs: 1)")
pair[1].legend()
plt.show()

# %% [markdown]
# The picture says what a falling line alone cannot. On the left the line has met the ground. On the
# right there is a schedule, known and checked, far below it: these choices do not suffice, and it is
# worth while to think of others. Only the grey is out of reach for sure.
#
# ## Does it hold elsewhere?
#
# Scores on instances that the search has not seen:

# %%
held_out = optsched.score(write(genes), ["chat-x1.5", "code-x1.5", "burst-cv3"])
for row in held_out.rows:
    low, high = row.captured
    print(f"{row.instance}: captured {low:.0%} to {high:.0%} of what fcfs loses")

assert held_out.value < 1

# %% [markdown]
# ## What to remember
#
# - A score without a floor tells a loop when it is tired. A floor tells it when it is done.
# - A failed scheduler costs one try: it runs in a process of its own, and is judged outside.
# - What is far from the floor may still be near the best: the optimum lies between the grey and the
#   best known schedule. Who narrows that improves [the library](../docs/library.md).
#
# On a command line it is `optsched score mine.py:Mine --json -` ([how](../docs/howto/policy.md)).
#
# *Next stop: [what should my agent server keep?](agent_server.ipynb)*
