"""Features of a data set by a frozen public module, computed once and kept on disk."""

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fodp.errors import ConfigurationError, DataError, PrivacyError
from fodp.support import checks

_CHUNK = 1000  # records of a file, and of the steps of the progress bar
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_ROUNDING = 1e-3  # of the largest feature; products of other sizes round otherwise


def features(
    dataset: Dataset[Any],
    module: nn.Module,
    transform: Callable[[Any], Tensor] | None = None,
    *,
    cache: str | Path | None = None,
    batch: int = 16,
    device: str | torch.device = "cpu",
    progress: bool = True,
) -> TensorDataset:
    """Compute what a frozen public module makes of each record, for private training on top of it.

    Guarantee: the features of a record depend on this record alone: the module works without gradients, in evaluation
    mode, and in every chunk a record is computed alone, too, and compared. Its weights must be public: trained on data
    that is not the private data, nor chosen by looking at it. That is the caller's statement; nothing can check it.

    The features are as private as the data. The cache holds them: its folder and files can be read by their owner only
    (modes 700 and 600), and its file names are checksums of the data. Delete it when the data is deleted.

    Args:
        dataset: records (input, target, …), by number; the targets become tensors.
        module: any `nn.Module` that makes one tensor of a batch of inputs: timm's, transformers' (`pooler_output` is
            taken where several tensors come back), your own. It is left as it was.
        transform: makes one input into the tensor that the module takes; None: the input is that already.
        cache: folder for computed chunks, by checksums of the module (weights, code, settings) and of its inputs.
            What is there is not computed again, so a broken-off computation goes on where it stopped.
        batch: inputs at a time.
        device: where to compute; features come back to the CPU.
        progress: show a bar on stderr.

    Returns:
        A `TensorDataset` of (features as float32, targets, …), in the order of the data set.

    Raises:
        PrivacyError: the module makes other features of a record in other company (BatchNorm without statistics).
        DataError: features are not finite, or are not one row per record.

    Example:
        >>> data = TensorDataset(torch.rand(10, 1, 8, 8), torch.arange(10))
        >>> found = features(data, nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten()), progress=False)
        >>> found.tensors[0].shape, found.tensors[1].shape
        (torch.Size([10, 144]), torch.Size([10]))
    """
    checks.whole("batch", batch)
    if not isinstance(module, nn.Module):
        raise ConfigurationError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    size = len(dataset)  # type: ignore[arg-type]
    if not size:
        raise DataError("the data set has no records to make features of")
    folder = _folder(cache)
    mark = fingerprint(module) if folder is not None else ""
    rows: list[Tensor] = []
    others: list[tuple[Tensor, ...]] = []
    with _frozen(module, device), _bar(size, progress) as advance:
        for start in range(0, size, _CHUNK):
            inputs, rest = _read(dataset, start, min(start + _CHUNK, size), transform)
            file = None if folder is None else folder / f"{_chunk_mark(mark, inputs)}.npy"
            found = None if file is None else _kept(file, len(inputs))
            if found is None:
                found = _computed(module, inputs, batch, device)
                if file is not None:
                    _keep(file, found)
            rows.append(found)
            others.append(rest)
            advance(len(inputs))
    return TensorDataset(torch.cat(rows), *(torch.cat(parts) for parts in zip(*others, strict=True)))


def fingerprint(module: nn.Module) -> str:
    """A checksum of what a module computes: its weights and buffers, the source of its classes, their settings.

    Example:
        >>> fingerprint(nn.Linear(2, 2)) == fingerprint(nn.Linear(2, 2))  # other weights
        False
    """
    digest = hashlib.sha256(torch.__version__.encode())
    for name, part in module.named_modules():
        kind = type(part)
        settings = [
            f"{key}={_named(value)}"
            for key, value in sorted(vars(part).items())
            if key not in _OF_EVERY_MODULE or ("hooks" in key and value)
        ]
        digest.update(f"{name}|{kind.__module__}.{kind.__qualname__}|{_source(kind)}|{settings}".encode())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):  # a state dict leaves buffers out
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _named(value: object) -> str:
    """A setting as text; with an address in it where it is no plain value, so that it is known to this process only."""
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, FunctionType) else repr(value)


