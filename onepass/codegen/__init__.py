"""(Kernel, Schedule) -> Source: the text of kernels, written once."""
