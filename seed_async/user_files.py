"""Reads the text files that users write, with errors that say where and what."""

from pathlib import Path

MAX_FILE_BYTES = 1 << 20
"""Such a file is a page or two of text; anything larger is a wrong file."""


def read_user_text(path: Path, what: str, error_type: type[ValueError], encoding: str = "utf-8") -> str:
    """Return the text of `path`, which should be `what`. Raises `error_type` with a message that is ready to print."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise error_type(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise error_type(f"{path}: {len(raw)} bytes; a {what} is at most {MAX_FILE_BYTES}")
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise error_type(f"{path}:{line}: not UTF-8 text (byte {error.start})") from error
