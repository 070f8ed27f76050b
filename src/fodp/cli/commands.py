"""The table of commands: name, help, options and what runs. Other packages add theirs by entry points."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from fodp.cli import audit, export, ledger, methods, predict, privacy, train, tune
from fodp.errors import PrivacyError

GROUP = "fodp.commands"  # entry points, each a `Command`
_OF_THE_LAB = ("reproduce", "report", "bench")


@dataclass(frozen=True)
class Command:
    """One word of the command line."""

    name: str
    help: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    epilog: str = ""


@dataclass(frozen=True)
class Missing:
    """A word that is known but cannot be followed here; the reason says what to do."""

    name: str
    reason: str


OWN = (
    Command("train", "Train a model with a stated (epsilon, delta).", train.options, train.run, train.EPILOG),
    Command(
        "epsilon", "The epsilon of a noise multiplier.", privacy.epsilon_options, privacy.run_epsilon, privacy.EPILOG
    ),
    Command(
        "calibrate",
        "The noise multiplier of an epsilon.",
        privacy.calibrate_options,
        privacy.run_calibrate,
        privacy.EPILOG,
    ),
    Command("methods", "List the private optimizers and their parameters.", methods.options, methods.run),
    Command("audit", "Attack a plan from outside: does its epsilon stand?", audit.options, audit.run, audit.EPILOG),
    Command("ledger", "What was spent on which data, and what is left.", ledger.options, ledger.run, ledger.EPILOG),
    Command("tune", "Search for parameters, sealed: only the best run leaves.", tune.options, tune.run, tune.EPILOG),
    Command("export", "Write what may be published of a run.", export.options, export.run),
    Command("predict", "Predict with a run or an exported model.", predict.options, predict.run, predict.EPILOG),
)


def known() -> list[Command | Missing]:
    """The library's own commands, which nobody replaces, then those that installed packages add."""
    found: dict[str, Command | Missing] = {command.name: command for command in OWN}
    for point in entry_points(group=GROUP):
        if point.name not in found:
            found[point.name] = _load(point)
    for name in _OF_THE_LAB:
        reason = f'fodp {name} belongs to the laboratory, which is not installed: pip install "fodp[lab]"'
        found.setdefault(name, Missing(name, reason))
    return list(found.values())


def _load(point: EntryPoint) -> Command | Missing:
    """A package that cannot be loaded takes only its own commands with it."""
    try:
        command = point.load()
    except PrivacyError as error:
        return Missing(point.name, str(error))
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        return Missing(point.name, f"fodp {point.name} cannot be loaded from {point.value} ({why}): mend that package")
    if not isinstance(command, Command) or command.name != point.name:
        why = f"not the Command {point.name!r}"
        return Missing(point.name, f"fodp {point.name}: {point.value} is {why}: mend the package that says so")
    return command
