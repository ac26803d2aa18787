"""What a schedule does and whether it is feasible: the replay, the metrics and the timelines."""
