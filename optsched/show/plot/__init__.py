"""Figures. Each function draws on the axes ``ax`` or on new ones, and returns them.

None runs anything or opens a window. All share a palette that colour-blind readers can tell apart
(`optsched.show.plot.style`). Where there is too much to draw, they aggregate. matplotlib is loaded
on first use.
"""

from optsched.show.plot.curves import (
    plot_capacity,
    plot_fit,
    plot_load,
    plot_percentiles,
    plot_progress,
    plot_shadow_prices,
    plot_splits,
)
from optsched.show.plot.policies import plot_comparison, plot_distribution, plot_gap, plot_ratios
from optsched.show.plot.rows import plot_changes, plot_claims, plot_lines
from optsched.show.plot.timelines import (
    plot_batch_times,
    plot_batches,
    plot_gantt,
    plot_kv,
    plot_states,
)
