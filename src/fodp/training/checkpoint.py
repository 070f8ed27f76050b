"""Checkpoints: written atomically, read without executing anything, refused if they do not fit."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from fodp._checks import PrivacyError

FORMAT = 1


def save(path: Path, content: dict[str, Any]) -> None:
    """Write all or nothing: a crash leaves the old checkpoint in place."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save({"format": FORMAT, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint: tensors and plain values only, never code."""
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
    return content
