"""The per-example gradients that follow from the owner's own passes over a lot, or over a part of one."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from fodp.clipping.batches import Batch
from fodp.clipping.engine import merged_each
from fodp.clipping.fallback import Unseparable
from fodp.clipping.layers.uses import Use
from fodp.clipping.recording import Recording
from fodp.clipping.self_check import tolerance
from fodp.errors import ConfigurationError
from fodp.gradients import HERE, Points
from fodp.sources.examiner import TRAINER, Examiner

Slot = list[Tensor]  # the gradient of one recorded tensor, once the owner's backward pass has brought it


class Caught:
    """What forward passes have recorded and backward passes have brought. It answers where `Chunks` asks an engine.

    `hook(slot)` makes what is called with the gradient of a recorded tensor. Un-noised gradients never stay in `.grad`,
    where another optimizer might find them: `raw` has them until they were compared once.
    """

    def __init__(self, engine: Examiner, rows: int, hook: Callable[[Slot], Callable[[Tensor], None]]):
        self.layout, self.backwards, self.raw = engine.layout, set[int](), dict[int, Tensor]()
        self._engine, self._rows, self._hook = engine, rows, hook
        self._by_mean = engine.mean
        self._recordings: list[Recording] = []
        self._open: Recording | None = None  # what records now
        self._uses: list[Use | None] | None = None

    def record(self) -> None:
        """Begin to record, until `close`."""
        recording = self._engine.recording(self._catch)
        if recording is not None:
            self._open = recording
            recording.__enter__()
            self._recordings.append(recording)

    def close(self) -> None:
        """Record no longer."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None

    def _catch(self, output: Tensor) -> Slot | None:
        if self._engine.is_looking:
            return None
        slot: Slot = []
        output.register_hook(self._hook(slot))
        return slot

    def sum_losses(self) -> None:
        """The backward pass that comes is of the sum of the examples' losses, whatever the declared reduction."""
        self._by_mean = False

    @property
    def factor(self) -> int:
        """What the owner's gradients are multiplied with, to be those of a sum over examples."""
        return self._rows if self._by_mean else 1

    def has_any(self) -> bool:
        """Whether a gradient has arrived that is not empty."""
        return any(slot and slot[0].numel() for recording in self._recordings for slot in recording.targets())

    def exactly(self) -> AbstractContextManager[None]:
        """Norms and sums in full precision."""
        return self._engine.exactly()

    def most_rows(self, batch: Batch) -> int | None:
        """All: the owner's passes have recorded the whole lot."""
        return None

    def uses(self, batch: Batch = (), points: Points = HERE, copies: int = 1) -> list[Use | None]:
        """For each parameter its merged use; refuses what cannot be told apart by example."""
        if self._uses is None:
            by_parameter: dict[int, list[Use]] = {id(p): [] for p in self.layout.parameters}
            for recording in self._recordings:
                gradients = [None if not slot else slot[0] * self.factor for slot in recording.targets()]
                try:
                    for parameter, use in recording.uses(gradients, self._rows, alive=False):
                        by_parameter[parameter].append(use)
                except Unseparable as reason:
                    raise ConfigurationError(
                        "a layer saw another number of rows than the lot has, or rows that cannot be told apart "
                        f"({reason}): feed the loader's batch to the model, all of it and nothing else, examples "
                        f"first; or {TRAINER}"
                    ) from None
            self._uses = merged_each(by_parameter.values())
        return self._uses

    def adds_up(self) -> bool:
        """Raise unless what was recorded is what backward computed; False: this lot does not tell.

        Otherwise a part of the loss went past the layers.
        """
        layout = self.layout
        raw = layout.zeros()
        for parameter, view in zip(layout.parameters, layout.views(raw), strict=True):
            if id(parameter) in self.raw:
                view.copy_(self.raw[id(parameter)].to_dense()).mul_(self.factor)
        if not raw.isfinite().all():
            return False  # an example that contributes nothing; the next lot will tell
        uses, ones = self.uses(), layout.zeros().new_ones(self._rows)
        sizes = torch.stack([ones.sum() * 0 if u is None else u.squared_norms().sqrt().sum().to(ones) for u in uses])
        half = any(recording.half_precision for recording in self._recordings)
        allowed = tolerance(half or self._engine.half_precision)
        for i, (use, expected) in enumerate(zip(uses, layout.views(raw), strict=True)):
            found = torch.zeros_like(expected)
            if use is not None:
                use.add_weighted(found, ones, False)
            if (found - expected).norm() > allowed * (sizes[i] + 1e-3 * sizes.sum()):
                raise ConfigurationError(
                    f"part of the loss reaches {layout.names[i]} past its layer (a penalty on weights, a weight used "
                    f"by hand) and would be lost: put penalties into the optimizer's weight_decay, or {TRAINER}"
                )
        self.raw.clear()
        return True
