"""Checkpoints of sharded runs: a file as any other, and beside it a folder of slices, to which every rank adds its own.

The folder is one of `torch.distributed.checkpoint`, which puts slices together again for any number of ranks, and for
one that holds the model whole. It is complete and on the disk before the file names it, with the SHA-256 of each of its
files; older folders go when the file has its name. So what a file names is there, and what was damaged is refused.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fodp._checks import ConfigurationError, PrivacyError
from fodp.ranks import ALONE, Alone
from fodp.ranks.shards import Shards
from fodp.training import checkpoint, slice_files

if TYPE_CHECKING:
    from fodp.training.resuming import LoopKeeper
    from fodp.training.trainer import Trainer

_PARTS = "model", "optimizer", "state"  # of a checkpoint, that have slices
_MARK = "fodp.slices"  # stands in the file for what is in the folder


def save(path: Path, trainer: "Trainer", noted: Callable[[str], None] | None) -> None:
    """Write a checkpoint of a sharded run: all ranks must call it, and `noted` is the first one's."""
    shards, ranks = trainer.run.shards, trainer.run.ranks
    assert shards is not None
    with ranks.together(), shards.in_slices():
        content, slices = checkpoint.snapshot(trainer), _Slices(shards)
        content |= {part: slices.taken_out(content[part], part) for part in _PARTS}
        folder, digests = _written(path, slices.found, ranks)
    if not ranks.is_first:
        return
    content |= {"format": checkpoint.SHARDED_FORMAT, "slices": {"folder": folder.name, "files": digests}}
    try:
        checkpoint.save(path, content, noted)
    except BaseException:
        if not _is_named(path, folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    slice_files.remove_others(path, folder)


def _written(path: Path, slices: dict[str, Tensor], ranks: Alone) -> tuple[Path, dict[str, str]]:
    """The folder with all ranks' slices, on the disk, and the digests of its files."""
    folder = path.with_name(ranks.text(lambda: slice_files.begin(path)))
    slice_files.write(folder, slices, ranks)
    names = json.loads(ranks.text(lambda: json.dumps(slice_files.files(folder))))
    digests = dict(zip(names, slice_files.digests(folder, names, ranks), strict=True))
    unread = [name for name, digest in digests.items() if not int(digest, 16)]
    if unread:
        raise checkpoint.NotWritten(
            f"{folder / unread[0]} was written, and another rank cannot read it: choose a folder that all ranks see; "
            "the checkpoint before it is untouched"
        )
    return folder, digests


def _is_named(path: Path, folder: Path) -> bool:
    """Whether the file may need this folder: it may have got its name before something failed."""
    try:
        return path.exists() and checkpoint.load(path).get("slices", {}).get("folder") == folder.name
    except PrivacyError:
        return True


def fitted(saved: dict[str, Any], path: Path, trainer: "Trainer | LoopKeeper") -> dict[str, Any]:
    """What a checkpoint holds, in the form of this run: whole, or this rank's slices, whatever it was when saved."""
    run = trainer.run
    if "slices" in saved:
        return _with_slices(saved, path, run.shards, run.ranks, run.engine.layout.device)
    return saved if run.shards is None else saved | _cut(saved, trainer)


def whole(saved: dict[str, Any], path: Path) -> dict[str, Any]:
    """What a checkpoint holds, all of it, for a process that has no run."""
    return _with_slices(saved, path, None, ALONE, torch.device("cpu")) if "slices" in saved else saved


def _with_slices(
    saved: dict[str, Any], path: Path, shards: Shards | None, ranks: Alone, device: torch.device
) -> dict[str, Any]:
    folder = path.with_name(str(saved["slices"]["folder"]))
    slice_files.refuse_damaged(folder, saved["slices"]["files"], ranks)
    found = slice_files.read(folder, shards, ranks, device)
    return saved | {part: _put_back(saved[part], found) for part in _PARTS}


class _Slices:
    """What is taken out of a checkpoint's content, by the key that stays in it: tensors divided as parameters are."""

    def __init__(self, shards: Shards):
        self._shards, self.found = shards, dict[str, Tensor]()

    def taken_out(self, value: Any, key: str) -> Any:
        """The value with marks for slices."""
        if isinstance(value, dict):
            kept = {name: self.taken_out(part, f"{key}/{name}") for name, part in value.items()}
            return type(value)(kept) if type(value) is dict else kept
        if isinstance(value, list | tuple):
            return type(value)(self.taken_out(part, f"{key}/{i}") for i, part in enumerate(value))
        if not isinstance(value, Tensor):
            return value
        if hasattr(value, "to_local"):
            self.found[key] = value.detach()
            return {_MARK: "parameter", "key": key}
        if key.startswith("optimizer/state/") and value.numel() > 1:  # the file would have the first rank's for all
            raise ConfigurationError(
                f"{key} is a plain tensor of shape {tuple(value.shape)}, of which each rank may have its own, and no "
                "checkpoint of a sharded run can hold it: let the optimizer keep tensors divided as parameters are "
                "(torch.zeros_like(parameter)), or numbers"
            )
        if not key.startswith("state/"):
            return value
        if value.shape != (self._shards.slices.size,):
            raise ConfigurationError(
                f"{key} is a tensor of shape {tuple(value.shape)}, and a sharded run keeps flat vectors of a release's "
                "form alone: keep numbers as floats"
            )
        parts = value.detach().split(list(self._shards.slices.sizes))
        for i, (parameter, part) in enumerate(zip(self._shards.trained, parts, strict=True)):
            self.found[f"{key}/{i}"] = self._shards.like(parameter, part)
        return {_MARK: "vector", "key": key, "parts": len(parts)}


def _put_back(value: Any, found: dict[str, Tensor]) -> Any:
    if isinstance(value, dict) and _MARK in value:
        key = str(value["key"])
        if value[_MARK] == "parameter":
            return found[key]
        parts: list[Any] = [found[f"{key}/{i}"] for i in range(int(value["parts"]))]
        return torch.cat([(part.to_local() if hasattr(part, "to_local") else part).reshape(-1) for part in parts])
    if isinstance(value, dict):
        return {name: _put_back(part, found) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_put_back(part, found) for part in value)
    return value


def _cut(saved: dict[str, Any], trainer: "Trainer | LoopKeeper") -> dict[str, Any]:
    """The slices of a checkpoint that holds everything."""
    shards = trainer.run.shards
    assert shards is not None

    def like(parameter: Any, whole: Any) -> Any:
        if not hasattr(parameter, "to_local") or not isinstance(whole, Tensor) or whole.shape != parameter.shape:
            return whole  # what does not fit is refused where it is loaded
        return shards.like(parameter, shards.rows(whole).contiguous())

    def vector(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: vector(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(vector, value))
        is_whole = isinstance(value, Tensor) and value.shape == (shards.slices.ranges.size,)
        return shards.slices.cut(value) if is_whole else value

    model, optimizer = trainer.model.state_dict(), saved["optimizer"]
    held = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    moments = {
        place: {name: like(held[place], part) for name, part in state.items()} if place < len(held) else state
        for place, state in optimizer["state"].items()
    }
    return {
        "model": {name: like(model.get(name), part) for name, part in saved["model"].items()},
        "optimizer": optimizer | {"state": moments},
        "state": vector(saved["state"]),
    }
