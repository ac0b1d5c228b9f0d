"""Which engine a server has, in a word: Triton's model compares it with that of the engine it was made for."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from urllib.parse import quote

from dflash_trt.engine.manifest import Manifest

HEADER = "X-Dflash-Engine"  # of every answer; `deploy/triton/dflash_triton/unix_http.py` reads it


def identity(manifest: Manifest) -> str:
    """The target's name and a digest of graphs, tokenizer, weights and limits: `SmolLM2-135M@93c1d2e0a5b64f78`.

    The same wherever the directory lies, compiled or not.
    """
    given = sorted((name, file.size, file.fingerprint) for name, file in manifest.given.items())
    content = [given, dataclasses.asdict(manifest.limits), dataclasses.asdict(manifest.mapping)]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return f"{quote(manifest.target.name[:60], errors='surrogatepass')}@{digest[:16]}"
