"""Regions of a whole model's graph, for torch.compile: which nodes they take, their Programs, and what their memory allows."""
