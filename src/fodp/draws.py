"""What a private pass draws for an example: a function of (key, step, record, draw) and of nothing else.

Dropout masks of a lot, drawn row after row from PyTorch's generator, tie the examples together: one record more
shifts every later row's mask, and the gradients of all of them move. Here a pass runs under a dispatch mode
that answers PyTorch's random operations itself. Rows that lie along the lot's dimension are keyed by the record they
belong to, other draws by the step. So a row draws the same whoever else is in the lot, in micro-batches, alone, after a
resume and in another process; with secure streams nobody without the run's key can tell what.

The words are AES-256 of explicit counters: (record, number of the draw, place within the record's part). A place is
made of one index per dimension, so it does not depend on how far other records stretch the tensor by padding.

Which dimension of a draw is the lot's cannot be seen from one pass. A `Site` (a loss, an augmentation, a collate
function) is run on two and on three copies of one row: what grows is the lot's. Where that does not tell, a site is
run one record at a time, and everything it draws is that record's.
"""

import copy
import hashlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fodp._checks import PrivacyError

Words = npt.NDArray[np.uint32]
Result = TypeVar("Result")

_DRAW_BITS: Final = 24  # draws in one pass; the other 40 bits of a half block name the record
_BACKWARDS_LOOKED_AT: Final = 8
_WORDS_AT_ONCE: Final = 1 << 21  # 8 MiB of words and as many counters
# What saves tensors at this moment otherwise than autograd does; older versions of PyTorch do not tell.
_TOP_HOOKS: Final = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


class Unkeyable(PrivacyError):
    """What is drawn here cannot be given to records; the site must run one record at a time."""


class _Missed(Exception):
    """Something was drawn in a function that was not known to draw: repeat the pass and look at every operation."""


class DerivedKeys(Protocol):
    """What is needed of `fodp.noise.Streams`: a key for each (step, name), the same whenever it is asked for."""

    def record_key(self, step: int, name: str) -> bytes:
        """32 bytes that belong to (key, step, name) alone."""


