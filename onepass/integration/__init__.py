"""The user-facing entry points: `onepass.fuse` and the torch.compile backend."""
