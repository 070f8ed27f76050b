"""fodp: train PyTorch models with differential privacy.

Names load when first used, so that `import fodp` and the command line answer at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Plan": "fodp.plan",
    "Run": "fodp.run",
    "Trainer": "fodp.training.trainer",
    "Ledger": "fodp.ledger",
    "make_private": "fodp.training.drop_in",
    "clipped_sum": "fodp.clipping",
    "Clipper": "fodp.clipping",
    "check": "fodp.clipping",
    "FractionalMemory": "fodp.memory",
    "UniformMemory": "fodp.memory",
    "ExponentialMemory": "fodp.memory",
    "ExponentialSumMemory": "fodp.exponentials",
    "GaussianMechanism": "fodp.mechanism",
    "Query": "fodp.mechanism",
    "epsilon": "fodp.accounting",
    "calibrate": "fodp.accounting",
    "PrivacyError": "fodp._checks",
}

__all__ = [*_HOME, "__version__", "losses"]

if TYPE_CHECKING:
    from fodp import losses as losses
    from fodp._checks import PrivacyError as PrivacyError
    from fodp.accounting import calibrate as calibrate
    from fodp.accounting import epsilon as epsilon
    from fodp.clipping import Clipper as Clipper
    from fodp.clipping import check as check
    from fodp.clipping import clipped_sum as clipped_sum
    from fodp.exponentials import ExponentialSumMemory as ExponentialSumMemory
    from fodp.ledger import Ledger as Ledger
    from fodp.mechanism import GaussianMechanism as GaussianMechanism
    from fodp.mechanism import Query as Query
    from fodp.memory import ExponentialMemory as ExponentialMemory
    from fodp.memory import FractionalMemory as FractionalMemory
    from fodp.memory import UniformMemory as UniformMemory
    from fodp.plan import Plan as Plan
    from fodp.run import Run as Run
    from fodp.training.drop_in import make_private as make_private
    from fodp.training.trainer import Trainer as Trainer


_ROOMS = ("losses",)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"fodp.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'fodp' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
