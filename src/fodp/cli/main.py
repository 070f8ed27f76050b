"""`fodp`: parse, dispatch, and turn every user error into one clear line with exit code 2."""

import argparse
import io
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import fodp
from fodp.cli._malloc import keep_freed_memory
from fodp.cli.exits import REFUSED, UNEXPECTED, epilog, stopped_by
from fodp.errors import ConfigurationError, PrivacyError
from fodp.support import words
from fodp.support.imports import import_modules


class _Parser(argparse.ArgumentParser):
    """Errors are one line, like all others. `refusal` is what a command that is not here answers to any words."""

    def __init__(self, *, refusal: str | None = None, **words: Any):
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **words})
        self._refusal = refusal
        self._misread: list[str] = []

    def parse_known_args(self, *args: Any, **words: Any) -> Any:
        if self._refusal is not None:
            raise ConfigurationError(self._refusal)
        self._misread = []
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

    commands = known()
    missing = [command.name for command in commands if isinstance(command, Missing)]
    absent = f"Not installed here: {', '.join(missing)}; each says what it takes." if missing else ""
    parser = _Parser(prog="fodp", description="Train PyTorch models with differential privacy.", epilog=epilog(absent))
    parser.add_argument("--version", action="version", version=f"fodp {fodp.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in commands:
        if isinstance(command, Missing):
            subparsers.add_parser(command.name, refusal=command.reason)
            continue
        sub = subparsers.add_parser(
            command.name, help=command.help, description=command.help, epilog=epilog(command.epilog)
        )
        command.options(sub)
        sub.set_defaults(run=command.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code, as `fodp.cli.exits` lists them."""
    _print_anything()
    try:
        options = build_parser().parse_args(arguments)
        keep_freed_memory()
        import_modules(getattr(options, "import", None) or ())
        return int(options.run(options))
    except PrivacyError as error:
        print(f"fodp: {_one_line(error)}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt as error:
        print(": ".join(["fodp: interrupted", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return stopped_by(error.args[0] if error.args else None)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe went away; that is its good right
        return 0
    except Exception as error:
        if _is_out_of_memory(error):
            print("fodp: not enough memory: use a smaller model or window, or --microbatch", file=sys.stderr)
            return REFUSED
        traceback.print_exc()
        print(
            "fodp: this should not have happened. If your own code is not in the traceback above, report it; a run "
            "that had begun can be resumed, and what it used stays charged",
            file=sys.stderr,
        )
        return UNEXPECTED


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
