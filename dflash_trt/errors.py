"""Errors a user sees: one sentence of the form *what is wrong — where — what to do*.

The command line prints the message alone; no traceback follows an error of these types.
"""


def one_line(text: str) -> str:
    """Text from outside may hold anything; a terminal gets its unprintable characters as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class DflashError(Exception):
    """Anything that ends a command with a message instead of a traceback."""

    exit_code = 1
    everywhere = False  # do all ranks of a job know of it? Then one of them says it (`runtime/world.py`)

    def __init__(self, message: str):
        super().__init__("\n".join(map(one_line, message.split("\n"))))


class UserError(DflashError):
    """The input is at fault (checkpoint, config, request, option): exit code 2."""

    exit_code = 2

    def __init__(self, what: str, *, where: object = None, fix: str | None = None):
        parts = [what] + [str(part) for part in (where, fix) if part]
        super().__init__(" — ".join(parts))


class Failure(DflashError):
    """The work failed although the input was right (compiler refusal, full disk): exit code 1."""


def explain(error: BaseException) -> tuple[str, int]:
    """What to print about an error that nobody caught, and the exit code."""
    match error:
        case DflashError():
            return f"error: {error}", error.exit_code
        case OSError():
            return f"error: {error.strerror or error} — {error.filename or 'input or output'}", 1
        case MemoryError():
            return "error: out of memory — lower --max-batch or --max-seq-len", 1
    fix = "this is a bug; DFLASH_TRT_TRACEBACK=1 shows where"
    return f"error: {type(error).__name__}: {error} — {fix}", 1
