"""`fodp predict`: what a trained model says about new examples."""

import argparse
import csv
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fodp.cli.options import add
from fodp.errors import ConfigurationError, DataError
from fodp.support.files import atomically

if TYPE_CHECKING:
    from fodp.runs.exported import Exported

EPILOG = """examples:
  fodp predict runs/patients new.csv --out predictions.csv
  fodp predict model.safetensors images.npy --probabilities

DATA is as it was before training: for a table a .csv or .tsv (the target may be left out), else a .npy of examples with
channels first. Predicting costs no privacy of the training data. No error holds anything of the new examples."""


def options(parser: argparse.ArgumentParser) -> None:
    """Options of `fodp predict`."""
    parser.add_argument("model_file", metavar="RUN", help="the folder of a run or search, or a file of `fodp export`")
    parser.add_argument("examples", metavar="DATA", help="the new examples: .csv, .tsv or .npy")
    parser.add_argument("--probabilities", action="store_true", help="a column per class in place of the likeliest one")
    told = {
        "model": "module:function of your own that built the model, where RUN is a file",
        "out": "the .csv to write; default: stdout",
        "json": "print JSON in place of CSV",
    }
    add(parser, "model out json", told=told, model=None)


def run(options: argparse.Namespace) -> int:
    """Write one row per example, in their order."""
    exported = _exported(Path(options.model_file), options.model)
    examples = _examples(Path(options.examples), exported)
    if options.probabilities:
        rows: list[list[Any]] = exported.predict_proba(examples).tolist()
        names = exported.data.class_names or range(exported.data.classes)
        titles = [f"probability of {name}" for name in names]
    else:
        rows, titles = [[value] for value in exported.predict(examples)], ["prediction"]
    if options.json:
        print(json.dumps([dict(zip(titles, row, strict=True)) for row in rows]))
    if options.out is not None:
        _write(Path(options.out), titles, rows)
    elif not options.json:
        csv.writer(sys.stdout, lineterminator="\n").writerows([titles, *rows])
    return 0


def _exported(path: Path, model: str | None) -> "Exported":
    """The model of a file, or of a run's folder, whose configuration names the function that built it."""
    from fodp.data.models import MODELS
    from fodp.runs.export import export
    from fodp.runs.exported import load_exported
    from fodp.runs.folder import RunFolder

    with tempfile.TemporaryDirectory() as scratch:
        file = path
        if os.path.isdir(path):
            file = path / "model.safetensors"  # of a search
            model = model or RunFolder(path).read_config().get("model")
            if not file.exists():
                file = Path(scratch) / "model.safetensors"
                export(path, file)
        return load_exported(file, None if model in MODELS else model)


def _examples(path: Path, exported: "Exported") -> Any:
    """A table is read by its schema; an array here. Pickled objects are refused."""
    import numpy as np

    if exported.data.schema is not None:
        return path
    if path.suffix != ".npy":
        raise ConfigurationError(f"the model takes arrays of examples: DATA is a .npy (numpy.save), got {path}")
    try:
        return np.load(path, allow_pickle=False)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): name a .npy file") from None
    except (ValueError, EOFError):
        raise DataError(f"{path} is not an array of numbers: write it with numpy.save") from None


def _write(file: Path, titles: list[str], rows: list[list[Any]]) -> None:
    try:
        with atomically(file) as part, part.open("w", newline="", encoding="utf-8") as text:
            csv.writer(text, lineterminator="\n").writerows([titles, *rows])
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be written ({error.strerror}): choose another --out") from None
