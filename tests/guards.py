"""What the suite guards: rules, faults, statements of the paper, mutants; compared with a list made before a change.

    python tests/guards.py before.json            write the list of this tree
    python tests/guards.py --compare before.json  print what is gone; exit code 1 if something has no test any more

Tests may be renamed, merged and moved. A rule keeps at least one test; every fault, statement and mutant of the earlier
list must still be there, or stand under "dropped" in that file with a reason. tests/guards.json is the list that
tests/test_guards.py compares with. The tests are read, not run.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reliability_page import faults
from rules_page import TESTS
from rules_page import guards as rules

BEFORE = TESTS / "guards.json"
Guards = dict[str, dict[str, list[str]]]


def guards() -> Guards:
    """For each kind of guard: what is guarded, and the tests that do it."""
    found: Guards = {"rules": {}, "faults": {}, "statements": {}, "mutants": {}}
    for number, tests in sorted(rules().items()):
        found["rules"][str(number)] = [f"{file}::{name}" for file, name in tests]
    for fault in faults():
        found["faults"].setdefault(fault.what, []).append(f"{fault.file}::{fault.test}")
    for file in sorted(TESTS.rglob("*.py")):
        where = file.relative_to(TESTS).as_posix()
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for label, test in _statements(tree):
            found["statements"].setdefault(label, []).append(f"{where}::{test}")
        for name in _mutants(tree):
            found["mutants"].setdefault(name, []).append(where)
    return found


def lost(before: dict[str, Any], now: Guards) -> list[str]:
    """What was guarded before and has no test now, except what the earlier list gives a reason for."""
    reasons = before.get("dropped", {})
    return [
        f"{kind}: {name}"
        for kind, guarded in now.items()
        for name in before[kind]
        if not guarded.get(name) and f"{kind}: {name}" not in reasons
    ]


def moved(before: dict[str, Any], now: Guards) -> Iterator[str]:
    """For each rule with other tests than before: how many it had and has, and which are gone and new."""
    for rule, tests in before["rules"].items():
        today = now["rules"].get(rule, [])
        gone, new = set(tests) - set(today), set(today) - set(tests)
        if gone or new:
            yield f"rule {rule}: {len(tests)} tests before, {len(today)} now"
            yield from (f"  - {test}" for test in sorted(gone))
            yield from (f"  + {test}" for test in sorted(new))


def _statements(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The labels of the paper that decorate tests, with the tests' names."""
    for node in ast.walk(tree):
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef | ast.ClassDef) else ():
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).rpartition(".")[2] == "statement":
                yield str(ast.literal_eval(decorator.args[0])), node.name


def _mutants(tree: ast.Module) -> Iterator[str]:
    """The mistakes that are planted: in pipelines, in the library, in methods, and late in a run."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            first = node.args[0]
            if node.func.id in ("Mutant", "Unseen") and isinstance(first, ast.Constant):
                yield str(first.value)
            if node.func.id == "Pair" and isinstance(first, ast.Name):
                yield first.id
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LATE" and isinstance(node.value, ast.List):
            for case in node.value.elts:
                yield ast.unparse(case.elts[0] if isinstance(case, ast.Tuple) else case)


def main(words: list[str]) -> int:
    """Write a list, or compare with one."""
    now = guards()
    if words[:1] != ["--compare"]:
        Path(words[0]).write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return 0
    before = json.loads(Path(words[1]).read_text(encoding="utf-8"))
    print(*moved(before, now), sep="\n")
    for kind, guarded in now.items():
        print(f"{kind}: {len(before[kind])} before, {len(guarded)} now")
    for what in lost(before, now):
        print(f"WITHOUT A TEST: {what}")
    return int(bool(lost(before, now)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