class Source:
    """The random words of one lot in one step."""

    def __init__(self, streams: DerivedKeys, step: int, name: str):
        self._keys = {shared: streams.record_key(step, f"{name}.{shared}") for shared in ("record", "lot")}
        self._parts: dict[str, Source] = {}
        self._ciphers: dict[str, Any] = {}

    def of(self, site: str) -> "Source":
        """The words of one site: what an augmentation draws for a record tells nothing of what the model draws."""
        if site not in self._parts:
            part = self._parts[site] = copy.copy(self)
            part._keys = {kind: _subkey(key, site) for kind, key in self._keys.items()}
            part._ciphers = {}
        return self._parts[site]

    def words(self, records: npt.NDArray[np.int64], draw: int, shape: Sequence[int], each: int) -> Words:
        """`each` uniform 32-bit words for every place of every record, [records, *shape, each]."""
        return self._words("record", records, draw, shape, each)

    def shared(self, draw: int, shape: Sequence[int], each: int) -> Words:
        """Words that are the same whoever is in the lot, [*shape, each]."""
        return self._words("lot", np.zeros(1, np.int64), draw, shape, each)[0]

    def seed(self, record: int, when: str) -> bytes:
        """A seed for generators that are not PyTorch's: a record's own, another one for each part of a pass."""
        place = record.to_bytes(8, "little") + when.encode()
        return hashlib.blake2b(place, digest_size=32, key=self._keys["record"]).digest()

    def _words(self, kind: str, records: npt.NDArray[np.int64], draw: int, shape: Sequence[int], each: int) -> Words:
        *outer, last = shape or (1,)
        blocks = -(-last * each // 4)  # of four words, along the last dimension
        bits = 64 // (len(outer) + 1)
        if draw >> _DRAW_BITS or max(outer, default=0) >> bits or blocks >> bits or (records >> 64 - _DRAW_BITS).any():
            raise Unkeyable(f"a draw of shape {tuple(shape)} has more places than counters")
        places = _places((*outer, blocks), bits % 64)
        owners = (records.astype(np.uint64) << np.uint64(_DRAW_BITS)) + np.uint64(draw)
        rows = max(1, _WORDS_AT_ONCE // max(1, 4 * len(places)))
        parts = [self._encrypted(kind, places, owners[at : at + rows]) for at in range(0, len(records), rows)]
        words = parts[0] if len(parts) == 1 else np.concatenate([np.empty((0, len(places), 4), np.uint32), *parts])
        out = words.reshape(len(records), math.prod(outer), 4 * blocks)[..., : last * each]
        return out.reshape(len(records), *shape, each)

    def _encrypted(self, kind: str, places: npt.NDArray[np.uint64], owners: npt.NDArray[np.uint64]) -> Words:
        """AES of (place, owner) for every pair of them, [owners, places, 4]."""
        counters = np.empty((len(owners), len(places), 2), "<u8")
        counters[..., 0], counters[..., 1] = places, owners[:, None]
        cipher_text = np.empty(counters.nbytes + 16, np.uint8)
        if kind not in self._ciphers:
            self._ciphers[kind] = Cipher(algorithms.AES256(self._keys[kind]), modes.ECB()).encryptor()
        self._ciphers[kind].update_into(counters.reshape(-1).view(np.uint8).data, cipher_text.data)
        return cipher_text[: counters.nbytes].view("<u4").reshape(len(owners), len(places), 4)


@lru_cache(maxsize=64)
def _places(sizes: tuple[int, ...], bits: int) -> npt.NDArray[np.uint64]:
    """One number for each place: an index for each dimension, side by side in the bits of the number."""
    places = np.zeros(1, np.uint64)
    for size in sizes:
        places = np.add.outer(places << np.uint64(bits), np.arange(size, dtype=np.uint64)).ravel()
    return places


def _subkey(key: bytes, name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=32, key=key, person=b"fodp.site").digest()


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
    at a time. Otherwise `_draws` lists its draws in their order.
    """

    def __init__(self, what: str):
        self.what = what
        self.quiet, self.alone = True, False
        self.foreign = False  # it draws from NumPy's or Python's generator too
        self._draws: tuple[_Draw, ...] = ()
        self._functions: frozenset[Any] | None = None  # of PyTorch's, those that draw; None: any may
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
            with generators_kept() as marks:
                try:
                    result = work(Pass(self, source, records))
                    if not self.quiet or not marks.moved():
                        return result
                except _Missed:
                    self._functions = None
                    continue
            self.learn(source, again)
            self.quiet = False

    def learn(self, source: Source, again: "Again") -> None:
        """Find out which dimension of each draw is the lot's, from two and three copies of one row."""
        seen, drawing = [], set[Any]()
        for copies in (2, 3):
            recorder = _Keyed(source.of(self.what), None, np.zeros(copies, np.int64))
            with generators_kept(), recorder, _Functions(recorder, drawing, learns=True):
                again(torch.zeros(copies, dtype=torch.int64))
            seen.append(recorder.seen)
        self._functions = frozenset(drawing)
        self.quiet = not any(seen)
        draws = [_draw_of(a, b) for a, b in zip(*seen, strict=False)]
        if len(seen[0]) != len(seen[1]) or None in draws:
            self.alone = True
        else:
            self._draws = tuple(draw for draw in draws if draw is not None)

    def look_for_foreign(self, work: Callable[[], Any]) -> None:
        """Notice that running the code moves NumPy's or Python's own generator; then it must run alone."""
        before = _foreign_state()
        try:
            work()
        finally:
            if _foreign_state() != before:
                self.foreign = self.alone = True
                self.quiet = False
                _restore_foreign(before)


Again = Callable[[Tensor], Any]


class Pass:
    """One run of a site's code over some rows of a lot."""

    def __init__(self, site: Site, source: Source | None, records: Tensor):
        self._site, self._source = site, None if source is None else source.of(site.what)
        self._mode: _Keyed | None = None
        if self._source is not None and not site.quiet:
            numbers = records.numpy()
            self._mode = _Keyed(
                self._source, None if site.alone else site._draws, numbers[:1] if site.alone else numbers
            )

    def forward(self, code: Callable[[], Result]) -> Result:
        """Run the user's code."""
        if self._mode is None:
            return code()
        # A mode over all operations costs more than one that looks at the functions that are called.
        functions = self._site._functions
        mode = self._mode if functions is None else _Functions(self._mode, functions)
        with mode, self._foreign_seeded("forward"):
            result = code()
        if functions is not None and self._mode.missed():
            raise _Missed
        self._mode.refuse_fewer()
        return result

    def backward(self, code: Callable[[], Result]) -> Result:
        """Run the backward pass, which draws where a part of the forward pass is repeated, or a hook draws."""
        keyed = self._site._keyed_backwards or self._site.foreign
        if self._mode is None or not (keyed or self._mode.repeated or self._mode.hidden):
            return code()
        drawn = self._mode.drawn
        with self._mode, self._foreign_seeded("backward"):
            result = code()
        self._site._keyed_backwards = math.inf if self._mode.drawn > drawn else max(0, self._site._keyed_backwards - 1)
        return result

    def _foreign_seeded(self, when: str) -> AbstractContextManager[None]:
        """NumPy's and Python's generators as functions of the record, where the site draws from them."""
        if self._source is None or self._mode is None or not self._site.foreign:
            return nullcontext()
        return _foreign_seeded(self._source.seed(int(self._mode.records[0]), when))


class OwnPass:
    """A pass that somebody else runs, from here to `end`: what it draws belongs to the records."""

    def __init__(self, site: Site, source: Source, records: Tensor):
        self._marks = Marks()
        self._mode = _Keyed(source.of(site.what), site._draws, records.numpy())
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


# --- the state of generators ---------------------------------------------------------------------------------


class Marks:
    """Where PyTorch's generators stand."""

    def __init__(self) -> None:
        self.saved = torch.default_generator.get_state()
        self._devices = _device_generators()
        self.offsets = [generator.get_state() for generator in self._devices]

    def moved(self) -> bool:
        """Whether anything was drawn since."""
        return not torch.equal(torch.default_generator.get_state(), self.saved) or not all(
            torch.equal(g.get_state(), s) for g, s in zip(self._devices, self.offsets, strict=True)
        )

    def restore(self) -> None:
        """Put them back."""
        torch.default_generator.set_state(self.saved)
        for generator, state in zip(self._devices, self.offsets, strict=True):
            generator.set_state(state)


def _device_generators() -> list[torch.Generator]:
    if torch.cuda.is_initialized():
        return list(torch.cuda.default_generators)
    return [torch.mps._get_default_mps_generator()] if _has_mps() else []


@cache
def _has_mps() -> bool:
    return torch.backends.mps.is_available()


@contextmanager
def generators_kept() -> Iterator[Marks]:
    """Private passes leave PyTorch's generators as they were."""
    marks = Marks()
    try:
        yield marks
    finally:
        if marks.moved():
            marks.restore()


def _foreign_state() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002  the generator that others use
    return random.getstate(), (kind, np.asarray(keys).tobytes(), *rest)


def _restore_foreign(state: tuple[Any, ...]) -> None:
    own, (kind, keys, *rest) = state
    random.setstate(own)
    np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))  # noqa: NPY002  the generator that others use


