"""The one exception for a mistake in what the user gave us: files, settings, command lines."""


class InputError(ValueError):
    """A mistake the user can mend. The message is one line: what, where, why, the mend.

    Commands print it without a traceback and exit with code 2 (see `run_command`).
    """


def run_command(main) -> int:
    """Run `main()` of a command line; returns the exit code: 0, 2 for an InputError, 130 for Ctrl-C."""
    import sys

    try:
        return main() or 0
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing half-written was kept under a final name", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0
