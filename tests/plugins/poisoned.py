"""Outputs of kernels that hold poison and lie between guards, and numpy arrays as torch tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

GUARD = 256  # elements of no one on each side
POISON = 0xA5  # each byte: no likely number, count or token


def as_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class _Torch:
    """torch, but its empty tensors are poisoned."""

    def __init__(self) -> None:
        self.guards: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, shape: Any, **how: Any) -> torch.Tensor:
        inner = torch.empty(shape, **how)
        count = inner.numel()
        edge = GUARD * inner.element_size()
        buffer = torch.full((count * inner.element_size() + 2 * edge,), POISON, dtype=torch.uint8)
        self.guards += [buffer[:edge], buffer[-edge:]]
        return buffer[edge:-edge].view(inner.dtype).view(inner.shape)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.empty(tensor.shape, dtype=tensor.dtype)


@contextmanager
def outputs(kernel: ModuleType) -> Iterator[None]:
    """Whatever the launchers of `kernel` allocate is poisoned; nothing around it may change."""
    guarded = _Torch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "torch", guarded)
        yield
    assert all((guard == POISON).all() for guard in guarded.guards)
