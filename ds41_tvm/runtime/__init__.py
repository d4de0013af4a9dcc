"""Runs compiled kernels over sequences. Needs NumPy and TVM's runtime, not its compiler."""
