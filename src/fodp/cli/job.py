"""What `train` and `audit` share: the options that say which run, and the data and the plan they stand for."""

import argparse
import ast
import math
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fodp import _checks
from fodp._checks import PrivacyError
from fodp.accounting import MOST_STEPS

if TYPE_CHECKING:
    from fodp.data import Splits
    from fodp.plan import Plan

DEFAULTS: dict[str, Any] = dict(
    dataset="digits", model="mlp", method="fo-dp-sgd", delta=1e-5, clip_norm=1.0, accountant="pld"
)

_OF_THE_COMMAND = ("command", "run", "out", "json", "quiet", "data_dir", "threads")


def add_options(parser: argparse.ArgumentParser, *, epochs: float) -> None:
    """The options. None has a default here, so that what the user said can be told from what was left open."""
    add = parser.add_argument
    add("--dataset", metavar="NAME", help="digits (default), cifar10, cifar100, svhn, or your own .npz")
    add("--model", metavar="NAME", help="mlp (default), cnn, logistic, or module:function of your own")
    add("--method", metavar="NAME", help="private optimizer, default fo-dp-sgd (see `fodp methods`)")
    add("--set", action="append", metavar="NAME=VALUE", help="a parameter of the method; may be repeated")
    add("--lr", type=float, help="learning rate (default: the method's)")
    add("--epochs", type=float, help=f"passes over the data, default {epochs:g}; steps = round(epochs / q)")
    add("--target-epsilon", type=float, metavar="EPS", help="calibrate the noise to this epsilon, never above")
    add("--noise-multiplier", type=float, metavar="SIGMA", help="the noise itself")
    add("--delta", type=float, help="default 1e-5")
    add("--clip-norm", type=float, metavar="C", help="default 1")
    add("--sampling-rate", type=float, metavar="Q", help="default: from the data set's public card")
    add("--lot-size", type=float, metavar="L", help="public divisor, default: q times the public size")
    add("--accountant", metavar="NAME", help="pld (default), rdp, rdp-classic")
    add(
        "--exact-noise",
        action="store_true",
        default=None,
        help="nothing leaks through the low bits of the noise, which takes longer",
    )
    add("--data-dir", metavar="DIR", help="folder with data sets (default: the variable FODP_DATA)")
    add("--assume-size", type=int, metavar="N", help="public size of your own data")
    add("--classes", type=int, metavar="N", help="public number of classes of your own data")
    add("--threads", type=int, metavar="N", help="threads of PyTorch")


def given(options: argparse.Namespace, apart: Collection[str]) -> dict[str, Any]:
    """What the user said about the run, without what is about this command alone; `apart` are more such options."""
    said = {k: v for k, v in vars(options).items() if v is not None and k not in _OF_THE_COMMAND and k not in apart}
    if "set" in said:
        said["set"] = dict(setting(item) for item in said["set"])
    return said


def public_plan(options: argparse.Namespace, **noise: Any) -> "Plan":
    """The plan of a method from public numbers alone, for its events; sums and lots do not enter them."""
    from fodp.plan import Plan

    params = dict(setting(item) for item in options.set or ())
    numbers = dict(sampling_rate=options.sampling_rate, steps=options.steps, delta=getattr(options, "delta", 1e-5))
    accountant = getattr(options, "accountant", "pld")
    words: dict[str, Any] = dict(
        method=options.method, params=params, accountant=accountant, lot_size=1.0, clip_norm=1.0
    )
    make = Plan.calibrated if "target_epsilon" in noise else Plan
    return make(**numbers, **words, **noise)


def use_threads(options: argparse.Namespace) -> None:
    """Give PyTorch the threads that were asked for."""
    import torch

    if options.threads is not None:
        torch.set_num_threads(_checks.whole("--threads", options.threads, maximum=4096))


