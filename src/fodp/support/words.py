"""Words that other libraries have for what is called otherwise here, and what is said to them."""

import inspect
from collections.abc import Callable, Collection
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

from fodp.errors import ConfigurationError
from fodp.support.checks import listed

P = ParamSpec("P")
R = TypeVar("R")

# Of a plan, and public sizes in their place; a test compares.
FIELDS = frozenset(
    (
        "sampling_rate", "steps", "lot_size", "clip_norm", "noise_multiplier", "delta", "method", "params",
        "accountant", "seed", "exact_noise", "unit", "records_per_person", "person_gradient",
        "public_size", "batch", "epochs",
    )
)  # fmt: skip


class Name(NamedTuple):
    """What something is called in Python, and on the command line."""

    here: str
    option: str


_MICROBATCHES = "microbatch_size num_microbatches max_physical_batch_size virtual_batch_size"
# Of Opacus, JAX-Privacy, TensorFlow Privacy, Hugging Face and Lightning.
_NAMES: dict[Name, str] = {
    Name("clip_norm", "--clip-norm"): (
        "max_grad_norm l2_norm_clip l2_clip_norm clipping_norm clip_threshold max_norm grad_clip gradient_clip_val"
    ),
    Name("noise_multiplier", "--noise-multiplier"): "sigma noise_scale noise_std noise stddev",
    Name("sampling_rate", "--sampling-rate"): "sample_rate sampling_probability sampling_prob subsampling_rate",
    Name("steps", "--epochs"): "num_steps max_steps n_steps iterations num_iterations num_updates",
    Name("delta", "--delta"): "target_delta",
    Name("seed", "--seed"): "random_seed random_state noise_seed",
    Name("epochs", "--epochs"): "num_epochs max_epochs num_train_epochs n_epochs",
    Name("batch, with public_size, a public guess of how many records there are", "--batch"): (
        "batch_size expected_batch_size per_device_train_batch_size train_batch_size"
    ),
    Name("public_size, a public guess of how many records there are", "--public-size"): (
        "dataset_size num_examples num_samples sample_size n_samples num_records"
    ),
    Name("Plan.calibrated(target_epsilon=…), which finds the noise", "--target-epsilon"): (
        "target_epsilon target_eps epsilon eps"
    ),
    Name("microbatch=, of the Trainer and make_private", "--microbatch"): _MICROBATCHES,
    Name("params=dict(lr=…)", "--lr"): "learning_rate",
    Name(
        "nothing: masks and noise come from the operating system, unless a seed is given", "nothing, without --seed"
    ): ("secure_mode secure_rng"),
    Name("nothing: lots are always Poisson lots", "nothing: lots are always Poisson lots"): "poisson_sampling",
}
_ANSWERS = {word: name for name, words in _NAMES.items() for word in words.split()}
_ARGUMENTS = {
    "dataset": "data data_loader dataloader train_loader train_dataloader train_dataset train_data",
    "loss_fn": "loss criterion loss_function",
    "scheduler": "lr_scheduler",
    "microbatch": _MICROBATCHES,
    "model": "module net",
}  # of Trainer and make_private
_OF_ARGUMENTS = {word: name for name, words in _ARGUMENTS.items() for word in words.split()}


def answer(word: str) -> str | None:
    """What a plan calls this; None for a word that nobody is known to use."""
    return _ANSWERS[word].here if word in _ANSWERS else None


def option(word: str) -> str | None:
    """The same in options of the command line, `word` without its dashes."""
    name = _ANSWERS.get(word.replace("-", "_"))
    return None if name is None else name.option


def unknown(door: str, word: str, known: Collection[str], *, has_plan: bool = True) -> str:
    """A sentence about an argument that a door does not have."""
    no = f"{door} has no argument {word!r}"
    if _OF_ARGUMENTS.get(word) in known:
        return f"{no}: here it is {_OF_ARGUMENTS[word]}"
    field = word if word in FIELDS else answer(word)
    if field is None:
        return f"{no}; it knows {', '.join(sorted(set(known) - {'self'}))}"
    if not has_plan:
        return f"{no}: here it is {field}"
    return f"{no}: {f'give the plan it, Plan({field}=…)' if field in FIELDS else f'of the plan it is {field}'}"


def in_our_words(
    door: str, *, has_plan: bool = True, also: type | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Refuse arguments that a function does not have, all in one message, which says what others' words are here.

    `also`: a dataclass whose fields the function takes as further keywords; its signature shows them.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        if also is not None:
            own = [one for one in signature.parameters.values() if one.kind != inspect.Parameter.VAR_KEYWORD]
            more = inspect.signature(also).parameters.values()
            own += [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in more]
            signature = signature.replace(parameters=own)
        known = tuple(signature.parameters)

        @wraps(function)
        def checked(*args: P.args, **named: P.kwargs) -> R:
            foreign = [word for word in named if word not in known]
            if foreign:
                raise ConfigurationError(listed([unknown(door, word, known, has_plan=has_plan) for word in foreign]))
            return function(*args, **named)

        if also is not None:
            checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked

    return decorated
