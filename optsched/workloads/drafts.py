"""Servers with speculative decoding: how many drafts each decode step of an instance accepts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from optsched.files.read_write import as_instance
from optsched.problem.columns import check_whole
from optsched.problem.drafts import MAX_DRAFTS
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.problem.specs import parse_spec
from optsched.problem.streams import Seed, stream


def with_drafts(
    instance: Instance | str | Path,
    num_speculative_tokens: int,
    *,
    accepted: float | None = None,
    rates: Sequence[float] | None = None,
    share: float | None = None,
    seed: Seed = 0,
) -> Instance:
    """Return the instance on a server whose decode steps verify drafts.

    Give one of the last three, or none: then every draft is accepted, which is what a bound grants
    a server of which nothing is known.

    Parameters
    ----------
    instance : Instance, str or path
        The instance, its file, or the name of a shipped one.
    num_speculative_tokens : int
        k: drafts of a step; 0 for none.
    accepted : float, optional
        Drafts accepted by a step in the mean, drawn from the two whole numbers beside it
        (AISimulate's ``expected_accepted_tokens``).
    rates : sequence of float, optional
        The shares of steps that accept the first draft, the second, and so on, as vLLM logs them.
    share : float, optional
        The share of drafts that is accepted, spread evenly over steps (BLIS's
        ``--speculative-acceptance-rate``).
    seed : int or sequence of int
    """
    instance = as_instance(instance)
    k = check_whole(num_speculative_tokens, "num_speculative_tokens", 0, MAX_DRAFTS)
    choices = {"accepted": accepted, "rates": rates, "share": share}
    chosen = {name: value for name, value in choices.items() if value is not None}
    if len(chosen) > 1 or (chosen and k == 0):
        raise InputError(f"drafts: found {' and '.join(chosen)}; expected one, with drafts")

    all_accepted = replace(instance, num_speculative_tokens=k, accepted=None, known=None)
    if not chosen:
        return all_accepted

    # The chance that a step accepts draft j, and so all before it, too.
    mean = accepted if share is None else share * k
    if rates is not None:
        chances = [float(rate) for rate in rates]
    elif mean is not None:
        chances = [min(max(mean - j, 0.0), 1.0) for j in range(k)]  # of its whole part, 1

    falls = all(x >= y for x, y in zip([1.0, *chances], [*chances, 0.0], strict=True))
    if len(chances) != k or not falls or (mean is not None and not 0 <= mean <= k):
        (name, value), *_ = chosen.items()
        expected = {"accepted": f"0 to {k}", "share": "0 to 1"}.get(name, f"{k} falling shares")
        raise InputError(f"drafts: {name}: found {value!r}; expected {expected}")

    coins, rows = stream(seed, "drafts"), []
    for o in instance.output_tokens.tolist():
        # Of o - 1 steps, which are enough even if no draft is accepted. One coin a step decides
        # how many: the drafts whose chance is above it. A share needs none: rounded down, its sum
        # over t steps is share * k * t, but for rounding.
        if share is not None:
            by_step = np.diff(np.floor(share * k * np.arange(o) + 1e-9)).astype(np.int64)
        else:
            by_step = (coins.random(o - 1)[:, None] < np.array(chances)).sum(axis=1)

        # The column has the first steps that yield the o - 1 tokens after the first, and no more.
        steps = int(np.searchsorted(np.cumsum(by_step + 1), o - 1)) + 1 if o > 1 else 0
        rows.append(tuple(by_step[:steps].tolist()))

    return replace(all_accepted, accepted=tuple(rows))


def parse_drafts(instance: Instance, text: str, seed: Seed) -> Instance:
    """Return `with_drafts` of a text such as ``3:accepted=1.99`` or ``3:rates=0.8/0.6/0.4``."""
    name, texts = parse_spec(text, "drafts")
    try:
        numbers = {key: list(map(float, value.split("/"))) for key, value in texts.items()}
        options = {key: value if key == "rates" else value[0] for key, value in numbers.items()}
        return with_drafts(instance, int(name), seed=seed, **options)  # type: ignore[arg-type]
    except (ValueError, TypeError):  # TypeError: a keyword that `with_drafts` does not have
        expected = "K, K:accepted=MEAN, K:share=SHARE or K:rates=R1/R2/..., as in 3:accepted=1.99"
        raise InputError(f"drafts: found {text!r:.80}; expected {expected}") from None
