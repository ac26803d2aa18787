"""Input tokens from a cache that a log counts beside its prompts, or among them."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from optsched.workloads.traces.base import Block, Findings

_READ = (
    "cache_read.input_tokens cache_read_input_tokens cache_read_tokens input_cached_tokens "
    "input_cache_read cached_input_tokens cached_tokens cacheReadInputTokens prefix_len"
)
_WRITTEN = (
    "cache_creation.input_tokens cache_creation_input_tokens cache_creation_tokens "
    "input_cache_creation cache_write_tokens cacheWriteInputTokens"
)


def cached_names(prompt: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the names of cached tokens that may stand beside those of prompt tokens.

    As the fields ``cached 0`` of tokens read and ``cached 1`` of tokens written, each with its
    names: beside ``usage.input_tokens``, for example, ``usage.cache_read_input_tokens``.
    """
    objects = [name[: name.rfind(".") + 1] for name in prompt]  # where these stand, with a point
    fields = dict[str, tuple[str, ...]]()
    for k, names in enumerate((_READ, _WRITTEN)):
        fields[f"cached {k}"] = tuple(path + name for path in objects for name in names.split())

    return fields


def with_cached(kept: Block, findings: Findings) -> Block:
    """Return requests with cached tokens added to prompts where they are not among them.

    Cached tokens that are more than the prompt stand beside it, and so do those in all rows of the
    same model, since one instrument wrote these. Elsewhere it cannot be told, and nothing is added.
    """
    if kept.cached is None:
        return kept

    outside_models = {model for model, tokens, prompt in kept.cached if tokens > prompt}
    tokens = np.array([tokens for _, tokens, _ in kept.cached], dtype=np.int64)
    outside = np.array([model in outside_models for model, _, _ in kept.cached], dtype=bool)

    def tell(rows: NDArray[np.bool_], words: str, harmless: bool) -> None:
        if rows.any():
            line = int(kept.line[np.argmax(rows)])
            findings.odd(words, line, int(rows.sum()), harmless=harmless)

    words = "cached input tokens are more than the prompt's, so they are added to them"
    tell(outside & (tokens > 0), words, True)
    words = (
        "it cannot be told whether cached input tokens are among the prompt's, as is assumed "
        "(of csv and jsonl, --column prompt_tokens=A+B adds columns)"
    )
    tell(~outside & (tokens > 0), words, False)
    return replace(kept, prompt_tokens=kept.prompt_tokens + np.where(outside, tokens, 0))
