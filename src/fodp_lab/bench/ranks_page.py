"""The tables of docs/scaling.md: what was measured over gloo, and what a billion parameters would need."""

from pathlib import Path
from typing import Any

from fodp.errors import PrivacyError
from fodp_lab.bench.needs import settings

BEGIN = "<!-- begin: {}, written by `python tests/scaling_page.py` -->"
END = "<!-- end: {} -->"
_TITLES = {"mlp": "the paper's MLP", "transformer": "a transformer"}


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Markdown by name."""
    return {"measured": measured(results), "needs": needs()}


def measured(results: dict[str, Any]) -> str:
    """Strong and weak scaling, bytes and the window's memory."""
    try:
        rows = sorted(results["rows"], key=lambda row: (row["workload"], row["ranks"]))
        lines = [_under(results["conditions"], rows), "", *_table(rows)]
    except (KeyError, TypeError, IndexError) as error:
        raise PrivacyError(f"these are no results of `fodp bench --ranks` ({error!r}): measure again") from None
    return "\n".join(lines)


def _under(conditions: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    loads = [row["load"] for row in rows]
    steps = sorted({(row["workload"], row["steps"]) for row in rows})
    return (
        "Milliseconds of a step, by the clock / of the processor, medians of the slowest rank; FO-DP-SGD with K = 8, "
        f"one thread a rank; {', '.join(f'{count} steps of the {name}' for name, count in steps)}; "
        f"{conditions['processor']}, {conditions['cores']} cores, torch {conditions['torch']}. The machine's load was "
        f"{min(loads):g} to {max(loads):g} while this was measured: above its number of cores ranks wait for others, "
        "and only the processor's time tells what is divided."
    )


def _table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| | ranks | the same lot | a lot times the ranks | bytes of sums, releases, meetings | window, MB a rank |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        alone = row["ranks"] == 1
        what = f"{_TITLES[row['workload']]}, {row['parameters']:,} parameters, lot {row['lot']}"
        sent = ", ".join(f"{row['bytes'].get(name, 0):,}" for name in ("reduce", "broadcast", "all_gather"))
        strong, weak = (f"{row[way]['wall_ms']:.1f} / {row[way]['processor_ms']:.1f}" for way in ("strong", "weak"))
        what, weak, sent = (what, "", "0") if alone else ("", weak, sent)
        lines.append(f"| {what} | {row['ranks']} | {strong} | {weak} | {sent} | {row['window_bytes'] / 1e6:.1f} |")
    return lines


def needs() -> str:
    """What each rank would hold and send, however many there are."""
    lines = [
        "| 10⁹ parameters | releases, GB | all, GB | sent and received in a step, GB |",
        "| --- | --- | --- | --- |",
    ]
    for setting in settings():
        some = "" if setting.trainable == setting.parameters else f", {setting.trainable / 1e6:g} million"
        held = setting.held()
        numbers = " | ".join(_gb(amount) for amount in (held["releases"], sum(held.values()), setting.sent()))
        lines.append(f"| {setting.what}{some} | {numbers} |")
    return "\n".join(lines)


def _gb(amount: float) -> str:
    return f"{amount / 1e9:.3g}"


def put_into(page: str, made: dict[str, str]) -> str:
    """The page with each table between its markers."""
    for name, table in made.items():
        begin, end = BEGIN.format(name), END.format(name)
        if page.count(begin) != 1 or page.count(end) != 1:
            raise PrivacyError(f"the page has no place for {name!r}: it needs the lines {begin} and {end}")
        before, rest = page.split(begin)
        page = f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"
    return page


def written(file: Path, made: dict[str, str]) -> str:
    """What the file should hold."""
    return put_into(file.read_text(encoding="utf-8"), made)
