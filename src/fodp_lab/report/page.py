"""The report as one HTML file that needs no network: texts and tables as HTML, charts and raw rows as data."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from html import escape
from importlib import resources
from typing import Any

from fodp_lab.judging.claims import CLAIMS, Claim
from fodp_lab.judging.results import Record, Results
from fodp_lab.judging.verdicts import NOT_DECIDABLE, NOT_REPRODUCED, REPRODUCED, RULES, Verdict
from fodp_lab.paper.catalog import FO, METHODS
from fodp_lab.paper.spec import RunSpec
from fodp_lab.report import findings, tables
from fodp_lab.report.charts import FO_COLOUR, INK, Chart, Mark, of
from fodp_lab.report.findings import environment, practitioner, summary
from fodp_lab.report.markdown import WORDS, sentence, title

_CLASSES = {REPRODUCED: "yes", NOT_REPRODUCED: "no", NOT_DECIDABLE: "open"}
_POINTS = 125  # of a curve in the page; the records have them all


def html(results: Results, verdicts: Mapping[str, Verdict], charts: dict[str, Chart]) -> str:
    """The whole page."""
    body = [_summary(results, verdicts), _claims(verdicts)]
    body += [_experiment(results, name, verdicts, charts) for name in tables.names()]
    body += [_privacy(), _configuration(results), _rows()]
    data = {"charts": {name: _thinned(chart) for name, chart in charts.items()}, "rows": raw_rows(results)}
    links = ["summary", "claims", *tables.names(), "privacy", "configuration", "raw-rows"]
    page = _asset("page.html")
    for marker, text in {
        "STYLE": _asset("page.css"),
        "NAV": "\n".join(f'<a href="#{name}">{name}</a>' for name in links),
        "BODY": "\n".join(body),
        # Inside a script element only "</" could end it.
        "DATA": json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("</", "<\\/"),
        "SCRIPT": _asset("charts.js") + _asset("page.js"),
    }.items():
        page = page.replace(f"<!--{marker}-->", text, 1)
    return page


def _asset(name: str) -> str:
    return (resources.files("fodp_lab.report") / "page_assets" / name).read_text(encoding="utf-8")


def _section(name: str, heading: str, *parts: str) -> str:
    return f'<section id="{name}"><h2>{heading}</h2>\n' + "\n".join(parts) + "</section>"


def _text(text: str) -> str:
    """Escaped, with the two marks of Markdown that our sentences use."""
    out = escape(text, quote=False)
    for mark, tag in (("**", "b"), ("`", "code")):
        pieces = out.split(mark)
        out = "".join(p if i % 2 == 0 else f"<{tag}>{p}</{tag}>" for i, p in enumerate(pieces))
    return out


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{_text(line)}</li>" for line in lines) + "</ul>"


def _badge(status: str) -> str:
    return f'<span class="badge {_CLASSES[status]}">{status}</span>'


def _summary(results: Results, verdicts: Mapping[str, Verdict]) -> str:
    counts = {s: sum(v.status == s for v in verdicts.values()) for s in _CLASSES}
    tiles = "".join(f'<div class="tile {_CLASSES[s]}"><b>{n}</b>{s}</div>' for s, n in counts.items())
    return (
        '<section id="summary"><h1>FO-DP-SGD: which claims of the paper hold?</h1>'
        f'<div class="tiles">{tiles}</div>'
        + "".join(f'<p class="lead">{_text(line)}</p>' for line in summary(results, verdicts))
        + f"<h3>What a practitioner should use</h3>{_list(practitioner(results))}</section>"
    )


def _claims(verdicts: Mapping[str, Verdict]) -> str:
    rows = "".join(
        f'<tr><td>{_badge(verdicts[c.id].status)}</td><td class="wide">{escape(c.words)} '
        f'<span class="dim">({escape(c.where)})</span></td>'
        f'<td><a href="#{c.experiment}">{c.experiment}</a></td></tr>'
        for c in CLAIMS
    )
    table = f"<thead><tr><th>verdict</th><th>the paper says</th><th>experiment</th></tr></thead><tbody>{rows}</tbody>"
    rules = _list(f"**{name}**: {rule}" for name, rule in RULES.items())
    return _section("claims", "All claims", f'<div class="scroll"><table>{table}</table></div>',
                    f"<details><summary>How verdicts are reached</summary>{rules}</details>")  # fmt: skip


def _experiment(results: Results, name: str, verdicts: Mapping[str, Verdict], charts: dict[str, Chart]) -> str:
    parts = []
    if name == "fair":
        parts.append(f"<details><summary>The rule, fixed before the runs</summary><pre>{escape(tables.FAIR_RULE)}</pre>"
                     "</details>")  # fmt: skip
    said = findings.of(results, name)
    parts.append(_list(said) if said else "")
    found = [claim for claim in CLAIMS if claim.experiment == name]
    parts.append(f'<div class="claims">{"".join(_claim(c, verdicts[c.id]) for c in found)}</div>' if found else "")
    for chart in of(charts, name):
        caption = f"{chart.title}. {chart.caption}"
        parts.append(f'<figure data-chart="{chart.name}"><figcaption>{escape(caption)}</figcaption></figure>')
    shown = "".join(_table(table) for table in tables.of(results, name))
    parts.append(f"<details><summary>All numbers</summary>{shown}</details>")
    return _section(name, f"<code>{name}</code> {escape(title(name))}", *parts)


def _claim(claim: Claim, verdict: Verdict) -> str:
    number = f" · paper: <b>{escape(claim.number)}</b>" if claim.number else ""
    note = f'<p class="dim">{_text(claim.note)}</p>' if claim.note else ""
    return (
        f'<article class="claim {_CLASSES[verdict.status]}">{_badge(verdict.status)} '
        f'<span class="dim">{escape(claim.where)}{number} · rule: {claim.rule}</span>'
        f"<q>{escape(claim.words)}</q><p>{_text(sentence(verdict.reason))}</p>{_evidence(verdict)}{note}</article>"
    )


def _evidence(verdict: Verdict) -> str:
    lines = "".join(f'<li class="{_CLASSES[s]}"><b>{WORDS[s]}</b> {escape(told)}</li>' for s, told in verdict.evidence)
    if len(verdict.evidence) < 4:
        return f'<ul class="evidence">{lines}</ul>' if lines else ""
    return f'<details><summary>{len(verdict.evidence)} rows</summary><ul class="evidence">{lines}</ul></details>'


def _table(table: tables.Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    note = f'<p class="dim">{_text(table.note)}</p>' if table.note else ""
    return (
        f'<h3>{escape(table.title)}</h3><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{note}"
    )


def _privacy() -> str:
    """The guarantee of the main configuration, as its plan states it."""
    method, params = METHODS[FO]
    plan = RunSpec(dataset="cifar10", method=method, params=params).plan()
    return _section("privacy", "Privacy statement of the main configuration", f"<pre>{escape(plan.statement())}</pre>")


def _configuration(results: Results) -> str:
    protocol = {k: v for k, v in RunSpec(dataset="", method="").to_dict().items() if v not in ("", None, {})}
    protocol.pop("seed")
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in protocol.items())
    return _section("configuration", "Configuration and environment", "<h3>The paper's protocol</h3>",
                    f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>',
                    f"<h3>Environment of the runs</h3>{_list(environment(results))}")  # fmt: skip


def _rows() -> str:
    return _section("raw-rows", "Raw rows", '<details id="rows"><summary>Every recorded run</summary></details>')


def _thinned(chart: Chart) -> dict[str, Any]:
    """The chart with fewer points and digits: the page stays small."""
    plain = asdict(chart)
    for panel in plain["panels"]:
        panel["marks"] = [_small(mark, chart.kind == "lines") for mark in panel["marks"]]
    return plain


def _small(mark: Mapping[str, Any], line: bool) -> dict[str, Any]:
    keep = range(len(mark["y"]))
    if line and len(keep) > _POINTS:
        keep = range((len(keep) - 1) % -(-len(keep) // _POINTS), len(keep), -(-len(keep) // _POINTS))
    small = {k: v for k, v in mark.items() if k in Mark.__dataclass_fields__}
    for name in ("x", "y", "low", "high"):
        values = [mark[name][i] for i in keep] if mark[name] else []
        small[name] = [v if isinstance(v, str) else round(v, 4) for v in values]
    return {**small, "main": mark["colour"] in (INK, FO_COLOUR)}


def raw_rows(results: Results) -> dict[str, Any]:
    """Every recorded run as one row."""
    columns = ("suite", "method", "data", "parameters", "seed", "steps", "scored on", "σ", "C", "ε", "final", "best",
               "loss", "seconds", "code", "key")  # fmt: skip
    rows = [_row("paper", r) for r in results.paper] + [_row("fair", r) for r in results.fair_records]
    return {"columns": columns, "rows": rows}


def _row(suite: str, r: Record) -> list[Any]:
    run = r["run"]
    chosen = " ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in run["params"].items())
    chosen += f" ({run['variant']})" if "variant" in run else ""
    numbers = [r["noise_multiplier"], run["clip_norm"], r["final_epsilon"]]
    return [
            suite, r["algorithm"], run["dataset"], chosen, r["seed"], run["steps"], run["scored_on"],
            *(None if v is None else round(v, 4) for v in numbers),
            r["final_accuracy"], r["best_accuracy"], round(r["final_loss"], 4), r["seconds"], r["code"], r["key"],
    ]  # fmt: skip
