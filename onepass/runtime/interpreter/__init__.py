"""Kernels on CPU tensors: Triton's interpreter for Triton kernels, and a functional model of the GPU for Gluon kernels."""
