"""Writes docs/rules.md: the rules that keep the guarantee true, each with the tests that carry its marker.

    make docs    (or: python tests/rules_page.py)

The tests are read, not run: a test guards rule 3 if `@pytest.mark.rule(3)` stands above it or above its class.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "rules.md"

RULES = {
    1: "q, the divisor L, the number of steps and the classes are declared public numbers. Deriving them from "
    "`len(dataset)` or `1/len(loader)` leaks.",
    2: "An empty Poisson lot is a noise-only step on the same code path, never skipped, never special-cased.",
    3: "The query owns its sensitivity; the noise takes it from there. Nobody types C twice.",
    4: "Every fast path equals the one-example-at-a-time loop, per layer, per reduction, with and without bias, tied "
    "and frozen weights, empty lot.",
    5: "Norms in at least float32; a non-finite per-example gradient contributes exactly zero and the step goes on. "
    "The loader, though, refuses data that is not finite.",
    6: "The mechanism reports its own accounting event; the accountant never reads a noise scale that was changed for "
    "another reason.",
    7: "One event per lot. Everything released from one lot is one joint event with z=(Σ zᵢ⁻²)^(-½); a fresh lot is a "
    "new event.",
    8: "Never account a shuffled loader as Poisson; refuse a foreign sampler.",
    9: "Speed knobs (micro-batch, engine, dtype, threads) cannot change the mechanism, beyond float tolerance.",
    10: "Calibration is conservative: ε at the returned σ is at most the target. Never return a negative ε. Reading "
    "changes nothing.",
    11: "A checkpoint holds everything a run needs; the streams' key only in seeded mode. Resuming never reuses noise "
    "for another lot and never under-counts: spend is written down before a release is used.",
    12: "What leaves a run by default is post-processing of releases, public configuration, or a score on data "
    "declared public. Training loss, the lot size actually drawn, norms and clip fractions are private.",
    13: "A recorded seed lets a reader subtract the noise and learn the masks. Real runs draw both from "
    "operating-system entropy and record no key; seeds are a research mode that the statement names as such.",
    14: "Fail closed: unknown keys, a missing σ, a non-positive C, β outside (0,1], an optimizer holding foreign "
    "parameters, an iterable data set, a spent budget all stop with a clear message before the first step.",
    15: "Learning-rate schedulers, parameter groups and frozen layers must really act through the wrapper. With "
    "σ=1000 accuracy must fall to chance.",
    16: "BatchNorm in training mode mixes examples: refuse it and say what to use instead.",
    17: "Budgets over several runs: later runs are chosen after seeing earlier results, so refusing needs a privacy "
    "filter; PLD composition holds for a plan fixed in advance.",
    18: "What a private pass draws for an example (dropout, augmentation, noise in a loss) depends on (secret key, "
    "step, record, draw) alone, never on the lot around it or on a generator that others can know.",
    19: "Norms are computed in at least the precision of the sums they bound, whatever autocast, TF32 or matmul "
    "setting the caller has on; the stated float tolerance is a worst case that was searched for, and is charged.",
    20: "Examples are kept apart: checked on whole lots by replacing and removing rows, again and again, not once on a "
    "pair; rows that come back from augmentation or collating are counted and compared; a mean over tokens or padded "
    "positions of several examples is met with a refusal.",
    21: "A pass in which no trainable parameter gets a gradient is refused.",
    22: "A ledger with a budget never grants two runs the same seed.",
    23: "ε of a run that ended because of what was seen is the plan's, unless the stop was fixed beforehand or a "
    "filter covers it; one published file holds one ε.",
    24: "State outside the model (loss modules, second optimizers, trainable leaves that the plan does not know) is "
    "watched or refused.",
    25: "A ledger that is damaged anywhere, its indexes included, grants nothing; the advice is to restore a copy, "
    "never to begin a new one.",
    26: "What each file of a run may hold is a closed list; times and messages are on it.",
    27: "A loss that the owner reduces is checked: weights, ignored targets and hand-made means that couple the lot "
    "are refused; one loss per example is the way that is shown first.",
    28: "State that a loss can reach (globals, attributes, closures, the whole LightningModule) is watched in every "
    "engine: what one pass leaves for the next is refused, however slowly it moves.",
    29: '"Is this the private data?" is one function, asked in every door that takes data as public: scoring, test '
    "files, tuning, public samples, early stopping.",
    30: "A preprocessing step that looks at more than one row is private, fitted or not.",
    31: "One example that is in the data many times is one example: repeats are looked for, whatever form they have.",
    32: "All papers of a run (statement, card, configuration, ledger) describe sampling and noise by one function.",
    33: "What a batch pads to, truncates to or sorts by must not depend on other examples: where it does, its effect "
    "is looked for with long, short, first and last examples, again and again, not once at the start.",
}


def guards() -> dict[int, list[tuple[str, str]]]:
    """For every rule, the (file, test) pairs that are marked with it, in the order of the files."""
    found: dict[int, list[tuple[str, str]]] = {number: [] for number in RULES}
    for file in sorted(TESTS.rglob("test_*.py")):
        for name, numbers in _marked(ast.parse(file.read_text(encoding="utf-8")).body, "", ()):
            for number in numbers:
                found.setdefault(number, []).append((file.relative_to(TESTS).as_posix(), name))
    return found


def page() -> str:
    """The text of docs/rules.md."""
    lines = [
        "# The rules, and the tests that guard them",
        "",
        "<!-- Generated by `make docs` from the tests' own markers; a test checks that it is up to date. -->",
        "",
        "Rules 1 to 17 come from faults that trusted libraries really shipped, rules 18 to 33 from two attacks on this",
        "one: each fault was silent, and each was shown. A test guards a rule if it carries the marker",
        "`@pytest.mark.rule(number)`; it fails when the rule is broken.",
        "",
    ]
    for number, tests in sorted(guards().items()):
        lines += [f"## Rule {number}", "", RULES.get(number, "(unknown rule)"), ""]
        lines += [f"* [{file}](../tests/{file}): {_sentence(name)}" for file, name in tests]
        lines += ([] if tests else ["* **No test guards this rule yet.**"]) + [""]
    return "\n".join(lines)


def _marked(body: list[ast.stmt], prefix: str, inherited: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _marked(node.body, f"{node.name}.", inherited + _numbers(node.decorator_list))
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield prefix + node.name, tuple(sorted({*inherited, *_numbers(node.decorator_list)}))


def _numbers(decorators: list[ast.expr]) -> tuple[int, ...]:
    return tuple(
        int(ast.literal_eval(decorator.args[0]))
        for decorator in decorators
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.rule"
    )


def _sentence(name: str) -> str:
    group, _, test = name.rpartition(".")
    words = test.removeprefix("test_").replace("_", " ")
    return f"{words} ({group})" if group else words


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
