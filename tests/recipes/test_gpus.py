"""GPUs are found by the names people write, and their numbers are those of data sheets."""

from __future__ import annotations

import pytest

from dflash_trt.engine.hardware import MEMORY, TABLE
from dflash_trt.errors import UserError
from dflash_trt.gpus import parse_gpus, read_cards


@pytest.mark.parametrize("text", ["B300x8", "b300 x 8", " B300×8 "])
def test_a_card_and_how_many_of_them(text):
    gpus = parse_gpus(text, nodes=2)
    assert (gpus.card.name, gpus.count, gpus.total, str(gpus)) == ("B300", 8, 16, "B300x8 on 2 nodes")


@pytest.mark.parametrize("text", ["RTX PRO 6000", "rtx-pro-6000x1", "RTX_PRO_6000 x 1"])
def test_names_with_spaces(text):
    assert str(parse_gpus(text)) == "RTX PRO 6000x1"


@pytest.mark.parametrize("text", ["", "x8", "A100x8", "B300x", "B300x-1", "B300x8x8", "B300x0", "8xB300"])
def test_others_are_refused_with_the_names_known(text):
    with pytest.raises(UserError, match=r"known: B300|how many"):
        parse_gpus(text)


def test_every_card_is_complete_and_its_sm_is_one_the_compilers_know():
    for card in read_cards().values():
        assert card.sm in TABLE and card.source
        assert 40 << 30 < card.memory < 400 << 30
        assert 1e12 < card.bandwidth < 1e13 and 1e9 < card.link < 2e12 and 0 < card.link_latency < 1e-3
        assert {"bf16", "fp8"} <= card.flops.keys() and ("fp4" in card.flops) == (card.sm >= 100)
        assert list(card.flops.values()) == sorted(card.flops.values())


def test_memory_is_what_the_driver_shows_of_the_data_sheets_memory():
    for name, gigabytes in MEMORY.items():
        assert 0.9 < read_cards()[name].memory / (gigabytes * 1e9) <= 1.075  # GiB are named GB on some sheets
