"""Schedules found without a solver."""
