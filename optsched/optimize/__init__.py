"""Best schedules: formulations, solvers, searches and the ramp relaxation."""

from optsched.optimize.ramp.bound import RAMP as RAMP  # registers the bound
