"""`fodp export`: what may be published of a run: weights, the privacy card and how to predict, nothing else."""

import argparse
from pathlib import Path


def options(parser: argparse.ArgumentParser) -> None:
    """Options of `fodp export`."""
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a run")
    parser.add_argument("file", metavar="FILE", help="the .safetensors file to write")


def run(options: argparse.Namespace) -> int:
    """Write weights with the privacy card as metadata."""
    from fodp.accounting import rounded_up
    from fodp.runs.export import export

    card = export(Path(options.run_folder), Path(options.file))
    spent = f"epsilon {rounded_up(card['epsilon'])} at delta {rounded_up(card['delta'], 6)}"
    print(f"wrote {options.file}: {spent}, {card['randomness']}")
    print("It holds the weights, the privacy card and what predicting takes; no key and no private quantity.")
    if "loader" in card:
        print(f"To predict with it:\n\n{card['loader']}")
    return 0
