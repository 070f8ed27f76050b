"""Whether book-keeping computes each example's own gradient with this model: the comparison with the loop."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fodp.clipping import fallback
from fodp.clipping.batches import Batch, batch_size, doubled, take
from fodp.clipping.fallback import Unseparable

if TYPE_CHECKING:
    from fodp.clipping.engine import Engine

_PAIRS = 4


def tolerance(half_precision: bool) -> float:
    """How far book-keeping and the one-example loop may differ."""
    return 3e-2 if half_precision else 1e-3


def problem(engine: "Engine", batch: Batch) -> str | None:
    """What is wrong with the engine's gradients: "" nothing, None that cannot be told from this batch.

    Runs in the model's own mode, since a model may mix examples in training mode only, but without
    dropout, which would differ between the two; leaves no trace. Pairs of examples whose gradients vanish
    or are not finite, or that a tie keeps apart, say nothing; then the next pair is asked.
    """
    rows = batch_size(batch)
    dropouts = [module for module in engine.model.modules() if fallback.drops(module)]
    buffers = [(buffer, buffer.clone()) for buffer in engine.model.buffers()]
    found: str | None = None
    try:
        for module in dropouts:
            module.training = False
        with torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            for i in range(min(rows // 2, _PAIRS)):
                pair = take(batch, torch.tensor([i, rows - 1 - i]))
                found = disagreement(engine, pair)
                if found and _is_a_tie(engine, pair):
                    found = None
                if found is not None:
                    break
            if found and not torch.equal(before, torch.get_rng_state()):
                found += " (the forward pass draws randomness outside of nn.Dropout)"
    finally:
        for module in dropouts:
            module.training = True
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    return found


def disagreement(engine: "Engine", pair: Batch) -> str | None:
    """What is wrong with the fast gradients of two examples: "" nothing, None that cannot be told."""
    truth = torch.stack(list(engine.example_gradients(pair)))
    totals = truth.norm(dim=1)
    # In both orders: a model that sorts its examples leaves one of them as it is.
    for order in ([0, 1], [1, 0]):
        try:
            fast, norms = _fast(engine, take(pair, torch.tensor(order)))
        except Unseparable as reason:
            return str(reason)
        if not (totals.isfinite() & (totals > 1e-9)).all():
            return None
        for i, name in enumerate(engine.layout.names):
            expected, found = (
                torch.stack([engine.layout.views(g)[i].flatten() for g in rows]) for rows in (truth[order], fast)
            )
            sizes = expected.norm(dim=1)
            apart = torch.maximum((expected - found).norm(dim=1), (sizes - norms[:, i]).abs())
            if not (apart <= tolerance(engine.half_precision) * (sizes + 1e-3 * totals[order])).all():
                return f"for {name} the layer rules and the one-example loop disagree"
    return ""


def _fast(engine: "Engine", pair: Batch) -> tuple[Tensor, Tensor]:
    """Each example's gradient by book-keeping, and its norms by parameter."""
    uses, layout = engine.recorded(pair), engine.layout
    fast, norms = torch.stack([layout.zeros()] * 2), torch.zeros(2, len(uses), dtype=layout.dtype, device=layout.device)
    for row, one in enumerate(torch.eye(2, dtype=layout.dtype, device=layout.device)):
        for i, (use, view) in enumerate(zip(uses, layout.views(fast[row]), strict=True)):
            if use is not None:
                norms[row, i] = use.squared_norms().to(one).dot(one).sqrt()
                use.add_weighted(view, one, False)
    return fast, norms


def _is_a_tie(engine: "Engine", pair: Batch) -> bool:
    """Whether they agree in float64: then a rounding decided, as between two equal maxima in a pooling.

    A library may round differently over two examples than over one. Models mix examples in float64 just as well.
    """
    try:
        with _in_double(engine.model):
            return disagreement(engine, doubled(pair)) == ""
    except Exception:  # a model or a loss without float64: there is no second opinion
        return False


@contextmanager
def _in_double(model: nn.Module) -> Iterator[None]:
    """The model in float64; afterwards exactly as before."""
    saved = [(t, t.data) for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    try:
        for tensor, value in saved:
            tensor.data = value.double()
        yield
    finally:
        for tensor, value in saved:
            tensor.data = value
