"""Per-layer clipping: each layer's part of an example's gradient is cut to a public share of the clip norm."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fodp import _checks
from fodp._checks import ConfigurationError

# Places of a layer's parameters in the flat vector, and the layer's share of the clip norm; squared shares sum to 1.
Layers = tuple[tuple[tuple[int, ...], float], ...]


@dataclass(frozen=True, kw_only=True)
class PerLayer:
    """The choice to clip layer by layer, with shares w_b of the clip norm in the ratio of `layer_shares`.

    Layer b is cut to C_b = C·w_b with Σ w_b² = 1, so that a whole gradient has norm √(Σ C_b²) = C at most: bound,
    noise and events are those of flat clipping. Shares are public: equal if none are given, else one for each layer.
    """

    layer_shares: tuple[float, ...]

    def __post_init__(self) -> None:
        for share in self.layer_shares:
            _checks.positive("each of layer_shares", share)

    def groups(self, names: Sequence[str]) -> Layers:
        """The layers of a model whose trainable parameters have these names: a module's own parameters are one."""
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
