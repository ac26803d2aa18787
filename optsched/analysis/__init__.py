"""Analysis of policies: comparison with the optimum, competitive ratios, theory and queueing."""
