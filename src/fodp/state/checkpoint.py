"""Checkpoints: what a run needs to go on, written atomically, read without executing anything, refused if unfit.

A file is what `torch.save` writes, followed by the SHA-256 of all of it. Tensors go from where they are to the disk,
and are hashed on the way, so that writing takes no memory to speak of and reading everything once.
"""

import errno
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_flatten_with_path

import fodp
from fodp.errors import ConfigurationError, LedgerError, PrivacyError
from fodp.plan import Plan
from fodp.session import Session
from fodp.state.course import Course
from fodp.support.files import atomically, make_room

FORMAT = 10  # raised whenever a part of the state gets another form
_DIGEST = 32  # bytes at the end of the file
_AT_ONCE = 2**22  # bytes
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NotWritten(PrivacyError):
    """A checkpoint could not be written; the one before it is untouched."""


def snapshot(
    course: Course,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
    iterate: Tensor | None,
    **more: Any,
) -> dict[str, Any]:
    """All that a run needs to go on: releases and public numbers only; to be written before the next step.

    `iterate` is where training goes on from, if the model is an average of iterates now, which may be published.
    """
    return {
        **course.position(),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "state": course.session.state_dict(views=True),
        **({} if iterate is None else {"iterate": iterate}),
        **more,
    }


def restore(
    saved: dict[str, Any],
    course: Course,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
) -> None:
    """Put a run where a checkpoint was written, and take up its account in the ledger."""
    session = course.session
    refuse_other_plan(saved["plan"], course.plan)
    refuse_other_version(saved["made_with"], course.plan.seed is not None)
    course.refuse_other_ledger(saved)
    if (saved["scheduler"] is None) != (scheduler is None):
        raise ConfigurationError("the checkpoint was written with another choice of scheduler: give the run's own")
    try:
        model.load_state_dict(saved["model"])
        if "iterate" in saved:
            session.source.layout.write(saved["iterate"])
        _load_optimizer(optimizer, saved["optimizer"])
        session.load_state_dict(saved["state"])
    except LedgerError:  # says what is wrong itself
        raise
    except (RuntimeError, ValueError, KeyError) as error:
        first = str(error).splitlines()[0]
        raise ConfigurationError(
            f"the checkpoint is of another model or optimizer ({first}): make the run's own, or start a new run"
        ) from None
    if scheduler is not None:
        scheduler.load_state_dict(saved["scheduler"])
    course.take_up(saved)


def loop_state(course: Course) -> dict[str, Any]:
    """What a loop needs to go on where another package saves model and optimizer, with a digest of it all."""
    made_with = {"fodp": fodp.__version__, "torch": str(torch.__version__)}
    position = course.position()
    ledger = None if position["ledger"] is None else list(position["ledger"])
    state = {**position, "ledger": ledger, "made_with": made_with, "state": course.session.state_dict()}
    return state | {"digest": _digest(course.session.parameters(), state)}


def take_up_loop(course: Course, state: dict[str, Any]) -> None:
    """Put a fresh loop where `loop_state` was taken; its model has the weights of that moment already."""
    refuse_other_plan(state["plan"], course.plan)
    refuse_other_version(state["made_with"], course.plan.seed is not None)
    if _digest(course.session.parameters(), state) != state["digest"]:
        raise PrivacyError("the checkpoint is damaged or was changed (its digest differs): restore a copy of it")
    course.refuse_other_ledger(state)
    course.session.load_state_dict(state["state"])
    course.take_up(state)


def _digest(weights: Tensor, state: dict[str, Any]) -> str:
    """Of the state without its digest, and of the weights that it belongs to."""
    found = hashlib.sha256()
    leaves, _ = tree_flatten_with_path({key: value for key, value in state.items() if key != "digest"})
    for path, leaf in [*leaves, (("weights",), weights)]:
        found.update(str(path).encode())
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """PyTorch takes the state of another kind of optimizer without a word, and misses its options in the next step."""
    wanted = [set(group) for group in optimizer.param_groups]  # not the defaults: AdamBC's have more than its groups
    optimizer.load_state_dict(saved)
    missing = {name for names, group in zip(wanted, optimizer.param_groups, strict=True) for name in names - set(group)}
    if missing:
        raise ValueError(f"it knows no {min(missing)}, which {type(optimizer).__name__} needs")


def make_room_for_all(path: Path, session: Session, optimizer: torch.optim.Optimizer) -> None:
    """Before the first release, take the room on the disk that later checkpoints need: the first one is far smaller."""
    later = path.stat().st_size + session.bytes_when_full() + _optimizer_bytes(session, optimizer)
    try:
        make_room(path, later)
    except OSError as error:
        raise NotWritten(
            f"there is no room for the checkpoints of this run, which need {2 * later / 1e6:.0f} MB beside {path} "
            f"({error.strerror or error}): free the disk or choose another folder; nothing was released"
        ) from None


def _optimizer_bytes(session: Session, optimizer: torch.optim.Optimizer) -> int:
    """What the optimizer will remember at most: Adam keeps two numbers for a parameter, plain descent none."""
    plain = isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups)
    return 0 if plain else 2 * sum(p.numel() * p.element_size() for p in session.source.layout.parameters)


