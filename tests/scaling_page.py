"""Writes the tables of docs/scaling.md from docs/scaling.json: `make docs`."""

from pathlib import Path

from fodp_lab.bench import measurements, ranks_page

DOCS = Path(__file__).parents[1] / "docs"


def page() -> str:
    """The page as it should be."""
    return ranks_page.written(DOCS / "scaling.md", ranks_page.tables(measurements.load(DOCS / "scaling.json")))


if __name__ == "__main__":
    (DOCS / "scaling.md").write_text(page(), encoding="utf-8")
