"""The language all the rest speaks: axes, buffers, ops, reductions, programs."""
