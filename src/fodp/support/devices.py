"""Devices by their names, as people write them: there, or refused in words."""

from typing import Any

import torch

from fodp.errors import ConfigurationError
from fodp.support.checks import shown


def named(name: str) -> torch.device:
    """The device of this name, such as cpu, cuda or cuda:1, if this machine and this PyTorch have it."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ConfigurationError(
            f"--device must be the name of a device, such as cpu or cuda; got {shown(name)}"
        ) from None
    if device.type == "cpu":
        return torch.device("cpu")
    module: Any = getattr(torch, device.type, None)
    try:
        count = module.device_count() if module.is_available() else 0
    except (AttributeError, RuntimeError):
        count = 0
    if (device.index or 0) >= count:
        has = f"has {count} of them" if count else "has none"
        raise ConfigurationError(
            f"--device {name}: this machine, or this build of PyTorch ({torch.__version__}), {has}: take another, "
            "or install PyTorch for it"
        )
    return device


def finish(device: torch.device) -> None:
    """Wait until a device has done what it was asked: for timings, never within a step."""
    synchronize = getattr(getattr(torch, device.type, None), "synchronize", None)
    if device.type != "cpu" and synchronize is not None:
        synchronize()
