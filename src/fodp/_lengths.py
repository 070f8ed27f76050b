"""Clip norms, bounds and standard deviations: floats, or a known multiple of a number that only a device knows.

An adapted clip norm is made of releases, and on an accelerator those are not read: the host would wait for them. So C
stays there, and what is made of it by known factors (β·C, σ·C, a layer's share) keeps the factor as a float. The
quotient of two such lengths, noise over sensitivity, is then a quotient of floats: accounting never needs the device.
"""

from dataclasses import dataclass
from typing import overload

from torch import Tensor

from fodp import _checks
from fodp._checks import PrivacyError


@dataclass(frozen=True, eq=False)
class LengthOnDevice:
    """factor·unit, where `unit` is a float64 tensor without dimensions that lies between two public numbers."""

    unit: Tensor
    least: float  # of the unit
    most: float
    factor: float = 1.0

    @property
    def value(self) -> Tensor:
        """The number itself, where it lies."""
        return self.unit if self.factor == 1 else self.unit * self.factor

    @property
    def ends(self) -> tuple[float, float]:
        """Between which public numbers it lies."""
        return self.factor * self.least, self.factor * self.most

    def __float__(self) -> float:
        """The number on the host, which waits for the device: not within a step."""
        return self.factor * float(self.unit)

    def __bool__(self) -> bool:
        return self.factor != 0

    @overload
    def __mul__(self, factor: float) -> "LengthOnDevice": ...
    @overload
    def __mul__(self, factor: Tensor) -> Tensor: ...
    def __mul__(self, factor: float | Tensor) -> "LengthOnDevice | Tensor":
        if isinstance(factor, Tensor):  # no length any more: numbers made of a release and of C
            return factor * self.value.to(factor.dtype)
        factor = _checks.number("the factor of a length", factor)
        return LengthOnDevice(self.unit, self.least, self.most, self.factor * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> "LengthOnDevice":
        return self * (1 / _checks.positive("a divisor", divisor))

    def __add__(self, other: object) -> "LengthOnDevice":
        return LengthOnDevice(self.unit, self.least, self.most, self.factor + _of_one_origin(self, other).factor)

    __radd__ = __add__

    def __eq__(self, other: object) -> bool:
        """Whether it is known to be the same, without a look at it."""
        return isinstance(other, LengthOnDevice) and other.unit is self.unit and other.factor == self.factor

    def __hash__(self) -> int:
        return hash((id(self.unit), self.factor))

    def __format__(self, how: str) -> str:
        return f"{self.factor:{how}} of a length on {self.unit.device}"


Length = float | LengthOnDevice


def in_tensors(length: Length) -> float | Tensor:
    """What tensors may be multiplied by or compared with."""
    return length.value if isinstance(length, LengthOnDevice) else length


def read(length: Length) -> float:
    """The number on the host; where a device knows it, the host waits for that: not for a step that must not."""
    return float(length) if isinstance(length, LengthOnDevice) else length


def clip_norm(name: str, length: Length) -> Length:
    """A clip norm that float32 can keep (`_checks.clip_norm`), wherever it lies between its ends."""
    if not isinstance(length, LengthOnDevice):
        return _checks.clip_norm(name, length)
    for end in length.ends:
        _checks.clip_norm(name, end)
    return length


def at_least_zero(name: str, length: Length) -> Length:
    """Zero or more, at both ends."""
    if not isinstance(length, LengthOnDevice):
        return _checks.at_least_zero(name, length)
    for end in length.ends:
        _checks.at_least_zero(name, end)
    return length


def ratio(length: Length, other: Length) -> float:
    """length / other, a public number: a length that a device knows is only compared with others made of it."""
    if isinstance(length, LengthOnDevice):
        return length.factor / _of_one_origin(length, other).factor
    if isinstance(other, LengthOnDevice):
        _of_one_origin(other, length)  # refuses
        raise AssertionError
    return length / other


def _of_one_origin(length: LengthOnDevice, other: object) -> LengthOnDevice:
    if isinstance(other, LengthOnDevice) and other.unit is length.unit:
        return other
    raise PrivacyError(
        "a length that only the device knows meets one that is not made of it, and their ratio is not public: make "
        "noise and bounds of run.clip_norm by known factors, or read it with float(run.clip_norm), which waits for it"
    )
