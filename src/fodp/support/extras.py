"""Packages that only some things take: looked for where they are first used, named with the extra that brings them."""

import logging
from importlib.util import find_spec
from typing import Any

from fodp.errors import ConfigurationError

_PACKAGES = {"sklearn": "scikit-learn", "dp_accounting": "dp-accounting"}  # where pip knows a module by another name


class MissingExtra(ConfigurationError):
    """What was asked for takes a package that is not installed."""


def need(module: str, what: str, *, extra: str) -> None:
    """Refuse `what` in one line if it takes a module that is not installed; `extra` brings it.

    Example:
        >>> need("math", "a sum", extra="data")
    """
    if find_spec(module) is None:
        package = _PACKAGES.get(module, module)
        raise MissingExtra(f'{what} takes {package}, which is not installed: pip install "fodp[{extra}]"')


def pyplot() -> Any:
    """Matplotlib's `pyplot`, for files alone, without a word about its font cache or folders; refused if missing."""
    need("matplotlib", "a picture", extra="plots")
    logger = logging.getLogger("matplotlib")
    if logger.level == logging.NOTSET:  # whoever has set it wants to hear
        logger.setLevel(logging.ERROR)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
