"""What a schedule does, and whether it may: the replay, the metrics and the timelines."""
