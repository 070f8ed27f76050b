"""Whether the loss of a loop of one's own is the declared reduction of its examples' own losses.

Of a lot that is looked at the calls between model and backward pass (`fodp.sources.tape`) are run again with some rows
replaced by others, and with fewer rows: what the loss says about the rows that are still there must stay what it was. A
number of rows that the code has read as a plain number (`len(batch)`) stands still in there, so lots of two sizes are
compared, too.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fodp.clipping.padding import ADVICE
from fodp.errors import ConfigurationError
from fodp.sources.between import WAY_OUT
from fodp.sources.padding import weights
from fodp.sources.tape import Memories, Tape, same_functions
from fodp.support import checks
from fodp.support.looks import is_rare

FIRST_LOTS = 2
_MOST = 8  # lots that are looked at until the reduction is known
_MOVED, _MOVED_HALF = 1e-4, 3e-2  # of the largest back-signal of a row: far above rounding
_COUPLED = (
    "the loss mixes the examples of the lot: with other rows beside it, an example's gradient is another (a weighted "
    "mean, a mean over tokens of unequal counts, a normalisation over the lot, pairs)"
)
_MEMORY = (
    "the loss, or what the model is given, uses a tensor that was computed from an earlier lot (a running "
    "mean, class centres): what one lot leaves "
    "for the next has no noise, and no bound on what one example changes. Leave it out, or keep it in the model as "
    "something that is trained"
)
_NOT_FOLLOWED = (
    "the loss cannot be followed from the model's outputs to backward (it is compiled or scripted, or has a backward "
    "pass of its own), so that it cannot be seen whether it is the {} of its examples' own losses"
)
_PADDED = (
    "the loss of an example depends on how far other examples of the lot make it padded (a mean over all positions, or "
    f"positions of padding that count): one long example would change the gradients of all: {ADVICE}"
)
_REDUCTION = (
    "the loss is not the {} of its examples' own losses, as loss_reduction says: how much one example weighs depends "
    "on how many others are in the lot"
)

_MIXED_ROWS = (
    "what the model is given mixes the examples of the lot: a row is another with other rows beside it (mixup, a "
    "normalisation by the lot). Do it by numbers that are public, or one record at a time in the data set or collate_fn"
)
_UNKNOWN_ROWS = (
    "nothing that the model is given was computed by PyTorch from the loader's batch, so that it cannot be seen "
    "whether each of its rows is of one record alone (a mean or a padding over the lot would break the bound): "
    "make the model's inputs in the data set or collate_fn"
)

Rows = Callable[[Tensor], Tensor]
Shapes = Sequence[tuple[int, dict[tuple[int, ...], tuple[int, ...]]]]  # of a row: shapes in the lot, and its own alone


class Coupling:
    """What the lots that were looked at have shown."""

    def __init__(self, mean: bool):
        self._word = "mean" if mean else "sum"
        self._divided_by: set[int] = set()  # widths of lots that their losses were divided by
        self._steps: set[int] = set()  # whose lots of two or more rows were looked at
        self._reduction_known = False
        self._earlier: Tape | None = None
        self._of_earlier_lots: Memories = {}
        self._has_warned = False

    def wants(self, step: int, look_again: bool, padded: bool) -> bool:
        """Whether to keep a tape of this step's lot: of the first steps, and of later ones that are looked at."""
        if padded:
            return True
        if step in self._steps:
            return False
        if look_again or len(self._steps) < FIRST_LOTS or (not self._reduction_known and len(self._steps) < _MOST):
            return True
        return is_rare(step - 1)  # a memory shows in the lot after the one that it was made of

    def tape(self, rows: int) -> Tape:
        """A tape for a lot of so many rows."""
        return Tape(rows, self._word == "mean", self._of_earlier_lots)

    def over(self, tape: Tape) -> None:
        """The next lot begins: what was made of this one must not reach its loss."""
        found = self._of_earlier_lots | tape.made()
        self._of_earlier_lots = {identity: tensor for identity, tensor in found.items() if tensor() is not None}

    def refuse_inputs(self, tape: Tape, given: Sequence[Tensor]) -> None:
        """Raise if a row of what the model is given depends on other rows of the lot, or on earlier lots."""
        if not any(tensor.shape[:1] == (tape.rows,) for tensor in given):
            return  # some of the rows, for a score
        made = [tensor for tensor in given if tape.knows(tensor)]
        if not made and not self._has_warned:
            self._has_warned = True
            checks.warn(_UNKNOWN_ROWS)
        if not made:
            return
        tape = tape.aimed(made)
        if tape.reads_memories():
            raise ConfigurationError(_MEMORY)
        if tape.rows > 1 and tape.calls() and any(map(_has_moved, repeat(tape), _replacements(tape))):
            raise ConfigurationError(_MIXED_ROWS)

    def refuse_crossing(self, tape: Tape, losses: Tensor) -> None:
        """Raise if the loss of one example has a gradient at the model's outputs for another."""
        outputs = tape.outputs()
        if not outputs:
            return
        factors = 1 + weights(len(losses)).abs().to(losses)
        try:
            plain, scaled = (
                torch.autograd.grad(losses, outputs, start, retain_graph=True, allow_unused=True)
                for start in (torch.ones_like(losses), factors)
            )
        except RuntimeError:
            return  # a compiled loss, whose graph can be gone through once
        finally:
            tape.forget_found()
        if not _each_its_own(plain, scaled, factors):
            raise ConfigurationError(
                "loader.backward: the loss of one example depends on the model's outputs for others (pairs, a mean or "
                "a normalisation over the lot), so that one example more changes the gradients of all: compute each "
                "loss from its own example alone"
            )

    def refuse(self, tape: Tape, step: int, shapes: Shapes = ()) -> None:
        """Raise unless one example's gradient depends on that example alone, as far as this lot shows.

        `shapes` are those of some records alone, where the lot is padded.
        """
        problem = self._problem(tape) or self._effect_of_padding(tape, shapes)
        if problem:
            earlier = any(step != other for other in self._steps)
            raise ConfigurationError(
                problem
                if problem in (_MEMORY, _PADDED)
                else f"{problem}: {WAY_OUT}"
                + (". Earlier lots did not show it, and what was released from them is not covered" if earlier else "")
            )
        if tape.rows > 1:
            self._steps.add(step)
        if not self._reduction_known:
            self._earlier = tape.kept()

    def _problem(self, tape: Tape) -> str:
        if tape.reads_memories():
            return _MEMORY
        if not tape.can_be_followed() or not _reproduced(tape):
            return "" if tape.by_example else _NOT_FOLLOWED.format(self._word)
        if tape.rows > 1 and any(_moves(tape, rows, same) for rows, same in _replacements(tape)):
            return _COUPLED
        return _REDUCTION.format(self._word) if self._other_reduction(tape) else ""

    def _effect_of_padding(self, tape: Tape, shapes: Shapes) -> str:
        """What is wrong if the loss says something else of a record where all are as short as it is alone."""
        for row, known in shapes:
            self._divided_by |= {width for width in _widths(known) if _divides_by(tape, width)}
            if len(self._divided_by) > 1 or _minds_padding(tape, row, known):
                return _PADDED
        return ""

    def _other_reduction(self, tape: Tape) -> bool:
        """Whether the loss weighs rows otherwise in a smaller lot."""
        if self._reduction_known:
            return False
        if not _mentions_rows(tape) and tape.rows > 2:
            fewer = torch.arange(0, tape.rows, 2) if tape.rows > 3 else torch.arange(2)
            moved = _moved_by(tape, _chosen(fewer), fewer, torch.arange(len(fewer)))
            if moved is not None:
                self._reduction_known = True
                return moved > _allowed(tape)
        if self._earlier is not None and self._earlier.rows != tape.rows:
            return self._other_than_before(*sorted((self._earlier, tape), key=lambda t: t.rows))
        return False

    def _other_than_before(self, small: Tape, large: Tape) -> bool:
        """Compare with a lot of another size, on the same rows; not where public numbers have changed since."""
        alike = same_functions(small.calls(), large.calls())
        if not small.rows or not alike or small.has_rows_of_its_own() or large.has_rows_of_its_own():
            return False
        try:
            there = large.again(lambda value: value)
            here = small.again_on(large)
        except Exception:
            return False  # shapes that depend on more than the number of rows
        moved = _distance([t[: small.rows] if t.dim() else t for t in there], here)
        if moved <= _allowed(large):
            self._reduction_known = True
            return False
        pairs = [(a, b) for a, b in zip(small.numbers(), large.numbers(), strict=False) if a != b]
        ratio = small.rows / large.rows
        counted = any(_is(a / b, ratio) or _is(b / a, ratio) for a, b in pairs if a and b)
        read = any(_among(a, small.numbers_read) and _among(b, large.numbers_read) for a, b in pairs)
        factors = (ratio, 1 / ratio)
        plain = any(_distance([f * t[: small.rows] for t in there if t.dim()], [h for h in here if h.dim()])
                    <= _allowed(large) for f in factors)  # fmt: skip
        return counted or read or plain or (not pairs and large.was_read_out)


