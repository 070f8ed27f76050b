"""Norms are never less exact than the sums they bound, whatever the caller has switched on for speed.

Autocast and reduced matrix products (TF32, bfloat16) belong to the user's own code, the loss. A norm computed in
bfloat16 beside a sum in float32 bounds nothing. So what the engine computes itself runs outside of both.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

# What each library may do to float32 products, where PyTorch has a switch for it.
_EXACT = ("ieee", "none", "highest")
_CPU_SWITCHES = ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
_SWITCHES = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", *_CPU_SWITCHES)


def switched_on(device: str) -> "Caller | None":
    """What the caller has switched on at this moment that concerns this kind of device; None: nothing."""
    kinds = ("cpu",) if device == "cpu" else sorted(("cpu", device))
    autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
    products = {}
    for name in _CPU_SWITCHES if device == "cpu" else _SWITCHES:
        mode = getattr(_PLACES[name], "fp32_precision", None)
        mode = _mode_of(name) if mode is None else mode
        if mode not in _EXACT:
            products[name] = str(mode)
    return Caller(autocast, products) if autocast or products else None


class Caller:
    """What the caller has switched on: autocast by device, and how float32 products are computed."""

    def __init__(self, autocast: list[tuple[str, torch.dtype]], products: dict[str, str]):
        self._autocast, self._products = autocast, products

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Exact arithmetic."""
        with ExitStack() as stack:
            for kind, _ in self._autocast:
                stack.enter_context(torch.autocast(kind, enabled=False))
            for name in self._products:
                stack.enter_context(_switched(name, "ieee"))
            yield

    def autocast(self) -> AbstractContextManager[Any]:
        """The caller's autocast again, around the loss."""
        if not self._autocast:
            return nullcontext()
        stack = ExitStack()
        for kind, dtype in self._autocast:
            # Without its cache, which outlives a pass while the caller's autocast lasts: it would give the loss the
            # weights of an earlier step, or of another point.
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
        return stack

    def products(self) -> AbstractContextManager[Any]:
        """The caller's float32 products again, around the forward and the backward pass."""
        if not self._products:
            return nullcontext()
        stack = ExitStack()
        for name, mode in self._products.items():
            stack.enter_context(_switched(name, mode))
        return stack


def _place(name: str) -> Any:
    found: Any = torch.backends
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


_PLACES = {name: _place(name) for name in _SWITCHES}


def _mode_of(name: str) -> str:
    place = _PLACES[name]
    if hasattr(place, "fp32_precision"):
        return str(place.fp32_precision)
    # Before PyTorch 2.9 there are two switches for all.
    if name.endswith("matmul"):
        return torch.get_float32_matmul_precision()
    return "tf32" if name.startswith("cudnn") and torch.backends.cudnn.allow_tf32 else "ieee"


@contextmanager
def _switched(name: str, mode: str) -> Iterator[None]:
    before = _mode_of(name)
    _switch(name, mode)
    try:
        yield
    finally:
        _switch(name, before)


def _switch(name: str, mode: str) -> None:
    place = _PLACES[name]
    if hasattr(place, "fp32_precision"):
        place.fp32_precision = mode
    elif name.endswith("matmul"):
        torch.set_float32_matmul_precision("highest" if mode == "ieee" else mode)
    elif name.startswith("cudnn"):
        torch.backends.cudnn.allow_tf32 = mode == "tf32"
