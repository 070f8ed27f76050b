"""Whose line a warning is about: the user's, however deep in fodp it was found."""

import sys
from pathlib import Path

_PACKAGE = str(Path(__file__).parent)


def users_level() -> int:
    """The `stacklevel` by which a warning of the function that calls this points at the first line outside of fodp."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level
