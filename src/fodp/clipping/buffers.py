"""A model's buffers leave with it, and no noise protects them: a private pass must leave them as they were."""

import operator
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from fodp.clipping.reach import modules_of as modules_of
from fodp.clipping.remembered import KeptOutside, Outside
from fodp.errors import PrivacyError
from fodp.support.torch_internals import has_buffers, own_buffers, versions


class KeptBuffers:
    """A model's buffers as they are now, to be compared after passes over private data.

    Any change is refused, not only one that looks like a statistic: even a count of passes tells how many examples
    were drawn. `parameters` are all of the model's, or none: they are watched for being written to in place (comparing
    them would cost), and for being others, frozen ones too, which leave with the model as buffers do.
    `alone` leaves out its parts; `who` is what messages call the model.
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[Tensor] = (), alone: bool = False, who: str = "the model"
    ):
        self._model, self._alone, self._who = model, alone, who
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        if has_buffers(model):
            self._before = {name: (buffer, buffer.detach().clone()) for name, buffer in self._now().items()}
        self._parameters, self._versions = parameters, versions(parameters) if parameters else []

    def refuse_changes(self) -> None:
        """Put back whatever has changed, and raise if anything has."""
        if self._parameters:
            if versions(self._parameters) != self._versions:
                raise self._written_parameter()
            now = tuple(self._model.parameters())
            if len(now) != len(self._parameters) or any(map(operator.is_not, now, self._parameters)):
                raise self._other_parameter()
        changed = self.restore()
        if changed:
            raise PrivacyError(
                f"{self._who} writes into the buffer {changed[0]} when it sees examples (their statistics, or a count "
                "of passes), and buffers leave with the model while no noise protects them: leave that out, freeze "
                "that part in evaluation mode, or fill a cache before training on made-up data"
            )

    def restore(self) -> list[str]:
        """Put back whatever has changed; returns its names."""
        if not self._before and not has_buffers(self._model):
            return []
        now = self._now()
        kept = [name for name in self._before if name in now]
        same = dict(zip(kept, _all_same([(now[name], self._before[name][1]) for name in kept]), strict=True))
        changed = [name for name in self._before if not same.get(name, False)]
        changed += [name for name in now if name not in self._before]
        for name in changed:
            path, _, key = name.rpartition(".")
            buffers = own_buffers(self._model.get_submodule(path))
            if name not in self._before:
                del buffers[key]
                continue
            buffer, copy = self._before[name]
            buffers[key] = buffer
            with torch.no_grad():
                buffer.copy_(copy)
        return changed

    def _now(self) -> dict[str, Tensor]:
        return dict(self._model.named_buffers(recurse=not self._alone))

    def _other_parameter(self) -> PrivacyError:
        known = {id(parameter) for parameter in self._parameters}
        names = (name for name, parameter in self._model.named_parameters() if id(parameter) not in known)
        return PrivacyError(
            f"{self._who} has another parameter, {next(names, 'one less')}, than before it saw examples, and no noise "
            "protects what a pass puts there: add and replace parameters before a step, and start again with a fresh "
            "model, since this one may hold something of examples"
        )

    def _written_parameter(self) -> PrivacyError:
        now = zip(self._parameters, versions(self._parameters), self._versions, strict=True)
        written = {id(parameter) for parameter, version, before in now if version != before}
        name = next((n for n, p in self._model.named_parameters() if id(p) in written), "that it no longer has")
        return PrivacyError(
            f"{self._who} writes into the parameter {name} when it sees examples, and no noise protects that: leave it "
            "out, and start again with fresh weights, since these hold it"
        )


class KeptState:
    """The buffers of a model, and what its loss or augmentation can reach beside it, through private passes."""

    def __init__(self, model: nn.Module, beside: Sequence[nn.Module | Outside], parameters: Sequence[Tensor] = ()):
        self._kept: list[KeptBuffers | KeptOutside] = [KeptBuffers(model, parameters)]
        for part in beside:
            if isinstance(part, nn.Module):
                self._kept.append(KeptBuffers(part, who=_beside(part)))
            elif not part.found.is_empty:
                self._kept += [KeptBuffers(module, who=_beside(module)) for module in part.found.modules]
                self._kept += [KeptBuffers(module, alone=True, who=_beside(module)) for module in part.found.shells]
                self._kept.append(KeptOutside(part))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Un-noised statistics must not outlive a step that broke off."""
        if error is not None:
            self.restore()

    def refuse_changes(self) -> None:
        """Put back whatever was written into, and raise if anything was."""
        for kept in self._kept:
            kept.refuse_changes()

    def restore(self) -> None:
        """Put back whatever has changed."""
        for kept in self._kept:
            kept.restore()


def _beside(module: nn.Module) -> str:
    return f"{type(module).__name__}, beside the model,"


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
