"""Training arguments that contradict a plan, each with the sentence that is said instead of silence.

`RULES` is one row per argument; docs/hugging-face.md has the same rows, and a test compares them.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from fodp.errors import ConfigurationError
from fodp.options import conflicts
from fodp.plan import Plan
from fodp.support.checks import shown

_PLAIN_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor")
_WITH_A_SCORE = ("reduce_lr_on_plateau", "greedy")
_DEFAULT_EPOCHS = 3.0  # that TrainingArguments has if nobody sets it
_DEFAULT_GRAD_NORM = 1.0


@dataclass(frozen=True)
class Rule:
    """An argument, when it is refused, and what to do instead."""

    name: str
    refused: Callable[[Any, Plan], bool]
    why: str


def _is_set(value: Any, plan: Plan) -> bool:
    return bool(value)


def _name_of(value: Any) -> str:
    """Of an option that is a string, or an enumeration of strings."""
    return str(getattr(value, "value", value))


def _other_epochs(value: Any, plan: Plan) -> bool:
    return value != _DEFAULT_EPOCHS and round(value / plan.sampling_rate) != plan.steps


_MEASURED = "a number of the private data (or of how long it takes) that would be written down: leave it out"

RULES = (
    Rule(
        "max_steps",
        lambda value, plan: value not in (-1, plan.steps),
        "the plan says how many steps there are, and ε is theirs: leave it out, or make another plan",
    ),
    Rule(
        "num_train_epochs",
        _other_epochs,
        "the plan says how many steps there are, and an epoch is 1/sampling_rate of them: leave it out, or make "
        "another plan",
    ),
    Rule(
        "gradient_accumulation_steps",
        lambda value, plan: value != 1,
        "one lot is one step, however many rows were drawn: leave it at 1; per_device_train_batch_size is how many "
        "rows go through the model at a time",
    ),
    Rule(
        "train_sampling_strategy",
        lambda value, plan: _name_of(value) != "random",
        "rows are drawn by the plan, each independently (Poisson): leave it out",
    ),
    Rule("group_by_length", _is_set, "rows are drawn by the plan, each independently (Poisson): leave it out"),
    Rule("data_seed", lambda value, plan: value is not None, "rows are drawn from a secret stream: leave it out"),
    Rule("dataloader_drop_last", _is_set, "no row is left out of a lot, and no lot of a run: leave it out"),
    Rule(
        "auto_find_batch_size",
        _is_set,
        "a run that is begun again has spent ε for nothing: set per_device_train_batch_size, which changes no result",
    ),
    Rule(
        "label_smoothing_factor",
        _is_set,
        "it is averaged over the tokens of the whole lot: give a compute_loss_func that returns one smoothed loss "
        "per row",
    ),
    Rule(
        "neftune_noise_alpha",
        _is_set,
        "its noise depends on how far a lot was padded, so one row changes that of all others: leave it out",
    ),
    Rule(
        "max_grad_norm",
        lambda value, plan: value not in (_DEFAULT_GRAD_NORM, 0, None),
        "every row's gradient is clipped to the plan's clip_norm, and the noisy sum is not clipped again: set "
        "clip_norm in the plan and leave it out",
    ),
    Rule("fp16", _is_set, "float16 rescales the loss, and with it every row's gradient: use float32, or bf16=True"),
    Rule("fp16_full_eval", _is_set, "it turns the weights that are trained into float16: leave it out"),
    Rule("bf16_full_eval", _is_set, "it turns the weights that are trained into bfloat16: leave it out"),
    Rule("torch_compile", _is_set, "a compiled model hides its layers from the clipping engine: leave it out"),
    Rule("use_liger_kernel", _is_set, "its fused loss is a mean over the lot, and hides layers: leave it out"),
    Rule("deepspeed", _is_set, "it has a loop of its own, where no row's gradient is clipped: leave it out"),
    Rule("fsdp", _is_set, "the private sum of sharded parameters is not built: leave it out"),
    Rule("parallelism_config", _is_set, "the private sum over parallel parts is not built: leave it out"),
    Rule(
        "n_gpu",
        lambda value, plan: value > 1,
        "one device per process: set CUDA_VISIBLE_DEVICES to one, or start several with torchrun or accelerate launch",
    ),
    Rule(
        "optim",
        lambda value, plan: _name_of(value) not in _PLAIN_OPTIMIZERS,
        f"it must step on the released gradient alone, which {', '.join(_PLAIN_OPTIMIZERS)} do: take one of them, or "
        "give an optimizer of yours in optimizers=",
    ),
    Rule(
        "lr_scheduler_type",
        lambda value, plan: _name_of(value) in _WITH_A_SCORE,
        "it steps on scores and not on steps: use linear, cosine, constant or another of the step alone",
    ),
    Rule("include_num_input_tokens_seen", lambda value, plan: value not in ("no", False, None), _MEASURED),
    Rule("skip_memory_metrics", lambda value, plan: value is False, _MEASURED),
    Rule("debug", _is_set, _MEASURED),
    Rule(
        "enable_jit_checkpoint",
        _is_set,
        "SIGTERM ends a private run after its step already, with a checkpoint: leave it out",
    ),
    Rule(
        "hub_strategy",
        lambda value, plan: plan.seed is not None and "checkpoint" in _name_of(value),
        "checkpoints of a seeded run hold its seed, which is no secret any more once it is pushed: use every_save, or "
        "a plan without a seed",
    ),
)


def refuse(args: Any, plan: Plan) -> None:
    """Raise for a plan that this door cannot carry out, and for the first argument that contradicts the plan."""
    conflicts.refuse(plan.features, {"Hugging Face": True})
    for rule in RULES:
        value = getattr(args, rule.name, None)
        if value is not None and rule.refused(value, plan):
            raise ConfigurationError(f"TrainingArguments has {rule.name}={shown(value)}: {rule.why}")
    _refuse_two_learning_rates(args, plan)


def _refuse_two_learning_rates(args: Any, plan: Plan) -> None:
    """The update belongs to the method if it brings its own, else to the training arguments."""
    method = plan.algorithm
    if not method.owns_optimizer:
        return
    usual = {field.name: field.default for field in fields(args)}  # new arguments would reset accelerate's state
    for name in ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim"):
        if _name_of(getattr(args, name)) != _name_of(usual[name]):
            raise ConfigurationError(
                f"TrainingArguments has {name}={shown(_name_of(getattr(args, name)))}, and {method.name} brings its "
                "own update: leave it out, and set lr and the like in the plan's params"
            )
