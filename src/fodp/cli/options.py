"""The options of all commands: one table with what each option takes, its help and its default."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fodp.cli.features import IMAGE_SIDE
from fodp.data.more_cards import known_cards

_DATA = "your own data (docs/your-data.md)"
_FEATURES = "public features (docs/features.md)"
_PEOPLE = "people with several records (docs/people.md)"
_LEDGER = "the ledger, a privacy budget over many runs (docs/ledger.md)"


def number_or_auto(text: str) -> float | str:
    """A learning rate, or the word auto."""
    return text if text == "auto" else float(text)


number_or_auto.__name__ = "rate (a number or auto)"  # as argparse names what it could not read


@dataclass(frozen=True)
class Option:
    """One option of the command line.

    name: in the namespace of parsed words; with dashes, the flag.
    shown: its value in --help; "" for a switch.
    default: what commands take where nothing is said, which --help tells.
    stored: whether it describes the run, and is kept in the run's configuration; if not, it is of one command. A stored
        option that was not said is None in the parsed words, so that what was said can be told from what was left open.
    """

    name: str
    shown: str
    help: str
    kind: Callable[[str], Any] = str
    default: Any = None
    part: str = ""
    many: bool = False
    stored: bool = True
    also: str = ""  # another flag for the same


_TABLE = (
    Option("dataset", "NAME", f"one of {', '.join(known_cards())}", default="digits"),
    Option("model", "NAME", "mlp, cnn, logistic, or module:function of your own", default="mlp"),
    Option("method", "NAME", "a private optimizer (`fodp methods`); default: fo-noise, a recipe without tuning"),
    Option("set", "NAME=VALUE", "a parameter of the method; may be repeated", many=True),
    Option("import", "MODULE", "your own module, for methods and layer rules that it registers", many=True),
    Option("lr", "RATE", "learning rate; default auto: from public numbers, without tuning", number_or_auto),
    Option("shape", "SHAPE", "of the query: none, fan-in, kronecker, transcript or numbers (0.5,1,1)"),
    Option("epochs", "E", "passes over the data; steps = round(epochs / q)", float, 40.0),
    Option("target_epsilon", "EPS", "calibrate the noise to this epsilon, never above", float),
    Option("noise_multiplier", "SIGMA", "the noise itself (`fodp methods NAME` says its unit)", float),
    Option("delta", "DELTA", "default 1e-5, or a tenth of one over the public size if that is smaller", float),
    Option("clip_norm", "C", "the most that an example's gradient weighs", float, 1.0),
    Option("sampling_rate", "Q", "probability of a record in a step; default: from the public size", float),
    Option("batch", "B", "records in a lot, about: sampling rate B/N and lot size B", float),
    Option("lot_size", "L", "public divisor of sums; default: q times the public size", float),
    Option("steps", "T", "number of steps", int, stored=False),
    Option("accountant", "NAME", "pld, rdp or rdp-classic", default="pld"),
    Option("exact_noise", "", "nothing leaks through the low bits of the noise, which takes longer"),
    Option("data_dir", "DIR", "folder with data sets; default: the variable FODP_DATA", stored=False),
    Option("data", "FILE", "an .npz of images or features, or a table (.csv, .tsv)", part=_DATA),
    Option("target", "COLUMN", "of a table: the column to predict", part=_DATA),
    Option("schema", "FILE", "of a table: its public bounds and values (.toml, .json)", part=_DATA),
    Option("test_data", "FILE", "a public table to score on; default: no scores", part=_DATA),
    Option(
        "shared_rows_are_public",
        "",
        "rows of the public data that are in the private data too are public all the same",
        part=_DATA,
    ),
    Option("assume_size", "N", "public number of records", int, part=_DATA, also="--public-size"),
    Option("classes", "N", "of an .npz: public number of classes", int, part=_DATA),
    Option("features", "NAME", "efficientnet-lite0, scattering, fourier, or FILE.py:FUNCTION", part=_FEATURES),
    Option("image_size", "N", f"pixels a side for efficientnet-lite0; default {IMAGE_SIDE}", int, part=_FEATURES),
    Option("features_cache", "DIR", "where they are kept; as private as the data", part=_FEATURES, stored=False),
    Option("records_per_person", "M", "protect people; use M records of each in a step", int, part=_PEOPLE),
    Option("owners", "FILE|COLUMN", "whose each record is: a .npy or text file; of a table a column", part=_PEOPLE),
    Option("person_gradient", "HOW", "mean (default) or sum of a person's records", part=_PEOPLE),
    Option("assume_people", "N", "public number of people", int, part=_PEOPLE),
    Option("ledger", "FILE", "ledger of many runs, or postgresql://…; default: the folder's own", part=_LEDGER,
           stored=False),
    Option("dataset_name", "NAME", "your name for the data; its runs in the ledger share one budget", part=_LEDGER),
    Option("budget", "EPS,DELTA", "budget of the data over all runs, fixed by its first run", part=_LEDGER),
    Option("no_budget", "", "a new data set in the ledger, without a limit", part=_LEDGER, stored=False),
    Option("wait", "", "wait for what other runs hold of the budget and may give back", part=_LEDGER, stored=False),
    Option("allow_changed_data", "", "the data has changed on purpose", part=_LEDGER, stored=False),
    Option("allow_other_name", "", "the ledger knows the data by two names", part=_LEDGER, stored=False),
    Option("preset", "NAME", "paper: the paper's protocol", stored=False),
    Option("seed", "N", "research mode: repeatable, not private against who knows the seed", int),
    Option("eval_every", "N", "score on the public test split every N epochs", int, 1),
    Option("early_stopping", "N", "stop after N public scores without a better one; same epsilon", int),
    Option("microbatch", "N", "examples in flight at a time; default: by the model", int),
    Option("augment", "NAME", "of images: standard, crop, flip or crop+flip; see --copies"),
    Option("copies", "K", "augmented pictures of a record, averaged before clipping; default 1", int),
    Option("public_sample", "FILE", "with the shape kronecker: public records of the data's form (.npz, .csv)"),
    Option("device", "NAME", "where to train: cpu (default), cuda, cuda:1, … (docs/scaling.md)"),
    Option("rank_timeout", "SECONDS", "under torchrun: wait so long for a rank", float, 300.0, stored=False),
    Option("vary", "NAME=V,V", "values of a parameter to try (lr=0.1,0.2); may be repeated", many=True),
    Option("runs", "MEAN", "mean of the random number of runs", float, 10.0),
    Option("distribution", "NAME", "of that number: geometric, logarithmic or poisson", default="geometric"),
    Option("subsample", "F", "search on a random fraction of the data, then one run on all", float),
    Option("search_epsilon", "EPS", "with --subsample: of the search; default half the target", float),
    Option("jobs", "N", "processes, one thread each; default: the number of cores", int, stored=False),
    Option("ray", "ADDRESS", "run on this Ray cluster (HOST:PORT or auto), or on a local one (local)", stored=False),
    Option("attack", "NAME", "mechanism, sampling, replay or one-run; default all", many=True, stored=False),
    Option("trials", "N", "guesses per direction of the mechanism attack; default: by the noise", int, stored=False),
    Option("canaries", "M", "canaries of the one-run attack", int, 1000, stored=False),
    Option("confidence", "P", "of the bounds; default 1 - 1e-6 for the whole audit", float, stored=False),
    Option("beta", "BETA", "mixing of FO-DP-SGD; 1 is DP-SGD", float, 0.9),
    Option("second_opinion", "", "compute epsilon with Google's dp-accounting, too (fodp[check])", stored=False),
    Option("page", "N", "older runs, page by page; 1 are the newest", int, 1, stored=False),
    Option("all", "", "all runs at once", stored=False),
    Option("mean", "M", "mean number of runs", float, stored=False),
    Option("unit", "UNIT", "record or person: that of the runs' plans", default="record", stored=False),
    Option("threads", "N", "threads of PyTorch", int, stored=False),
    Option("out", "DIR", "folder to write; of a run, default: a fresh one under runs/", stored=False),
    Option("resume", "", "go on with what is in --out", stored=False),
    Option("json", "", "the last line on stdout is the result as JSON", stored=False),
    Option("quiet", "", "no progress on stderr", stored=False),
)  # fmt: skip
TABLE: Mapping[str, Option] = {option.name: option for option in _TABLE}

CONFIGURATION = (
    "dataset model method set import lr shape epochs target_epsilon noise_multiplier delta clip_norm sampling_rate "
    "batch lot_size accountant exact_noise data_dir data target schema test_data shared_rows_are_public assume_size "
    "classes features image_size features_cache records_per_person owners person_gradient assume_people"
)  # which run: what train, tune and audit have in common
INPUTS = "microbatch augment copies public_sample"
LEDGER = "ledger dataset_name budget no_budget allow_changed_data allow_other_name"


def flag(name: str) -> str:
    """The flag of an option, as messages name it.

    Example:
        >>> flag("clip_norm")
        '--clip-norm'
    """
    return "--" + name.replace("_", "-")


def add(
    parser: argparse.ArgumentParser, names: str, *, required: str = "", told: Mapping[str, str] | None = None,
    **defaults: Any,
) -> None:  # fmt: skip
    """Add options of the table by their names.

    Args:
        names: of the options, separated by blanks, in the order of --help.
        required: names of those that must be said.
        told: other words of help, by name, where an option means something special to this command.
        defaults: of this command, where they are not the table's; None for none.
    """
    parts: dict[str, Any] = {"": parser}
    for name in names.split():
        option = TABLE[name]
        default = defaults.get(name, option.default)
        help_ = (told or {}).get(name, option.help) + ("" if default is None else f"; default {_short(default)}")
        words: dict[str, Any] = {"dest": name, "help": help_, "default": None if option.stored else default}
        if option.shown:
            words |= {"metavar": option.shown, "type": option.kind, "action": "append" if option.many else "store"}
        else:
            words |= {"action": "store_true"}
        if name in required.split():
            words["required"] = True
        if option.part not in parts:
            parts[option.part] = parser.add_argument_group(option.part)
        parts[option.part].add_argument(*filter(None, (flag(name), option.also)), **words)


def _short(default: Any) -> str:
    return f"{default:g}" if isinstance(default, float) else str(default)
