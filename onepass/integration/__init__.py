"""Where users come in: onepass.fuse."""
