"""The one exception for a mistake in what the user gave us, and how commands report it."""

from __future__ import annotations

import argparse
import os
import sys


class InputError(ValueError):
    """A mistake the user can mend. The message is one line: what, where, why, the mend.

    Commands print it without a traceback and exit with code 2 (see `run_command`).
    """


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser that takes no abbreviations and whose mistakes are InputErrors."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str):
        raise InputError(f"{message}; see --help")


def of_file(error: OSError) -> InputError:
    """The InputError for a file that can't be read or written."""
    return InputError(f"{error.filename}: {error.strerror}")


def run_command(main) -> int:
    """Run `main()` of a command line; returns the exit code: 0, 2 for an InputError, 130 for Ctrl-C, 1 for a network fault."""
    try:
        return main() or 0
    except InputError as error:
        message = str(error)
    except BrokenPipeError:
        return 0
    except ConnectionError as error:  # no mistake: another try can do
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        message = str(of_file(error))
    except KeyboardInterrupt:
        print("interrupted; nothing half-written was kept under a final name", file=sys.stderr)
        return 130
    print(f"error: {message}", file=sys.stderr)
    return 2


def quiet_libraries() -> None:
    """Show the progress bars of transformers and DeepSpeed on a terminal only. Before they are imported."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
