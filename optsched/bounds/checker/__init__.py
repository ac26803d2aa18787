"""Independent check of certificates. Nothing here is imported from what makes them.

`check` reads a certificate and its tree, and checks leaves of prices. Chains of the ramp relaxation
(`ramp`) are replayed (`replay`) by compiled code (`period`, `product`, `states`, `enumeration`,
`groups`), which the prover of `optsched.optimize.ramp` calls, too. In seconds (`seconds`), each
kind of leaf has a file: `work`, `busy_time`, `shares`, `clock`, and `classes` and `class_work`,
whose `charges` are proved over all batches.
"""

from optsched.bounds.checker.check import check_certificate, schedule_value

__all__ = ["check_certificate", "schedule_value"]
