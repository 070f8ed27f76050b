"""Checkpoints of sharded runs: a file as any other, and beside it a folder of slices, to which every rank adds its own.

The folder is one of `torch.distributed.checkpoint`, which puts slices together again for any number of ranks, and for
one that holds the model whole. It is complete and on the disk before the file names it, with the SHA-256 of each of its
files; older folders go when the file has its name. So what a file names is there, and what was damaged is refused.
"""

import hashlib
import json
import os
import pickle
import secrets
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

from fodp._checks import ConfigurationError, LedgerError
from fodp.ranks import ALONE, Alone
from fodp.ranks.shards import Shards
from fodp.training import checkpoint

if TYPE_CHECKING:
    from fodp.training.resuming import LoopKeeper
    from fodp.training.trainer import Trainer

_DIGEST = 32  # bytes
_AT_ONCE = 2**22
_PARTS = "model", "optimizer", "state"  # of a checkpoint, that have slices
_MARK = "fodp.slices"  # stands in the file for what is in the folder
# What a folder's metadata may be made of: it is a pickle, and must not run anything.
_HARMLESS = {
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.serialization",
}
_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}


_VALUES = torch.dtype, torch.layout, torch.memory_format


def save(path: Path, trainer: "Trainer", noted: Callable[[str], None] | None) -> None:
    """Write a checkpoint of a sharded run: all ranks must call it, and `noted` is the first one's."""
    shards, ranks = trainer.run.shards, trainer.run.ranks
    assert shards is not None
    with shards.in_slices():
        content, slices = checkpoint.snapshot(trainer), _Slices(shards)
        content |= {part: slices.taken_out(content[part], part) for part in _PARTS}
        folder = path.with_name(ranks.text(lambda: _begin(path)))
        _write(folder, slices.found, ranks)
    names = json.loads(ranks.text(lambda: json.dumps(sorted(file.name for file in folder.iterdir()))))
    digests = dict(zip(names, _digests(folder, names, ranks), strict=True))
    if not ranks.is_first:
        return
    content |= {"format": checkpoint.SHARDED_FORMAT, "slices": {"folder": folder.name, "files": digests}}
    try:
        checkpoint.save(path, content, noted)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _remove_others(path, folder)


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
    _refuse_damaged(folder, saved["slices"]["files"], ranks)
    found = _read(folder, shards, ranks, device)
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


def _begin(path: Path) -> str:
    """A fresh folder that its owner alone can read."""
    folder = path.with_name(f"{path.name}.slices-{secrets.token_hex(8)}")
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise checkpoint.NotWritten(
            f"the checkpoint {path} could not be written ({error.strerror or error}); the one before it is untouched"
        ) from None
    return folder.name


def _write(folder: Path, slices: dict[str, Tensor], ranks: Alone) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_slices

    try:
        with ranks.reached():
            writer = FileSystemWriter(folder, sync_files=True)
            save_slices(dict(slices), storage_writer=writer, no_dist=ranks.count == 1)
    except (CheckpointException, OSError) as error:
        if ranks.is_first:
            shutil.rmtree(folder, ignore_errors=True)
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise checkpoint.NotWritten(
            f"the slices of a checkpoint could not be written to {folder} ({reason}); the one before it is untouched: "
            "free the disk or make the folder writable by all ranks, then resume"
        ) from None
    if ranks.is_first:
        with suppress(OSError):  # not every system opens folders
            handle = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _remove_others(path: Path, kept: Path) -> None:
    for folder in path.parent.glob(f"{path.name}.slices-*"):
        if folder != kept:
            shutil.rmtree(folder, ignore_errors=True)


def _digests(folder: Path, names: list[str], ranks: Alone) -> list[str]:
    """SHA-256 of each file, or zeros where it cannot be read; every rank reads its share of them."""
    found = torch.zeros(len(names), _DIGEST, dtype=torch.float64)
    for place, name in enumerate(names):
        if place % ranks.count == ranks.rank:
            with suppress(OSError):
                found[place] = torch.frombuffer(bytearray(_digest(folder / name)), dtype=torch.uint8)
    return [bytes(row).hex() for row in ranks.added(found).to(torch.uint8).tolist()]


def _digest(file: Path) -> bytes:
    state = hashlib.sha256()
    with file.open("rb") as opened:
        while part := opened.read(_AT_ONCE):
            state.update(part)
    return state.digest()


def _refuse_damaged(folder: Path, files: dict[str, str], ranks: Alone) -> None:
    names = sorted(files)
    for name, found in zip(names, _digests(folder, names, ranks), strict=True):
        if found != files[name]:
            raise LedgerError(
                f"{folder / name}, a part of the checkpoint, is missing, damaged or was changed (its digest differs), "
                "or a rank cannot read it: restore a copy of the folder, which all ranks must see"
            )


class _Harmless(pickle.Unpickler):
    """Reads what a folder's metadata is made of, and refuses whatever else a pickle could do."""

    def find_class(self, module: str, name: str) -> Any:
        found = None
        if module in _HARMLESS or (module, name) in _NAMES:
            found = super().find_class(module, name)
        elif module == "torch" and isinstance(getattr(torch, name, None), _VALUES):
            return getattr(torch, name)
        if found is None or not (isinstance(found, type) or (module, name) in _NAMES):
            raise LedgerError(f"the slices' metadata names {module}.{name}, which has no place in it: restore a copy")
        return found


def _reader(folder: Path) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with (folder / ".metadata").open("rb") as file:
                found = _unpickled(file)
            if getattr(found, "storage_meta", None) is None:
                found.storage_meta = StorageMeta()
            found.storage_meta.load_id = self.load_id
            return found

    return Reader(folder)


def _unpickled(file: IO[bytes]) -> Any:
    return _Harmless(file).load()


def _read(folder: Path, shards: Shards | None, ranks: Alone, device: torch.device) -> dict[str, Tensor]:
    """Everything in the folder: whole, or divided as these shards are."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load as load_slices

    reader, wanted = _reader(folder), dict[str, Tensor]()
    for key, known in reader.read_metadata().state_dict_metadata.items():
        shape, dtype = known.size, known.properties.dtype
        wanted[key] = torch.empty(shape, dtype=dtype, device=device) if shards is None else shards.empty(shape, dtype)
    try:
        with ranks.reached(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*load in a single process")  # which is meant
            load_slices(wanted, storage_reader=reader, no_dist=shards is None or ranks.count == 1)
    except (CheckpointException, OSError) as error:
        raise LedgerError(f"{folder} could not be read ({error}): restore a copy of it") from None
    return wanted
