"""`dflash-trt plugins` lists, compiles and reports kernels on a machine without a GPU."""

from __future__ import annotations

import io
import json
import time

import pytest
from rich.console import Console

from dflash_trt.plugins import kernels
from dflash_trt.plugins.report import LIMITS, show
from tests.plugins.process import run

FACTS = {"op", "kernel", "models", "sm", "registers", "spill_bytes", "shared_bytes", "occupancy", "bound_by"}
FACTS |= {"tensor_core", "ptx_bytes", "blocks_per_multiprocessor", "threads"}


def test_list_names_every_op_and_its_kernels_and_compiles_nothing(tmp_path):
    began = time.monotonic()
    done = run("list", "--json", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 30  # imports; compiling takes minutes
    assert not list(tmp_path.iterdir())
    rows = json.loads(done.stdout)
    assert {row["op"] for row in rows} >= {"kv_inject", "block_attention", "accept", "draft_head"}
    assert len(rows) == len(kernels.shipped())
    inject = next(row for row in rows if row["op"] == "kv_inject")
    assert inject["arguments"][0] == "rows: *bf16" and len(inject["grid"]) == 3
    ops = [row["op"] for row in rows]
    assert ops == sorted(ops, key=ops.index)  # kernels of one op come together


def test_list_is_a_table_for_people(tmp_path):
    done = run("list", cache=tmp_path, COLUMNS="200")
    assert done.returncode == 0 and "kv_inject" in done.stdout and "cdiv(Q" in done.stdout
    assert "gpt-oss-120b" in done.stdout


@pytest.mark.slow
def test_compile_says_how_many_kernels_are_where(tmp_path):
    done = run("compile", "--op", "accept", "--sm", "90", "--sm", "120", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    made = len([kernel for kernel in kernels.shipped() if kernel.op == "accept"]) * 2
    assert done.stdout == f"{made} kernels for SM 90, 120 are in {tmp_path}\n"
    assert len(list(tmp_path.iterdir())) == made


@pytest.mark.slow
def test_report_tells_the_same_as_json_and_as_a_table(tmp_path):
    words = ("report", "--op", "draft_head_combine", "--sm", "100")
    done = run(*words, "--json", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = json.loads(done.stdout)
    assert set(line) >= FACTS and line["sm"] == 100 and line["tensor_core"] == "none" and line["spill_bytes"] == 0
    table = run(*words, cache=tmp_path, COLUMNS="200").stdout
    assert "draft_head_combine" in table and f" {line['registers']} " in table and "none" in table


def test_sms_that_come_out_alike_share_a_line():
    line = {
        "op": "op", "kernel": "kernel", "registers": 64, "spill_bytes": 0, "shared_bytes": 100 << 10, "occupancy": 0.5,
        "blocks_per_multiprocessor": 8, "bound_by": "registers", "tensor_core": "tcgen05.mma", "ptx_bytes": 2048,
    }  # fmt: skip
    console = Console(width=160, record=True, file=io.StringIO())
    show(console, [line | {"sm": 100}, line | {"sm": 103}, line | {"sm": 120, "spill_bytes": 8}])
    text = console.export_text()
    assert "100, 103" in text and "100 KiB*" in text and "8 B" in text and "8 (50%)" in text
    assert len([row for row in text.splitlines() if "tcgen05.mma" in row]) == 2


@pytest.mark.parametrize(
    "words, said",
    [
        (("compile", "--sm", "89"), "kernels are not compiled for SM89 — --sm — choose 90, 100, 103, 120"),
        (("list", "--op", "nothing"), "there is no op nothing — --op — choose from kv_inject"),
        (("explain",), "'explain' is not one of"),
    ],
)
def test_wrong_words_are_refused_with_the_right_ones(words, said, tmp_path):
    done = run(*words, cache=tmp_path)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_limits_are_known_for_every_sm_that_is_compiled_for():
    from dflash_trt.plugins.compile import SMS

    assert set(LIMITS) == set(SMS)
