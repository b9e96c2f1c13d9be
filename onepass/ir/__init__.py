"""The intermediate representation (IR): sizes, axes, buffers, scalar ops, monoids and Programs, and the passes over them."""
