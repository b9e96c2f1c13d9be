"""Source -> Executable: compile (with or without the GPU at hand), launch, interpret."""
