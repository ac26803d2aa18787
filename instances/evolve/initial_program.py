"""A scheduler of LLM inference: which requests run in the next batch."""

from optsched.policies import Batch, View, admit, decode_all, evict_until_fits

# EVOLVE-BLOCK-START


class Evolved:
    """Admits who fits, in the order of arrival, and evicts the last to have begun."""

    clairvoyant = False  # it is shown no output lengths

    def batch(self, view: View) -> Batch:
        """Return the tokens that each request processes in the next batch, and who is evicted.

        All that run decode a token or go on with their prompt; then waiting ones are admitted in
        the order of a line as long as KV memory lasts. `view.now` is the time; by request there
        are `view.arrival[i]`, `view.prompt_tokens[i]` and `view.rest(i)`, the tokens left of its
        prompt.
        """
        tokens, evicted = evict_until_fits(view, decode_all(view))
        line = sorted(view.waiting, key=lambda i: view.arrival[i])
        return Batch(admit(view, tokens, line, evicted), evicted)


# EVOLVE-BLOCK-END
