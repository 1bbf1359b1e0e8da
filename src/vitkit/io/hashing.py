"""SHA-256 of files."""

import hashlib
from pathlib import Path


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
