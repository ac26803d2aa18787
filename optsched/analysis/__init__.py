"""Analysis of policies: comparison with the optimum, competitive ratios and theory."""
