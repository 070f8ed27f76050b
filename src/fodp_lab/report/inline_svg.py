"""Matplotlib's SVG made fit to stand inside an HTML page: small, named, and in the colours of the page."""

import re
from collections.abc import Sequence
from xml.etree import ElementTree as ET

from fodp_lab.report.charts import PALETTE

_NUMBER = re.compile(r"-?\d+\.\d+")
_NAMESPACE = re.compile(r"\{.*\}")
_NO_TURN = re.compile(r"rotate\(-?0(\.0+)?\s[^)]*\)")
_FONT = re.compile(r"font-family: [^;]*;? ?|(?<=px) '[^;]*'")
# Colours follow the reader's theme: the style sheet of the page defines these variables.
_COLOURS = {"#000000": "currentColor", "#ffffff": "var(--bg)", **{c: f"var(--{n})" for n, c in PALETTE.items()}}


def inline(svg: str, name: str, title: str, description: str, labels: Sequence[str]) -> str:
    """The element for a page; `name` makes its ids unique there, and group `mark-i` is titled `labels[i]`."""
    root = ET.fromstring(svg)
    for element in root.iter():
        _clean(element, name, labels)
    children = _flat(root)
    root[:] = [_told("title", title, id=f"{name}-title"), _told("desc", description, id=f"{name}-desc"), *children]
    named = {"role": "img", "aria-labelledby": f"{name}-title", "aria-describedby": f"{name}-desc"}
    root.attrib = {"viewBox": root.attrib["viewBox"], **named}
    return re.sub(r">\s+<", "><", ET.tostring(root, encoding="unicode"))


def share_styles(page: str) -> tuple[str, str]:
    """The page with a class in place of every style attribute, and the style sheet that says what they are."""
    names: dict[str, str] = {}

    def named(found: re.Match[str]) -> str:
        return f'class="{names.setdefault(found[1], f"s{len(names)}")}"'

    return re.sub('style="([^"]*)"', named, page), "".join(f".{name}{{{style}}}\n" for style, name in names.items())


def _told(tag: str, text: str, **attributes: str) -> ET.Element:
    element = ET.Element(tag, attributes)
    element.text = text
    return element


def _flat(element: ET.Element) -> list[ET.Element]:
    """The children, with those of groups that say nothing in place of the group; without what shows nothing."""
    found = []
    for child in element:
        child[:] = _flat(child)
        if child.tag == "g" and not child.attrib:
            found += list(child)
        elif child.attrib.get("style") != "fill: none" and child.tag not in ("metadata", "style"):
            found += [child] if child.tag != "defs" or len(child) else []
    return found


def _clean(element: ET.Element, name: str, labels: Sequence[str]) -> None:
    """Plain names, ids of this chart only where something refers to them, short numbers, colours of the page."""
    element.tag = _NAMESPACE.sub("", element.tag)
    old, element.attrib = element.attrib, {}
    for key, value in ((_NAMESPACE.sub("", key), value) for key, value in old.items()):  # xlink:href is href today
        if key == "id" and value.startswith("mark-"):
            element.attrib["class"] = "mark"
            element.insert(0, _told("title", labels[int(value.removeprefix("mark-"))]))
        elif key == "id" and element.tag != "g":
            element.attrib["id"] = f"{name}-{value}"
        elif key in ("href", "clip-path"):
            element.attrib[key] = value.replace("#", f"#{name}-")
        elif key == "style":
            plain = _FONT.sub("", value).strip()
            element.attrib[key] = re.sub("#[0-9a-f]{6}", lambda found: _COLOURS.get(found[0], found[0]), plain)
        elif key != "id" and (value := _NO_TURN.sub("", value).strip()):
            element.attrib[key] = _short(value, digits=1 if len(value) > 200 else 2)  # curves, not dots


def _short(numbers: str, digits: int) -> str:
    """Fewer digits; a line of a path needs its letter once."""
    rounded = _NUMBER.sub(lambda found: f"{float(found[0]):.{digits}f}".rstrip("0").rstrip("."), numbers)
    letter, words = "", []
    for word in rounded.split():
        if word != "L" or letter != "L":
            words.append(word)
        letter = word if word.isalpha() else letter
    return " ".join(words)
