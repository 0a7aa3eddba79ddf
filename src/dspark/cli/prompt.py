"""The prompt of a command: an argument, a file, or stdin; always valid, never empty."""

import sys
from pathlib import Path

from dspark.cli.files import decode_utf8, read_text
from dspark.config.errors import DSparkError

DEFAULT_PROMPT = "def fibonacci(n):\n"
STDIN = Path("-")


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The text to continue.

    Args:
        argument: the text itself, or None.
        file: a UTF-8 file whose whole content is the prompt, `-` for stdin, or None.

    Returns:
        The prompt; `DEFAULT_PROMPT` when neither is given.

    Raises:
        DSparkError: both are given, the prompt is empty, or it is not valid UTF-8.
    """
    if argument is not None and file is not None:
        raise DSparkError("a prompt and --prompt-file were both given: leave one of them out")
    if file is not None:
        source = "stdin" if file == STDIN else str(file)
        text = decode_utf8(sys.stdin.buffer.read(), source) if file == STDIN else read_text(file)
    elif argument is not None:
        source, text = "the prompt", checked_text(argument, "the prompt")
    else:
        return DEFAULT_PROMPT
    if not text.strip():
        raise DSparkError(f"{source} is empty: give some text to continue")
    return text


def checked_text(text: str, name: str) -> str:
    """Text from the command line or a terminal, where Python hides invalid bytes as surrogates."""
    return decode_utf8(text.encode("utf-8", "surrogateescape"), name)
