"""Randomized campaigns that look for wrong answers, uncoded errors and hangs; each module is one, as `python -m tests.campaign.graphs`."""
