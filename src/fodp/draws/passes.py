"""Sites that draw, and passes over them: which draw belongs to which record (the package's docstring says why)."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fodp.draws.answers import ANSWERS, bernoulli_, may_draw
from fodp.draws.generators import Marks, foreign_seeded, foreign_state, restore_foreign
from fodp.draws.source import Source, Unkeyable, Words
from fodp.errors import PrivacyError
from fodp.support.torch_internals import top_saved_tensors_hooks

Result = TypeVar("Result")

_BACKWARDS_LOOKED_AT: Final = 8


class _Missed(Exception):
    """Something was drawn in a function that was not known to draw: repeat the pass and look at every operation."""


@dataclass(frozen=True)
class _Draw:
    """What one draw of a site looks like: the operation, and the lot's dimension with how many entries a row has there.

    `dim` None: the draw has no lot in it and is shared.
    """

    operation: str
    dim: int | None
    entries: int = 1


class Site:
    """One piece of the user's code that sees a lot and may draw: what it has been seen to draw, and how it is run.

    `quiet`: it draws nothing, as far as seen; that is looked at in every pass. `alone`: it must be given one record
    at a time. Otherwise `draws` lists its draws in their order.
    """

    def __init__(self, what: str):
        self.what = what
        self.quiet, self.alone = True, False
        self.foreign = False  # it draws from NumPy's or Python's generator too
        self.draws: tuple[_Draw, ...] = ()
        self.functions: frozenset[Any] | None = None  # of PyTorch's, those that draw; None: any may
        # Where parts of the forward pass are repeated in the backward pass, that has draws too. Checkpointing is seen
        # in the forward pass; for whatever else there may be the first backward passes are looked at, since a mode
        # costs time.
        self._keyed_backwards: float = _BACKWARDS_LOOKED_AT

    def run(
        self,
        work: Callable[["Pass"], Result],
        source: "Source | None",
        records: Tensor,
        again: "Again",
        single: bool = False,
    ) -> Result:
        """work(pass), in which `pass.forward` and `pass.backward` run the user's code.

        `again(rows)` runs the code on copies of the given rows of the lot, to learn from; `single` says that all rows
        are one record's. Without a source the code draws from PyTorch's own generator.
        """
        if source is None:
            return work(Pass(self, None, records))
        while True:
            if self.alone and not single:
                raise Unkeyable("what it draws cannot be told apart by example")
            with Marks() as marks:
                try:
                    result = work(Pass(self, source, records))
                except _Missed:
                    self.functions = None
                    continue
            if not self.quiet or not marks.were_moved:
                return result
            self.learn(source, again)
            self.quiet = False

    def learn(self, source: Source, again: "Again") -> None:
        """Find out which dimension of each draw is the lot's, from two and three copies of one row."""
        seen, drawing = [], set[Any]()
        for copies in (2, 3):
            recorder = _Keyed(source.of(self.what), None, np.zeros(copies, np.int64))
            with Marks(), recorder, _Functions(recorder, drawing, learns=True):
                again(torch.zeros(copies, dtype=torch.int64))
            seen.append(recorder.seen)
        # With those that functions which hold a whole layer (attention, recurrent ones) draw by.
        self.functions = frozenset(drawing | {F.dropout, F.scaled_dot_product_attention} if drawing else ())
        self.quiet = not any(seen)
        draws = [_draw_of(a, b) for a, b in zip(*seen, strict=False)]
        if len(seen[0]) != len(seen[1]) or None in draws:
            self.take_alone()
        else:
            self.draws = tuple(draw for draw in draws if draw is not None)

    def take_alone(self) -> None:
        """From now on it is given one record at a time."""
        self.alone = True

    @contextmanager
    def undecided(self) -> Iterator[None]:
        """What runs here does not decide whether the site is given one record at a time."""
        before = self.alone
        try:
            yield
        finally:
            self.alone = before

    def draws_backwards(self) -> bool:
        """Whether what the backward pass draws is looked at in this pass, though no sign of it was seen."""
        return self.foreign or self._keyed_backwards > 0

    def went_backwards(self, drew: bool) -> None:
        """A backward pass that was looked at has drawn something, or nothing."""
        self._keyed_backwards = math.inf if drew else max(0, self._keyed_backwards - 1)

    def take_seeded(self) -> None:
        """It draws from NumPy's or Python's generator: from now on each record is alone, with generators of its own."""
        self.foreign = True
        self.take_alone()
        self.quiet = False

    def look_for_foreign(self, work: Callable[[], Any]) -> None:
        """Notice that running the code moves NumPy's or Python's own generator; then it must run alone."""
        before = foreign_state()
        try:
            work()
        finally:
            if foreign_state() != before:
                self.take_seeded()
                restore_foreign(before)


