"""`fodp epsilon` and `fodp calibrate`: accounting without data."""

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from fodp import accounting
from fodp._checks import PrivacyError
from fodp.accounting import ACCOUNTANTS
from fodp.cli.job import public_plan

EPILOG = """examples:
  fodp epsilon --noise-multiplier 1.1 --sampling-rate 0.04 --steps 6250 --beta 0.9
  fodp calibrate --target-epsilon 8 --sampling-rate 0.04 --steps 1000 --method dp-sam

Without --method: DP-SGD, or FO-DP-SGD with --beta. Methods that ask more than one question per step cost more."""

if TYPE_CHECKING:
    from fodp.plan import Plan

_COVERS = (
    "For Poisson sampling, one example added or removed, per-example clipping; it does not cover the choice of "
    "hyper-parameters, other runs on the same data, or people with several examples."
)


def _shared_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sampling-rate", type=float, required=True, metavar="Q", help="probability q of an example")
    parser.add_argument("--steps", type=int, required=True, metavar="T", help="number of steps")
    parser.add_argument("--delta", type=float, default=1e-5, help="default 1e-5")
    parser.add_argument("--beta", type=float, default=1.0, help="mixing of FO-DP-SGD, default 1 (DP-SGD)")
    parser.add_argument("--method", metavar="NAME", help="another private optimizer (see `fodp methods`)")
    parser.add_argument("--set", action="append", metavar="NAME=VALUE", help="a parameter of --method")
    parser.add_argument("--accountant", default="pld", metavar="NAME", help=f"{', '.join(ACCOUNTANTS)}; default pld")
    parser.add_argument("--json", action="store_true", help="print JSON")


def epsilon_options(parser: argparse.ArgumentParser) -> None:
    """Options of `fodp epsilon`."""
    parser.add_argument("--noise-multiplier", type=float, required=True, metavar="SIGMA", help="noise over C")
    _shared_options(parser)


def calibrate_options(parser: argparse.ArgumentParser) -> None:
    """Options of `fodp calibrate`."""
    parser.add_argument("--target-epsilon", type=float, required=True, metavar="EPS", help="never exceeded")
    _shared_options(parser)


def run_epsilon(options: argparse.Namespace) -> int:
    """Print ε."""
    if options.method is not None:
        plan = public_plan(_without_beta(options), noise_multiplier=options.noise_multiplier)
        _show(options.json, plan.epsilon(), _numbers(plan))
        return 0
    public = _public(options)
    epsilon = accounting.epsilon(noise_multiplier=options.noise_multiplier, **public)
    _show(options.json, epsilon, {"noise_multiplier": options.noise_multiplier, **public})
    return 0


def run_calibrate(options: argparse.Namespace) -> int:
    """Print σ and the ε it really has."""
    if options.method is not None:
        plan = public_plan(_without_beta(options), target_epsilon=options.target_epsilon)
        _show(options.json, plan.epsilon(), _numbers(plan))
        return 0
    public = _public(options)
    sigma = accounting.calibrate(target_epsilon=options.target_epsilon, **public)
    epsilon = accounting.epsilon(noise_multiplier=sigma, **public)
    _show(options.json, epsilon, {"noise_multiplier": sigma, **public})
    return 0


def _without_beta(options: argparse.Namespace) -> argparse.Namespace:
    if options.beta != 1:
        raise PrivacyError("--beta goes without --method; with it, say --set beta=VALUE")
    return options


def _numbers(plan: "Plan") -> dict[str, Any]:
    names = ("noise_multiplier", "sampling_rate", "steps", "delta", "method", "accountant")
    return {name: getattr(plan, name) for name in names}


def _public(options: argparse.Namespace) -> dict[str, Any]:
    if options.set:
        raise PrivacyError("--set is for the parameters of --method: say which")
    names = ("sampling_rate", "steps", "delta", "beta", "accountant")
    return {name: getattr(options, name) for name in names}


def _show(as_json: bool, epsilon: float, numbers: dict[str, Any]) -> None:
    if not math.isfinite(epsilon):
        raise PrivacyError(
            f"no finite epsilon holds for noise multiplier {numbers['noise_multiplier']:g} at delta "
            f"{numbers['delta']:g}: use more noise or a larger delta"
        )
    if as_json:
        print(json.dumps({"epsilon": epsilon, **numbers}))
        return
    print(f"epsilon {accounting.rounded_up(epsilon, 6)} at delta {accounting.rounded_up(numbers['delta'], 6)}")
    which = f"method {numbers['method']}" if "method" in numbers else f"beta {numbers['beta']:g}"
    print(
        f"noise multiplier {numbers['noise_multiplier']:.6g}, {which}, "
        f"sampling rate {numbers['sampling_rate']:g}, {numbers['steps']} steps, accountant {numbers['accountant']}"
    )
    print(_COVERS)
