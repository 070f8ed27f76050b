"""`fodp epsilon` and `fodp calibrate`: accounting without data."""

import argparse
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fodp import accounting
from fodp.accounting import Event, Phase
from fodp.accounting.described import Described
from fodp.cli.options import TABLE, add
from fodp.cli.plans import public_numbers, public_plan
from fodp.cli.waiting import slow_note
from fodp.errors import ConfigurationError
from fodp.support.extras import need

EPILOG = """examples:
  fodp epsilon --noise-multiplier 1.1 --sampling-rate 0.04 --steps 6250 --beta 0.9
  fodp calibrate --target-epsilon 8 --sampling-rate 0.04 --steps 1000 --method dp-sam

Without --method these are calculators of FO-DP-SGD, with beta 0.9; --beta 1 is DP-SGD. `fodp train` has another
default, its recipe, whose noise is that of --method fo-noise --set order=None, and so has `Plan`. Methods that ask more
than one question per step cost more."""

# Of fo-dp-sgd; said here again because methods take a second to import.
FO_NOISE_MEANING = "the paper's σ: noise std over C; the event's multiplier is σ/β"

if TYPE_CHECKING:
    from fodp.plan import Plan

_COVERS = (
    "For per-example clipping; it does not cover the choice of hyper-parameters, other runs on the same data, or "
    "people with several examples."
)


_NAMES = "sampling_rate steps assume_size batch epochs delta beta method set import accountant json"
_TOLD = {
    "sampling_rate": "probability q of a record in a step",
    "steps": "number of steps, or --epochs",
    "assume_size": "public number N of records: with --batch, in place of --sampling-rate",
    "batch": "records in a lot, about: sampling rate B/N",
    "epochs": "in place of --steps, which are round(E/q)",
    "method": "a private optimizer (`fodp methods`); default fo-dp-sgd (of `fodp train`: fo-noise)",
    "json": "print JSON",
}


def epsilon_options(parser: argparse.ArgumentParser) -> None:
    """Options of `fodp epsilon`."""
    add(parser, f"noise_multiplier {_NAMES} second_opinion", required="noise_multiplier", told=_TOLD, epochs=None)


def calibrate_options(parser: argparse.ArgumentParser) -> None:
    """Options of `fodp calibrate`."""
    add(parser, f"target_epsilon {_NAMES}", required="target_epsilon", told=_TOLD, epochs=None)


def run_epsilon(options: argparse.Namespace) -> int:
    """Print ε."""
    with slow_note("adding up privacy losses"):
        if options.method is not None:
            plan = public_plan(options, _method(options), noise_multiplier=options.noise_multiplier)
            phases, epsilon, numbers, described = plan.events(), plan.epsilon(), _numbers(plan), plan.described()
        else:
            numbers = {"noise_multiplier": options.noise_multiplier, **_public(options)}
            epsilon = accounting.epsilon(**numbers)
            phases = _phases(numbers)
            described = Described(phases)
        other = _second_opinion(phases, numbers["delta"], numbers["accountant"]) if options.second_opinion else None
    _show(options, epsilon, numbers, described, other)
    return 0


def _phases(numbers: dict[str, Any]) -> tuple[Phase, ...]:
    """The events of FO-DP-SGD."""
    event = Event(numbers["sampling_rate"], numbers["noise_multiplier"] / numbers["beta"])
    return (Phase((event,), numbers["steps"]),)


def _second_opinion(phases: Sequence[Phase], delta: float, accountant: str) -> float:
    """The ε that dp-accounting finds for the same releases: by loss distributions, or by Rényi divergences."""
    need("dp_accounting", "--second-opinion", extra="check")
    import dp_accounting
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    theirs = PLDAccountant() if accountant == "pld" else RdpAccountant()
    for phase in phases:
        for event in phase.events:
            release = dp_accounting.GaussianDpEvent(event.noise_multiplier)
            theirs.compose(dp_accounting.PoissonSampledDpEvent(event.sampling_rate, release), phase.times)
    return float(theirs.get_epsilon(delta))


