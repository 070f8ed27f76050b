"""The report as one HTML file that needs neither network nor script: a template filled with texts, tables, charts."""

from collections.abc import Mapping
from typing import Any

from fodp_lab.judging.claims import CLAIMS
from fodp_lab.judging.results import Results
from fodp_lab.judging.verdicts import NOT_DECIDABLE, NOT_REPRODUCED, REPRODUCED, RULES, Verdict
from fodp_lab.paper import fair
from fodp_lab.paper.catalog import FO, METHODS
from fodp_lab.paper.spec import RunSpec
from fodp_lab.report import figures, sentences, tables
from fodp_lab.report.charts import INK, PALETTE, Chart, charts_of
from fodp_lab.report.inline_svg import share_styles
from fodp_lab.report.markdown import EVIDENCE_WORDS, sentence, title

_CLASSES = {REPRODUCED: "yes", NOT_REPRODUCED: "no", NOT_DECIDABLE: "open"}  # of the style sheet


def html(results: Results, verdicts: Mapping[str, Verdict], charts: dict[str, Chart]) -> str:
    """The whole page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("fodp_lab.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {"sentence": sentence, "marked": _marked}
    drawn, styles = _drawings(charts)
    return environment.get_template("page.html").render(
        palette=PALETTE,
        styles=Markup(styles),
        classes=_CLASSES,
        words=EVIDENCE_WORDS,
        counts={status: sum(v.status == status for v in verdicts.values()) for status in _CLASSES},
        summary=sentences.summary(results, verdicts),
        advice=sentences.practitioner(results),
        claims=CLAIMS,
        verdicts=verdicts,
        rules=RULES,
        sections=[
            {
                "name": name,
                "title": title(name),
                "rule": fair.RULE if name == "fair" else "",
                "findings": sentences.about(results, name),
                "claims": [claim for claim in CLAIMS if claim.experiment == name],
                "charts": [(chart, _legend(chart), drawn[chart.name]) for chart in charts_of(charts, name)],
                "tables": tables.tables_of(results, name),
            }
            for name in tables.names()
        ],
        statement=RunSpec(dataset="cifar10", method=METHODS[FO][0], params=METHODS[FO][1]).plan().statement(),
        protocol=_protocol(),
        environment=sentences.environment(results),
        runs=len(results.paper) + len(results.fair_records),
        records=[path.name for path in sorted(results.folder.glob("*.jsonl"))],
    )


def _drawings(charts: Mapping[str, Chart]) -> tuple[dict[str, list[Any]], str]:
    """The panels of every chart, ready to stand in the page, and the style sheet that they share."""
    from markupsafe import Markup

    between = "\0"  # is in no SVG
    drawn = {name: list(figures.panels(chart)) for name, chart in charts.items()}
    text, styles = share_styles(between.join(panel for panels in drawn.values() for panel in panels))
    shared = iter(text.split(between))
    return {name: [Markup(next(shared)) for _ in panels] for name, panels in drawn.items()}, styles


def _legend(chart: Chart) -> dict[str, tuple[str, str]]:
    """Colour and kind of what has a name in a chart, where there is more than one."""
    names = {colour: f"var(--{name})" for name, colour in PALETTE.items()} | {INK: "currentColor"}
    found: dict[str, tuple[str, str]] = {}
    for panel in chart.panels:
        for mark in panel.marks:
            kind = "dashed" if mark.dashed else "hollow" if mark.hollow else "" if chart.kind == "lines" else "dot"
            found.setdefault(mark.label, (names[mark.colour], kind))
        for _, label in panel.references:
            found |= {label: ("currentColor", "dotted")} if label else {}
    return found if len(found) > 1 else {}


def _protocol() -> dict[str, Any]:
    fields = RunSpec(dataset="", method="").to_dict()
    return {name: value for name, value in fields.items() if value not in ("", None, {}) and name != "seed"}


def _marked(text: str) -> Any:
    """Escaped, with the two marks of Markdown that our sentences use."""
    from markupsafe import Markup, escape

    out = str(escape(text))
    for mark, tag in (("**", "b"), ("`", "code")):
        pieces = out.split(mark)
        out = "".join(piece if i % 2 == 0 else f"<{tag}>{piece}</{tag}>" for i, piece in enumerate(pieces))
    return Markup(out)
