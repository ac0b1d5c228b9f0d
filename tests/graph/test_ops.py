"""The functions that stand for the plugins, on ONNX Runtime, against their references in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.graph import block_attention, decide, kv_inject
from dflash_trt.graph.net import Net
from dflash_trt.plugins.reference import accept as accept_reference
from dflash_trt.plugins.reference import block_attention as attention_reference
from dflash_trt.plugins.reference import draft_head as head_reference
from dflash_trt.plugins.reference import kv_inject as inject_reference

TYPES = {"float32": ir.DataType.FLOAT, "int64": ir.DataType.INT64, "int32": ir.DataType.INT32}


def run(build: Callable[..., Any], **inputs: np.ndarray) -> list[np.ndarray]:
    """One call of an op as a graph of its own."""
    net = Net("float32", native=False)
    values = [net.input(name, TYPES[str(x.dtype)], x.shape) for name, x in inputs.items()]
    results = build(net, *values)
    for i, value in enumerate(results if isinstance(results, tuple) else (results,)):
        net.output(f"y{i}", value, ir.DataType.UNDEFINED, ())
        value.type = value.shape = None
    session = ort.InferenceSession(ir.to_proto(net.model("test")).SerializeToString())
    return session.run(None, inputs)


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def close(ours: np.ndarray, reference: np.ndarray) -> None:
    """float32 against float64: sums of at most some hundred products of size 1."""
    np.testing.assert_allclose(ours, reference, rtol=0, atol=2e-5)


SIZES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "batch": st.integers(1, 3),
        "query": st.integers(1, 6),
        "kv_heads": st.integers(1, 2),
        "layers": st.integers(1, 3),
        "length": st.integers(6, 20),
    }
)


@settings(max_examples=25, deadline=None)
@given(SIZES, st.booleans(), st.sampled_from([2, 4]), st.booleans())
def test_kv_inject_puts_rows_where_they_belong(sizes, normed, pairs, to_the_end):
    rng = np.random.default_rng(sizes["seed"])
    batch, query, layers, length, dim = sizes["batch"], sizes["query"], sizes["layers"], sizes["length"], 8
    heads = 2 * layers * sizes["kv_heads"]
    count = rng.integers(0, query + 1, batch)
    start = length - count + rng.integers(0, 3, batch) if to_the_end else rng.integers(0, length, batch)
    angles = random(rng, batch, query, pairs)
    given = {
        "rows": random(rng, batch, query, heads * dim),
        "cos": np.cos(angles),
        "sin": np.sin(angles),
        "k_norm": random(rng, layers, dim),
        "start": start,
        "count": count,
        "cache": random(rng, batch, heads, length, dim),
    }
    if not normed:
        del given["k_norm"]

    def build(net: Net, *values: ir.Value) -> Any:
        inputs = dict(zip(given, values, strict=True))
        return kv_inject.kv_inject(net, **{"k_norm": None} | inputs, rotated=2 * pairs, epsilon=1e-6)

    cache, overflow = run(build, **given)
    expected, lost = inject_reference.kv_inject(**{"k_norm": None} | given, layers=layers, eps=1e-6)
    close(cache, expected)
    assert overflow.tolist() == [lost]
    untouched = cache == given["cache"]
    written = np.zeros((batch, length), bool)
    for b in range(batch):
        written[b, start[b] : start[b] + count[b]] = True
    assert untouched[np.broadcast_to(~written[:, None, :, None], cache.shape)].all()


@settings(max_examples=40, deadline=None)
@given(
    SIZES,
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.sampled_from([0, 1, 3, 50]),
    st.booleans(),
    st.booleans(),
)
def test_block_attention_sees_what_its_reference_sees(sizes, group, causal, window, both_sides, with_sinks):
    rng = np.random.default_rng(sizes["seed"])
    batch, query, kv_heads, layers, length = (sizes[key] for key in ("batch", "query", "kv_heads", "layers", "length"))
    dim, layer = 8, layers - 1
    given = {
        "q": random(rng, batch, group * kv_heads, query, dim),
        "k_block": random(rng, batch, kv_heads, query, dim),
        "v_block": random(rng, batch, kv_heads, query, dim),
        "cache": random(rng, batch, 2 * layers * kv_heads, length, dim),
        "start": rng.integers(0, length + 1, batch),
        "count": rng.integers(0, query + 1, batch),
    }
    sinks = {"sinks": random(rng, group * kv_heads)} if with_sinks else {}
    options = {
        "k_head": layer * kv_heads,
        "v_head": (layers + layer) * kv_heads,
        "causal": causal,
        "window": window,
        "both_sides": both_sides and window > 0,
        "scale": dim**-0.5,
    }

    def build(net: Net, *values: ir.Value) -> Any:
        return block_attention.block_attention(net, *values, *([] if with_sinks else [None]), **options)

    (out,) = run(build, **given, **sinks)
    close(out, attention_reference.block_attention(**given, **sinks, **options))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 5), st.integers(1, 8))
def test_accept_counts_as_its_reference_counts(seed, batch, block, query):
    rng = np.random.default_rng(seed)
    n_given = rng.integers(1, query + 1, batch)
    given = {
        "greedy": rng.integers(0, 2, (batch, block)),
        "sampled": rng.integers(0, 2, (batch, block)),
        "temperature": rng.integers(0, 2, batch).astype(np.float32),
        "ids": rng.integers(0, 2, (batch, query)),
        "n_valid": np.minimum(n_given + rng.integers(0, block, batch), query),
        "n_given": n_given,
        "past_len": rng.integers(0, 100, batch),
    }
    for ours, expected in zip(run(decide.accept, **given), accept_reference.accept(**given), strict=True):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("count", [40, 5000])
def test_sample_draws_as_its_reference_draws(count):
    """Weights of eighths: every sum is exact in float32."""
    rng = np.random.default_rng(count)
    weights = rng.integers(0, 8, (20, count)).astype(np.float32) / 8
    uniform = np.concatenate([rng.random(19), [0]]).astype(np.float32)
    (index,) = run(lambda net, w, u: decide.sample(net, w, u, count), weights=weights, uniform=uniform)
    np.testing.assert_array_equal(index, accept_reference.sample(weights, uniform))


@pytest.mark.parametrize("seed", range(3))
def test_draft_head_takes_the_first_of_the_largest(seed):
    logits = np.random.default_rng(seed).integers(0, 4, (5, 37)).astype(np.float32)
    value, index = run(lambda net, x: decide.draft_head(net, x, 1000), logits=logits)
    expected = head_reference.draft_head(logits, 1000)
    np.testing.assert_array_equal(value, expected[0])
    np.testing.assert_array_equal(index, expected[1])
