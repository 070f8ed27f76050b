"""`--features`: train on public features of the records instead of the records (docs/features.md)."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fodp.errors import ConfigurationError
from fodp.support import checks

if TYPE_CHECKING:
    from torch import nn

    from fodp.data import Card, Splits

IMAGE_SIDE = 160  # what efficientnet-lite0 is given unless --image-size says otherwise
_FOURIER = 1024
# What each says it rests on.
_PUBLIC = {
    "efficientnet-lite0": "weights trained on ImageNet-1k",
    "scattering": "fixed wavelets, no weights",
    "fourier": "directions drawn from a public seed",
}


def applied(config: dict[str, Any], splits: "Splits", cache_folder: str | None, *, quiet: bool) -> "Splits":
    """The splits with features in place of records, if the configuration asks for them."""
    if "features" not in config:
        if "image_size" in config:
            raise ConfigurationError("--image-size is for --features efficientnet-lite0")
        return splits
    from torch.utils.data import TensorDataset

    from fodp.features import features

    name = config["features"]
    _refuse_odd(config, splits.card)
    module = _module(config, splits.card)
    cache = Path(cache_folder or _cache_folder())
    public = _PUBLIC.get(name, "a module of yours, whose weights must be public")
    print(
        f"fodp: training on public features: {name} ({public}). They are kept in {cache}, as private as the data",
        file=sys.stderr,
    )

    def made(part: TensorDataset) -> TensorDataset:
        return features(part, module, cache=cache, batch=8, progress=not quiet)

    train = made(splits.train)
    empty = TensorDataset(*(tensor[:0] for tensor in train.tensors))
    validation, test = (made(part) if len(part) else empty for part in (splits.validation, splits.test))
    card = replace(
        splits.card,
        description=f"{name} features of {splits.card.name}",
        shape=tuple(train.tensors[0].shape[1:]),
        scale=1.0,
        mean=(0.0,),
        std=(1.0,),
        constants=f"features that {name} makes of each record by itself",
        mirrored=False,
    )
    return replace(splits, card=card, train=train, validation=validation, test=test)


def _refuse_odd(config: dict[str, Any], card: "Card") -> None:
    if card.schema is not None:
        raise ConfigurationError("--features is for images, arrays and named data sets; for a table use fodp.features")
    if "augment" in config:
        raise ConfigurationError("--augment changes records in each step, --features makes them once: leave one out")
    if "public_sample" in config:
        raise ConfigurationError("--public-sample holds records, --features makes others of the data: leave one out")
    if "image_size" in config and config["features"] != "efficientnet-lite0":
        raise ConfigurationError("--image-size is for --features efficientnet-lite0")


def _module(config: dict[str, Any], card: "Card") -> "nn.Module":
    """The module, in the same state each time: what is drawn for it comes from one public seed."""
    import torch
    from torch import nn

    from fodp.data.models import build
    from fodp.features import Grouped, PerExample, Prepared, RandomFourier, Scattering, efficientnet_lite0
    from fodp.features.efficientnet_lite import MEAN, STD

    name = config["features"]
    if name == "fourier":
        return RandomFourier(card.features, _FOURIER)
    if name == "scattering":
        _, height, width = _image_shape(name, card)
        return nn.Sequential(Scattering((height, width)), Grouped(27))
    if name == "efficientnet-lite0":
        if _image_shape(name, card)[0] not in (1, 3) or not card.is_uint8:
            raise ConfigurationError(f"{name} wants grey or colour images as uint8, and {card.name} has others")
        side = checks.whole("--image-size", config.get("image_size", IMAGE_SIDE), minimum=32, maximum=1024)
        words: dict[str, Any] = dict(mean=card.mean, std=card.std, wants_mean=MEAN, wants_std=STD)
        return nn.Sequential(Prepared(efficientnet_lite0(), side=side, **words), PerExample())
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        file, colon, function = name.partition(":")
        if not (file and colon and function):
            raise ConfigurationError(
                f"--features must be one of {', '.join(_PUBLIC)} or FILE.py:FUNCTION, which returns a module; got "
                f"{checks.shown(name)}"
            )
        return build(f"{file.removesuffix('.py').replace('/', '.')}:{function}", card)


def _image_shape(name: str, card: "Card") -> tuple[int, ...]:
    if len(card.shape) != 3:
        raise ConfigurationError(f"--features {name} is for images, and {card.name} has records of shape {card.shape}")
    return card.shape


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fodp" / "features"
