"""The plan of a configuration, or of public numbers alone."""

import argparse
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fodp.accounting.sizes import completed as completed_sizes
from fodp.accounting.sizes import steps_of, usual_delta
from fodp.cli.config import said_params, setting
from fodp.data.cards import default_rate
from fodp.errors import ConfigurationError, LedgerError
from fodp.support import checks

if TYPE_CHECKING:
    from fodp.data import Card, Splits
    from fodp.plan import Plan


def public_plan(options: argparse.Namespace, method: str, **noise: Any) -> "Plan":
    """The plan of a method from public numbers alone, for its events; sums and lots do not enter them."""
    from fodp.plan import Plan

    params = dict(setting(item) for item in options.set or ())
    words: dict[str, Any] = dict(method=method, params=params, accountant=getattr(options, "accountant", None) or "pld")
    make = Plan.calibrated if "target_epsilon" in noise else Plan
    return make(**public_numbers(options), **words, **noise)


def public_numbers(options: argparse.Namespace) -> dict[str, Any]:
    """Sampling rate, steps and δ of the options, or what follows from --public-size, --batch and --epochs."""
    names = ("batch", "epochs", "sampling_rate", "steps", "delta")
    said = {"public_size": getattr(options, "assume_size", None)}
    said |= {name: getattr(options, name, None) for name in names}
    if said["delta"] is None:
        size = said["public_size"]
        said["delta"] = 1e-5 if size is None else usual_delta(checks.whole("--public-size", size))
    return completed_sizes({"lot_size": None if said["batch"] else 1.0, **said})


def make_plan(config: dict[str, Any], splits: "Splits") -> "Plan":
    """The plan of a configuration: the stored one, or a new one, calibrated if it names a target and no noise."""
    from fodp.plan import Plan

    if "plan" in config:
        return _stored_plan(config)
    card = splits.card if config.get("records_per_person") is None else _card_of_people(config, splits.card)
    batch, size = config.get("batch"), card.train_size
    usual = card.sampling_rate if batch is None else checks.positive("--batch", batch) / size
    rate = checks.fraction("--sampling-rate", config.get("sampling_rate", usual))
    public: dict[str, Any] = dict(
        sampling_rate=rate,
        steps=steps_of(config["epochs"], rate, "--epochs"),
        lot_size=config.get("lot_size", max(1.0, round(rate * size)) if batch is None else batch),
        batch=batch,
        public_size=size,
        **_unit(config),
        clip_norm=config["clip_norm"],
        delta=config.get("delta"),
        method=config["method"],
        params=said_params(config),
        accountant=config["accountant"],
        seed=config.get("seed"),
        exact_noise=config.get("exact_noise", False),
    )
    if config.get("noise_multiplier") is None:
        return Plan.calibrated(target_epsilon=config["target_epsilon"], **public)
    plan = Plan(noise_multiplier=config["noise_multiplier"], **public)
    if not math.isfinite(plan.epsilon()):
        raise ConfigurationError(
            f"no finite epsilon holds for --noise-multiplier {plan.noise_multiplier:g}: use more noise"
        )
    return plan


def _unit(config: dict[str, Any]) -> dict[str, Any]:
    if config.get("records_per_person") is None:
        return {}
    how = config.get("person_gradient", "mean")
    return dict(unit="person", records_per_person=config["records_per_person"], person_gradient=how)


def _card_of_people(config: dict[str, Any], card: "Card") -> "Card":
    """The public numbers with people in place of records: rates and lots are theirs."""
    if "assume_people" in config:
        people = checks.whole("--assume-people", config["assume_people"])
        return replace(card, train_size=people, sampling_rate=default_rate(people))
    if {"sampling_rate", "lot_size"} - config.keys():
        raise ConfigurationError(
            "--assume-people N says how many people there are, as a public number: counted from the data it would "
            "reveal who is in it (or give --sampling-rate and --lot-size, both of people)"
        )
    return card


def _stored_plan(config: dict[str, Any]) -> "Plan":
    """The plan that a run was started with: to calibrate again, with another accountant perhaps, might find another."""
    from fodp.plan import Plan

    try:
        plan = Plan(**config["plan"])
    except (TypeError, ConfigurationError) as error:
        raise LedgerError(f"the run's configuration holds no plan ({error}): restore a copy of it") from None
    numbers = {name: config[name] for name in plan.to_dict() if name in config}
    if numbers.get("noise_multiplier", 0) is None:
        del numbers["noise_multiplier"]
    for name, value in {**numbers, "steps": steps_of(config["epochs"], plan.sampling_rate, "--epochs")}.items():
        if value != getattr(plan, name):
            raise LedgerError(
                f"the run's configuration says {name} {checks.shown(value)}, its plan {getattr(plan, name)}: restore "
                "a copy of it"
            )
    params = said_params(config)
    said = replace(plan, params={**plan.params, **params})
    # None leaves some parameters to calibration, and the plan has what it chose.
    left = {name for choice in said.algorithm.candidates(said) for name in choice if params.get(name, "") is None}
    if replace(said, params={**said.params, **{name: plan.params[name] for name in left}}) != plan:
        raise LedgerError(
            f"the run's configuration says {checks.shown(params)}, its plan something else: restore a copy of it"
        )
    return plan
