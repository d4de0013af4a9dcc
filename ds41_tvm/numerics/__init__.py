"""Exact low-precision number formats: ``formats`` in NumPy, ``tir`` as TensorIR expressions."""
