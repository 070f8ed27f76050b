"""Checkpoints: written atomically, read without executing anything, refused if they do not fit."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fodp
from fodp._checks import PrivacyError
from fodp._files import atomically
from fodp.plan import Plan

FORMAT = 6  # raised whenever a part of the state gets another form


def save(path: Path, content: dict[str, Any], before_naming: Callable[[str], None] | None = None) -> None:
    """Write all or nothing: a crash leaves the old checkpoint in place.

    `before_naming` is told the content's digest when everything is written but does not have its name yet.
    """
    made_with = {"fodp": fodp.__version__, "torch": str(torch.__version__)}
    content = {"format": FORMAT, "made_with": made_with, **{key: _builtin(value) for key, value in content.items()}}
    content["digest"] = digest(content)
    try:
        with atomically(path) as part:
            with part.open("wb") as file:
                torch.save(content, file)
            if before_naming is not None:
                before_naming(content["digest"])
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PrivacyError(
            f"the checkpoint {path} could not be written ({reason}); the one before it is untouched: free the disk or "
            "make the folder writable, then resume"
        ) from None


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint: tensors and plain values only, never code; refuses one that was damaged or changed."""
    try:
        content = torch.load(path, weights_only=True, map_location=device)
    except FileNotFoundError:
        raise PrivacyError(f"there is no checkpoint {path}; start without resuming") from None
    except Exception as error:  # a damaged file can raise almost anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PrivacyError(f"the checkpoint {path} is damaged or not ours ({reason}); restore a copy of it") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise PrivacyError(f"the checkpoint {path} has format {found!r}, this version reads {FORMAT}")
    if content.get("digest") != digest({key: value for key, value in content.items() if key != "digest"}):
        raise PrivacyError(
            f"the checkpoint {path} is damaged or was changed (its digest differs); restore a copy of it"
        )
    return content


def refuse_other_version(made_with: dict[str, str], seeded: bool) -> None:
    """A replay by other code would put the same noise on another gradient; and states may mean other things."""
    mine = {"fodp": fodp.__version__, "torch": str(torch.__version__)}
    for name in ("fodp", "torch") if seeded else ("fodp",):
        if made_with.get(name) != mine[name]:
            raise PrivacyError(
                f"the checkpoint was written with {name} {made_with.get(name)}, this is {mine[name]}: go on with the "
                "version that wrote it, or start a new run"
            )


def refuse_other_plan(saved: dict[str, Any], plan: Plan) -> None:
    """A run goes on under its own plan, whose ε it has promised."""
    mine = {**plan.to_dict(), "params": dict(plan.params)}
    different = sorted(key for key in mine if _plain(mine[key]) != _plain(saved.get(key)))
    if different:
        key = different[0]
        raise PrivacyError(
            f"the checkpoint belongs to another plan: {key} was {saved.get(key)!r}, now {mine[key]!r}; "
            "resume with the settings of the run, or start a new one"
        )


def _plain(value: Any) -> Any:
    """Tuples and lists alike, so that a plan read from a file equals the one it came from."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def _builtin(value: Any) -> Any:
    """NumPy's numbers as Python's: a file is read without running code, and theirs would need some."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {_builtin(key): _builtin(part) for key, part in value.items()}
    return type(value)(map(_builtin, value)) if type(value) in (list, tuple) else value


def digest(content: Any) -> str:
    """A hash of nested values and tensors."""
    state = hashlib.blake2b(digest_size=32)
    _feed(state, content)
    return state.hexdigest()


def _feed(state: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        entries = value.detach().to_sparse_coo().coalesce()
        _feed(state, [str(value.layout), tuple(value.shape), entries.indices(), entries.values()])
    elif isinstance(value, torch.Tensor):
        state.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        state.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        state.update(f"map {len(value)};".encode())
        for key, part in value.items():
            _feed(state, key)
            _feed(state, part)
    elif isinstance(value, list | tuple):
        state.update(f"list {len(value)};".encode())
        for part in value:
            _feed(state, part)
    else:
        text = repr(value).encode()
        state.update(f"{type(value).__name__} {len(text)};".encode() + text)
