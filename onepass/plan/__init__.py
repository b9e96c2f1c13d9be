"""Planning: decide which results share a kernel and how each kernel runs. Pure arithmetic; needs no GPU."""
