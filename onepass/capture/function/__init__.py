"""Capture of one function, for `onepass.fuse`: its trace, arguments and results, and the guards on what else it reads."""
