"""What of Opacus has no public name, or is set by Opacus alone."""

from typing import Any

from opacus.accountants import IAccountant
from opacus.optimizers import DPOptimizer
from torch import nn

_OF_PARAMETERS = ("grad_sample", "summed_grad", "_forward_counter", "_current_grad_sample", "_norm_sample")


def accountant_of(optimizer: DPOptimizer) -> IAccountant | None:
    """The one whose hook counts the optimizer's steps, if there is one."""
    cells = getattr(optimizer.step_hook, "__closure__", None) or ()
    return next((cell.cell_contents for cell in cells if isinstance(cell.cell_contents, IAccountant)), None)


def without_hooks(model: nn.Module, optimizer: DPOptimizer) -> nn.Module:
    """The model as it was before Opacus wrapped it; the optimizer's steps are counted no more."""
    plain: Any = model
    if hasattr(plain, "_module") and hasattr(plain, "remove_hooks"):
        plain.remove_hooks()
        plain = plain._module
    for parameter in plain.parameters():
        parameter.grad = None
        for name in _OF_PARAMETERS:
            if hasattr(parameter, name):
                delattr(parameter, name)
    optimizer.step_hook = None
    return plain
