"""The recommended recipe: what `fodp train` uses where nothing is said about the method.

It needs no search: the learning rate and the bands of the noise follow from public numbers. It was chosen on validation
data (`benchmarks/recipes.py`); docs/utility.md shows how it fares on test data.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

METHOD: Final = "fo-noise"
PARAMS: Final[Mapping[str, Any]] = MappingProxyType(
    {"order": None, "shape": "fan-in", "lr": "auto", "average": "ema"}
)  # bands and their order are the plan's choice: one band, which is DP-SGD, where more do not pay


def fitting(*, exact_noise: bool = False) -> dict[str, Any]:
    """The parameters, without what a run cannot have: exact noise lies on a grid, which takes one band."""
    params = dict(PARAMS)
    if exact_noise:
        params["bands"] = 1
    return params
