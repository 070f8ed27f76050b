"""What the ranks of one run must have in common, as bytes to be hashed under a key that only they know."""

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Subset

import fodp
from fodp.draws import Source
from fodp.errors import ConfigurationError
from fodp.identity.origins import origins
from fodp.lots.reading import Fetcher
from fodp.lots.records import tensor_columns
from fodp.noise import Streams

_WHOLE = 2**28  # bytes of data that are compared whole; of more, rows at random places
_ROWS = 2**16  # that many
_RECORDS = 32  # of a data set that must be read record by record
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


def refuse_wrapped(model: nn.Module) -> None:
    """Raise for a model that sums gradients over ranks by itself, before they are clipped."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    found = next((name for name in _WRAPPERS if name in kinds), None)
    if found is not None:
        raise ConfigurationError(
            f"{found} divides a model or sums its gradients over processes without clipping: give the plain model, "
            "whole on every rank (model.module of a wrapper); ranks are summed by fodp itself"
        )


def facts(
    secret: bytes, plan: Mapping[str, Any], model: nn.Module, dataset: Any, fetcher: Fetcher, options: Mapping[str, Any]
) -> dict[str, bytes]:
    """All facts by name. Those about data must never leave but as a keyed hash, compared among ranks."""
    state = model.state_dict()
    shapes = [(name, str(value.dtype), tuple(value.shape)) for name, value in state.items()]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    found = {
        "the versions of fodp and PyTorch": f"{fodp.__version__} {torch.__version__}".encode(),
        "the code of fodp": _code(),
        **{f"the plan's {name}": json.dumps(value, default=repr).encode() for name, value in plan.items()},
        **{f"the option {name}": repr(value).encode() for name, value in options.items()},
        "the model's parameters": repr((shapes, trained)).encode(),
        "the model's initial weights (seed PyTorch alike before the model is made, or broadcast them)": _hashed(
            secret, (value for value in state.values())
        ),
        "the number of records": str(fetcher.size).encode(),
    }
    found["the records"] = _data(secret, dataset, fetcher)
    return found


@functools.cache
def _code() -> bytes:
    """Of the sources of this package."""
    state, folder = hashlib.blake2b(), Path(fodp.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        state.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return state.digest()


def _data(secret: bytes, dataset: Any, fetcher: Fetcher) -> bytes:
    """Which record is at which place: another order on one rank would give a record two owners, and others none.

    Data made of tensors is compared whole up to 256 MB, above that at 65,536 places that nobody can foresee; views of a
    data set by their indices; and of what must be read record by record, 32 records (all, if there are no more).
    """
    places = torch.from_numpy(_places(secret, fetcher.size))
    columns = tensor_columns(dataset)
    if columns is not None:
        if sum(column.numel() * column.element_size() for column in columns) <= _WHOLE:
            return _hashed(secret, (part for column in columns for part in column.split(4096)))
        few = places[:_ROWS].clone()
        return _hashed(secret, (column.index_select(0, few.to(column.device)) for column in columns))
    view = b""
    if isinstance(dataset, Subset | ConcatDataset):
        view = _hashed(secret, [torch.from_numpy(origins(dataset, memory=False))])
    seed = int.from_bytes(secret, "little")
    few = torch.arange(fetcher.size) if fetcher.size <= _RECORDS else places[:_RECORDS].clone()
    read = fetcher.records(few, Source(Streams.seeded(seed), 0, "facts"))
    return view + _hashed(secret, (part for record in read for part in _parts(record)))


def _places(secret: bytes, size: int) -> Any:
    """Places in the data, the same on all ranks."""
    words = np.frombuffer(hashlib.shake_256(b"places" + secret).digest(8 * _ROWS), dtype="<u8")
    return (words % np.uint64(size)).astype(np.int64)


def _parts(record: Any) -> Iterator[torch.Tensor | bytes]:
    """A record as tensors and bytes; of what has neither, the type."""
    if isinstance(record, torch.Tensor):
        yield record
    elif isinstance(record, Mapping):
        for name in record:
            yield repr(name).encode()
            yield from _parts(record[name])
    elif isinstance(record, list | tuple):
        yield f"{len(record)};".encode()
        for part in record:
            yield from _parts(part)
    elif hasattr(record, "tobytes"):
        yield record.tobytes()
    else:
        simple = record is None or isinstance(record, bool | int | float | str | bytes)
        yield (repr(record) if simple else type(record).__name__).encode()


def _hashed(secret: bytes, parts: Any) -> bytes:
    state = hashlib.blake2b(key=secret)
    for part in parts:
        if isinstance(part, torch.Tensor):
            state.update(f"{part.dtype} {tuple(part.shape)};".encode())
            part = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        state.update(part)
    return state.digest()
