"""The compiled loops that run schedulers batch by batch. Import lazily: they load numba.

`rules` runs `optsched.policies.rules.Rules`: an order that is fixed when a request begins to wait,
groups, an admission rule and an overflow rule. `rerank` runs `optsched.policies.trail.Trail`,
whose order may change with every token. `windows` runs `optsched.policies.windows.Windows`:
windows of tokens on one or several workers. `common` holds what they share. `online` asks a policy
object before every batch, and `stepwise` is such an object for `Rules`.
"""
