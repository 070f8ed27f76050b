"""Packages that only some things take: looked for where they are first used, named with the extra that brings them."""

from importlib.util import find_spec

from fodp._checks import PrivacyError

_PACKAGES = {"sklearn": "scikit-learn"}  # where pip knows a module by another name


class MissingExtra(PrivacyError):
    """What was asked for takes a package that is not installed."""


def need(module: str, what: str, *, extra: str) -> None:
    """Refuse `what` in one line if it takes a module that is not installed; `extra` brings it.

    Example:
        >>> need("math", "a sum", extra="data")
    """
    if find_spec(module) is None:
        package = _PACKAGES.get(module, module)
        raise MissingExtra(f'{what} takes {package}, which is not installed: pip install "fodp[{extra}]"')
