"""Best schedules: formulations, solvers, searches and the ramp relaxation."""
