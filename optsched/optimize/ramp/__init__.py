"""The reverse-time ramp relaxation, and how few requests are solved with it."""
