"""The recommended recipe: what every door takes where nothing is said about the method.

It needs no search: the learning rate and the bands of the noise follow from public numbers. It was chosen on validation
data (`benchmarks/recipes.py`); docs/utility.md shows how it fares on test data.
"""

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final

from fodp.errors import ConfigurationError

METHOD: Final = "fo-noise"
PARAMS: Final[Mapping[str, Any]] = MappingProxyType(
    {"order": None, "shape": "fan-in", "lr": "auto", "average": "ema"}
)  # bands and their order are the plan's choice: one band, which is DP-SGD, where more do not pay


def completed(
    method: str | None, params: Mapping[str, Any], *, exact_noise: bool = False
) -> tuple[str, dict[str, Any]]:
    """A method with its parameters: as said, or without a word about the method the recipe with these parameters.

    Exact noise lies on a grid, so it has one band.
    """
    if method is not None:
        return method, dict(params)
    usual = {**PARAMS, "bands": 1} if exact_noise else dict(PARAMS)
    if "bands" in params or "order" in params:
        del usual["order"]
    _refuse_of_another(params)
    return METHOD, {**usual, **params}


def _refuse_of_another(params: Mapping[str, Any]) -> None:
    """Name the method of a parameter that is not the recipe's."""
    from fodp.methods import METHODS

    mine = {field.name for field in fields(METHODS[METHOD].Params)}
    for name in params:
        owners = [m.name for m in METHODS.values() if name in {field.name for field in fields(m.Params)}]
        if owners and name not in mine:
            raise ConfigurationError(
                f"{name} is a parameter of {', '.join(owners)}, and without a word about the method a plan takes the "
                f"recipe, which is {METHOD}: say which method"
            )
