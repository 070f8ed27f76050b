"""Exit codes of all commands: the one list, for --help and docs/exit-codes.md."""

import signal

REFUSED, UNEXPECTED = 2, 70  # 70 is sysexits.h's internal software error
VIOLATION = 1  # of `fodp audit` alone
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)

CODES: dict[tuple[int, ...], str] = {
    (0,): "success",
    (VIOLATION,): "an audit found that the claimed epsilon does not stand",
    (REFUSED,): "refused, or could not go on: one line on stderr says what to mend",
    (UNEXPECTED,): "unexpected: the traceback is on stderr",
    tuple(128 + number for number in _SIGNALS): "stopped by SIGHUP, SIGINT (Ctrl-C) or SIGTERM",
}


def stopped_by(number: int | None) -> int:
    """The exit code of a command that a signal has stopped; None: Ctrl-C."""
    return 128 + (number or signal.SIGINT)


def epilog(text: str = "") -> str:
    """The end of a command's --help: its own text, then the exit codes."""
    codes = [f"  {', '.join(map(str, numbers))}: {meaning}" for numbers, meaning in CODES.items()]
    return "\n".join([*([text, ""] if text else []), "exit codes (docs/exit-codes.md):", *codes])
