"""Modules of the user's own, named by a word on the command line or in a configuration."""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fodp.errors import ConfigurationError
from fodp.support.checks import shown


@contextmanager
def current_directory_importable() -> Iterator[None]:
    """An installed command, unlike `python -m`, does not look for modules where it is called."""
    here = os.getcwd()
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with suppress(ValueError):  # the user's module may have tidied up itself
            sys.path.remove(here)


def import_modules(names: Any) -> None:
    """Import the user's modules for what they register: methods, layer rules. Those of the current directory too.

    Example:
        >>> import_modules(["math"])
    """
    if not isinstance(names, list | tuple):
        raise ConfigurationError(f"modules to import must be a list of names, got {shown(names)}")
    for name in names:
        if not isinstance(name, str) or not name or name.endswith(".py") or os.sep in name:
            raise ConfigurationError(f"--import takes the name of a module, as in `import name`; got {shown(name)}")
        with current_directory_importable():
            try:
                importlib.import_module(name)
            except Exception as error:
                raise ConfigurationError(
                    f"--import {name} failed ({type(error).__name__}: {one_line(error)}); modules are looked up in the "
                    "current directory and among installed packages"
                ) from error


def one_line(error: Exception) -> str:
    """The error's message, short enough to be part of another."""
    return " ".join(str(error).split())[:200]
