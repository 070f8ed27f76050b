"""Several processes, started by torchrun or `accelerate launch`: only fodp's ranks wait for each other.

Hugging Face writes its callbacks, scores and checkpoints for a loop that all processes run alike, and has them wait for
each other in there. Here the first process does these things alone, so meanwhile accelerate is told that every process
is by itself. So it is in `evaluate` and `predict`, where each takes all rows: transformers multiplies the loss of many
models by the number of processes there (5.23, `average_tokens_across_devices`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fodp.errors import ConfigurationError
from fodp.ranks import here

_PLAIN = ("NO", "MULTI_CPU", "MULTI_GPU")  # names of accelerate: every process has the whole model


def refuse_unknown(trainer: Any) -> None:
    """Raise unless accelerate's processes are those of PyTorch's group: each would release by itself, under one ε."""
    args, count = trainer.args, here().count
    kind = str(getattr(args.distributed_state.distributed_type, "value", args.distributed_state.distributed_type))
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:  # by a configuration file of accelerate
        kind = "FSDP" if trainer.is_fsdp_enabled else "DEEPSPEED"
    if args.world_size != count:
        raise ConfigurationError(
            f"TrainingArguments knows of {args.world_size} processes and PyTorch's process group of {count}, so each "
            "might release by itself: start them with torchrun or accelerate launch, and let TrainingArguments make "
            "the group"
        )
    if kind not in _PLAIN:
        raise ConfigurationError(
            f"accelerate was set up for {kind}, which divides the model or has a loop of its own: launch plain "
            "processes (--cpu or --multi_gpu)"
        )


@contextmanager
def by_itself(trainer: Any) -> Iterator[None]:
    """While in here, nothing of accelerate waits for another process: scores, saving and barriers are of this one.

    Which process this is stays known, so that the first one alone writes files.
    """
    if here().count == 1:
        yield
        return
    known = [trainer.args.distributed_state, trainer.accelerator.state]  # the second has a copy of the first
    states = [state for state in known if "distributed_type" in vars(state)]  # until other arguments reset it
    before = [(state.distributed_type, state.num_processes) for state in states]
    trainer.__dict__.pop("_eval_dataloaders", None)  # kept ones are for as many processes as they were made with
    try:
        for state in states:
            state.distributed_type, state.num_processes = type(state.distributed_type).NO, 1
        yield
    finally:
        for state, (kind, count) in zip(states, before, strict=True):
            state.distributed_type, state.num_processes = kind, count
