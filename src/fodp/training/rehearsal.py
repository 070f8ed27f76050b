"""A rehearsal before the first private step: mistakes that would show in it are found while nothing is charged."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fodp._checks import ConfigurationError, PrivacyError
from fodp.clipping.batches import repeat, tensors
from fodp.clipping.buffers import KeptState
from fodp.draws import generators_kept
from fodp.draws.generators import foreign_state, restore_foreign
from fodp.sampling import tensor_columns

if TYPE_CHECKING:
    from fodp.run import Run


def rehearse(run: "Run", dataset: Any) -> None:
    """Run augmentation and loss forwards on two records, of tensors those with the extremes of a whole-number column.

    Buffers and generators are left as they were; a model that writes what it sees is refused. An exception is the
    user's own, with a note of what it means: types that do not fit, labels out of range, a batch of another form than
    the loss expects.
    """
    refuse_hooks(run.engine.model)
    kept, foreign = KeptState(run.engine.model, run._watched, run._parameters), foreign_state()
    batch: Any = None
    try:
        with generators_kept():
            run._fetcher.refuse_what_cannot_be_divided()
            batch = repeat(run._fetcher.fetch(_telling(dataset)), run._copies)
            if run._augmentation is not None:
                batch = run._augmentation.augment(batch)
            run.engine.loss_fn(run.engine.model, batch)
    except Exception as error:
        error.add_note(
            f"fodp: found in a rehearsal on two records{_form(batch)}; the parameters are {run.engine.layout.dtype}. "
            "Nothing was released or charged"
        )
        raise
    finally:
        restore_foreign(foreign)
        kept.refuse_changes()  # also after an exception: what a model has written of records must not stay
        kept.restore()  # nor what was kept in an attribute that was empty


def refuse_hooks(model: nn.Module) -> None:
    """Raise if somebody listens to gradients of parameters, which have no noise while a step is made."""
    for name, parameter in model.named_parameters():
        hooks = [*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values()]
        # A loop of the user's own, made private in this process, watches for models that are not in it.
        if any(not str(getattr(hook, "__module__", "")).startswith("fodp.") for hook in hooks):
            raise ConfigurationError(
                f"a hook on the parameter {name} would be given gradients without noise: remove it "
                "(wandb.watch: log='parameters', or WANDB_WATCH=false)"
            )


def _telling(dataset: Any) -> torch.Tensor:
    """Two records: of tensors those with the smallest and the largest whole number of a column, which may be labels."""
    for column in tensor_columns(dataset) or ():
        if column.dim() == 1 and not column.is_floating_point() and not column.is_complex():
            numbers = column.long()
            return torch.stack([numbers.argmin(), numbers.argmax()]).cpu()
    return torch.zeros(2, dtype=torch.int64)


def _form(batch: Any) -> str:
    try:
        return " (" + ", ".join(f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in tensors(batch)) + ")"
    except PrivacyError:  # not made of tensors
        return ""
