"""Competitive ratios of online policies: measure them, and look for bad cases.

Examples
--------
>>> from optsched import generate
>>> from optsched.analysis.ratio import competitive_ratio
>>> instances = [generate("uniform", seed=k, n=5, output_max=4) for k in range(3)]
>>> study = competitive_ratio("mc-sf", instances)
>>> 1 <= study.worst("mc-sf").low
True
"""

from optsched.analysis.ratio.families import (
    FAMILIES,
    against,
    geometric,
    two_point,
    weighted_geometric,
)
from optsched.analysis.ratio.study import Paired, Ratio, Study, competitive_ratio
from optsched.analysis.ratio.worst import WorstCase, worst_case
