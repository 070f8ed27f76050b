"""Whether a model and its loss can be trusted with a lot: what the first lots, and some later ones, are asked.

Three questions. Does one example give the same loss again, from draws that are the record's own, also after others have
passed? Does book-keeping give each example's own gradient, as the one-example loop does? And do the examples of a whole
lot stay apart: when rows are taken away, replaced or put in another order, do the losses and back-signals of all others
stay as they were?

A check shows what it meets. A loss that couples examples only for data that no looked-at lot held passes. The loop
(`engine="loop"`) gives the loss one example at a time: nothing in a lot is mixed, but a loss that remembers an example
mixes it with later ones there too. So the first question is asked of every engine.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from fodp.clipping.batches import (
    Batch,
    Keyed,
    batch_size,
    doubled,
    examples_in,
    plain,
    rows_at_once,
    rows_of,
    sizes_of,
    take,
    take_examples,
    tensors,
)
from fodp.clipping.fallback import Unseparable
from fodp.clipping.loss_form import refuse_joint
from fodp.clipping.remembered import WAY_OUT, Values, changes, read_by_others
from fodp.draws import Source
from fodp.errors import PrivacyError

if TYPE_CHECKING:
    from fodp.clipping.engine import Engine

_PAIRS = 4
_ROWS = 32  # of which two with a gradient are looked for, where the pairs have none
# How far losses and back-signals of untouched rows may move, relative to the lot's largest: rounding over another
# number of rows reaches 1e-5, and vanishes in float64; what does not vanish there is no rounding.
_MOVED, _CLEARLY_MOVED = 1e-5, 1e-3
_NO_ROUNDING = 1e-2
_OTHERS = 4  # rows that pass one by one between two passes over an example
_TOGETHER = 8  # and rows that pass together


def tolerance(half_precision: bool) -> float:
    """How far book-keeping and the one-example loop may differ."""
    return 3e-2 if half_precision else 1e-3


def refuse_wrong_form(engine: "Engine", empty: Batch) -> None:
    """Raise if the loss of a batch without examples is no vector of losses: found before any data is used or charged.

    Not every model takes an empty batch; one that fails on it is asked again with the first lot.
    """
    with _buffers_kept(engine.model), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            losses = engine.loss_fn(engine.model, plain(empty))
        except Exception:
            return
    refuse_joint(losses, 0)


# --- one example, twice --------------------------------------------------------------------------------------


def refuse_unsteady(engine: "Engine", batch: Batch) -> None:
    """Raise if an example's loss depends on randomness of its own making, on earlier passes, or on what is trained
    elsewhere."""
    outside = engine.outside
    outside.look()
    before = outside.values()
    batch = with_draws(batch)
    one: Keyed = take(batch, slice(0, 1))
    with _buffers_kept(engine.model):
        if engine.site.quiet:
            engine.site.learn(one.source, lambda rows: engine.losses(take(one, rows)))
        engine.site.look_for_foreign(lambda: _look(engine, one))
        if engine.site.foreign:  # from now on with generators that are the record's own
            _look(engine, one)
        others = _others(engine, batch)
        seen = _before_and_after(engine, one, others)
        if any(_is_drift(engine, one, others, seen, later) for later in (1, 2)):
            moved = next((f" (what moves is {place.called(key)})" for place, key, _, _ in changes(before)), "")
            raise PrivacyError(_UNSTEADY + moved)
        _refuse_places_that_are_read(engine, one, others, before, seen[-1])
    _refuse_outside_leaves(engine, seen[-1][0], one)


Result = TypeVar("Result")
Seen = tuple[Tensor, list[Tensor]]  # what a pass over one example gave: its loss, and gradients

_UNSTEADY = (
    "two passes over one example with the same random numbers gave two losses or gradients: the model or the loss "
    "draws from a generator of its own, or remembers earlier passes, and one example would change what others draw, or "
    "what their losses are. Draw with PyTorch's functions (torch.rand, dropout, ...) and without a generator object of "
    "NumPy's; keep nothing of what a pass has seen"
)


def _look(engine: "Engine", one: Keyed) -> Seen:
    """The loss and the gradients of one example."""
    found: list[Seen] = []

    def trainable() -> list[Tensor]:
        return [parameter for parameter in engine.layout.parameters if parameter.requires_grad]

    def look() -> None:
        losses, gradients = engine.differentiate(_copied(one), trainable, single=True)
        found.append(
            (losses, [gradient.to_dense() for gradient in gradients if gradient is not None])
        )  # tables: sparse

    engine.site.look_for_foreign(look)
    return found[0]


def _others(engine: "Engine", batch: Keyed) -> list[Keyed]:
    """Other rows, one by one, and some rows together where the engine gives the loss several at once."""
    rows = batch_size(batch)
    most = min(rows, rows_at_once(batch), _TOGETHER)
    alone = [take(batch, slice(row, row + 1)) for row in range(1, min(rows, _OTHERS + 1))]
    return alone if engine.path == "loop" or most < 2 else [*alone, take(batch, slice(0, most))]


def _before_and_after(engine: "Engine", one: Keyed, others: Sequence[Keyed]) -> list[Seen]:
    """One example twice, and again after others have passed: three times the same, if nothing is remembered."""
    seen = [_look(engine, one), _look(engine, one)]
    for rows in others:
        _pass(engine, rows)
    return [*seen, _look(engine, one)]


def _pass(engine: "Engine", rows: Keyed) -> None:
    if batch_size(rows) == 1:
        _look(engine, rows)
        return
    try:
        with engine.site.undecided():  # the comparison of whole lots finds that too, and says why
            engine.differentiate(_copied(rows), lambda: engine.layout.parameters)
    except Unseparable:
        pass
    except PrivacyError:
        raise
    except Exception:  # the loop will do: it gives the loss one example at a time
        pass


def _is_drift(engine: "Engine", one: Keyed, others: Sequence[Keyed], seen: list[Seen], later: int) -> bool:
    """Whether the first of these passes and a later one differ by more than rounding, which vanishes in float64."""

    def again() -> float:
        passes = _before_and_after(engine, doubled(one), [doubled(rows) for rows in others])
        return _apart(passes[0], passes[later])

    moved = _apart(seen[0], seen[later])
    return moved > 0 and (moved > _CLEARLY_MOVED or not _vanishes_in_double(engine, moved, again, _MOVED))


def _apart(first: Seen, second: Seen) -> float:
    """By how much two passes over one example differ, relative to the largest number; 0: not in a single bit."""
    pairs = list(zip((first[0], *first[1]), (second[0], *second[1]), strict=False))
    if len(first[1]) != len(second[1]) or any(a.shape != b.shape for a, b in pairs):
        return float("inf")
    worst = 0.0
    for a, b in pairs:
        a, b = a.detach(), b.detach()
        if torch.equal(a, b):
            continue
        if not torch.equal(a.isfinite(), b.isfinite()):
            return float("inf")
        a, b = a.double().nan_to_num(0, 0, 0), b.double().nan_to_num(0, 0, 0)
        largest = float(torch.maximum(a.abs().max(), b.abs().max()))
        worst = max(worst, float((a - b).abs().max()) / largest if largest else 0.0)
    return worst


def _refuse_places_that_are_read(
    engine: "Engine", one: Keyed, others: Sequence[Keyed], before: Values, last: Seen
) -> None:
    """Raise if a pass leaves something in an attribute, a global or a closure that another pass reads."""

    def differs() -> bool:
        return _apart(last, _look(engine, one)) > _MOVED

    def begins_otherwise(empty: Callable[[], None]) -> bool:
        empty()
        _look(engine, one)
        first = _look(engine, one)
        empty()
        for rows in others:
            _pass(engine, rows)
        return _apart(first, _look(engine, one)) > _MOVED

    name = read_by_others(engine.outside, before, differs, begins_otherwise)
    if name is not None:
        raise PrivacyError(f"a pass of the loss leaves something in {name} that the next pass reads: {WAY_OUT}")


def _largest(values: Tensor) -> float:
    return float(values.detach().nan_to_num(0, 0, 0).abs().max()) if values.numel() else 0.0


def _refuse_outside_leaves(engine: "Engine", losses: Tensor, one: Batch) -> None:
    """Trainable tensors that the loss reaches outside of the model would learn without noise, or not at all."""
    inside = {id(parameter) for parameter in engine.model.parameters()}
    given = {id(tensor) for tensor in tensors(one)}
    waiting, known = [losses.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in inside | given and isinstance(leaf, nn.Parameter):
            raise PrivacyError(
                f"the loss depends on a trainable parameter of shape {tuple(leaf.shape)} that is not the model's: the "
                "plan does not cover it, and an optimizer of its own would train it without noise. Make it part of the "
                "model, or freeze it (requires_grad_(False))"
            )
        waiting += [before for before, _ in node.next_functions]


def with_draws(batch: Batch) -> Keyed:
    """The batch with draws of its own, for a check only, if it has none."""
    if isinstance(batch, Keyed):
        return batch
    return Keyed(batch, torch.arange(batch_size(batch)), Source(_Throwaway(), 0, "check"))


class _Throwaway:
    def record_key(self, step: int, name: str) -> bytes:
        return name.encode().ljust(32, b".")[:32]


# --- book-keeping against the loop ---------------------------------------------------------------------------


def problem(engine: "Engine", batch: Batch) -> str | None:
    """What is wrong with the engine's gradients: "" nothing, None that cannot be told from this batch.

    Runs in the model's own mode, its dropout included; leaves no trace. Pairs of examples whose gradients vanish
    or are not finite, or that a tie keeps apart, say nothing; then the next pair is asked.
    """
    batch = with_draws(batch)
    found: str | None = None
    with _buffers_kept(engine.model):
        for first, second in _pairs(engine, batch):
            pair = take_examples(batch, torch.tensor([first, second]))
            found = disagreement(engine, pair)
            if found and _is_a_tie(engine, pair):
                found = None
            if found is not None:
                break
    return found


def _pairs(engine: "Engine", batch: Batch) -> Iterator[tuple[int, int]]:
    """Examples to compare: a few from both ends, and if those say nothing, two that have a gradient."""
    rows = examples_in(batch)
    yield from ((i, rows - 1 - i) for i in range(min(rows // 2, _PAIRS)))
    some = take_examples(batch, torch.arange(min(rows, _ROWS)))
    norms = [float(gradient.norm()) for gradient in engine.example_gradients(some)]
    telling = [i for i, norm in enumerate(norms) if 1e-9 < norm < float("inf")]
    yield from zip(telling[:1], telling[-1:], strict=True) if len(telling) > 1 else ()


def disagreement(engine: "Engine", pair: Batch) -> str | None:
    """What is wrong with the fast gradients of two examples: "" nothing, None that cannot be told."""
    truth = torch.stack(list(engine.example_gradients(pair)))
    totals = truth.norm(dim=1)
    # In both orders: a model that sorts its examples leaves one of them as it is.
    for order in ([0, 1], [1, 0]):
        try:
            fast, norms = _fast(engine, take_examples(pair, torch.tensor(order)))
        except PrivacyError:
            raise
        except Unseparable as reason:
            return str(reason)
        except Exception as error:  # the loop, which has just done these examples, needs no second run of anything
            return f"recording a pass of two examples failed ({type(error).__name__}: {error})"
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
    return _again_in_double(engine, lambda: disagreement(engine, doubled(pair))) == ""


# --- whole lots ----------------------------------------------------------------------------------------------


def mixing(engine: "Engine", batch: Batch) -> str:
    """How one example of this lot reaches another's loss or gradient; "" if in no way that was tried."""
    rows = batch_size(batch)
    most = min(rows_at_once(batch), engine.rows_at_once or rows)  # the loss is never given more at once
    batch = with_draws(batch)
    sizes = sizes_of(batch)  # of people, all of whose records come and go together: these may know of each other
    if sizes is None:
        batch = take(batch, slice(0, most))
    else:
        batch = take_examples(batch, torch.arange(max(2, int((sizes.cumsum(0) <= most).sum())))[: len(sizes)])
    if examples_in(batch) < 2:
        return ""
    with _buffers_kept(engine.model):
        all_rows = engine.traced(_copied(batch))
        for what, order, same in _trials_of_rows(all_rows[0], batch):

            def again(order: Tensor = order, same: Tensor = same) -> float:
                rows = doubled(batch)
                return _moved(engine.traced(_copied(rows)), engine.traced(take(rows, order)), order, same)

            moved = _moved(all_rows, engine.traced(take(batch, order)), order, same)
            if moved > _MOVED and not _vanishes_in_double(engine, moved, again, _CLEARLY_MOVED):
                return (
                    f"the model or its loss mixes the examples of a lot: {what} changes the loss or the gradient of "
                    "others"
                )
    return ""


