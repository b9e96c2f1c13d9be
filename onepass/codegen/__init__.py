"""(Kernel, Schedule) -> Source: generation of kernel text."""
