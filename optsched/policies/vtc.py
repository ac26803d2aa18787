"""The virtual token counter: the client that has been served least first."""

from optsched.policies import policy
from optsched.policies.base import Rules
from optsched.policies.programs import in_chunks


@policy(
    "vtc",
    "the client that has been served the fewest tokens first, outputs counting double",
    paper="Sheng et al. 2024, Algorithm 2",
)
def vtc(*, clients: int = 4, max_running: int | None = None, max_batch_tokens: int = 2048) -> Rules:
    """Return rules that take the client with the smallest counter (docs/policies/discussed.md).

    `clients`: to so many clients requests are dealt out in turn, where there are no sessions.
    """
    return in_chunks("service", max_running, max_batch_tokens, clients=clients)