def setting(item: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as Python reads it, else as text."""
    name, equals, text = item.partition("=")
    if not equals or not name:
        raise PrivacyError(f"--set takes NAME=VALUE, for example --set beta=0.9; got {item!r}")
    try:
        return name.strip(), ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return name.strip(), text


def load_data(config: dict[str, Any], options: argparse.Namespace) -> "Splits":
    """The data; a method that scores its proposals gets a public held-out part of it."""
    from fodp.data import CARDS, load
    from fodp.methods import find
    from fodp.models import wants_flat

    words: dict[str, Any] = dict(
        assume_size=config.get("assume_size"),
        classes=config.get("classes"),
        flatten=wants_flat(config["model"]),
        progress=not options.quiet,
    )
    splits = load(config["dataset"], options.data_dir, **words)
    if not find(config["method"]).proposes or len(splits.validation):
        return splits
    if config["dataset"] not in CARDS:
        raise PrivacyError(
            f"{config['method']} scores proposals on a public held-out split, which your own data does not have: "
            "use another method, or fodp.Trainer with public_score"
        )
    # A sixth of the data is declared public and held out, and the public card says so.
    return load(config["dataset"], options.data_dir, train_size=splits.card.train_size * 5 // 6, **words)


def make_plan(config: dict[str, Any], splits: "Splits") -> "Plan":
    """The plan of a configuration: the stored one, or a new one, calibrated if it names a target and no noise."""
    from fodp.plan import Plan

    if "plan" in config:
        return _stored_plan(config)
    card = splits.card
    rate = _checks.fraction("--sampling-rate", config.get("sampling_rate", card.sampling_rate))
    public: dict[str, Any] = dict(
        sampling_rate=rate,
        steps=_steps(config["epochs"], rate),
        lot_size=config.get("lot_size", max(1.0, round(rate * card.train_size))),
        clip_norm=config["clip_norm"],
        delta=config["delta"],
        method=config["method"],
        params=_said_params(config),
        accountant=config["accountant"],
        seed=config.get("seed"),
        exact_noise=config.get("exact_noise", False),
    )
    if config.get("noise_multiplier") is None:
        return Plan.calibrated(target_epsilon=config["target_epsilon"], **public)
    plan = Plan(noise_multiplier=config["noise_multiplier"], **public)
    if not math.isfinite(plan.epsilon()):
        raise PrivacyError(f"no finite epsilon holds for --noise-multiplier {plan.noise_multiplier:g}: use more noise")
    return plan


def _stored_plan(config: dict[str, Any]) -> "Plan":
    """The plan that a run was started with: to calibrate again, with another accountant perhaps, might find another."""
    from fodp.plan import Plan

    try:
        plan = Plan(**config["plan"])
    except TypeError as error:
        raise PrivacyError(f"the run's configuration holds no plan ({error}): restore a copy of it") from None
    said = {name: config[name] for name in plan.to_dict() if name in config}
    if said.get("noise_multiplier", 0) is None:
        del said["noise_multiplier"]
    for name, value in {**said, "steps": _steps(config["epochs"], plan.sampling_rate)}.items():
        if value != getattr(plan, name):
            raise PrivacyError(
                f"the run's configuration says {name} {_checks.shown(value)}, its plan {getattr(plan, name)}: restore "
                "a copy of it"
            )
    params = _said_params(config)
    if replace(plan, params={**plan.params, **params}) != plan:
        raise PrivacyError(
            f"the run's configuration says {_checks.shown(params)}, its plan something else: restore a copy of it"
        )
    return plan


def _said_params(config: dict[str, Any]) -> dict[str, Any]:
    """Parameters of the method, of which the learning rate has an option of its own."""
    params = config.get("set", {})
    if not isinstance(params, dict):
        raise PrivacyError(f"the run's configuration says set {_checks.shown(params)}: restore a copy of it")
    return {**params, **({"lr": config["lr"]} if "lr" in config else {})}


def _steps(epochs: Any, rate: float) -> int:
    steps = _checks.positive("--epochs", epochs) / rate
    if steps > MOST_STEPS:
        raise PrivacyError(f"--epochs {epochs:g} at a sampling rate of {rate:g} are more than {MOST_STEPS:g} steps")
    return max(1, round(steps))
