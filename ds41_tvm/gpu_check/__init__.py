"""One command that shows on a GPU whether the compiled kernels are right there, and how fast they are.

`pack` compiles artefacts and puts them into a tar file with everything that runs them; the rest is what runs: golden
cases, invariance under poisoned memory, times per layer and per kernel beside the machine's own rates. Each part runs
in a process of its own, since an error on a GPU ends the process's use of it, and all write one report.
"""
