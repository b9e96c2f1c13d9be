"""Lowering of aten ops to the IR: the table of ops, and the loop over a graph that applies it."""