def save(path: Path, content: dict[str, Any], before_naming: Callable[[str], None] | None = None) -> None:
    """Write all or nothing: a crash leaves the old checkpoint in place.

    `before_naming` is told the file's digest when everything is written but does not have its name yet.
    """
    made_with = {"fodp": fodp.__version__, "torch": str(torch.__version__)}
    content = {"format": FORMAT, "made_with": made_with, **{key: _builtin(value) for key, value in content.items()}}
    hashed = None
    try:
        with atomically(path) as part:
            with part.open("r+b") as file:  # it may lie on room that was made for it, which "wb" would give away
                hashed = _Hashed(file)
                with _without_second_checksum():
                    torch.save(content, cast(IO[bytes], hashed))
                file.write(hashed.digest.digest())
                file.truncate()
            if before_naming is not None:
                before_naming(hashed.digest.hexdigest())
    except (OSError, RuntimeError) as error:  # torch.save turns what a file raises into a RuntimeError
        cause = hashed.failed if hashed is not None and hashed.failed is not None else error
        full = isinstance(cause, OSError) and cause.errno in _FULL
        reason = "the disk is full" if full else str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        raise NotWritten(
            f"the checkpoint {path} could not be written ({reason}); the one before it is untouched: free the disk or "
            "make the folder writable, then resume"
        ) from None


class _Hashed:
    """A file that hashes what passes through it, and remembers what the system said against it."""

    def __init__(self, file: IO[bytes]):
        self._file, self.digest = file, hashlib.sha256()
        self.failed: OSError | None = None

    def write(self, data: Any) -> int:
        """Write and hash."""
        try:
            written = self._file.write(data)
        except OSError as error:
            self.failed = error
            raise
        self.digest.update(data)
        return written

    def flush(self) -> None:
        """Nothing to do: the file is closed, and synced, when it is complete."""


@contextmanager
def _without_second_checksum() -> Iterator[None]:
    """PyTorch's own CRC-32 takes longer than the hash, which it would add nothing to."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint: tensors and plain values only, never code; refuses one that was damaged or changed."""
    try:
        found, said = _digests(path)
        if found != said:
            raise LedgerError(
                f"the checkpoint {path} is damaged, was changed or is not ours (its digest differs); restore a copy of "
                "it, or go on with the version of fodp that wrote it"
            )
        # An optimizer sends its own state where its parameters are, and some of it must stay on the CPU.
        content = torch.load(path, weights_only=True, map_location="cpu")
        content = {key: part if key == "optimizer" else _sent(part, device) for key, part in content.items()}
    except PrivacyError:
        raise
    except FileNotFoundError:
        raise LedgerError(f"there is no checkpoint {path}; start without resuming") from None
    except Exception as error:  # a damaged file can raise almost anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LedgerError(f"the checkpoint {path} is damaged or not ours ({reason}); restore a copy of it") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        kind = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise LedgerError(
            f"the checkpoint {path} has format {kind!r}, this version reads {FORMAT}: go on with the version that "
            "wrote it"
        )
    content["digest"] = found
    return content


def _sent(value: Any, device: torch.device | str) -> Any:
    """The same with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) is dict:
        return {key: _sent(part, device) for key, part in value.items()}
    return type(value)(_sent(part, device) for part in value) if type(value) in (list, tuple) else value


def _digests(path: Path) -> tuple[str, str]:
    """Of what is in the file, and what its end says that it should be."""
    state, left = hashlib.sha256(), path.stat().st_size - _DIGEST
    with path.open("rb") as file:
        while left > 0:
            part = file.read(min(left, _AT_ONCE))
            state.update(part)
            left -= len(part) or left
        return state.hexdigest(), file.read().hex()


def refuse_other_version(made_with: dict[str, str], seeded: bool) -> None:
    """Raise if a seeded run would be replayed by code that may compute something else: the same noise would lie on
    another gradient. That takes the same torch and the same minor version of fodp, within which seeded bits stay
    (docs/stability.md). A secure run draws fresh noise, so it goes on wherever its format can be read.
    """
    mine = {"fodp": fodp.__version__, "torch": str(torch.__version__)}
    alike = {
        "fodp": _minor(str(made_with.get("fodp"))) == _minor(mine["fodp"]),
        "torch": made_with.get("torch") == mine["torch"],
    }
    for name, is_alike in alike.items():
        if seeded and not is_alike:
            raise LedgerError(
                f"the checkpoint was written with {name} {made_with.get(name)}, this is {mine[name]}, and a seeded run "
                "must be repeated bit for bit: go on with the version that wrote it, or start a new run"
            )


def _minor(version: str) -> list[str]:
    """The parts of a version that say what it computes: 0.1 of 0.1.7."""
    return version.split(".")[:2]


def refuse_other_plan(saved: dict[str, Any], plan: Plan) -> None:
    """A run goes on under its own plan, whose ε it has promised."""
    mine = {**plan.to_dict(), "params": dict(plan.params)}
    different = sorted(key for key in {*mine, *saved} if _plain(mine.get(key)) != _plain(saved.get(key)))
    if different:
        key = different[0]
        raise ConfigurationError(
            f"the checkpoint belongs to another plan: {key} was {saved.get(key)!r}, now {mine.get(key)!r}; "
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
