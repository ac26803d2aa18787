"""Input tokens from a cache that a log counts beside its prompts, or among them."""

from dataclasses import replace

import numpy as np

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
    """Return the names of cached tokens that may stand beside those of prompt tokens."""
    within = [name[: name.rfind(".") + 1] for name in prompt]
    return {
        f"cached {k}": tuple(path + name for path in within for name in names.split())
        for k, names in enumerate((_READ, _WRITTEN))
    }


def with_cached(kept: Block, findings: Findings) -> Block:
    """Return requests with cached tokens added to prompts where they are not among them.

    They are not where they are more than the prompt, and so in all rows of the same model, since
    one instrument wrote those. Of the others it cannot be told.
    """
    if kept.cached is None:
        return kept

    outside = {model for model, tokens, prompt in kept.cached if tokens > prompt}
    tokens = np.array([tokens for _, tokens, _ in kept.cached], dtype=np.int64)
    proved = np.array([model in outside for model, _, _ in kept.cached], dtype=bool)
    for rows, words, harmless in (
        (proved, "cached input tokens are more than the prompt's, so they are added to them", True),
        (
            ~proved,
            "it cannot be told whether cached input tokens are among the prompt's, as is assumed "
            "(of csv and jsonl, --column prompt_tokens=A+B adds columns)",
            False,
        ),
    ):
        if (told := rows & (tokens > 0)).any():
            line = int(kept.line[np.argmax(told)])
            findings.odd(words, line, int(told.sum()), harmless=harmless)

    return replace(kept, prompt_tokens=kept.prompt_tokens + np.where(proved, tokens, 0))
