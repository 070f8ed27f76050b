"""fodp: train PyTorch models with differential privacy.

`__all__` shows what people need, in the order in which they need it. A few more names work as well. The type stub
`__init__.pyi` beside this file lists all of them once, with the module they come from. Names load when they are first
used, so that `import fodp` and the command line answer at once.
"""

import ast
from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def _listed() -> tuple[dict[str, str], set[str]]:
    """From the stub: the module of every name, and the modules that are names themselves."""
    stub = __spec__.loader.get_data(f"{__path__[0]}/__init__.pyi")  # also from a zip archive
    imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: f"fodp.{node.module}" for node in imports if node.module for alias in node.names}
    return homes, {alias.name for node in imports if not node.module for alias in node.names}


_HOMES, _MODULES = _listed()

__all__ = [
    "Clipper",
    "ExponentialMemory",
    "FractionalMemory",
    "GaussianMechanism",
    "Ledger",
    "Plan",
    "PrivacyError",
    "Trainer",
    "UniformMemory",
    "calibrate",
    "callbacks",
    "check",
    "clipped_sum",
    "epsilon",
    "fix",
    "losses",
    "make_private",
    "methods",
    "options",
    "register_rule",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"fodp.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'fodp' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
