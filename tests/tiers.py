"""Writes tests/slow.txt, the tests that `make quick` leaves out, from what pytest says about durations:

    python -m pytest -n auto --durations=0 > durations.log;  python tests/tiers.py durations.log

A test is slow if all its cases together take longer than LIMIT seconds.
"""

import re
import sys
from collections import Counter
from pathlib import Path

LIMIT = 1.0
LIST = Path(__file__).with_name("slow.txt")


def slow_tests() -> frozenset[str]:
    """The slow tests, without their parameters: file::test or file::Class::test."""
    return frozenset(LIST.read_text(encoding="utf-8").split())


if __name__ == "__main__":
    seconds: Counter[str] = Counter()
    for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
        found = re.match(r"\s*([\d.]+)s (?:call|setup)\s+(\S+?)(?:\[|$)", line)
        if found:
            seconds[found[2]] += float(found[1])
    slow = sorted(name for name, total in seconds.items() if total > LIMIT)
    LIST.write_text("\n".join(slow) + "\n", encoding="utf-8")
    rest = sum(total for total in seconds.values() if total <= LIMIT)
    print(f"{len(slow)} slow tests of {len(seconds)}; the others take {rest:.0f} of {seconds.total():.0f} seconds")