def _trials_of_rows(losses: Tensor, batch: Batch) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The trials on examples, or on owners with all of their rows, in rows."""
    sizes = sizes_of(batch)
    if sizes is None:
        yield from _trials(losses)
        return
    of_owners = torch.stack([part.nan_to_num(0).sum() for part in losses.split(sizes.tolist())])
    for what, order, same in _trials(of_owners):
        yield what, rows_of(batch, order), same.repeat_interleave(sizes[order])


def _trials(losses: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(what is done, which rows the changed lot has, at which of its places a row of its own stands)."""
    count = len(losses)
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    half, everyone = chosen[: max(1, count // 2)], torch.arange(count)
    worst = int(losses.nan_to_num(0).argmax())
    for what, gone in (("taking rows away", half), ("taking the row of the largest loss away", everyone[worst][None])):
        left = everyone[~torch.isin(everyone, gone)]
        yield what, left, torch.ones(len(left), dtype=torch.bool)
    for what, other in (("replacing rows by others", half.roll(1)), ("replacing rows", torch.full_like(half, worst))):
        if len(half) < count and not torch.equal(other, half):
            replaced = everyone.clone()
            replaced[half] = other
            yield what, replaced, replaced == everyone
    yield "another order of the rows", everyone.flip(0), torch.ones(count, dtype=torch.bool)


Trace = tuple[Tensor, list[Tensor | None]]


def _moved(all_rows: Trace, changed: Trace, order: Tensor, same: Tensor) -> float:
    """By how much losses and back-signals of the rows that are still there have moved, relative to the largest."""
    if len(all_rows[1]) != len(changed[1]):
        return float("inf")
    worst = 0.0
    for before, after in zip((all_rows[0], *all_rows[1]), (changed[0], *changed[1]), strict=True):
        if before is None or after is None or before.shape[:1] != all_rows[0].shape or after.shape[:1] != order.shape:
            if (before is None) != (after is None):
                return float("inf")
            continue  # the examples do not lie first: the comparison with the loop has its say
        if before.shape[1:] != after.shape[1:] or not before.numel():
            return float("inf") if before.numel() else worst
        mine, theirs = (t.reshape(len(order), -1) for t in (before[order.to(before.device)], after))
        mine, theirs = mine[same.to(mine.device)].double(), theirs[same.to(mine.device)].double()
        if not torch.equal(mine.isfinite(), theirs.isfinite()):
            return float("inf")
        mine, theirs = mine.nan_to_num(0, 0, 0), theirs.nan_to_num(0, 0, 0)
        if mine.numel():
            largest = mine.norm(dim=1).max().item()
            worst = max(worst, (mine - theirs).norm(dim=1).max().item() / largest if largest else 0.0)
    return worst


def is_rounding(engine: "Engine", moved: float, again: Callable[[], float]) -> bool:
    """Whether what has moved, relative to its size, is rounding; `again()` is asked with the model in float64."""
    return moved <= _MOVED or (moved < float("inf") and _vanishes_in_double(engine, moved, again, _CLEARLY_MOVED))


def _vanishes_in_double(engine: "Engine", moved: float, again: Callable[[], float], otherwise: float) -> bool:
    """Whether what has moved hardly moves in float64; without float64 whether it moved by no more than `otherwise`."""
    left = _again_in_double(engine, again)
    if left is None:
        return moved <= (tolerance(True) if engine.half_precision else otherwise)
    return left < _NO_ROUNDING * moved


def _again_in_double(engine: "Engine", again: Callable[[], Result]) -> Result | None:
    """The answer with the model in float64; None where the model or its loss cannot: there is no second opinion."""
    try:
        with _in_double(engine):
            return again()
    except PrivacyError:
        raise
    except Exception:
        return None


def _copied(batch: Batch) -> Batch:
    """In memory of its own: a model may write into its inputs."""
    return take(batch, torch.arange(batch_size(batch)))


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


@contextmanager
def _in_double(engine: "Engine") -> Iterator[None]:
    """The model, and vectors of its gradients, in float64; afterwards exactly as before."""
    model = engine.model
    parts = (model, *engine.outside.found.modules, *engine.outside.found.shells)
    held = {id(t): t for part in parts for t in (*part.parameters(), *part.buffers())}
    saved = [(t, t.data) for t in held.values() if t.is_floating_point()]
    try:
        for tensor, value in saved:
            tensor.data = value.double()
        with engine.layout.in_double():
            yield
    finally:
        for tensor, value in saved:
            tensor.data = value