Again = Callable[[Tensor], Any]


class Pass:
    """One run of a site's code over some rows of a lot."""

    def __init__(self, site: Site, source: Source | None, records: Tensor):
        self._site, self._source = site, source
        self._mode: _Keyed | None = None
        if source is not None and not site.quiet:
            self._source, numbers = source.of(site.what), records.numpy()
            draws = None if site.alone else site.draws
            self._mode = _Keyed(self._source, draws, numbers[:1] if site.alone else numbers)

    def forward(self, code: Callable[[], Result]) -> Result:
        """Run the user's code."""
        if self._mode is None:
            return code()
        # A mode over all operations costs more than one that looks at the functions that are called.
        functions = self._site.functions
        mode = self._mode if functions is None else _Functions(self._mode, functions)
        with mode, self._foreign_seeded("forward"):
            result = code()
        if functions is not None and self._mode.missed():
            raise _Missed
        self._mode.refuse_fewer()
        return result

    def backward(self, code: Callable[[], Result]) -> Result:
        """Run the backward pass, which draws where a part of the forward pass is repeated, or a hook draws."""
        if self._mode is None:
            return code()
        if not (self._site.draws_backwards() or self._mode.repeated or self._mode.hidden):
            return code()
        drawn = self._mode.drawn
        with self._mode, self._foreign_seeded("backward"):
            result = code()
        self._site.went_backwards(self._mode.drawn > drawn)
        return result

    def _foreign_seeded(self, when: str) -> AbstractContextManager[None]:
        """NumPy's and Python's generators as functions of the record, where the site draws from them."""
        if self._source is None or self._mode is None or not self._site.foreign:
            return nullcontext()
        return foreign_seeded(self._source.seed(int(self._mode.records[0]), when))


class OwnPass:
    """A pass that somebody else runs, from here to `end`: what it draws belongs to the records."""

    def __init__(self, site: Site, source: Source, records: Tensor):
        self._marks = Marks()
        self._mode = _Keyed(source.of(site.what), site.draws, records.numpy())
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def end(self, finished: bool) -> None:
        """Leave PyTorch's generators as they were. A pass that broke off may have drawn less."""
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._marks.restore()
        if not finished:
            return
        self._mode.refuse_fewer()
        if self._mode.repeated:
            raise PrivacyError(
                "a checkpointed part of the model draws random numbers (dropout). The backward pass would draw them "
                "again, for the whole lot and not by record: switch checkpointing off, leave what draws out of it, or "
                "use fodp.Trainer, which computes the gradients itself"
            )


