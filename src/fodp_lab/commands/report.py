"""`fodp report`: tables, figures and pages from the records; nothing is trained."""

import argparse
import json
from pathlib import Path

from fodp.errors import PrivacyError


def options(parser: argparse.ArgumentParser) -> None:
    """Options of `fodp report`."""
    parser.add_argument("--out", metavar="DIR", default="results", help="folder with the records (default: results)")
    parser.add_argument("--utility", action="store_true", help="print the page of the utility comparison as Markdown")
    parser.add_argument("--figures", metavar="DIR", help="with --utility: where its figure goes (default: nowhere)")
    parser.add_argument("--json", action="store_true", help="the last line on stdout lists what was written, as JSON")


def run(options: argparse.Namespace) -> int:
    """Write everything beside the records."""
    folder = Path(options.out)
    if not any(folder.glob("*.jsonl")):
        raise PrivacyError(f"{folder} holds no records: run `fodp reproduce --out {folder}` first")
    if options.utility:
        return _utility(folder, options.figures)
    if options.figures:
        raise PrivacyError("--figures belongs to --utility: the figures of the report lie beside its records")
    from fodp_lab.report.files import write

    done = write(folder)
    print(json.dumps(done) if options.json else f"wrote {done['report']} and {len(done['figures'])} figures")
    return 0


def _utility(folder: Path, figures_in: str | None) -> int:
    from fodp_lab.judging.utility import Utility
    from fodp_lab.report import figures, utility

    found = Utility(folder)
    drawn = utility.chart(found)
    if figures_in and drawn.panels:
        figures.save([drawn], Path(figures_in))
    print(utility.page(found), end="")
    return 0
