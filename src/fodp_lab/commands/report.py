"""`fodp report`: tables, figures, REPRODUCTION.md and one HTML page from the records; nothing is trained."""

import argparse
import json
from pathlib import Path

from fodp._checks import PrivacyError


def options(parser: argparse.ArgumentParser) -> None:
    """Options of `fodp report`."""
    parser.add_argument("--out", metavar="DIR", default="results", help="folder with the records (default: results)")
    parser.add_argument("--json", action="store_true", help="the last line on stdout lists what was written, as JSON")


def run(options: argparse.Namespace) -> int:
    """Write everything beside the records."""
    folder = Path(options.out)
    if not any(folder.glob("*.jsonl")):
        raise PrivacyError(f"{folder} holds no records: run `fodp reproduce --out {folder}` first")
    from fodp_lab.report.files import write

    done = write(folder)
    print(json.dumps(done) if options.json else f"wrote {done['report']} and {len(done['figures'])} figures")
    return 0
