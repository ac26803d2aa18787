"""HiGHS and CP-SAT back ends."""
