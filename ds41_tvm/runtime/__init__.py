"""Runs compiled kernels over sequences. Needs NumPy and TVM's runtime, not its compiler.

Threads and processes:

* A `Runner`, its sequences and its steps belong to one thread at a time; they may move between threads. A call of
  `step`, `forward`, `commit` or `restore` while another thread is inside one of them raises UsedConcurrently; changing
  a sequence meanwhile is not noticed.
* An opened `Artifact` (its code and its weights) may be used from any thread: one runner per thread, each with
  sequences of its own. Every thread that calls kernels starts a pool of workers for itself. Runners in one process
  share nothing else.
* Processes that load one artefact share the memory of its weights.
* fork: a child may run kernels if the forking thread had not run any; otherwise the workers are missing in the child,
  and AfterFork is raised there, except in threads that the child starts itself. `spawn` has no such limit.
"""
