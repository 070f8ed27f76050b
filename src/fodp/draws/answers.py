"""Answers to PyTorch's random operations, from the words that a pass has for its next draw."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fodp.draws.source import Words


class Drawing(Protocol):
    """A pass that is drawing."""

    def words(self, operation: str, shape: Sequence[int], each: int = 1) -> Words:
        """The words of the next draw, [*shape, each]."""


def _tensor(values: npt.NDArray[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(values)).to(like.device, non_blocking=True)


def _uniforms(mode: Drawing, out: Tensor, operation: str) -> Tensor:
    """Uniform in [0, 1), with as many bits as the type holds."""
    if out.dtype == torch.float64:
        return _tensor((mode.words(operation, out.shape, 2).view("<u8")[..., 0] >> 11) * 2.0**-53, out)
    words = mode.words(operation, out.shape)[..., 0]
    return _tensor((words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24), out)


def _normals(mode: Drawing, out: Tensor, operation: str) -> Tensor:
    words = mode.words(operation, out.shape, 2)
    radius = np.sqrt(-2 * np.log((words[..., 0] + 0.5) * 2.0**-32))
    return _tensor(radius * np.cos(words[..., 1] * (2 * math.pi * 2.0**-32)), out)


def _exponentials(mode: Drawing, out: Tensor, operation: str) -> Tensor:
    """-ln of uniforms in (0, 1)."""
    words = mode.words(operation, out.shape, 2).view("<u8")[..., 0]
    return _tensor(-np.log(((words >> 11) + 0.5) * 2.0**-53), out)


def bernoulli_(mode: Drawing, out: Tensor, p: float | Tensor = 0.5) -> Tensor:
    """1 with probability p, else 0."""
    if isinstance(p, Tensor):
        words = _tensor(mode.words("bernoulli", out.shape)[..., 0].astype(np.float64) * 2.0**-32, out)
        return out.copy_(words < p)
    bound = round(float(p) * 2**32)
    words32 = mode.words("bernoulli", out.shape)[..., 0]
    kept = np.ones(words32.shape, bool) if bound >= 2**32 else words32 < np.uint32(bound)
    return out.copy_(_tensor(kept, out))


def uniform_(mode: Drawing, out: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Uniform between two numbers."""
    return out.copy_(_uniforms(mode, out, "uniform") * (high - low) + low)


def normal_(mode: Drawing, out: Tensor, mean: float | Tensor = 0.0, std: float | Tensor = 1.0) -> Tensor:
    """Normal."""
    return out.copy_(_normals(mode, out, "normal") * std + mean)


def random_(mode: Drawing, out: Tensor, low: int = 0, high: int | None = None) -> Tensor:
    """Whole numbers from `low` to below `high`."""
    if high is None:
        limits = 2 ** {torch.float64: 53, torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}.get(out.dtype, 0)
        high = int(limits) if out.is_floating_point() else torch.iinfo(out.dtype).max
    words = mode.words("integers", out.shape, 2).view("<u8")[..., 0]
    return out.copy_(_tensor((words % np.uint64(high - low)).astype(np.int64) + low, out))


def exponential_(mode: Drawing, out: Tensor, lambd: float = 1.0) -> Tensor:
    """Exponential."""
    return out.copy_(_exponentials(mode, out, "exponential") / lambd)


def geometric_(mode: Drawing, out: Tensor, p: float) -> Tensor:
    """How many tries until the first success."""
    tries = _exponentials(mode, out, "geometric") / -math.log1p(-p) if p < 1 else torch.zeros_like(out)
    return out.copy_(tries.ceil().clamp(min=1))


def cauchy_(mode: Drawing, out: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    """Cauchy."""
    return out.copy_(((_uniforms(mode, out, "cauchy").double() - 0.5) * math.pi).tan() * sigma + median)


def log_normal_(mode: Drawing, out: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    """The exponential of a normal."""
    return out.copy_((_normals(mode, out, "log_normal") * std + mean).exp())


def multinomial(mode: Drawing, weights: Tensor, count: int, replacement: bool = False) -> Tensor:
    """Categories in proportion to their weights: the smallest of exponentials over weights."""
    times = count if replacement else 1
    like = weights.new_empty((*weights.shape[:-1], times, weights.shape[-1]), dtype=torch.float64)
    race = _exponentials(mode, like, "multinomial") / weights.double().unsqueeze(-2)
    if replacement:
        return race.argmin(-1)
    return race.squeeze(-2).topk(count, dim=-1, largest=False).indices


def randperm(mode: Drawing, count: int, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    """A permutation. Of a lot it would mix the examples, and makes its site run alone (`_draw_of`)."""
    words = mode.words("randperm", (count,), 2).view("<u8")[..., 0]
    return (
        torch.from_numpy(words.argsort(kind="stable")).to(dtype or torch.int64).to(device or "cpu", non_blocking=True)
    )


def native_dropout(mode: Drawing, inputs: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    """Dropout in one operation, as devices have it."""
    if not train:
        return inputs.clone(), torch.ones_like(inputs, dtype=torch.bool)
    mask = bernoulli_(mode, torch.empty_like(inputs, dtype=torch.bool), 1 - p)
    return inputs * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def rrelu(
    mode: Drawing, x: Tensor, noise: Tensor, low: float = 0.125, high: float = 1 / 3, train: bool = False
) -> Tensor:
    """Randomised leaky ReLU; `noise` receives the slopes."""
    slopes = uniform_(mode, torch.empty_like(x), low, high) if train else torch.full_like(x, (low + high) / 2)
    noise.copy_(torch.where(x <= 0, slopes, torch.ones_like(x)))
    return x * noise


def _made(fill: Callable[..., Tensor], like: bool, *, after: int) -> Callable[..., Tensor]:
    """The operation that makes a tensor (of a size, or like another) and fills it; `after` arguments come before."""

    def answer(mode: Drawing, *args: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        given, rest = args[after] if not like else args[0], args[:after] if not like else args[1:]
        if fill is random_:
            rest = rest if len(rest) == 2 else (0, *rest)
            dtype = dtype or (None if like else torch.int64)
        out = (torch.empty_like if like else torch.empty)(given, dtype=dtype, device=device)
        return fill(mode, out, *rest)

    return answer


def _like_self(fill: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda mode, self, *args, **kwargs: fill(mode, torch.empty_like(self), *args, **kwargs)


def _normal_of(mode: Drawing, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **options: Any) -> Tensor:
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
def may_draw(operation: Any) -> bool:
    """Whether PyTorch says that an operation may draw."""
    return torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())


ANSWERS: Final = _answers()
