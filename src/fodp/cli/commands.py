"""The table of commands: name, help, options and what runs."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from fodp.cli import audit, bench, export, ledger, methods, privacy, report, reproduce, train


@dataclass(frozen=True)
class Command:
    """One word of the command line."""

    name: str
    help: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    epilog: str = ""


ALL = (
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
    Command(
        "reproduce",
        "Run the paper's experiments, or the fair comparison.",
        reproduce.options,
        reproduce.run,
        reproduce.EPILOG,
    ),
    Command("report", "Tables, figures and one HTML page from the records.", report.options, report.run),
    Command("methods", "List the private optimizers and their parameters.", methods.options, methods.run),
    Command("audit", "Attack a plan from outside: does its epsilon stand?", audit.options, audit.run, audit.EPILOG),
    Command("ledger", "What was spent on which data, and what is left.", ledger.options, ledger.run, ledger.EPILOG),
    Command("export", "Write what may be published of a run.", export.options, export.run),
    Command(
        "bench", "Time private steps beside plain ones and other libraries.", bench.options, bench.run, bench.EPILOG
    ),
)
