"""A dress rehearsal of a user's own model on made-up data, before private data is touched."""

import torch
from torch import Tensor, nn

from fodp.clipping.buffers import KeptBuffers
from fodp.clipping.findings import refuse_errors
from fodp.data.cards import Card
from fodp.data.models import loss_for, wants_flat
from fodp.errors import ConfigurationError
from fodp.support.imports import one_line


def rehearse(name: str, model: nn.Module, card: Card) -> None:
    """Run a model forwards and backwards on made-up examples and refuse it if training would break or leak.

    Private data is not touched, random state and buffers are left as they were. Every step of a run looks at the
    buffers too; here a model that writes into them is found before anything is spent.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigurationError(
            f"model {name} is compiled to TorchScript, which cannot be looked into; return it uncompiled"
        )
    refuse_errors(model)
    shape = (card.features,) if wants_flat(name) else card.shape
    labels = torch.zeros(2) if card.is_regression else torch.full((2,), card.classes - 1)
    ramp = torch.linspace(-0.5, 1, 2 * card.features).reshape(2, *shape)
    finite, buffers = [], KeptBuffers(model, tuple(model.parameters()), who=f"model {name}")
    with torch.random.fork_rng(devices=[]):
        for images in (ramp, torch.zeros_like(ramp)):
            torch.default_generator.manual_seed(0)  # the same dropout for both
            try:
                losses = loss_for(card)(model, (images.clone(), labels))
                _differentiate(losses, model)
            except Exception as error:
                raise ConfigurationError(
                    f"model {name} fails on a batch of shape {tuple(ramp.shape)}, float32, with labels up to "
                    f"{card.classes - 1} ({type(error).__name__}: {one_line(error)})"
                ) from error
            if losses.shape != (2,):
                raise ConfigurationError(f"model {name} must return one row of {card.classes} scores for each example")
            finite.append(bool(losses.isfinite().all()))
            buffers.refuse_changes()
    if not any(finite):
        raise ConfigurationError(f"model {name} gives losses that are not finite; look at its initial weights")


def _differentiate(losses: Tensor, model: nn.Module) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if losses.requires_grad:  # if nothing depends on the parameters, the engine says so
        torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
