"""Readers of what the pipeline made: reports, checks, the named workloads. Nothing imports tools but the command line."""
