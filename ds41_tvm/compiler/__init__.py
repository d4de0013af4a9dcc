"""From a program to machine code. Imports TVM's compiler; the runtime does not import this package."""
