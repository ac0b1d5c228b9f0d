"""Sizes are short and in a unit that fits."""

from __future__ import annotations

import pytest

from dflash_trt.sizes import format_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (3 << 19, "1.5 MiB"), (5 << 40, "5120 GiB")],
)
def test_the_unit_is_the_largest_that_leaves_a_digit(count, text):
    assert format_bytes(count) == text
