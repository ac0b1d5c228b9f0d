"""Acceptance and sampling of the graph against a few lines of numpy, for any logits and drafts."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.graph.accept import Sampling, accept, choose
from dflash_trt.graph.net import Net

B, K, V = 3, 4, 32
F32, I64 = ir.DataType.FLOAT, ir.DataType.INT64


def session(*, native: bool) -> ort.InferenceSession:
    net = Net("float32", native=native)
    logits = net.input("logits", F32, ("batch", K, V))
    sampling = Sampling(
        net.input("temperature", F32, ("batch",)),
        net.input("top_p", F32, ("batch",)),
        net.input("top_k", I64, ("batch",)),
        net.input("uniform", F32, ("batch", K)),
    )
    drafts, n_drafts = net.input("drafts", I64, ("batch", K - 1)), net.input("n_drafts", I64, ("batch",))
    choice = choose(net, lambda: logits, sampling, V, net.op("ArgMax", logits, axis=-1, keepdims=0))
    n_accepted, next_token = accept(net, choice, drafts, n_drafts, K - 1)
    net.output("n_accepted", n_accepted, I64, ("batch",))
    net.output("next_token", next_token, I64, ("batch",))
    net.output("choice", net.op("Identity", choice), I64, ("batch", K))
    return ort.InferenceSession(ir.to_proto(net.model("accept")).SerializeToString())


@pytest.fixture(scope="module")
def forms():
    """The form for ONNX Runtime, which skips what no row asks for, and the one for TensorRT, which never branches."""
    return [session(native=False), session(native=True)]


def chosen(logits, temperature, top_p, top_k, uniform) -> int:
    """One position: top-k, then top-p, then the first token whose cumulated share exceeds `uniform`."""
    if temperature == 0:
        return int(logits.argmax())
    weights = np.exp((logits / temperature - (logits / temperature).max()).astype(np.float64))
    order = np.arange(V) if top_p == 1 and top_k == 0 else np.argsort(-weights, kind="stable")
    weights = weights[order]
    if top_k:
        weights[top_k:] = 0
    if top_p < 1:
        weights[weights.cumsum() - weights >= top_p * weights.sum()] = 0
    return int(order[np.searchsorted(weights.cumsum(), uniform * weights.sum(), side="right")])


@given(st.data())
def test_choices_and_acceptance_equal_the_definition(forms, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    logits = rng.normal(0, 3, (B, K, V)).astype(np.float32)
    temperature = np.array(
        data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.7]), min_size=B, max_size=B)), np.float32
    )
    top_p = np.array(data.draw(st.lists(st.sampled_from([1.0, 0.9, 0.4, 1e-6]), min_size=B, max_size=B)), np.float32)
    top_k = np.array(data.draw(st.lists(st.sampled_from([0, 1, 5, V, 1024]), min_size=B, max_size=B)), np.int64)
    uniform = rng.random((B, K), np.float32)
    want = np.array(
        [[chosen(logits[b, k], temperature[b], top_p[b], top_k[b], uniform[b, k]) for k in range(K)] for b in range(B)]
    )
    right = rng.integers(0, K, B)
    drafts = np.where(np.arange(K - 1) < right[:, None], want[:, :-1], (want[:, :-1] + 1) % V)
    n_drafts = rng.integers(0, K, B)
    feeds = {
        "logits": logits,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "uniform": uniform,
        "drafts": drafts,
        "n_drafts": n_drafts,
    }
    for form in forms:
        n_accepted, next_token, choice = form.run(None, feeds)
        assert choice.tolist() == want.tolist()
        assert n_accepted.tolist() == np.minimum(right, n_drafts).tolist()
        assert next_token.tolist() == want[np.arange(B), n_accepted].tolist()


def test_a_uniform_next_to_one_never_picks_an_excluded_token(forms):
    logits = np.full((B, K, V), -30.0, np.float32)
    logits[:, :, :3] = 0
    feeds = {
        "logits": logits,
        "temperature": np.ones(B, np.float32),
        "top_p": np.array([1, 0.9, 1], np.float32),
        "top_k": np.array([0, 0, 2], np.int64),
        "uniform": np.full((B, K), np.nextafter(np.float32(1), np.float32(0))),
        "drafts": np.zeros((B, K - 1), np.int64),
        "n_drafts": np.zeros(B, np.int64),
    }
    for form in forms:
        choice = form.run(["choice"], feeds)[0]
        assert (choice[1] < 3).all() and (choice[2] < 2).all() and (choice < V).all()
