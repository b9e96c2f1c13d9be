"""Writes generated sources to the folder that the user named for them (ONEPASS_KEEP_SOURCES)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from .. import files
from ..codegen.source import Source
from ..errors import SourcesNotKept, text_of, warn
from ..knobs import knobs


def keep_sources(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    """Write generated sources to the folder of ONEPASS_KEEP_SOURCES, if set. If that fails, warn and continue."""
    folder = knobs().keep_sources
    try:
        for source in sources if folder else ():
            path = Path(folder or ".") / f"{files.slug(source.name)}.py"
            files.write_user_file(path, source.text.encode(errors="backslashreplace"))
    except OSError as error:
        _warn_not_kept(str(folder), error.strerror or text_of(error))
    return sources


@cache
def _warn_not_kept(folder: str, detail: str) -> None:
    """Warn once per folder and reason, because a model has many kernels."""
    warn(SourcesNotKept(folder=folder, detail=detail))
