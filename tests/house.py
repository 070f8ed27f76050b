"""Measures the house: private doors, large things, sizes.  python tests/house.py [folder or file … | --table]

`tests/test_house.py` holds what is found here to the limits of `docs/architecture.md`.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src"

MOST_ATTRIBUTES, MOST_METHODS, MOST_PARAMETERS, MOST_LINES = 15, 25, 12, 50

# What belongs to others, and has no public name there: the file that may touch it, and why.
FOREIGN: dict[tuple[str, str], str] = {
    ("fodp/sources/hooks.py", "_backward_hooks"): "who listens to a parameter's gradient: PyTorch has no public name",
    ("fodp/sources/hooks.py", "_post_accumulate_grad_hooks"): "the same",
    ("fodp/support/checks.py", "_getframe"): "whose line a warning is about: `inspect.stack` reads every source file",
    ("fodp/ranks/leaving.py", "__defaults__"): "PyTorch's functions that keep a process group as a default",
    ("fodp/identity/origins.py", "_indices"): "which rows of its table a data set of Hugging Face's `datasets` shows",
    ("fodp/clipping/advice.py", "max_norm"): "a setting of a table, which `fix` is asked to drop",
    ("fodp/clipping/advice.py", "scale_grad_by_freq"): "a setting of a table, which `fix` is asked to drop",
    ("fodp/clipping/precision.py", "allow_tf32"): "a switch of PyTorch's before 2.9",
    ("fodp/clipping/precision.py", "fp32_precision"): "a switch of PyTorch's from 2.9 on",
    ("fodp/clipping/reach.py", "cell_contents"): "what a closure holds is put back after a pass has changed it",
    ("fodp/kernels/library.py", "argtypes"): "how ctypes is told what a function takes",
    ("fodp/kernels/library.py", "restype"): "how ctypes is told what a function returns",
    ("fodp/support/torch_internals.py", "CheckpointFunction"): "reentrant checkpoints refuse torch.autograd.grad",
    ("fodp/support/torch_internals.py", "_C"): "DisableTorchFunction, the number of a backward pass, hooks that save",
    ("fodp/support/torch_internals.py", "_autograd"): "whether a part of a pass is checkpointed",
    (
        "fodp/support/torch_internals.py",
        "_base",
    ): "a layer's output may be a view, whose edge an in-place change cuts off",
    ("fodp/support/torch_internals.py", "_buffers"): "whether there are any, twice in each step; and to put one back",
    ("fodp/support/torch_internals.py", "_current_graph_task_id"): "which backward pass a hook is called in",
    ("fodp/support/torch_internals.py", "_get_default_mps_generator"): "Apple's generator has no public name",
    ("fodp/support/torch_internals.py", "_modules"): "the parts of a module without a walk by name, in each step",
    ("fodp/support/torch_internals.py", "_version"): "whether a tensor was written into in place",
    ("fodp/support/torch_internals.py", "_weight_norm"): "the function that a normalised weight is made by",
    ("fodp/integrations/_privates/opacus.py", "_module"): "what Opacus's wrapper of a model wraps has no public name",
    ("fodp/integrations/_privates/opacus.py", "step_hook"): "`attach_step_hook` cannot take a hook away",
    ("fodp/ledger/sqlite.py", "text_factory"): "how sqlite3's connections are told to decode texts",
}

OF_TRANSFORMERS = """_evaluate _determine_best_metric _save_checkpoint model optimizer lr_scheduler train_dataloader
    global_step epoch control should_save"""
OF_LIGHTNING = """_detect_anomaly _data_source _combined_loader _results log max_epochs max_steps precision_plugin
    should_stop"""
for package, names, reason in (
    ("transformers", OF_TRANSFORMERS, "the loop of its own Trainer does the same"),
    ("lightning", OF_LIGHTNING, "its loop has no public door to its data, length and logs"),
):
    FOREIGN |= {(f"fodp/integrations/_privates/{package}.py", name): reason for name in names.split()}

OF_TUPLES = {"_replace", "_asdict", "_make", "_fields", "_exit"}  # public names: of named tuples, and os._exit

# Attributes that PyTorch, ElementTree and other packages mean to be set from outside.
SETTABLE = {
    "grad",
    "data",
    "requires_grad",
    "__doc__",
    "__signature__",
    "__wrapped__",
    "__name__",
    "training",
    "tag",
    "attrib",
}


class Finding(NamedTuple):
    """A place that breaks a rule of the house."""

    rule: str
    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.what}"


def files(*under: str) -> list[Path]:
    """The library's files, or those under these folders of it."""
    tops = [ROOT / name for name in under] or [SOURCES / "fodp", SOURCES / "fodp_lab"]
    return sorted(file for top in tops for file in ([top] if top.is_file() else top.rglob("*.py")))


def lines(*under: str, ending: str = "py") -> int:
    """All lines of these files or folders: code, docstrings, comments and blank ones."""
    tops = [ROOT / name for name in under]
    found = [file for top in tops for file in ([top] if top.is_file() else top.rglob(f"*.{ending}"))]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in found)


