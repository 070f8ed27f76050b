"""The names that `fodp.NAME` finds."""

import re
from pathlib import Path

import fodp


def all_names():
    """Those of the type stub: what `fodp.__all__` shows, and the few more that work."""
    stub = Path(fodp.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    return re.findall(r" as (\w+)$", stub, re.MULTILINE)
