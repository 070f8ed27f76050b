"""Why a function of PyTorch's refused its arguments, in words about records: types, widths, numbers out of range."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # PyTorch's own default
_WHOLE = (torch.int64, torch.uint8)  # as class numbers


@dataclass(frozen=True)
class Reason:
    """What a record has that does not fit, and what to do; no value of it."""

    what: str
    remedy: str = ""

    def fix(self, mend: str) -> str:
        """What to do about one record."""
        return mend if not self.remedy else f"{mend}; if all are so, {self.remedy}"


def reason_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reason | None:
    """Why the call failed, if it is one of the usual reasons."""
    name = getattr(func, "__name__", "")
    try:
        special = _KNOWN.get(name)
        found = None if special is None else special(*args, **kwargs)
        return found or _types(args, kwargs)
    except Exception:  # another signature than is known here: say nothing
        return None


def out_of_range(numbers: Tensor, count: int, ignored: int | None) -> Tensor:
    """For each row whether it holds a whole number outside of 0 to count - 1 that is not the ignored one."""
    wrong = (numbers < 0) | (numbers >= count)
    if ignored is not None:
        wrong &= numbers != ignored
    return wrong.reshape(len(numbers), -1).any(1) if numbers.dim() else wrong[None]


def scored(scores: Tensor) -> int:
    """How many classes a loss is given scores for."""
    return scores.shape[1] if scores.dim() > 1 else scores.shape[0]


def outside(count: int) -> Reason:
    """Labels beyond the scores."""
    return Reason(
        f"a label outside of 0 to {count - 1}, the {count} classes that the model gives scores for",
        "let classes count from 0 and the model give a score for each",
    )


def _classes(
    input: Tensor, target: Tensor, weight: Any = None, size_average: Any = None, ignore_index: int = IGNORED,
    *_: Any, **__: Any,
) -> Reason | None:  # fmt: skip
    if not isinstance(target, Tensor):
        return None
    if target.is_floating_point():
        kind = str(target.dtype).removeprefix("torch.")
        return Reason(f"{kind} labels, where the loss takes the number of a class", "make them whole: labels.long()")
    if target.dim() == input.dim() and target.shape[-1:] == (1,):
        return Reason("labels in a column of their own", "drop that dimension: labels.squeeze(1)")
    if target.dtype not in _WHOLE:
        kind = str(target.dtype).removeprefix("torch.")
        return Reason(f"{kind} labels, where the loss takes int64", "convert them: labels.long()")
    if target.dim() == input.dim():
        return Reason(
            "a whole number for each class, where the loss takes the number of one class",
            "give that number, labels.argmax(1), or shares of classes in floating point",
        )
    if target.dim() and out_of_range(target, scored(input), ignore_index).any():
        return outside(scored(input))
    return None


def _table(input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Reason | None:
    if input.is_floating_point():
        return Reason(f"{str(input.dtype).removeprefix('torch.')} numbers for an embedding", "make them whole: .long()")
    if out_of_range(input.reshape(1, -1), len(weight), None).any():
        return Reason(
            f"a whole number outside of 0 to {len(weight) - 1}, the rows of an embedding",
            "let numbers count from 0 and the embedding have a row for each",
        )
    return None


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Reason | None:
    if num_classes > 0 and not tensor.is_floating_point() and out_of_range(tensor.reshape(1, -1), num_classes, None)[0]:
        return outside(num_classes)
    return None


def _targets(input: Tensor, target: Tensor, *_: Any, **__: Any) -> Reason | None:
    if target.dim() < input.dim():
        return Reason(
            f"one number for a label, where the loss takes {input.shape[-1]}, one for each score",
            "give the number of a class as a whole number (int64), or one number for each class",
        )
    if target.is_floating_point():
        return None
    kind = str(target.dtype).removeprefix("torch.")
    return Reason(f"{kind} targets, where the loss takes floating point", "convert them: targets.float()")


def _linear(input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Reason | None:
    if input.shape[-1] == weight.shape[1]:
        return None
    return Reason(
        f"another number of values than the {weight.shape[1]} that a linear layer of the model takes",
        "build the model for their width, or flatten them (inputs.flatten(1))",
    )


def _convolution(input: Tensor, weight: Tensor, *rest: Any, groups: int = 1, **__: Any) -> Reason | None:
    groups = rest[4] if len(rest) > 4 else groups
    if input.dim() != weight.dim():
        return Reason(
            f"{input.dim() - 1} dimensions, where a convolution of the model takes {weight.dim() - 1}",
            "give them a dimension of channels, or build the model for their form",
        )
    if input.shape[1] == weight.shape[1] * groups:
        return None
    return Reason(
        f"another number of channels than the {weight.shape[1] * groups} that a convolution of the model takes",
        "put the channels first, or build the model for their number",
    )


def _types(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reason | None:
    """Numbers of one type beside parameters of another."""
    tensors = [part for part in (*args, *kwargs.values()) if isinstance(part, Tensor)]
    parameters = {part.dtype for part in tensors if isinstance(part, torch.nn.Parameter)}
    others = {part.dtype for part in tensors if not isinstance(part, torch.nn.Parameter)} - parameters
    if len(parameters) != 1 or not others:
        return None
    given, wanted = (str(kinds.pop()).removeprefix("torch.") for kinds in (others, parameters))
    return Reason(
        f"{given} numbers, where the model's parameters are {wanted}",
        f"convert the data once, inputs.to(torch.{wanted}), or the model (model.to(torch.{given}), for floating point)"
        if given.startswith(("float", "bfloat"))
        else f"convert the data once, inputs.to(torch.{wanted}), scaled to a public range",
    )


_KNOWN: dict[str, Callable[..., Reason | None]] = {
    "cross_entropy": _classes,
    "nll_loss": _classes,
    "embedding": _table,
    "one_hot": _one_hot,
    "binary_cross_entropy_with_logits": _targets,
    "binary_cross_entropy": _targets,
    "linear": _linear,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
}
