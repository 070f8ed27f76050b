"""Checkpoints: what a run needs to go on, written atomically, read without executing anything, refused if unfit.

A file is what `torch.save` writes, followed by the SHA-256 of all of it. Tensors go from where they are to the disk,
and are hashed on the way, so that writing takes no memory to speak of and reading everything once.
"""

import errno
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
import torch

import fodp
from fodp import _checks
from fodp._checks import ConfigurationError, DataError, LedgerError, PrivacyError
from fodp._files import atomically, make_room
from fodp.plan import Plan
from fodp.training.bookkeeping import open_account

if TYPE_CHECKING:
    from fodp.ledger import Account
    from fodp.training.resuming import LoopKeeper
    from fodp.training.trainer import Trainer

FORMAT = 8  # raised whenever a part of the state gets another form
_DIGEST = 32  # bytes at the end of the file
_AT_ONCE = 2**22  # bytes
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NotWritten(PrivacyError):
    """A checkpoint could not be written; the one before it is untouched."""


def snapshot(trainer: "Trainer | LoopKeeper") -> dict[str, Any]:
    """All that a run needs to go on: releases and public numbers only; to be written before the next step."""
    account = trainer._account
    return {
        "run": trainer.run_id,
        "ledger": None if account is None else account.position,
        "plan": {**trainer.plan.to_dict(), "params": dict(trainer.plan.params)},
        "step": trainer.step,
        "planned": trainer._planned,
        "lost_steps": trainer.lost_steps,
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": None if trainer.scheduler is None else trainer.scheduler.state_dict(),
        "state": trainer.run.state_dict(views=True),
        "metrics": dict(trainer.metrics),
        "callbacks": {name: callback.state_dict() for name, callback in trainer._named_callbacks()},
        # Where "model" is an average of iterates, which is what may be published: where training goes on from.
        **({} if trainer._weights.iterate is None else {"iterate": trainer._weights.iterate}),
    }


def restore(trainer: "Trainer | LoopKeeper", saved: dict[str, Any]) -> None:
    """Put a trainer where a checkpoint was written, and take up its account in the ledger."""
    refuse_other_plan(saved["plan"], trainer.plan)
    refuse_other_version(saved["made_with"], trainer.plan.seed is not None)
    _refuse_other_ledger(trainer, saved)
    if (saved["scheduler"] is None) != (trainer.scheduler is None):
        raise ConfigurationError("the checkpoint was written with another choice of scheduler: give the run's own")
    try:
        trainer._weights.forget()
        trainer.model.load_state_dict(saved["model"])
        if "iterate" in saved:
            trainer.run.engine.layout.write(saved["iterate"])
        _load_optimizer(trainer.optimizer, saved["optimizer"])
        trainer.run.load_state_dict(saved["state"])
    except LedgerError:  # says what is wrong itself
        raise
    except (RuntimeError, ValueError, KeyError) as error:
        first = str(error).splitlines()[0]
        raise ConfigurationError(
            f"the checkpoint is of another model or optimizer ({first}): make the run's own, or start a new run"
        ) from None
    if trainer.scheduler is not None:
        trainer.scheduler.load_state_dict(saved["scheduler"])
    for name, callback in trainer._named_callbacks():
        if name in saved["callbacks"]:
            callback.load_state_dict(saved["callbacks"][name])
    trainer.metrics.update(saved["metrics"])
    trainer.metrics.new.clear()
    trainer.run_id = str(saved["run"])
    trainer.run.step, trainer.lost_steps = int(saved["step"]), int(saved["lost_steps"])
    trainer._planned = saved["planned"]
    trainer._account = None
    if trainer.ledger is not None:
        trainer._account = _reopened_account(trainer)
        _skip_lost_steps(trainer, trainer._account)


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """PyTorch takes the state of another kind of optimizer without a word, and misses its options in the next step."""
    wanted = [set(group) for group in optimizer.param_groups]  # not the defaults: AdamBC's have more than its groups
    optimizer.load_state_dict(saved)
    missing = {name for names, group in zip(wanted, optimizer.param_groups, strict=True) for name in names - set(group)}
    if missing:
        raise ValueError(f"it knows no {min(missing)}, which {type(optimizer).__name__} needs")


