"""Who may come in, and how much of the engine one caller may use at a time."""

from __future__ import annotations

from collections import Counter

from fastapi import Depends, Request
from fastapi.security import HTTPBearer

from dflash_trt.errors import UserError
from dflash_trt.serve.keys import Keys
from dflash_trt.serve.openai.errors import Problem


class Gate:
    """A dependency of the routes that need a key; gives its name, "" if none is needed.

    A Unix socket needs none: the file's mode says who may use it.
    """

    def __init__(self, keys: Keys | None, limit: int | None):
        """At most `limit` answers may be under way for one key. Raises UserError if there are no keys to tell apart."""
        if limit is not None and keys is None:
            what, fix = "a limit for each API key, but there are no keys", "give --api-keys FILE"
            raise UserError(what, where="--max-concurrent-per-key", fix=fix)
        self.documented = [Depends(HTTPBearer(scheme_name="api_key", auto_error=False))] if keys else []  # no effect
        self._keys, self._limit = keys, limit
        self._running: Counter[str] = Counter()  # by name of the key; touched by the event loop alone

    async def __call__(self, request: Request) -> str:
        """Raises Problem."""
        if self._keys is None or _came_by_unix_socket(request):
            return ""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        name = self._keys.name(key.strip().encode("latin-1")) if scheme.lower() == "bearer" else None
        if name is None:
            message = "there is no API key, or a wrong one — Authorization — send `Authorization: Bearer KEY`"
            raise Problem(401, "invalid_api_key", message, headers={"WWW-Authenticate": "Bearer"})
        return name

    def enter(self, name: str, count: int) -> None:
        """Take `count` answers' worth of a key's share; give it back with `leave`. Raises Problem."""
        if not name or self._limit is None:
            return
        if count > self._limit:
            message = f"{count} answers at once are more than the {self._limit} of a key — n, prompt — ask for fewer"
            raise Problem(400, "invalid_value", message, param="n")
        if self._running[name] + count > self._limit:
            message = f"{self._running[name]} answers are under way for this key, of {self._limit} — key — wait for one"
            raise Problem(429, "rate_limit_exceeded", message, headers={"Retry-After": "1"})
        self._running[name] += count

    def leave(self, name: str, count: int) -> None:
        """The answers that `enter` counted have ended."""
        if name and self._limit is not None:
            self._running[name] -= count


def _came_by_unix_socket(request: Request) -> bool:
    """Did it come by a Unix socket? The server's side says so: a TCP peer that has left has no address, either."""
    server = request.scope.get("server")
    return server is not None and server[1] is None and request.client is None
