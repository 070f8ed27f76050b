"""From the norm of an example's gradient to its weight: clipped as a whole, by layer, or all brought to one norm."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fodp import gradients
from fodp.errors import ConfigurationError
from fodp.options.option import Option
from fodp.support import checks

# Places of a layer's parameters in the flat vector, and the layer's share of the clip norm; squared shares sum to 1.
Layers = tuple[tuple[tuple[int, ...], float], ...]


class Clip(Option):
    """How one example's gradient is brought to the clip norm C."""

    def rule(self, names: Sequence[str]) -> gradients.ClipRule:
        """The rule for a model whose trainable parameters have these names."""
        return gradients.FLAT


@dataclass(frozen=True)
class Flat(Clip):
    """A gradient g that is longer than C becomes C·g/‖g‖."""


@dataclass(frozen=True)
class Normalised(Clip):
    """Every gradient g becomes C·g/(‖g‖ + `clip_stability`), so that C drops out but for the rate.

    Bu et al., Automatic Clipping, NeurIPS 2023.
    """

    clip_stability: float = 0.01

    def __post_init__(self) -> None:
        checks.positive("clip_stability", self.clip_stability)

    def rule(self, names: Sequence[str]) -> gradients.ClipRule:
        return gradients.Normalised(self.clip_stability)


@dataclass(frozen=True)
class PerLayer(Clip):
    """Each module's part is clipped by itself, with shares w_b of the clip norm in the ratio of `layer_shares`.

    Layer b is cut to C_b = C·w_b with Σ w_b² = 1, so that a whole gradient has norm √(Σ C_b²) = C at most: bound,
    noise and events are those of flat clipping. Shares are public: equal if none are given, else one for each layer.
    """

    layer_shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_shares", checks.numbers("layer_shares", self.layer_shares))
        for share in self.layer_shares:
            checks.positive("each of layer_shares", share)

    def rule(self, names: Sequence[str]) -> gradients.ClipRule:
        return gradients.ByLayer(self.groups(names))

    def groups(self, names: Sequence[str]) -> Layers:
        """The parameters of one module, without those of its children, are one layer."""
        modules: dict[str, list[int]] = {}
        for place, name in enumerate(names):
            modules.setdefault(name.rpartition(".")[0], []).append(place)
        shares = self.layer_shares or (1.0,) * len(modules)
        if len(shares) != len(modules):
            raise ConfigurationError(
                f"layer_shares has {len(shares)} numbers, and the model has {len(modules)} layers with trainable "
                f"parameters ({', '.join(list(modules)[:6])}…): give one for each"
            )
        # Rounded down, so that the squares never sum to more than one.
        whole = math.sqrt(math.fsum(share * share for share in shares)) * (1 + 1e-15)
        return tuple((tuple(places), share / whole) for places, share in zip(modules.values(), shares, strict=True))
