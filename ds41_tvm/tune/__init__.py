"""Tuning: search the knobs of every kernel's program on a machine, keep what is faster, and use it when compiling."""