def _reproduced(tape: Tape) -> bool:
    try:
        return _distance(tape.again(lambda value: value), tape.real()) <= 10 * _allowed(tape)
    except Exception:
        return False


def _replacements(tape: Tape) -> Iterator[tuple[Rows, Tensor]]:
    """Every second row becomes another one; and which rows stay."""
    everyone = torch.arange(tape.rows)
    halves = everyone[::2], everyone[1::2]
    for number, other in enumerate(_telling_rows(tape)):
        for half in (halves, halves[::-1])[number % 2]:
            order = everyone.clone()
            order[half] = other
            yield _chosen(order), everyone[~torch.isin(everyone, half)]


def _chosen(order: Tensor) -> Rows:
    return lambda value: value[order.to(value.device)]


def _telling_rows(tape: Tape) -> list[int]:
    """Rows that differ from others: with the least and the largest label, the least and the largest back-signal."""
    column = tape.column()
    found = [] if column is None else [int(column.argmin()), int(column.argmax())]
    sizes: Any = sum(g.detach().float().reshape(tape.rows, -1).norm(dim=1).cpu() for g in tape.real() if g.dim())
    if isinstance(sizes, Tensor):
        sizes = sizes.nan_to_num(0, 0, 0)
        found += [int(sizes.argmin()), int(sizes.argmax())]
    return list(dict.fromkeys([*found, 0]))