def _skip_lost_steps(trainer: "Trainer | LoopKeeper", account: "Account") -> None:
    """A secure run cannot repeat the steps that were used after its checkpoint: they are lost but stay charged. A
    seeded run repeats them where the ledger knows what each released, and loses them otherwise.

    Where records take turns, it goes on with a whole round of new groups, and the rest of the old one is lost too.
    """
    used, first = max(account.charged, trainer.run.step), trainer.run.step
    used = max(used, min(trainer.run.next_round(used), trainer.last_step))
    if used <= first or (trainer.plan.seed is not None and account.repeats(first)):
        return
    if trainer.plan.seed is not None:
        _checks.warn(
            f"steps {first} to {used - 1} of this seeded run were charged after the checkpoint was written, and the "
            "ledger does not know what all of them released (the system crashed, the run went on elsewhere, or an "
            "earlier version of fodp made it): they are lost, and the run goes on after them"
        )
    trainer.lost_steps += used - trainer.run.step
    trainer.run.step = used
    if used >= trainer.last_step and trainer.lost_steps >= used:
        raise LedgerError(
            f"all {used} steps of this run were used, and its only checkpoint is from before the first of them: the "
            "training is lost, and the model is as it was at the beginning. Start a new run; what was used stays "
            "charged"
        )
    trainer._jumped_to_the_end = used >= trainer.last_step


def _reopened_account(trainer: "Trainer | LoopKeeper") -> "Account":
    assert trainer.ledger is not None
    account = open_account(trainer.ledger, trainer.run_id, trainer.plan, trainer.last_step, trainer._dataset)
    if account.data_changed and trainer.plan.seed is not None:
        raise DataError(
            "a seeded run cannot go on with other data, on which it would repeat its noise: start a new run"
        )
    return account


def _refuse_other_ledger(trainer: "Trainer | LoopKeeper", saved: dict[str, Any]) -> None:
    """A checkpoint alone cannot know what was released after it was written. Of several ranks the first one asks."""
    if not trainer.run.ranks.is_first:
        return
    if saved["ledger"] is not None and trainer.ledger is not None:
        trainer.ledger.refuse_stranger(str(saved["run"]), saved["digest"], saved["ledger"])
    elif saved["step"] < trainer.plan.steps and (trainer.plan.seed is None or saved["ledger"] is not None):
        raise LedgerError(
            "this run goes on only with its ledger, which knows the steps used after this checkpoint: "
            "train and resume with ledger=fodp.Ledger(file)"
            + ("" if saved["ledger"] is not None else ", or use a seed for research")
        )


def make_room_for_all(trainer: "Trainer", path: Path) -> None:
    """Before the first release, take the room on the disk that later checkpoints need: the first one is far smaller."""
    later = path.stat().st_size + trainer.run.bytes_when_full() + _optimizer_bytes(trainer)
    try:
        make_room(path, later)
    except OSError as error:
        raise NotWritten(
            f"there is no room for the checkpoints of this run, which need {2 * later / 1e6:.0f} MB beside {path} "
            f"({error.strerror or error}): free the disk or choose another folder; nothing was released"
        ) from None


def _optimizer_bytes(trainer: "Trainer") -> int:
    """What the optimizer will remember at most: Adam keeps two numbers for a parameter, plain descent none."""
    plain = isinstance(trainer.optimizer, torch.optim.SGD) and not any(
        group["momentum"] for group in trainer.optimizer.param_groups
    )
    return 0 if plain else 2 * sum(p.numel() * p.element_size() for p in trainer.run.engine.layout.parameters)


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
