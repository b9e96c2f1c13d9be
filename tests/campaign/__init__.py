"""Randomized campaigns that find wrong answers, uncoded errors, hangs. Each module is one: `python -m tests.campaign.graphs`."""
