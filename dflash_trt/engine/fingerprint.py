"""Fingerprints that notice a changed file without reading all of it: a 16 GB checkpoint takes milliseconds."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

BLOCK = 4096
SAMPLES = 1024  # files up to SAMPLES * BLOCK = 4 MiB are covered in full


def fingerprint(path: Path) -> str:
    """sha256 over the size, the head (of safetensors: the whole header) and evenly spaced blocks, the last included."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(size.to_bytes(8, "little"))
        if path.suffix == ".safetensors":
            header = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header, size)))
        blocks = -(-size // BLOCK)
        samples = min(blocks, SAMPLES)
        for i in range(samples):
            block = i * (blocks - 1) // max(samples - 1, 1)
            digest.update(os.pread(file.fileno(), BLOCK, block * BLOCK))
    return digest.hexdigest()