def _source(kind: type) -> str:
    """The code of a class that is not PyTorch's, whose version is known."""
    import inspect

    if kind.__module__.startswith("torch."):
        return ""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # made in a prompt
        raise ConfigurationError(
            f"the code of {kind.__qualname__} cannot be read, so features of it cannot be told from those of another "
            "version: put the class into a file, or give no cache"
        ) from None


def _bytes(tensor: Tensor) -> Any:
    """The memory of a tensor, as hashes take it."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def _chunk_mark(mark: str, inputs: Tensor) -> str:
    digest = hashlib.sha256(f"{mark}|{inputs.dtype}|{tuple(inputs.shape)}".encode())
    digest.update(_bytes(inputs))
    return digest.hexdigest()


@contextmanager
def _frozen(module: nn.Module, device: str | torch.device) -> Iterator[None]:
    """Evaluation mode and no gradients, on a device; everything is put back."""
    training = [part for part in module.modules() if part.training]
    homes = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    module.eval().to(device)
    try:
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True
        if len(homes) == 1:
            module.to(homes.pop())


def _read(
    dataset: Any, start: int, stop: int, transform: Callable[[Any], Tensor] | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Inputs of some records, as the module takes them, and what else the records hold."""
    if isinstance(dataset, TensorDataset):
        inputs, *rest = (tensor[start:stop] for tensor in dataset.tensors)
        return (inputs if transform is None else torch.stack([transform(each) for each in inputs])), tuple(rest)
    records = [dataset[place] for place in range(start, stop)]
    if not isinstance(records[0], tuple | list):
        raise DataError(f"records must be (input, target, …), got {type(records[0]).__name__}")
    columns = list(zip(*records, strict=True))
    inputs = torch.stack([torch.as_tensor(each if transform is None else transform(each)) for each in columns[0]])
    return inputs, tuple(torch.stack([torch.as_tensor(each) for each in column]) for column in columns[1:])


def _computed(module: nn.Module, inputs: Tensor, batch: int, device: str | torch.device) -> Tensor:
    parts = [_applied(module, part, device) for part in inputs.split(batch)]
    found = torch.cat(parts)
    _refuse_company(module, inputs, parts[0], device)
    if not torch.isfinite(found).all():
        raise DataError("features must be finite, and those of a record are not: look at the module and its inputs")
    return found


def _applied(module: nn.Module, inputs: Tensor, device: str | torch.device) -> Tensor:
    found = module(inputs.to(device))
    found = getattr(found, "pooler_output", found)  # of transformers' models
    if not isinstance(found, Tensor) or found.dim() < 2 or len(found) != len(inputs):
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise DataError(
            f"the module must make one tensor with a row for each of {len(inputs)} inputs, got {got}: wrap it in a "
            "module that returns the features"
        )
    return found.float().cpu()


def _refuse_company(module: nn.Module, inputs: Tensor, together: Tensor, device: str | torch.device) -> None:
    """Raise if the first records of a chunk get other features alone than together."""
    tolerance = _ROUNDING * max(float(together.abs().max()), 1e-6)
    for place in {0, len(together) - 1}:
        try:
            alone = _applied(module, inputs[place : place + 1], device)[0]
            same = torch.allclose(alone, together[place], rtol=0, atol=tolerance, equal_nan=True)
        except Exception:  # as BatchNorm fails on one record
            same = False
        if not same:
            raise PrivacyError(
                "the module makes other features of a record alone than among others, or others each time: one record "
                "would reach many. Use a module that treats each record by itself (BatchNorm with its statistics kept)"
            )


def _folder(cache: str | Path | None) -> Path | None:
    if cache is None:
        return None
    folder = Path(cache).expanduser()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot make the folder {folder} ({error.strerror}): name another cache") from None
    return folder


def _kept(file: Path, count: int) -> Tensor | None:
    """The features in a file; None where it is not there, or damaged."""
    try:
        found = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return torch.from_numpy(found) if len(found) == count and found.dtype == np.float32 else None


def _keep(file: Path, found: Tensor) -> None:
    """Write a file that only its owner can read, complete or not at all."""
    fresh = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as written:
            np.save(written, found.numpy())
        fresh.replace(file)
    finally:
        fresh.unlink(missing_ok=True)


@contextmanager
def _bar(size: int, progress: bool) -> Iterator[Callable[[int], None]]:
    if not progress:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("features"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("features", total=size)
        yield lambda count: shown.advance(task, count)