class _Keyed(TorchDispatchMode):
    """Answers random operations with words of the records; `draws` None takes every draw as the first record's own."""

    def __init__(self, source: Source, draws: tuple[_Draw, ...] | None, records: npt.NDArray[np.int64]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.source, self.records, self._expected = source, records, draws
        self.seen: list[tuple[str, tuple[int, ...]]] = []
        self.drawn = 0
        self.repeated = self.hidden = False  # whether something was drawn in a checkpointed part, without gradients
        self._numbers: dict[bytes, int] = {}
        self._marks = Marks()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = ANSWERS.get(func)
        if answer is not None:
            return answer(self, *args, **{k: v for k, v in (kwargs or {}).items() if k != "generator"})
        if may_draw(func):
            return self._refuse_if_random(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def words(self, operation: str, shape: Sequence[int], each: int = 1) -> Words:
        """The words of the next draw, [*shape, each]."""
        number = self._number()
        shape = tuple(int(size) for size in shape)
        if number == len(self.seen):
            self.seen.append((operation, shape))
        if self._expected is None:
            return self.source.words(self.records[:1], number, shape, each)[0]
        draw = self._expected[number] if number < len(self._expected) else None
        if draw is None or draw.operation != operation:
            raise Unkeyable(f"it draws by {operation} in some passes only")
        if draw.dim is None:
            return self.source.shared(number, shape, each)
        rows = len(self.records)
        if draw.dim >= len(shape) or shape[draw.dim] != rows * draw.entries:
            raise Unkeyable(f"what it draws by {operation} does not have a part for each example")
        others = shape[: draw.dim] + shape[draw.dim + 1 :]
        inner = (draw.entries, *others) if draw.entries > 1 else others
        words = self.source.words(self.records, number, inner, each).reshape(rows * draw.entries, *others, each)
        return words if draw.dim == 0 else np.ascontiguousarray(np.moveaxis(words, 0, draw.dim))

    def refuse_fewer(self) -> None:
        """A pass that draws less than it did is another pass."""
        if self._expected is not None and len(self.seen) < len(self._expected):
            raise Unkeyable("it draws less in some passes")

    def _number(self) -> int:
        """The number of this draw.

        It is told by the state of PyTorch's generator, which is moved on by one number with each draw: whoever puts
        that state back to repeat a part of the forward pass, as checkpointing does, repeats the draws.
        """
        state = torch.default_generator.get_state().numpy().tobytes()
        self.drawn += 1
        self.repeated = self.repeated or _is_checkpointed()
        self.hidden = self.hidden or not torch.is_grad_enabled() or top_saved_tensors_hooks is None
        number = self._numbers.setdefault(state, len(self._numbers))
        torch.empty((), dtype=torch.int64).random_()
        self._marks.advance()
        return number

    def missed(self) -> bool:
        """Whether PyTorch's generators stand elsewhere than these draws have left them."""
        return self._marks.moved()

    def _refuse_if_random(self, func: Any, args: Any, kwargs: Any) -> Any:
        marks = Marks()
        result = func(*args, **kwargs)
        if marks.moved():
            raise PrivacyError(
                f"the model, its loss or its augmentation draws random numbers by {func}, which cannot be keyed by "
                "record: use dropout, rand, randn, randint, normal, bernoulli, exponential or multinomial instead, and "
                "for attention with dropout the backend torch.nn.attention.SDPBackend.MATH"
            )
        return result


def _is_checkpointed() -> bool:
    """Whether a part of the forward pass is under way that keeps its tensors otherwise than autograd does."""
    return top_saved_tensors_hooks is not None and top_saved_tensors_hooks(True) is not None


class _Functions(TorchFunctionMode):
    """Puts the dispatch mode around functions that draw, or (`learns`) collects them under it."""

    def __init__(self, mode: _Keyed, drawing: Any, learns: bool = False):
        super().__init__()
        self._mode, self._drawing, self._learns = mode, drawing, learns

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._learns:
            before = self._mode.drawn
            result = func(*args, **(kwargs or {}))
            if self._mode.drawn > before:
                self._drawing.add(func)
            return result
        if func is F.dropout and func in self._drawing:
            return self._dropout(*args, **(kwargs or {}))
        # A generator object of the user's own leaves no trace in PyTorch's, by which anything else would be noticed.
        if func in self._drawing or (kwargs and kwargs.get("generator") is not None):
            with self._mode:
                return func(*args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """What PyTorch makes of dropout, without a mode around each of its operations."""
        if not training or not 0 < p < 1:
            with self._mode:
                return F.dropout(x, p, training, inplace)
        kept = bernoulli_(self._mode, torch.empty_like(x), 1 - p).div_(1 - p)
        return x.mul_(kept) if inplace else x * kept


def _draw_of(two: tuple[str, tuple[int, ...]], three: tuple[str, tuple[int, ...]]) -> _Draw | None:
    """What two copies and three copies of a row say about a draw; None where they do not agree."""
    (operation, short), (other, long) = two, three
    if operation != other or len(short) != len(long):
        return None
    grown = [dim for dim, (a, b) in enumerate(zip(short, long, strict=True)) if a != b]
    if not grown:
        return _Draw(operation, None)
    dim = grown[0]
    if len(grown) > 1 or short[dim] % 2 or short[dim] // 2 * 3 != long[dim] or operation == "randperm":
        return None
    return _Draw(operation, dim, short[dim] // 2)
