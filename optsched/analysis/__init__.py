"""Policies beside the optimum: comparisons, competitive ratios, theory and queueing."""
