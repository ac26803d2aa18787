"""Prefills as large as the pace of decodes allows; ``table.toml`` has other policies for SLOs."""

from optsched.policies import policy
from optsched.policies.base import Rules
from optsched.policies.table import rules_like


@policy("paced", "chunks as large as the TPOT limits of running requests allow, late ones last")
def paced(
    *,
    hold: float = 2.0,
    catch_up: float = 1.0,
    lump: float = 0.5,
    late_last: bool = True,
    by_slack: bool = False,
    eviction_free: bool = False,
    max_running: int | None = None,
) -> Rules:
    """Return rules that prefill as much in a batch as keeps the pace of those that decode.

    docs/policies/deadlines.md and `Rules` describe the parameters. With `by_slack` the request is
    admitted whose prefill must start first to be in time, else as they arrive; if `eviction_free`,
    only where the predicted peaks of all fit together.
    """
    return rules_like(
        "edf",
        order="slack" if by_slack else "arrival",
        admission="reserve" if eviction_free else "present",
        late_last=late_last,
        max_batch_tokens=None,
        max_running=max_running,
        paced=True,
        hold=hold,
        catch_up=catch_up,
        lump=lump,
    )
