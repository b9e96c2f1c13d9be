"""Randomized campaigns that look for wrong answers, uncoded errors and hangs: `python -m tests.campaign --help`."""
