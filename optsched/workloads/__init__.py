"""Where requests come from: random instances, traces of real systems and predicted lengths."""
