"""Clipped sums of one model as a building block, for training loops of one's own."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fodp.clipping.batches import Batch, Keyed, batch_size
from fodp.clipping.chunks import Chunks
from fodp.clipping.engine import Engine, LossFunction
from fodp.draws import Source
from fodp.errors import PrivacyError
from fodp.gradients import Gradients
from fodp.noise import Streams


class Clipper:
    """Clipped sums of one model under one loss, for a training loop of your own: as fast as the Trainer's.

    A building block: the sums are private and carry no noise. The engine is kept from call to call, so the model is
    looked at on the first lots and not on every one. `loss_fn(model, batch)` returns one loss per example.

    What the model draws in a call (dropout) belongs to a row: to its number in `records`, and to its place in the
    batch where none are given. Give the records' numbers if the same record comes in other places. `seed` None draws
    from operating-system entropy.

    Guarantee: adding or removing one example (with `records`, or at the end of the batch) moves a sum by at most
    clip_norm, times 1 + FLOAT_TOLERANCE in float32.

    Example:
        >>> import torch, fodp
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> clipper = fodp.Clipper(model, lambda model, batch: model(batch[0]).squeeze(1))
        >>> x = torch.tensor([[3.0, 0.0, 4.0]])  # the gradient is x itself, of norm 5
        >>> clipper.clipped_sum((x,), clip_norm=1.0)
        tensor([0.6000, 0.0000, 0.8000])
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, *, engine: str = "auto", seed: int | None = None):
        self._engine = Engine(model, loss_fn, engine)
        self._streams = Streams(seed)
        self._calls = 0

    @property
    def path(self) -> str:
        """How gradients are computed: rules for "layers" or "functions", the "loop", "unknown" before a lot."""
        return self._engine.path

    def clipped_sum(
        self,
        batch: Batch,
        clip_norm: float,
        *,
        records: Tensor | Sequence[int] | None = None,
        microbatch: int | None = None,
    ) -> Tensor:
        """The sum of the batch's per-example gradients, each clipped to `clip_norm`, as one flat tensor."""
        rows = batch_size(batch)
        numbers = torch.arange(rows) if records is None else torch.as_tensor(records, dtype=torch.int64, device="cpu")
        if numbers.shape != (rows,) or (numbers < 0).any():
            raise PrivacyError("records must give one number of zero or more for each row of the batch")
        keyed = Keyed(batch, numbers, Source(self._streams, self._calls, "clipper"))
        self._calls += 1
        chunks = Chunks(self._engine, keyed, microbatch=microbatch)
        return Gradients(chunks, self._engine.layout).clipped_sum(clip_norm).value


def clipped_sum(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    clip_norm: float,
    *,
    microbatch: int | None = None,
    engine: str = "auto",
) -> Tensor:
    """The sum of the batch's per-example gradients, each clipped to `clip_norm`, as one flat tensor.

    A building block: the result is private data, it carries no noise.

    Guarantee: adding or removing one example moves the result by at most `clip_norm` (times 1 + FLOAT_TOLERANCE in
    float32). For a model that draws random numbers (dropout) this holds for the last example of the batch, because rows
    draw by their place.

    Args:
        model: the model; its trainable parameters are summed over, in the order of `model.parameters()`.
        loss_fn: `loss_fn(model, batch)` returns one loss per example.
        batch: tensors with the examples first, or a tuple, list or dict of such tensors.
        clip_norm: the bound C on the norm of each example's gradient.
        microbatch: the most examples that are worked on at once; None: all.
        engine: "auto", or one way to compute the gradients, for comparisons.

    Returns:
        One flat tensor. Every call examines the model anew: for a loop of calls `Clipper` is several times faster.

    Example:
        >>> import torch, fodp
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> loss_fn = lambda model, batch: model(batch[0]).squeeze(1)
        >>> x = torch.tensor([[3.0, 0.0, 4.0]])  # the gradient is x itself, of norm 5
        >>> fodp.clipped_sum(model, loss_fn, (x,), clip_norm=1.0)
        tensor([0.6000, 0.0000, 0.8000])
    """
    return Clipper(model, loss_fn, engine=engine).clipped_sum(batch, clip_norm, microbatch=microbatch)
