"""KV injection: the kernel against the float64 reference and against the graph's own layers, byte by byte around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.checkpoint import Rope
from dflash_trt.graph.layer import heads
from dflash_trt.graph.net import Net
from dflash_trt.graph.rope import Rotation
from dflash_trt.plugins.kernels import kv_inject as kernel
from dflash_trt.plugins.kernels.spec import Config
from dflash_trt.plugins.reference.kv_inject import kv_inject as reference
from tests.plugins import described
from tests.plugins.poisoned import as_torch, outputs

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
GUARD = 4096  # bytes of no one on each side of the cache


@dataclass(frozen=True)
class Case:
    rows: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    k_norm: np.ndarray | None
    start: np.ndarray
    count: np.ndarray
    length: int
    layers: int
    kv_heads: int
    dim: int
    eps: float = 1e-6

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.start), 2 * self.layers * self.kv_heads, self.length, self.dim)


def make(
    dtype: str, dim: int, rotated: int, layers: int, kv_heads: int, norm: bool, start, count, query: int, length: int,
    seed: int = 0,
) -> Case:  # fmt: skip
    rng = np.random.default_rng(seed)
    batch = len(start)
    rows = rng.normal(0, 1, (batch, query, 2 * layers * kv_heads * dim)) * 10.0 ** rng.uniform(-2, 1, (batch, query, 1))
    angles = rng.uniform(-np.pi, np.pi, (batch, query, rotated))
    k_norm = rng.uniform(0.5, 2, (layers, dim)).astype(DTYPES[dtype]) if norm else None
    rows = rows.astype(DTYPES[dtype])
    for b in range(batch):
        rows[b, max(count[b], 0) :] = np.nan  # what nobody may use
    cos, sin = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
    return Case(
        rows, cos, sin, k_norm, np.array(start, np.int64), np.array(count, np.int64), length, layers, kv_heads, dim
    )


def run(case: Case) -> tuple[np.ndarray, int]:
    """The cache after the kernel, and its overflow. All that no valid row belongs to is checked to be untouched."""
    dtype = case.rows.dtype
    size = int(np.prod(case.shape)) * dtype.itemsize
    buffer = np.full(2 * GUARD + size, 0xFF, np.uint8)  # NaNs of every dtype
    inner = slice(GUARD, GUARD + size)
    cache = as_torch(buffer[inner].view(dtype).reshape(case.shape))
    floats = [as_torch(x) for x in (case.rows, case.cos, case.sin)]
    k_norm = None if case.k_norm is None else as_torch(case.k_norm)
    place = (as_torch(case.start), as_torch(case.count), cache)
    with outputs(kernel):
        overflow = kernel.launch(*floats, k_norm, *place, layers=case.layers, eps=case.eps)
    written = np.zeros(case.shape, bool)
    for b, (start, count) in enumerate(zip(case.start, case.count, strict=True)):
        first, last = np.clip([start, start + np.clip(count, 0, case.rows.shape[1])], 0, case.length)
        written[b, :, first:last] = True
    raw = buffer[inner].reshape(*case.shape, dtype.itemsize)
    assert (raw[~written] == 0xFF).all()
    assert (buffer[: inner.start] == 0xFF).all() and (buffer[inner.stop :] == 0xFF).all()
    return buffer[inner].view(dtype).reshape(case.shape), int(overflow[0])


def expected(case: Case) -> tuple[np.ndarray, np.ndarray, int]:
    """What the reference says, how far from it each element may lie, and the overflow.

    A value is rounded to the cache's dtype once, and with a norm once before and once after its weights: each by u of
    what it is then. A rotation adds two products, so their magnitudes count. float32 adds a few units of 2**-24.
    """
    empty = np.full(case.shape, np.nan)
    args = (case.start, case.count, empty)
    how = {"layers": case.layers, "eps": case.eps}
    want, overflow = reference(case.rows, case.cos, case.sin, case.k_norm, *args, **how)
    magnitude = reference_magnitude(case)
    u = float(ml_dtypes.finfo(case.rows.dtype).eps) / 2
    tiny = float(ml_dtypes.finfo(case.rows.dtype).smallest_subnormal)
    steps = 3 if case.k_norm is not None else 1
    keys = case.shape[1] // 2
    bound = magnitude * (steps * u * (1 + 2 * u) + 16 * 2.0**-24) + 4 * tiny
    bound[:, keys:] = 0  # values are copied
    return want, bound, overflow


def reference_magnitude(case: Case) -> np.ndarray:
    """|low cos| + |high sin| and so on: the reference of magnitudes, with a rotation that only adds."""
    turned = case.cos.shape[-1]
    rows = case.rows.reshape(*case.rows.shape[:2], -1, case.dim).copy()
    rows[..., :turned] = np.abs(rows[..., :turned])
    rows[..., turned : 2 * turned] = np.abs(rows[..., turned : 2 * turned])
    how = {"layers": case.layers, "eps": case.eps}
    args = (case.k_norm, case.start, case.count, np.full(case.shape, np.nan))
    cos, sin = np.abs(case.cos), np.abs(case.sin)
    rows = rows.reshape(case.rows.shape)
    low = np.abs(reference(rows, cos, -sin, *args, **how)[0])  # low cos + high sin in the first half
    high = np.abs(reference(rows, cos, sin, *args, **how)[0])  # high cos + low sin in the second
    return np.maximum(low, high)


def check(case: Case) -> None:
    cache, overflow = run(case)
    want, bound, lost = expected(case)
    assert overflow == lost
    have = cache.astype(np.float64)
    there = ~np.isnan(want)
    assert (np.isnan(have) == ~there).all()
    assert (np.abs(have - want)[there] <= bound[there]).all()


@settings(max_examples=40)
@given(st.data())
def test_every_row_lands_at_its_position_and_nothing_else_is_touched(data):
    dim = data.draw(st.sampled_from([64, 128, 256]), "head_dim")
    rotated = data.draw(st.sampled_from([dim // 2, dim // 4, dim // 8, 24]), "rotated")
    query, length = data.draw(st.integers(1, 9), "Q"), data.draw(st.integers(1, 24), "S")
    batch = data.draw(st.integers(1, 3), "B")
    pairs = st.tuples(st.integers(0, length + 2), st.integers(0, query))
    start, count = zip(*data.draw(st.lists(pairs, min_size=batch, max_size=batch), "start, count"), strict=True)
    check(
        make(
            data.draw(st.sampled_from(["bfloat16", "float16"]), "dtype"),
            dim,
            rotated,
            data.draw(st.integers(1, 5), "layers"),
            data.draw(st.sampled_from([1, 2, 8]), "kv_heads"),
            data.draw(st.booleans(), "norm"),
            start,
            count,
            query,
            length,
            data.draw(st.integers(0, 2**32 - 1), "seed"),
        )
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_last_positions_of_the_cache_are_filled_and_the_rest_is_counted(dtype):
    case = make(dtype, 64, 32, 2, 1, True, [20, 22, 23, 24, 0], [4, 4, 4, 4, 4], 4, 24)
    assert run(case)[1] == 0 + 2 + 3 + 4 + 0
    check(case)


def test_positions_and_counts_out_of_all_reason_write_nothing():
    far = [2**62, -(2**62), 2**31, -2, 3, 3]
    case = make("bfloat16", 64, 32, 1, 2, False, far, [3, 3, 3, 3, 99, -5], 4, 16)
    assert run(case)[1] == 3 + 3 + 3 + 2 + 0 + 0


def test_a_batch_of_more_rows_than_one_pass_of_the_count_is_counted_whole():
    case = make("float16", 64, 32, 1, 1, False, [7] * 131, [2] * 130 + [1], 2, 8)
    assert run(case)[1] == 130


def test_idle_rows_leave_the_cache_as_it_is():
    cache, overflow = run(make("bfloat16", 128, 64, 3, 2, True, [0, 5], [0, 0], 6, 16))
    assert np.isnan(cache.astype(np.float32)).all() and overflow == 0


@pytest.mark.parametrize(
    "rope",
    [
        Rope(theta=1e4, kind="default"),
        Rope(theta=5e5, kind="llama3", factor=8.0, original_max_position=8192),
        Rope(theta=1.5e5, kind="yarn", factor=32.0, original_max_position=4096),
    ],
    ids=lambda rope: rope.kind,
)
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
def test_in_float32_the_kernel_equals_the_graphs_layers(rope, norm):
    batch, query, layers, kv, dim, length, eps = 2, 5, 3, 2, 64, 40, 1e-5
    case = make("float32", dim, dim // 2, layers, kv, norm, [0, 33], [query] * 2, query, length)
    net = Net("float32", native=True)
    rows = net.input("rows", ir.DataType.FLOAT, (batch * query, 2 * layers * kv * dim))
    start = net.input("start", ir.DataType.INT64, (batch,))
    cache = net.input("cache", ir.DataType.FLOAT, case.shape)
    rotation = Rotation(net, rope, dim, net.add(net.unsqueeze(start, 1), net.unsqueeze(net.arange(query), 0)))
    k, v = net.split(heads(net, rows, net.const([batch, query]), 2 * layers * kv, dim), [layers * kv] * 2, axis=1)
    if norm:
        weights = np.repeat(case.k_norm, kv, axis=0)[:, None]
        k = net.mul(net.rms_norm(k, net.const(np.ones(dim), np.float32), eps), net.const(weights, np.float32))
    both = net.concat([rotation(k), v], axis=1)
    net.output("after", net.op("TensorScatter", cache, both, start, axis=2, mode="linear"), net.dtype, case.shape)
    for name in ("cos", "sin"):
        net.output(name, getattr(rotation, name), net.dtype, (batch, query, dim // 2))
    session = ort.InferenceSession(ir.to_proto(net.model("inject")).SerializeToString())
    before = np.full(case.shape, 7, np.float32)
    feeds = {"rows": case.rows.reshape(batch * query, -1), "start": case.start, "cache": before}
    after, cos, sin = session.run(None, feeds)

    mine = as_torch(before.copy())
    k_norm = None if case.k_norm is None else as_torch(case.k_norm)
    kernel.launch(
        *(as_torch(x) for x in (case.rows, cos, sin)), k_norm, as_torch(case.start),
        as_torch(case.count), mine, layers=layers, eps=eps,
    )  # fmt: skip
    np.testing.assert_allclose(mine.numpy(), after, rtol=0, atol=2e-6 * float(np.abs(after).max()))


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_launched_as_it_is_described_it_writes_the_same(kv_heads, norm):
    case = make("bfloat16", 64, 32, 5, kv_heads, norm, [3, 0, 30], [17, 0, 5], 17, 32)
    want, overflow = run(case)
    (what,) = kernel.kernels(Config("any", 8, kv_heads, 64, layers=5, k_norm=norm, eps=case.eps))
    tensors = {name: as_torch(getattr(case, name)) for name in ("rows", "cos", "sin", "start", "count")}
    tensors["cache"] = tensors["cache_out"] = as_torch(np.full(case.shape, np.nan, case.rows.dtype))
    tensors["overflow"] = torch.full((1,), -1, dtype=torch.int32)
    if norm:
        tensors["k_norm"] = as_torch(case.k_norm)
    described.launch(what, {"B": 3, "Q": 17, "S": case.length}, **tensors)
    assert tensors["overflow"].tolist() == [overflow] == [3]
    np.testing.assert_array_equal(tensors["cache"].float().numpy(), want.astype(np.float32))


SHAPES = """
import json, sys
from pathlib import Path
from dflash_trt.plugins.compile import SMS, compile_kernel
from dflash_trt.plugins.kernels.kv_inject import kernels
from dflash_trt.plugins.kernels.spec import Config
said = []
shapes = (64, 32, "float16", True), (128, 32, "bfloat16", True), (256, 128, "bfloat16", False)
for dim, rotated, dtype, norm in shapes:
    kernel, = kernels(Config("any", 8, 2, dim, layers=2, rotated=rotated, dtype=dtype, k_norm=norm))
    for sm in SMS:
        made = compile_kernel(kernel, sm, Path(sys.argv[1]))
        said.append([kernel.name, sm, made.spill_stores + made.spill_loads, made.ptx])
print(json.dumps(said))
"""


def test_it_moves_sixteen_bytes_an_instruction_without_spills_on_every_sm(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SHAPES, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
    )
    for name, sm, spilled, ptx in json.loads(done.stdout):
        assert spilled == 0, (name, sm)
        stores = [line for line in ptx.splitlines() if "st.global" in line]
        narrow = [line for line in stores if ".v4.b32" not in line]
        assert len(stores) > 2 and len(narrow) == 1, (name, sm, narrow)  # the overflow
