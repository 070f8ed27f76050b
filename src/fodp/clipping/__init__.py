"""Per-example gradients and what may be asked about them; knows models and bounds, not noise or ε."""

from fodp.clipping.advice import check, fix
from fodp.clipping.batches import Batch
from fodp.clipping.clipper import Clipper, clipped_sum
from fodp.clipping.engine import Engine, LossFunction
from fodp.clipping.findings import Issue
from fodp.clipping.layers.rules import register_rule
from fodp.gradients import FLOAT_TOLERANCE, Gradients

__all__ = [
    "FLOAT_TOLERANCE",
    "Batch",
    "Clipper",
    "Engine",
    "Gradients",
    "Issue",
    "LossFunction",
    "check",
    "clipped_sum",
    "fix",
    "register_rule",
]