def findings(file: Path) -> Iterator[Finding]:
    """Everything in one file that breaks a rule."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    name = str(file.relative_to(SOURCES)) if file.is_relative_to(SOURCES) else str(file)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fodp"):
            for alias in node.names:
                if _is_private(alias.name):
                    yield Finding("private import", name, node.lineno, f"{node.module}.{alias.name}")
        if isinstance(node, ast.ClassDef):
            yield from _large_class(node, name)
        if isinstance(node, ast.FunctionDef):
            yield from _large_function(node, name)
    yield from _doors(tree, name)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _doors(tree: ast.Module, file: str) -> Iterator[Finding]:
    """Private names of other objects, and attributes of other objects that are set."""

    def visit(node: ast.AST, own: frozenset[str], made: frozenset[str]) -> Iterator[Finding]:
        if isinstance(node, ast.ClassDef):
            own = frozenset(_names_of(node))
        if isinstance(node, ast.FunctionDef):
            made = frozenset(_made_here(node))
        if isinstance(node, ast.Attribute) and _is_door(node, own) and (file, node.attr) not in FOREIGN:
            yield Finding("private door", file, node.lineno, ast.unparse(node))
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and not _is_self(target.value) and target.attr not in SETTABLE:
                base = target.value
                if isinstance(base, ast.Name) and base.id in made | {"state"}:
                    continue  # made by this function and not yet given away; a method is given its state to change
                if (file, target.attr) not in FOREIGN and not _is_private(target.attr):
                    yield Finding("set from outside", file, target.lineno, ast.unparse(target))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, own, made)

    yield from visit(tree, frozenset(), frozenset())


def _is_door(node: ast.Attribute, own: frozenset[str]) -> bool:
    """Whether this is a private name of another object; a class knows its own in other objects of it."""
    return _is_private(node.attr) and not _is_self(node.value) and node.attr not in own | OF_TUPLES


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """What an assignment sets."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _leaves(target)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        yield node.target


def _leaves(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _leaves(element)
    else:
        yield target


def _is_self(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
        return True
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _self_targets(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Where attributes of `self` are set."""
    for node in ast.walk(tree):
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                yield target


def _names_of(node: ast.ClassDef) -> set[str]:
    """The attributes and methods that a class gives itself."""
    names = {target.attr for target in _self_targets(node)}
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(item.name)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            names.add(item.target.id)
        elif isinstance(item, ast.Assign):
            names |= {target.id for target in item.targets if isinstance(target, ast.Name)}
    return names


def _made_here(node: ast.FunctionDef) -> set[str]:
    """Names that hold something which this function has made by a call of a class or of `copy`."""
    made = set()
    for item in ast.walk(node):
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Call):
            called = ast.unparse(item.value.func).rpartition(".")[2]
            if called[:1].isupper() or called in ("copy", "deepcopy", "replace", "__new__", "super", "cls", "state"):
                made |= {target.id for target in item.targets if isinstance(target, ast.Name)}
    return made


def _large_class(node: ast.ClassDef, file: str) -> Iterator[Finding]:
    attributes = {target.attr for target in _self_targets(node)}
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    if "sklearn" in file:  # scikit-learn asks for an attribute of each parameter, and has no limit on these
        attributes -= {argument.arg for item in methods if item.name == "__init__" for argument in item.args.kwonlyargs}
    if len(attributes) > MOST_ATTRIBUTES:
        yield Finding("large class", file, node.lineno, f"{node.name} has {len(attributes)} attributes")
    if len(methods) > MOST_METHODS:
        yield Finding("large class", file, node.lineno, f"{node.name} has {len(methods)} methods")


def _large_function(node: ast.FunctionDef, file: str) -> Iterator[Finding]:
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        length -= (first.end_lineno or first.lineno) - first.lineno + 1  # its docstring
    if length > MOST_LINES:
        yield Finding("large function", file, node.lineno, f"{node.name} has {length} lines without its docstring")
    arguments = node.args
    count = len(
        [a for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if a.arg not in ("self", "cls")]
    )
    if count > MOST_PARAMETERS and not (_is_private(node.name) or "sklearn" in file):
        yield Finding("many parameters", file, node.lineno, f"{node.name} has {count}")


def table() -> str:
    """What is left of each rule, by file, as `tests/test_house.py` has it."""
    left: dict[str, Counter[str]] = {}
    for file in files():
        for finding in findings(file):
            left.setdefault(finding.rule, Counter())[finding.file] += 1
    rows = ""
    for rule in sorted(left):
        counts = "".join(f'        "{file}": {count},\n' for file, count in sorted(left[rule].items()))
        rows += f'    "{rule}": {{\n{counts}    }},\n'
    return "ALLOWED: dict[str, dict[str, int]] = {\n" + rows + "}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--table"]:
        print(table())
        sys.exit()
    found = [finding for file in files(*sys.argv[1:]) for finding in findings(file)]
    for finding in found:
        print(finding)
    print(f"{len(found)} findings; src/fodp {lines('src/fodp')} lines, tests {lines('tests')} lines")