def run_calibrate(options: argparse.Namespace) -> int:
    """Print σ and the ε it really has."""
    with slow_note("calibrating the noise"):
        if options.method is not None:
            plan = public_plan(options, _method(options), target_epsilon=options.target_epsilon)
            epsilon, numbers = plan.epsilon(), _numbers(plan) | _against_dp_sgd(plan, options.target_epsilon)
            described = plan.described()
        else:
            public = _public(options)
            sigma = accounting.calibrate(target_epsilon=options.target_epsilon, **public)
            numbers = {"noise_multiplier": sigma, **public}
            epsilon = accounting.epsilon(**numbers)
            described = Described(_phases(numbers))
    _show(options, epsilon, numbers, described)
    return 0


def _method(options: argparse.Namespace) -> str:
    if options.beta is not None:
        raise ConfigurationError("--beta goes without --method; with it, say --set beta=VALUE")
    return str(options.method)


def _numbers(plan: "Plan") -> dict[str, Any]:
    names = ("noise_multiplier", "sampling_rate", "steps", "delta", "method", "accountant")
    numbers = {name: getattr(plan, name) for name in names}
    if "beta" in plan.params:
        numbers["beta"] = plan.params["beta"]
    if "bands" in plan.params:  # chosen by the plan, perhaps: without them sigma means nothing
        numbers |= {name: plan.params[name] for name in ("bands", "order")}
    return {**numbers, "noise_meaning": plan.algorithm.noise_meaning}


def _against_dp_sgd(plan: "Plan", target_epsilon: float) -> dict[str, float]:
    """Of correlated noise: what accumulates over what DP-SGD's would at this ε, over all steps and after the last."""
    from fodp.noise.banded import accumulated_noise, last_noise

    if "bands" not in plan.params:
        return {}
    public = {name: value for name, value in plan.to_dict().items() if name not in ("noise_multiplier", "params")}
    plain = type(plan).calibrated(target_epsilon=target_epsilon, **{**public, "method": "dp-sgd"})
    found = {}
    for name, measure in (("noise_over_dp_sgd", accumulated_noise), ("last_noise_over_dp_sgd", last_noise)):
        here, there = (p.noise_multiplier * measure(p.algorithm.strategy(), p.steps) for p in (plan, plain))
        found[name] = here / there
    return found


def _public(options: argparse.Namespace) -> dict[str, Any]:
    if options.set:
        raise ConfigurationError("--set is for the parameters of --method: say which")
    numbers = {name: value for name, value in public_numbers(options).items() if name != "lot_size"}
    usual = {name: TABLE[name].default for name in ("accountant", "beta")}
    said = {name: getattr(options, name) for name in usual if getattr(options, name) is not None}
    return {**numbers, **usual, **said}


def _show(
    options: argparse.Namespace,
    epsilon: float,
    numbers: dict[str, Any],
    described: Described,
    other: float | None = None,
) -> None:
    if not math.isfinite(epsilon):
        raise ConfigurationError(
            f"no finite epsilon holds for noise multiplier {numbers['noise_multiplier']:g} at delta "
            f"{numbers['delta']:g}: use more noise or a larger delta"
        )
    numbers = {"method": "fo-dp-sgd", "noise_meaning": FO_NOISE_MEANING, **numbers}
    if options.json:
        second = {} if other is None else {"second_opinion": other if math.isfinite(other) else None}
        print(json.dumps({"epsilon": epsilon, **second, **numbers}))
        return
    print(f"epsilon {accounting.rounded_up(epsilon, 6)} at delta {accounting.rounded_up(numbers['delta'], 6)}")
    if other is not None:
        print(f"second opinion: epsilon {accounting.rounded_up(other, 6)} by dp-accounting")
    beta = f" with beta {numbers['beta']}" if "beta" in numbers else ""
    beta += f" with {numbers['bands']} bands" if "bands" in numbers else ""
    same = " (the same as DP-SGD)" if numbers.get("beta") == 1 else ""
    print(
        f"method {numbers['method']}{beta}{same}, noise multiplier {numbers['noise_multiplier']:.6g}, "
        f"sampling rate {numbers['sampling_rate']:g}, {numbers['steps']} steps, accountant {numbers['accountant']}"
    )
    print(f"The noise multiplier is {numbers['noise_meaning']}.")
    if "noise_over_dp_sgd" in numbers:
        print(
            f"The noise that accumulates in the model is {numbers['noise_over_dp_sgd']:.3f} of DP-SGD's at this "
            f"epsilon, over all steps, and {numbers['last_noise_over_dp_sgd']:.3f} after the last."
        )
    print("\n".join((described.protected(), described.sampling(), described.noise(), _COVERS)))
