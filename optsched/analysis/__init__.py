"""Analysis of policies: comparison with the optimum, and competitive ratios."""
