"""From the records to everything a reader sees: tables, figures, REPRODUCTION.md and one HTML page."""

from pathlib import Path
from typing import Any

from fodp_lab.judging.claims import judge_all
from fodp_lab.judging.results import Results
from fodp_lab.report import charts, figures, markdown, page, tables


def texts(results: Results, drawn: dict[str, charts.Chart]) -> dict[str, str]:
    """Every generated text file but the page, by its path in the folder of results: a function of the records alone."""
    files = {"REPRODUCTION.md": markdown.reproduction(results, judge_all(results), drawn)}
    for name in tables.names():
        parts = [f"# `{name}`", "", *(table.markdown() for table in tables.tables_of(results, name))]
        files[f"tables/{name}.md"] = "\n".join(parts)
    return {**files, "tables/runs.csv": tables.runs_as_csv(results)}


def write(folder: str | Path) -> dict[str, Any]:
    """Generate everything into the folder that holds the records; nothing is trained."""
    results = Results(folder)
    drawn = charts.draw(results)
    files = {**texts(results, drawn), "report.html": page.html(results, judge_all(results), drawn)}
    for name, text in files.items():
        path = results.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    figures.save(drawn.values(), results.folder / "figures")
    return {"files": sorted(files), "figures": sorted(drawn), "report": str(results.folder / "report.html")}
