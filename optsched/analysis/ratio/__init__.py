"""Competitive ratios of online policies: measure them, and look for bad cases.

Examples
--------
>>> from optsched import generate, ratios
>>> instances = [generate("uniform", seed=k, n=5, output_max=4) for k in range(3)]
>>> study = ratios("mc-sf", instances)
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
from optsched.analysis.ratio.measure import ratios
from optsched.analysis.ratio.study import Paired, Ratio, Study
from optsched.analysis.ratio.worst import WorstCase, worst_case