def _moves(tape: Tape, rows: Rows, same: Tensor) -> bool:
    moved = _moved_by(tape, rows, same, same)
    return moved is not None and moved > _allowed(tape)


def _has_moved(tape: Tape, replaced: tuple[Rows, Tensor]) -> bool:
    """Whether the rows that stay are others in the model's inputs, where other rows are replaced."""
    rows, same = replaced
    try:
        before, after = tape.ends(lambda value: value), tape.ends(rows)
    except Exception:
        return False
    pairs = [[t[same.to(t.device)] if t.shape[:1] == (tape.rows,) else t for t in ts] for ts in (before, after)]
    return _distance(*pairs) > _allowed(tape)


def _moved_by(tape: Tape, rows: Rows, before: Tensor, after: Tensor) -> float | None:
    """By how much the back-signals of rows move that are at `before` and then at `after`; None: it cannot be run so."""
    try:
        changed = tape.again(rows)
    except Exception:
        return None
    mine = [g[before.to(g.device)] if g.dim() else g for g in tape.real()]
    theirs = [g[after.to(g.device)] if g.dim() else g for g in changed]
    return _distance(mine, theirs)


def _minds_padding(tape: Tape, row: int, own: dict[tuple[int, ...], tuple[int, ...]]) -> bool:
    def alone(value: Tensor) -> Tensor:
        shape = own.get(tuple(value.shape[1:]), value.shape[1:])
        return value[torch.full((tape.rows,), row)][(slice(None), *map(slice, shape))]

    for widths in ({}, _widths(own)):  # the second where calls name the lot's own
        try:
            changed = tape.again(alone, widths)
            break
        except Exception:
            changed = []
    for here, there in zip(tape.real(), changed, strict=False):
        if here.dim():
            same = torch.zeros_like(here[:1])
            same[(slice(None), *map(slice, there.shape[1:]))] = there[row : row + 1]
            if _distance([here[row : row + 1]], [same]) > _allowed(tape):
                return True
    return False


def _widths(own: dict[tuple[int, ...], tuple[int, ...]]) -> dict[int, int]:
    """How wide the lot is, and a record alone; a language model's shifted labels are one less."""
    found = {a: b for long, short in own.items() for a, b in zip(long, short, strict=True) if a != b}
    return {a - 1: b - 1 for a, b in found.items()} | found


def _divides_by(tape: Tape, width: int) -> bool:
    """Whether a plain number by which something is divided, or that it is multiplied with, may be a lot's width."""
    calls = [call for call in tape.calls() if call.scales()]
    numbers = [n for call in calls for n in tree_leaves((call.args, call.kwargs)) if type(n) in (int, float)]
    return any(_among(number, [width]) for number in numbers)


def _distance(mine: list[Tensor], theirs: list[Tensor]) -> float:
    """How far rows are apart, relative to the largest."""
    worst = 0.0
    for one, other in zip(mine, theirs, strict=True):
        a, b = (t.detach().double().reshape(max(1, len(t)) if t.dim() else 1, -1) for t in (one, other))
        if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
            return float("inf")
        a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
        if a.numel():
            largest = max(a.norm(dim=1).max().item(), b.norm(dim=1).max().item())
            worst = max(worst, (a - b).norm(dim=1).max().item() / largest if largest else 0.0)
    return worst


def _allowed(tape: Tape) -> float:
    return _MOVED_HALF if tape.half_precision else _MOVED


def _mentions_rows(tape: Tape) -> bool:
    """Whether a plain number may be the number of rows, or one over it."""
    return any(_is_multiple(n, tape.rows) or (n != 0 and _is_multiple(1 / n, tape.rows)) for n in tape.numbers())


def _is_multiple(number: float, rows: int) -> bool:
    whole = round(abs(number)) if abs(number) < 1e15 else 0
    return whole > 0 and _is(abs(number), whole) and whole % rows == 0


def _is(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-6 * abs(other)


def _among(number: float, read: list[float]) -> bool:
    return any(_is(number, other) or (number != 0 and _is(1 / number, other)) for other in read)


def _each_its_own(plain: Sequence[Tensor | None], scaled: Sequence[Tensor | None], factors: Tensor) -> bool:
    """Whether the gradient of losses times factors is, row by row, that of the losses times the row's factor."""
    for one, other in zip(plain, scaled, strict=True):
        if (one is None) != (other is None):
            return False
        if one is None or other is None:
            continue
        if one.shape[:1] != factors.shape:
            return False  # made of all rows
        by_row = factors.to(one).reshape(-1, *[1] * (one.dim() - 1))
        half = one.dtype in (torch.float16, torch.bfloat16)
        if _distance([one], [other / by_row]) > (_MOVED_HALF if half else _MOVED):
            return False
    return True
