"""`fodp`: parse, dispatch, and turn every user error into one clear line with exit code 2."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import fodp
from fodp._checks import PrivacyError
from fodp._malloc import keep_freed_memory


class _Parser(argparse.ArgumentParser):
    """Errors are one line, like all others."""

    refusal: str | None = None  # what a command that is not here answers, whatever follows it

    def parse_known_args(self, *args: Any, **words: Any) -> Any:
        if self.refusal is not None:
            raise PrivacyError(self.refusal)
        return super().parse_known_args(*args, **words)

    def error(self, message: str) -> NoReturn:
        raise PrivacyError(f"{message} (see {self.prog} --help)")


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
    """Exit code 0 for success, 2 for what the user can mend, 130 for Ctrl-C."""
    try:
        options = build_parser().parse_args(arguments)
        keep_freed_memory()
        return int(options.run(options))
    except PrivacyError as error:
        print(f"fodp: {_one_line(error)}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        print("fodp: not enough memory: use a smaller model or window, or --microbatch", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fodp: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe went away; that is its good right
        return 0


def _one_line(error: PrivacyError) -> str:
    line = " ".join(str(error).split())
    return line if len(line) <= 900 else f"{line[:500]} ... {line[-300:]}"  # whatever somebody typed


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error)


if __name__ == "__main__":
    sys.exit(main())
