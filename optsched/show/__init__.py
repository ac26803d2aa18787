"""Pictures, reports and traces for people."""
