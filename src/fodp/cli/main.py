"""`fodp`: parse, dispatch, and turn every user error into one clear line with exit code 2."""

import argparse
import io
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import fodp
from fodp.cli._malloc import keep_freed_memory
from fodp.errors import ConfigurationError, PrivacyError
from fodp.support import words
from fodp.support.imports import import_modules

_UNEXPECTED = 70  # sysexits.h: an internal software error; 1 would say that an audit found a violation


class _Parser(argparse.ArgumentParser):
    """Errors are one line, like all others."""

    refusal: str | None = None  # what a command that is not here answers, whatever follows it

    def parse_known_args(self, *args: Any, **words: Any) -> Any:
        if self.refusal is not None:
            raise ConfigurationError(self.refusal)
        self._misread: list[str] = []
        found = super().parse_known_args(*args, **words)
        if self._misread:
            self.error("; ".join(self._misread))
        return found

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """As ever, but all values that cannot be read are told of at once."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            self._misread.append(str(error))
            return None

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}{_in_our_words(message)} (see {self.prog} --help)")


def _in_our_words(message: str) -> str:
    """Of options that other libraries have: what they are here."""
    if not message.startswith("unrecognized"):
        return ""
    foreign = re.findall(r"--([a-z][\w-]*)", message)
    here = [f"--{word} is {name} here" for word in foreign if (name := words.option(word)) is not None]
    return f": {'; '.join(here)}" if here else ""


def build_parser() -> argparse.ArgumentParser:
    """All commands; torch is not loaded for this."""
    from fodp.cli.commands import Missing, known

    parser = _Parser(prog="fodp", description="Train PyTorch models with differential privacy.")
    parser.add_argument("--version", action="version", version=f"fodp {fodp.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    missing = []
    for command in known():
        if isinstance(command, Missing):
            subparsers.add_parser(command.name).refusal = command.reason
            missing.append(command.name)
            continue
        sub = subparsers.add_parser(
            command.name,
            help=command.help,
            description=command.help,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=command.epilog,
        )
        command.options(sub)
        sub.set_defaults(run=command.run)
    if missing:
        parser.epilog = f"Not installed here: {', '.join(missing)}; each says what it takes."
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code, as docs/exit-codes.md lists them.

    0 success, 1 an audit found a violation, 2 what the user can mend, 70 a mistake of ours, 128 + n signal n.
    """
    _print_anything()
    try:
        options = build_parser().parse_args(arguments)
        keep_freed_memory()
        import_modules(getattr(options, "import", None) or ())
        return int(options.run(options))
    except PrivacyError as error:
        print(f"fodp: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(": ".join(["fodp: interrupted", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return 128 + (error.args[0] if error.args else signal.SIGINT)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe went away; that is its good right
        return 0
    except Exception as error:
        if _is_out_of_memory(error):
            print("fodp: not enough memory: use a smaller model or window, or --microbatch", file=sys.stderr)
            return 2
        traceback.print_exc()
        print(
            "fodp: this should not have happened. If your own code is not in the traceback above, report it; a run "
            "that had begun can be resumed, and what it used stays charged",
            file=sys.stderr,
        )
        return _UNEXPECTED


def _print_anything() -> None:
    """Replace what the terminal or pipe cannot show (ASCII under cron, names of files that are no text)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _one_line(error: PrivacyError) -> str:
    line = " ".join(str(error).split())
    return line if len(line) <= 900 else f"{line[:500]} ... {line[-300:]}"  # whatever somebody typed


def _is_out_of_memory(error: Exception) -> bool:
    said = str(error) if isinstance(error, RuntimeError) else ""  # PyTorch's own
    return isinstance(error, MemoryError) or "allocate memory" in said or "out of memory" in said


if __name__ == "__main__":
    sys.exit(main())
