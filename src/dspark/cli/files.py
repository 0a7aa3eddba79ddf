"""Files that commands read and write: whole or not at all."""

import os
import tempfile
from pathlib import Path

from dspark.config.errors import DSparkError


def read_text(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises:
        DSparkError: the file cannot be read or is not UTF-8; the message names the first bad byte.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DSparkError(f"{path} cannot be read: {error.strerror or error}") from error
    return decode_utf8(content, str(path))


def decode_utf8(content: bytes, name: str) -> str:
    """Decode strictly; `name` says in the error where the bytes came from."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = content[error.start]
        raise DSparkError(f"{name} is not valid UTF-8: byte 0x{bad:02x} at offset {error.start}") from error


def require_writable(flag: str, path: Path) -> None:
    """Refuse a file that could not be written after minutes of work.

    Args:
        flag: that names it, for the message.
    Raises:
        DSparkError: its folder is missing or closed, or it is a folder itself.
    """
    if path.is_dir():
        raise DSparkError(f"{flag} cannot write to {path}: it is a folder")
    if not path.parent.is_dir():
        raise DSparkError(f"{flag} cannot write to {path}: the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise DSparkError(f"{flag} cannot write to {path}: the folder {path.parent} is not writable")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that an interruption leaves the old file or none, never half of the new one.

    Raises:
        DSparkError: the folder does not exist or cannot be written, or the path is a folder.
    """
    try:
        descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.chmod(partial, 0o644)
            os.replace(partial, path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise DSparkError(f"{path} cannot be written: {error.strerror or error}") from error
