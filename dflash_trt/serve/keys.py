"""API keys: read from a file or the environment, compared in constant time, never shown.

A key's name, "key 2", is its place in the file; that is what logs may say.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from dflash_trt.errors import UserError

VARIABLE = "DFLASH_TRT_API_KEYS"


class Keys:
    """The keys that a server accepts. Keeps their digests alone, so that no traceback or dump can show a key."""

    def __init__(self, keys: Iterable[str], *, where: object = "API keys"):
        """Raises UserError if there is no key, or one that cannot be sent in a header."""
        self._digests: list[bytes] = []
        for number, key in enumerate(keys, 1):
            if not key.isascii() or not key.isprintable() or " " in key:
                what = f"key {number} has characters that cannot be sent in a header"
                raise UserError(what, where=where, fix="use letters, digits and punctuation, without spaces")
            self._digests.append(_digest(key.encode()))
        if not self._digests:
            raise UserError("there is no API key", where=where, fix="give at least one, e.g. of `openssl rand -hex 32`")

    @classmethod
    def read(cls, path: Path) -> Keys:
        """A key a line; lines that begin with # are comments. Raises UserError, also if everyone may read the file."""
        try:
            with path.open(encoding="utf-8") as file:
                if os.fstat(file.fileno()).st_mode & stat.S_IROTH:
                    raise UserError("every user may read the API keys", where=path, fix=f"chmod o-r {path}")
                lines = [line.strip() for line in file]
        except OSError as error:
            what = f"cannot read the API keys: {error.strerror}"
            raise UserError(what, where=path, fix="give a file of one key a line") from None
        except UnicodeDecodeError:
            raise UserError("the API keys are not text", where=path, fix="give a file of one key a line") from None
        return cls([line for line in lines if line and not line.startswith("#")], where=path)

    @classmethod
    def from_environment(cls) -> Keys | None:
        """Those of DFLASH_TRT_API_KEYS, separated by commas; None if it is not set."""
        value = os.environ.get(VARIABLE)
        if value is None:
            return None
        return cls([key for part in value.split(",") if (key := part.strip())], where=VARIABLE)

    def __len__(self) -> int:
        return len(self._digests)

    def name(self, key: bytes) -> str | None:
        """The name of a key, None if it is none of ours. Takes as long for a wrong key as for any right one."""
        digest, found = _digest(key), 0
        for number, known in enumerate(self._digests, 1):  # all of them, always
            found |= number * hmac.compare_digest(digest, known)
        return f"key {found}" if found else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
