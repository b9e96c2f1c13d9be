"""Find the line of a compiler's output that tells the user what is wrong.

Worker processes import this module too, so it needs only the standard library.
"""

from __future__ import annotations

LONGEST_LINE = 400


def error_line(*texts: str) -> str:
    """The last line that mentions an error, else the last line with text, else an empty string."""
    lines = [line.strip() for text in texts for line in text.splitlines()]
    useful = [line for line in lines if line and not set(line) <= set("^~= ") and not line.startswith("Repro command")]
    errors = [line for line in useful if "error" in line.lower()]
    return (errors or useful or [""])[-1][:LONGEST_LINE]
