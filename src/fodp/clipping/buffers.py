"""A model's buffers leave with it, and no noise protects them: a private pass must leave them as they were."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from fodp.clipping.reach import modules_of as modules_of
from fodp.clipping.remembered import KeptOutside, Outside
from fodp.errors import PrivacyError


class KeptBuffers:
    """A model's buffers as they are now, to be compared after passes over private data.

    Any change is refused, not only one that looks like a statistic: even a count of passes tells how many examples
    were drawn. `parameters` are watched too, but only for being written to in place: comparing them would cost.
    `alone` leaves out its parts.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[Tensor] = (), alone: bool = False):
        self._model, self._alone = model, alone
        self._before = {name: (buffer, buffer.detach().clone()) for name, buffer in _buffers(model, alone).items()}
        self._versions = [(parameter, parameter._version) for parameter in parameters]

    def refuse_changes(self, who: str = "the model") -> None:
        """Put back whatever has changed, and raise if anything has."""
        self._refuse_written_parameters(who)
        changed = self.restore()
        if changed:
            raise PrivacyError(
                f"{who} writes into the buffer {changed[0]} when it sees examples (their statistics, or a count of "
                "passes), and buffers leave with the model while no noise protects them: leave that out, freeze that "
                "part in evaluation mode, or fill a cache before training on made-up data"
            )

    def restore(self) -> list[str]:
        """Put back whatever has changed; returns its names."""
        now = _buffers(self._model, self._alone)
        kept = [name for name in self._before if name in now]
        same = dict(zip(kept, _all_same([(now[name], self._before[name][1]) for name in kept]), strict=True))
        changed = [name for name in self._before if not same.get(name, False)]
        changed += [name for name in now if name not in self._before]
        for name in changed:
            path, _, key = name.rpartition(".")
            buffers = self._model.get_submodule(path)._buffers
            if name not in self._before:
                del buffers[key]
                continue
            buffer, copy = self._before[name]
            buffers[key] = buffer
            with torch.no_grad():
                buffer.copy_(copy)
        return changed

    def _refuse_written_parameters(self, who: str) -> None:
        written = [id(parameter) for parameter, version in self._versions if parameter._version != version]
        if written:
            name = next((n for n, p in self._model.named_parameters() if id(p) in written), "that it no longer has")
            raise PrivacyError(
                f"{who} writes into the parameter {name} when it sees examples, and no noise protects that: leave it "
                "out, and start again with fresh weights, since these hold it"
            )


class KeptState:
    """The buffers of a model, and what its loss or augmentation can reach beside it, through private passes."""

    def __init__(self, model: nn.Module, beside: Sequence[nn.Module | Outside], parameters: Sequence[Tensor] = ()):
        self._kept = [("the model", KeptBuffers(model, parameters))]
        self._outside: list[KeptOutside] = []
        for part in beside:
            if isinstance(part, nn.Module):
                self._kept.append((_beside(part), KeptBuffers(part)))
                continue
            self._outside.append(KeptOutside(part))
            self._kept += [(_beside(module), KeptBuffers(module)) for module in part.found.modules]
            self._kept += [(_beside(module), KeptBuffers(module, alone=True)) for module in part.found.shells]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Un-noised statistics must not outlive a step that broke off."""
        if error is not None:
            self.restore()

    def refuse_changes(self) -> None:
        """Put back whatever was written into, and raise if anything was."""
        for who, buffers in self._kept:
            buffers.refuse_changes(who)
        for kept in self._outside:
            kept.refuse_changes()

    def restore(self) -> None:
        """Put back whatever has changed."""
        for _, buffers in self._kept:
            buffers.restore()
        for kept in self._outside:
            kept.restore()


def _beside(module: nn.Module) -> str:
    return f"{type(module).__name__}, beside the model,"


def _buffers(model: nn.Module, alone: bool = False) -> dict[str, Tensor]:
    return dict(model.named_buffers(recurse=not alone)) if _has_buffers(model) else {}


def _has_buffers(module: nn.Module) -> bool:
    """Asked twice in every step, so without PyTorch's way through all modules by name."""
    return bool(module._buffers) or any(_has_buffers(part) for part in module._modules.values() if part is not None)


def _all_same(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Which are the same; of those on another device than the CPU in one look, for which the host waits."""
    found = [False] * len(pairs)
    there: dict[torch.device, list[int]] = {}
    for place, (now, before) in enumerate(pairs):
        is_plain = now.layout == before.layout == torch.strided and now.device == before.device
        if is_plain and not now.is_cpu and now.shape == before.shape and now.dtype == before.dtype:
            there.setdefault(now.device, []).append(place)
        else:
            found[place] = _same(now, before)
    for places in there.values():
        for place, same in zip(places, torch.stack([_equal(*pairs[p]) for p in places]).tolist(), strict=True):
            found[place] = same
    return found


def _equal(now: Tensor, before: Tensor) -> Tensor:
    return ((now == before) | ((now != now) & (before != before))).all()  # NaN is NaN


def _same(now: Tensor, before: Tensor) -> bool:
    if now.shape != before.shape or now.dtype != before.dtype or now.layout != before.layout:
        return False
    if now.layout != torch.strided:
        ours, theirs = (tensor.to_sparse_coo().coalesce() for tensor in (now, before))
        return _same(ours.indices(), theirs.indices()) and _same(ours.values(), theirs.values())
    return torch.equal(now, before) or bool(_equal(now, before))
