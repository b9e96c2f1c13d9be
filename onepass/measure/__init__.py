"""Benchmarks, calibration and their charts. Only the command line imports this package."""
