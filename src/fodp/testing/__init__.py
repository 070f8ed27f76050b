"""What every private optimizer must pass: `check_method(MyMethod)`, the suite that the library's own go through.

    import fodp
    print(fodp.testing.check_method(MyMethod, rho=0.5))

Each check trains a small network on a small problem for a few steps and compares. A failure is an AssertionError that
lists everything that was found. Passing shows what it shows: no mistake of these kinds on this problem. It is no proof,
and does not replace the argument why the promised events are right.
"""

from fodp.testing.checks import CHECKS, PARTS
from fodp.testing.problem import delete_one
from fodp.testing.suite import MethodReport, check_method, faults, registered

__all__ = ["CHECKS", "PARTS", "MethodReport", "check_method", "delete_one", "faults", "registered"]
