"""Figures, reports and traces of schedules, for people to look at."""
