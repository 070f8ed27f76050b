"""Which code a recorded number came from: a hash of the sources that decide it."""

import ast
import hashlib
from functools import cache
from pathlib import Path

import fodp

# What a run's numbers depend on. The ledger, the command line, reports and audits are not among them.
_MATTERS = (
    "adaptive_clip.py", "clipping", "data", "exact.py", "experiments/execute.py", "filters.py", "flat.py", "kernels.py",
    "mechanism.py", "memory.py", "methods", "models.py", "noise.py", "recall.py", "run.py", "sampling.py",
    "schedule.py", "updates.py",
)  # fmt: skip


@cache
def code_version() -> str:
    """Changes when the code that matters changes; comments, docstrings and formatting do not count."""
    root = Path(fodp.__file__).parent
    files = sorted(
        f for part in _MATTERS for f in ([root / part] if part.endswith(".py") else (root / part).rglob("*.py"))
    )
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.relative_to(root).as_posix().encode())
        digest.update(meaning(file.read_text(encoding="utf-8")).encode())
    return digest.hexdigest()[:12]


def meaning(source: str) -> str:
    """The source without what does not act."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and body and _is_docstring(body[0]):
            node.body = body[1:]
    return ast.dump(tree)


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
