"""The folder of slices beside a sharded run's checkpoint: written by all ranks, hashed, read without running code."""

import glob
import hashlib
import pickle
import secrets
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fodp._checks import LedgerError
from fodp._files import atomically
from fodp.ranks import Alone
from fodp.ranks.shards import Shards
from fodp.training.checkpoint import NotWritten

_DIGEST = 32  # bytes
_AT_ONCE = 2**22
_ABOUT = ".metadata"  # PyTorch's own file about the others
# What that file may be made of: it is a pickle, and must not run anything.
_VALUES = torch.dtype, torch.layout, torch.memory_format
_METADATA = "torch.distributed.checkpoint.metadata"
_HARMLESS = {
    *((_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")),
    *((_METADATA, name) for name in ("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *(("pathlib", name) for name in ("PosixPath", "WindowsPath")),
}


def begin(path: Path) -> str:
    """A fresh folder that its owner alone can read."""
    folder = path.with_name(f"{path.name}.slices-{secrets.token_hex(8)}")
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise NotWritten(
            f"the checkpoint {path} could not be written ({error.strerror or error}); the one before it is untouched"
        ) from None
    return folder.name


def files(folder: Path) -> list[str]:
    """The names of all files, which all must be here by now."""
    there = {file.name for file in folder.iterdir()}
    missing = {part.relative_path for part in about(folder).storage_data.values()} - there
    if missing:
        raise NotWritten(
            f"another rank wrote {min(missing)}, which is not in {folder} here: choose a folder that all ranks see; "
            "the checkpoint before it is untouched"
        )
    return sorted(there)


def write(folder: Path, slices: dict[str, Tensor], ranks: Alone) -> None:
    """Each rank its slices, on the disk when it returns; all must call it."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_slices

    try:
        with ranks.reached():
            writer = FileSystemWriter(folder, sync_files=True)
            save_slices(dict(slices), storage_writer=writer, no_dist=ranks.count == 1)
        if ranks.is_first:
            _forget_where(folder)  # and makes the folder itself durable
    except (CheckpointException, OSError) as error:
        if ranks.is_first:
            shutil.rmtree(folder, ignore_errors=True)
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise NotWritten(
            f"the slices of a checkpoint could not be written to {folder} ({reason}); the one before it is untouched: "
            "free the disk or make the folder writable by all ranks, then resume"
        ) from None


def remove_others(path: Path, kept: Path) -> None:
    """Remove what earlier checkpoints of this name had."""
    for folder in path.parent.glob(f"{glob.escape(path.name)}.slices-*"):
        if folder != kept:
            shutil.rmtree(folder, ignore_errors=True)


def digests(folder: Path, names: list[str], ranks: Alone) -> list[str]:
    """SHA-256 of each file, or zeros where it cannot be read; every rank reads its share of them."""
    found = torch.zeros(len(names), _DIGEST, dtype=torch.float64)
    for place, name in enumerate(names):
        if place % ranks.count == ranks.rank:
            with suppress(OSError):
                found[place] = torch.frombuffer(bytearray(digest(folder / name)), dtype=torch.uint8)
    return [bytes(row).hex() for row in ranks.added(found).to(torch.uint8).tolist()]


def digest(file: Path) -> bytes:
    """SHA-256 of a file."""
    state = hashlib.sha256()
    with file.open("rb") as opened:
        while part := opened.read(_AT_ONCE):
            state.update(part)
    return state.digest()


def refuse_damaged(folder: Path, files: dict[str, str], ranks: Alone) -> None:
    """Raise, on all ranks alike, unless every file is there and has its digest."""
    names = sorted(files)
    for name, found in zip(names, digests(folder, names, ranks), strict=True):
        if found != files[name]:
            raise LedgerError(
                f"{folder / name}, a part of the checkpoint, is missing, damaged or was changed (its digest differs), "
                "or a rank cannot read it: restore a copy of the folder, which all ranks must see"
            )


class _Harmless(pickle.Unpickler):
    """Reads what a folder's metadata is made of, and refuses whatever else a pickle could do."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _HARMLESS:
            return super().find_class(module, name)
        if module == "torch" and isinstance(value := getattr(torch, name, None), _VALUES):
            return value
        raise LedgerError(f"the slices' metadata names {module}.{name}, which has no place in it: restore a copy of it")


def _reader(folder: Path) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            found = about(folder)
            found.storage_meta = StorageMeta(load_id=self.load_id)
            return found

    return Reader(folder)


def about(folder: Path) -> Any:
    """What PyTorch has noted of the files, which all lie in the folder."""
    with (folder / _ABOUT).open("rb") as file:
        found = _Harmless(file).load()
    outside = [
        part.relative_path
        for part in found.storage_data.values()
        if Path(part.relative_path).name != part.relative_path
    ]
    if outside:
        raise LedgerError(f"{folder} names a file outside of it, {outside[0]!r}: restore a copy of it")
    return found


def _forget_where(folder: Path) -> None:
    """PyTorch notes the folder's whole path, which is nobody's business; the rest is written again without it."""
    found = about(folder)
    found.storage_meta = None
    with atomically(folder / _ABOUT) as part:
        part.write_bytes(pickle.dumps(found))


def read(folder: Path, shards: Shards | None, ranks: Alone, device: torch.device) -> dict[str, Tensor]:
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
