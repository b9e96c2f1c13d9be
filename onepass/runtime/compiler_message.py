"""What of all that a compiler printed tells a user what is wrong.

Worker processes import this module too, so it needs nothing but the standard library.
"""

from __future__ import annotations

LONGEST_LINE = 400


def error_line(*texts: str) -> str:
    """The last line that speaks of an error, or else the last that says anything; empty where nothing does."""
    lines = [line.strip() for text in texts for line in text.splitlines()]
    useful = [line for line in lines if line and not set(line) <= set("^~= ") and not line.startswith("Repro command")]
    errors = [line for line in useful if "error" in line.lower()]
    return (errors or useful or [""])[-1][:LONGEST_LINE]