@contextmanager
def _foreign_seeded(seed: bytes) -> Iterator[None]:
    """NumPy's and Python's generators from this seed, afterwards as before."""
    before = _foreign_state()
    try:
        random.seed(seed)
        np.random.seed(np.frombuffer(seed, np.uint32))  # noqa: NPY002  the generator that others use
        yield
    finally:
        _restore_foreign(before)


# --- the dispatch mode ---------------------------------------------------------------------------------------


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
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(self, *args, **{k: v for k, v in (kwargs or {}).items() if k != "generator"})
        if _may_draw(func):
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
        self.hidden = self.hidden or not torch.is_grad_enabled() or _TOP_HOOKS is None
        number = self._numbers.setdefault(state, len(self._numbers))
        torch.empty((), dtype=torch.int64).random_()
        self._marks.saved = torch.default_generator.get_state()
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
    return _TOP_HOOKS is not None and _TOP_HOOKS(True) is not None


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


# --- answers to PyTorch's random operations ------------------------------------------------------------------


def _tensor(values: npt.NDArray[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(values)).to(like.device)


def _uniforms(mode: _Keyed, out: Tensor, operation: str) -> Tensor:
    """Uniform in [0, 1), with as many bits as the type holds."""
    if out.dtype == torch.float64:
        return _tensor((mode.words(operation, out.shape, 2).view("<u8")[..., 0] >> 11) * 2.0**-53, out)
    words = mode.words(operation, out.shape)[..., 0]
    return _tensor((words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24), out)


def _normals(mode: _Keyed, out: Tensor, operation: str) -> Tensor:
    words = mode.words(operation, out.shape, 2)
    radius = np.sqrt(-2 * np.log((words[..., 0] + 0.5) * 2.0**-32))
    return _tensor(radius * np.cos(words[..., 1] * (2 * math.pi * 2.0**-32)), out)


def _exponentials(mode: _Keyed, out: Tensor, operation: str) -> Tensor:
    """-ln of uniforms in (0, 1)."""
    words = mode.words(operation, out.shape, 2).view("<u8")[..., 0]
    return _tensor(-np.log(((words >> 11) + 0.5) * 2.0**-53), out)


def bernoulli_(mode: _Keyed, out: Tensor, p: float | Tensor = 0.5) -> Tensor:
    """1 with probability p, else 0."""
    if isinstance(p, Tensor):
        words = _tensor(mode.words("bernoulli", out.shape)[..., 0].astype(np.float64) * 2.0**-32, out)
        return out.copy_(words < p)
    bound = round(float(p) * 2**32)
    words32 = mode.words("bernoulli", out.shape)[..., 0]
    kept = np.ones(words32.shape, bool) if bound >= 2**32 else words32 < np.uint32(bound)
    return out.copy_(_tensor(kept, out))


def uniform_(mode: _Keyed, out: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Uniform between two numbers."""
    return out.copy_(_uniforms(mode, out, "uniform") * (high - low) + low)


def normal_(mode: _Keyed, out: Tensor, mean: float | Tensor = 0.0, std: float | Tensor = 1.0) -> Tensor:
    """Normal."""
    return out.copy_(_normals(mode, out, "normal") * std + mean)


def random_(mode: _Keyed, out: Tensor, low: int = 0, high: int | None = None) -> Tensor:
    """Whole numbers from `low` to below `high`."""
    if high is None:
        limits = 2 ** {torch.float64: 53, torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}.get(out.dtype, 0)
        high = int(limits) if out.is_floating_point() else torch.iinfo(out.dtype).max
    words = mode.words("integers", out.shape, 2).view("<u8")[..., 0]
    return out.copy_(_tensor((words % np.uint64(high - low)).astype(np.int64) + low, out))


def exponential_(mode: _Keyed, out: Tensor, lambd: float = 1.0) -> Tensor:
    """Exponential."""
    return out.copy_(_exponentials(mode, out, "exponential") / lambd)


def geometric_(mode: _Keyed, out: Tensor, p: float) -> Tensor:
    """How many tries until the first success."""
    tries = _exponentials(mode, out, "geometric") / -math.log1p(-p) if p < 1 else torch.zeros_like(out)
    return out.copy_(tries.ceil().clamp(min=1))


def cauchy_(mode: _Keyed, out: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    """Cauchy."""
    return out.copy_(((_uniforms(mode, out, "cauchy").double() - 0.5) * math.pi).tan() * sigma + median)


def log_normal_(mode: _Keyed, out: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    """The exponential of a normal."""
    return out.copy_((_normals(mode, out, "log_normal") * std + mean).exp())


def multinomial(mode: _Keyed, weights: Tensor, count: int, replacement: bool = False) -> Tensor:
    """Categories in proportion to their weights: the smallest of exponentials over weights."""
    times = count if replacement else 1
    like = weights.new_empty((*weights.shape[:-1], times, weights.shape[-1]), dtype=torch.float64)
    race = _exponentials(mode, like, "multinomial") / weights.double().unsqueeze(-2)
    if replacement:
        return race.argmin(-1)
    return race.squeeze(-2).topk(count, dim=-1, largest=False).indices


def randperm(mode: _Keyed, count: int, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    """A permutation. Of a lot it would mix the examples, and makes its site run alone (`_draw_of`)."""
    words = mode.words("randperm", (count,), 2).view("<u8")[..., 0]
    return torch.from_numpy(words.argsort(kind="stable")).to(dtype or torch.int64).to(device or "cpu")


def native_dropout(mode: _Keyed, inputs: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    """Dropout in one operation, as devices have it."""
    if not train:
        return inputs.clone(), torch.ones_like(inputs, dtype=torch.bool)
    mask = bernoulli_(mode, torch.empty_like(inputs, dtype=torch.bool), 1 - p)
    return inputs * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def rrelu(
    mode: _Keyed, x: Tensor, noise: Tensor, low: float = 0.125, high: float = 1 / 3, train: bool = False
) -> Tensor:
    """Randomised leaky ReLU; `noise` receives the slopes."""
    slopes = uniform_(mode, torch.empty_like(x), low, high) if train else torch.full_like(x, (low + high) / 2)
    noise.copy_(torch.where(x <= 0, slopes, torch.ones_like(x)))
    return x * noise


def _made(fill: Callable[..., Tensor], like: bool, *, after: int) -> Callable[..., Tensor]:
    """The operation that makes a tensor (of a size, or like another) and fills it; `after` arguments come before."""

    def answer(mode: _Keyed, *args: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        given, rest = args[after] if not like else args[0], args[:after] if not like else args[1:]
        if fill is random_:
            rest = rest if len(rest) == 2 else (0, *rest)
            dtype = dtype or (None if like else torch.int64)
        out = (torch.empty_like if like else torch.empty)(given, dtype=dtype, device=device)
        return fill(mode, out, *rest)

    return answer


def _like_self(fill: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda mode, self, *args, **kwargs: fill(mode, torch.empty_like(self), *args, **kwargs)


def _normal_of(mode: _Keyed, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **options: Any) -> Tensor:
    """torch.normal of numbers or tensors."""
    if size is None:
        size = torch.broadcast_shapes(*(t.shape for t in (mean, std) if isinstance(t, Tensor)))
        like = mean if isinstance(mean, Tensor) else std
        return normal_(mode, like.new_empty(size), mean, std)
    out = torch.empty(size, dtype=options.get("dtype"), device=options.get("device"))
    return normal_(mode, out, mean, std)


def _answers() -> dict[Any, Callable[..., Any]]:
    """Every overload that is answered here, by its name."""
    by_name: dict[str, Callable[..., Any]] = {
        "bernoulli_.float": bernoulli_,
        "bernoulli_.Tensor": bernoulli_,
        "bernoulli.default": lambda mode, p: bernoulli_(mode, torch.empty_like(p), p),
        "bernoulli.p": _like_self(bernoulli_),
        "bernoulli.Tensor": _like_self(bernoulli_),
        "uniform_.default": lambda mode, out, *a, **k: uniform_(
            mode, out, *(a or (k.get("from", 0.0), k.get("to", 1.0)))
        ),
        "normal_.default": normal_,
        "random_.default": random_,
        "random_.to": lambda mode, out, to: random_(mode, out, 0, to),
        "random_.from": random_,
        "exponential_.default": exponential_,
        "geometric_.default": geometric_,
        "cauchy_.default": cauchy_,
        "log_normal_.default": log_normal_,
        "multinomial.default": multinomial,
        "randperm.default": randperm,
        "randperm.generator": randperm,
        "native_dropout.default": native_dropout,
        "_fused_dropout.default": lambda mode, x, keep: native_dropout(mode, x, 1 - keep),
        "rrelu_with_noise.default": rrelu,
        "normal.Tensor_Tensor": _normal_of,
        "normal.Tensor_float": _normal_of,
        "normal.float_Tensor": _normal_of,
        "normal.float_float": _normal_of,
    }
    for suffix in ("default", "generator"):
        by_name[f"rand.{suffix}"] = _made(uniform_, False, after=0)
        by_name[f"randn.{suffix}"] = _made(normal_, False, after=0)
        by_name[f"rand_like.{suffix}"] = _made(uniform_, True, after=0)
        by_name[f"randn_like.{suffix}"] = _made(normal_, True, after=0)
        by_name[f"randint.{suffix}"] = _made(random_, False, after=1)
        by_name[f"randint_like.{suffix}"] = _made(random_, True, after=0)
    for suffix in ("low", "low_generator"):
        by_name[f"randint.{suffix}"] = _made(random_, False, after=2)
    for suffix in ("low_dtype", "low_generator_dtype"):
        by_name[f"randint_like.{suffix}"] = _made(random_, True, after=0)
    return {found: answer for name, answer in by_name.items() if (found := _overload(name)) is not None}


def _overload(name: str) -> Any:
    """An operation of PyTorch, None where this version does not have it."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload, None)


@cache
def _may_draw(operation: Any) -> bool:
    """Whether PyTorch says that an operation may draw."""
    return torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())


_ANSWERS: Final = _answers()
