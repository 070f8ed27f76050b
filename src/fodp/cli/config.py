"""From words to the configuration of a run: a dictionary that is stored beside the run and read when it goes on."""

import argparse
import ast
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from fodp.cli.options import TABLE, flag
from fodp.errors import ConfigurationError, LedgerError
from fodp.support import checks

if TYPE_CHECKING:
    from fodp.runs.folder import RunFolder

MOST_COPIES = 1024
# The paper's protocol; an option given beside it wins.
_PRESETS: dict[str, dict[str, Any]] = {
    "paper": dict(
        dataset="cifar10", model="mlp", method="fo-dp-sgd", epochs=250.0, delta=1e-5, clip_norm=1.0, lr=0.8,
        noise_multiplier=1.1, sampling_rate=0.04, lot_size=200.0, accountant="rdp-classic",
    ),
}  # fmt: skip
_DEFAULTS = ("dataset", "model", "clip_norm", "accountant", "epochs")
_OF_THE_RUN = {"plan", "described", "run", "fodp", "card", "model_code"}  # written beside the options


def setting(item: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as Python reads it, else as text."""
    name, equals, text = item.partition("=")
    if not equals or not name:
        raise ConfigurationError(f"--set takes NAME=VALUE, for example --set beta=0.9; got {item!r}")
    try:
        return name.strip(), ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return name.strip(), text


def given(options: argparse.Namespace, apart: Collection[str] = ()) -> dict[str, Any]:
    """What was said about the run, without options of one command (and without those in `apart`)."""
    words = {name: value for name, value in vars(options).items() if name in TABLE and TABLE[name].stored}
    said = {name: value for name, value in words.items() if value is not None and name not in apart}
    if "set" in said:
        said["set"] = dict(setting(item) for item in said["set"])
    if "schema" in said:  # a run keeps what the file said when it began
        from fodp.data.schema import read_schema

        said["schema"] = read_schema(said["schema"]).to_dict()
    if "data" in said:
        if "dataset" in said:
            raise ConfigurationError("--dataset names a data set of fodp, --data a file of your own: give one of them")
        said["dataset"] = said.pop("data")
    return said


def defaults(*more: str, **others: Any) -> dict[str, Any]:
    """The defaults of a run: those of the table that every run has, of `more` options, and others."""
    return {**{name: TABLE[name].default for name in (*_DEFAULTS, *more)}, **others}


def completed(said: dict[str, Any], usual: dict[str, Any], preset: str | None = None) -> dict[str, Any]:
    """Defaults, then the preset, then what was said; without a word about the method the recommended recipe."""
    from fodp.methods import recipe

    config = {**usual, **_preset(preset, said), **said}
    if "method" in config:
        return config
    exact = bool(config.get("exact_noise"))
    method, params = recipe.completed(None, said_params(config), exact_noise=exact)
    return {**config, "method": method, "set": {name: value for name, value in params.items() if name not in said}}


def _preset(name: str | None, said: Mapping[str, Any]) -> dict[str, Any]:
    if name is None:
        return {}
    if name not in _PRESETS:
        raise ConfigurationError(f"--preset must be one of {', '.join(_PRESETS)}; got {name!r}")
    calibrated = "target_epsilon" in said and "noise_multiplier" not in said  # a target alone calibrates
    return {key: value for key, value in _PRESETS[name].items() if not (calibrated and key == "noise_multiplier")}


def said_params(config: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the method, of which the learning rate and the shape have options of their own."""
    params = config.get("set", {})
    if not isinstance(params, dict):
        raise LedgerError(f"the run's configuration says set {checks.shown(params)}: restore a copy of it")
    shape = {"shape": setting(f"shape={config['shape']}")[1]} if "shape" in config else {}
    return {**params, **shape, **({"lr": config["lr"]} if "lr" in config else {})}


def says_how_private(config: Mapping[str, Any]) -> bool:
    """Whether there is a target ε or a noise multiplier."""
    return config.get("target_epsilon") is not None or config.get("noise_multiplier") is not None


def refuse_odd(config: Mapping[str, Any]) -> None:
    """Raise, in one message, for all options that no run can have, before any data is read."""
    from fodp.methods import METHODS, find
    from fodp.plan import field_checks

    def privacy() -> None:
        if not says_how_private(config):
            raise ConfigurationError(
                "how private? add --target-epsilon EPS (for example 4), or --noise-multiplier SIGMA"
            )

    def params() -> None:
        if config["method"] in METHODS:
            find(config["method"]).from_dict(said_params(config))

    numbers: dict[str, Callable[[str, Any], object]] = {
        "epochs": checks.positive,
        "sampling_rate": checks.fraction,
        "target_epsilon": checks.positive,
        "eval_every": checks.whole,
        "early_stopping": checks.whole,
        "microbatch": checks.whole,
        "copies": lambda name, value: checks.whole(name, value, maximum=MOST_COPIES),
    }
    mine = {name: config[name] for name in numbers if config.get(name) is not None}
    of_the_plan = {name: value for name, value in config.items() if name not in numbers and value is not None}
    checks.together(
        privacy,
        *(partial(numbers[name], flag(name), value) for name, value in mine.items()),
        *field_checks(of_the_plan),
        params,
    )


def refuse_otherwise(stored: Mapping[str, Any], said: Mapping[str, Any], folder: "RunFolder", what: str) -> None:
    """Raise if something is said against the stored configuration of what is resumed."""
    for name, value in said.items():
        if stored.get(name) != value:
            raise ConfigurationError(
                f"the {what} in {folder.path} has {flag(name)} {checks.shown(stored.get(name))}, not "
                f"{checks.shown(value)}: leave the option out to resume, or begin in another folder (--out)"
            )


def refuse_incomplete(
    stored: Mapping[str, Any], folder: "RunFolder", usual: Collection[str], known: Collection[str]
) -> None:
    """Raise if the stored configuration of a run lacks what every run has, or has what is not known."""
    missing = sorted({*usual, "delta", "method", "plan", "run"} - stored.keys())
    if not says_how_private(stored):
        missing.append("noise_multiplier")
    if missing:
        raise LedgerError(f"the configuration in {folder.path} lacks {missing[0]}: restore a copy of it")
    unknown = sorted(stored.keys() - {*known} - _OF_THE_RUN)
    if unknown:
        raise LedgerError(
            f"the configuration in {folder.path} says {checks.shown(unknown[0])}, which no run knows: restore a copy "
            "of it"
        )
