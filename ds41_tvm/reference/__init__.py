"""The executable specification: the attention stack in plain NumPy, one file per operator, to be read.

bf16 tensors are their uint16 bits, float32 tensors float32; shapes are those of one sequence, tokens first.
Slow and exact: products accumulate in float64 and are rounded once. ``layer.Reference`` is the whole model.
"""
