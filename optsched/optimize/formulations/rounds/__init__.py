"""The hindsight-optimal program of the round model, a file per method."""
