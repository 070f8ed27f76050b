"""The house does not grow back: private doors, large things, sizes and the files of the core.

A number here is what was reached; it may only shrink. `tests/house.py` finds and counts, import-linter holds the rings.
"""

from collections import Counter

import house

# What is left of each rule, by file (`python tests/house.py --table`). A file that is not listed has none.
ALLOWED: dict[str, dict[str, int]] = {
    "large class": {
        "fodp/sources/tape.py": 1,
    },
    "private door": {
        "fodp/sources/beside.py": 2,
    },
}

# Lines: what was reached, and what to aim for (issue 32).
LIBRARY, AIM_OF_LIBRARY = 40_113, 25_000
CORE_AND_ENGINES, AIM_OF_CORE_AND_ENGINES = 27_558, 15_500
CORE, AIM_OF_CORE = 3_210, 2_500
TESTS, AIM_OF_TESTS = 45_374, 28_000
C_SOURCES = 120
FILES_OF_THE_CORE = 18

EXTENSIONS = ("audit", "cli", "data", "features", "integrations", "runs", "sklearn", "testing", "tuning", "workers")


def test_no_rule_of_the_house_is_broken_where_it_was_kept():
    found: dict[str, Counter[str]] = {}
    for file in house.files():
        for finding in house.findings(file):
            found.setdefault(finding.rule, Counter())[finding.file] += 1
    worse = [
        f"{file}: {rule}, {count} and at most {ALLOWED.get(rule, {}).get(file, 0)}"
        for rule, files in found.items()
        for file, count in files.items()
        if count > ALLOWED.get(rule, {}).get(file, 0)
    ]
    assert not worse, "python tests/house.py FILE shows the lines: " + "; ".join(worse)


def core_files() -> list[str]:
    """Of the core: what lies directly in `src/fodp`."""
    return [str(file.relative_to(house.ROOT)) for file in sorted((house.SOURCES / "fodp").glob("*.py"))]


def test_the_house_does_not_grow():
    whole = house.lines("src/fodp")
    assert whole <= LIBRARY
    assert whole - house.lines(*(f"src/fodp/{name}" for name in EXTENSIONS)) <= CORE_AND_ENGINES
    assert house.lines(*core_files()) <= CORE
    assert house.lines("tests") <= TESTS
    assert house.lines("src/fodp", ending="c") <= C_SOURCES


def test_the_core_has_few_files_and_the_page_lists_each():
    page = (house.ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    files = core_files()
    assert len(files) <= FILES_OF_THE_CORE
    missing = [file for file in files if "__" not in file and f"`{file.rpartition('/')[2][:-3]}" not in page]
    assert not missing


def test_every_folder_is_an_engine_or_an_extension():
    page = (house.ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    folders = [
        folder.name for folder in sorted((house.SOURCES / "fodp").iterdir()) if (folder / "__init__.py").exists()
    ]
    assert set(EXTENSIONS) < set(folders)
    assert not [name for name in folders if f"`{name}/`" not in page]
