"""The compiled loops that run schedulers batch by batch. Import lazily: they load numba.

`rules` runs `optsched.policies.rules.Rules`: an order fixed when a request begins to wait, groups,
an admission and an overflow rule. `rerank` runs `optsched.policies.trail.Trail`, whose order every
token may change. `windows` runs `optsched.policies.windows.Windows`: windows of tokens on one or
several workers. `common` holds what they share.
"""
