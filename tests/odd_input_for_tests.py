"""Commands with odd input: how they may end, and words and numbers to try."""

import contextlib
import io
import string

from hypothesis import strategies as st

from fodp.cli.main import main


def run(*words: str) -> tuple[int, str, str]:
    """Exit code and output of a command; whatever it raises is a traceback for the user and fails the test."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    if code == 2:
        line = err.getvalue().splitlines()[-1]  # warnings may stand before it
        assert line.startswith("fodp: ")
        assert len(line) > 20
    else:
        assert code == 0
    return code, out.getvalue(), err.getvalue()


ODD_NUMBERS = ["nan", "inf", "-inf", "0", "-0.0", "-1", "1", "1e400", "1e308", "-1e308", "1e-308", "5e-324", "1e30",
               "1e-30", "0.9999999999999999", "1.0000000000000002", str(2**63), str(2**64), "1e5", "", "x", "0x1",
               "1_0", "\u0661"]  # fmt: skip
odd = st.sampled_from(ODD_NUMBERS)
plain = st.floats(1e-3, 10).map(lambda value: f"{value:.4g}")
mostly_plain = st.one_of(plain, plain, odd)
text = st.text(string.printable, max_size=12)
