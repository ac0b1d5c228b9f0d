"""Acceptance and sampling kernels: the same integers as the graph's own layers and as the references."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.graph import accept as graph
from dflash_trt.graph.net import Net
from dflash_trt.plugins.kernels import accept as kernel
from dflash_trt.plugins.kernels.spec import Config
from dflash_trt.plugins.reference import accept as reference
from tests.plugins import described
from tests.plugins.poisoned import as_torch, outputs

F32, I64 = ir.DataType.FLOAT, ir.DataType.INT64
ALMOST_ONE = np.nextafter(np.float32(1), np.float32(0))


def acceptance(block: int) -> ort.InferenceSession:
    """The layers of `dflash_trt.graph.step` between the target's choice and the committed length."""
    net = Net("float32", native=True)
    greedy, sampled = (net.input(name, I64, ("batch", block)) for name in ("greedy", "sampled"))
    temperature = net.input("temperature", F32, ("batch",))
    ids = net.input("ids", I64, ("batch", "query"))
    n_valid, n_given, past_len = (net.input(name, I64, ("batch",)) for name in ("n_valid", "n_given", "past_len"))
    hot = net.op("Greater", temperature, net.const(0, np.float32))
    choice = net.op("Where", net.unsqueeze(hot, 1), sampled, greedy)
    last = net.op("Sub", net.op("Squeeze", net.op("Shape", ids, start=1, end=2)), net.const(1))
    following = net.op("Min", net.add(net.unsqueeze(n_given, 1), net.const([range(block - 1)])), last)
    drafts = net.op("GatherElements", ids, following, axis=1)
    n_accepted, token = graph.accept(net, choice, drafts, net.op("Sub", n_valid, n_given), block - 1)
    new_len = net.add(past_len, net.add(n_given, n_accepted))
    for name, value in (("n_accepted", n_accepted), ("next_token", token), ("new_len", new_len)):
        net.output(name, value, I64, ("batch",))
    return ort.InferenceSession(ir.to_proto(net.model("accept")).SerializeToString())


@pytest.fixture(scope="module")
def layers():
    return {block: acceptance(block) for block in (2, 8, 10, 16)}


def inverse_cdf() -> ort.InferenceSession:
    net = Net("float32", native=True)
    weights, uniform = net.input("weights", F32, ("n", 1, "v")), net.input("uniform", F32, ("n", 1))
    net.output("index", graph._inverse_cdf(net, weights, uniform), I64, ("n", 1))
    return ort.InferenceSession(ir.to_proto(net.model("sample")).SerializeToString())


@pytest.fixture(scope="module")
def sampler():
    return inverse_cdf()


def run_accept(feeds: dict[str, np.ndarray]) -> list[list[int]]:
    with outputs(kernel):
        return [x.tolist() for x in kernel.launch_accept(**{name: as_torch(x) for name, x in feeds.items()})]


def run_sample(weights: np.ndarray, uniform: np.ndarray) -> list[int]:
    with outputs(kernel):
        return kernel.launch_sample(as_torch(weights), as_torch(uniform)).tolist()


@settings(max_examples=60)
@given(st.data())
def test_acceptance_equals_the_graph_and_the_reference(layers, data):
    block = data.draw(st.sampled_from(sorted(layers)), "K")
    batch = data.draw(st.sampled_from([1, 3, 8, 11]), "B")
    query = data.draw(st.sampled_from([1, block - 1, block, block + 7]), "Q")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    n_given = rng.integers(0, query + 1, batch)  # 0: idle
    n_valid = np.where(n_given > 0, n_given + rng.integers(0, query - n_given + 1), 0)
    ids = rng.integers(0, 2**40, (batch, query))
    greedy, sampled = rng.integers(0, 2**40, (2, batch, block))
    for b in range(batch):  # some of the leading drafts are what the target wants
        for choice in (greedy[b], sampled[b]):
            right = int(rng.integers(0, block + 1))
            following = ids[b, n_given[b] :][:right]
            choice[: len(following)] = following[:block]
    feeds = {
        "greedy": greedy,
        "sampled": sampled,
        "temperature": rng.choice(np.array([0, 0.7], np.float32), batch),
        "ids": ids,
        "n_valid": n_valid,
        "n_given": n_given,
        "past_len": rng.integers(0, 2**17, batch),
    }
    got = run_accept(feeds)
    assert got == [x.tolist() for x in layers[block].run(None, feeds)]
    assert got == [x.tolist() for x in reference.accept(**feeds)]


def test_without_a_drafter_the_choice_itself_is_next():
    one = np.ones(3, np.int64)
    feeds = {
        "greedy": np.array([[4], [5], [6]]),
        "sampled": np.array([[7], [8], [9]]),
        "temperature": np.array([0, 1, 0], np.float32),
        "ids": np.array([[4], [8], [6]]),
        "n_valid": one,
        "n_given": one,
        "past_len": 10 * one,
    }
    assert run_accept(feeds) == [[0, 0, 0], [4, 8, 6], [11, 11, 11]]


@settings(max_examples=60)
@given(st.data())
def test_where_float32_sums_are_exact_sampling_equals_the_graph(sampler, data):
    vocab = data.draw(st.sampled_from([1, 2, 31, 1024, 4096, 4097, 9001]), "V")
    count = data.draw(st.integers(1, 3), "N")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    filled = data.draw(st.sampled_from([0.0, 0.001, 0.1, 1.0]), "filled")
    weights = rng.integers(1, 16, (count, vocab)) * (rng.random((count, vocab)) < filled) / 1024
    edges = [i for i in (0, 4095, 4096, 8191, 8192, vocab - 1) if i < vocab]
    for row in weights:  # around the cuts between chunks
        row[data.draw(st.sampled_from(edges), "edge")] = data.draw(st.sampled_from([0, 1 / 1024, 0.5]), "there")
    uniform = rng.choice(np.array([*np.arange(64) / 64, ALMOST_ONE], np.float32), count)
    weights = weights.astype(np.float32)
    got = run_sample(weights, uniform)
    assert got == sampler.run(None, {"weights": weights[:, None], "uniform": uniform[:, None]})[0][:, 0].tolist()
    assert got == reference.sample(weights, uniform).tolist()


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.sampled_from([50, 3000, 9999]), st.floats(0.1, 10), st.booleans())
def test_for_any_weights_only_a_share_within_rounding_of_uniform_may_go_to_a_neighbour(seed, vocab, spread, normal):
    rng = np.random.default_rng(seed)
    weights = np.exp(rng.normal(0, spread, (3, vocab)))
    weights[:, rng.random(vocab) < 0.3] = 0
    weights /= weights.sum(1, keepdims=True) if normal else weights.max(1, keepdims=True)
    weights = weights.astype(np.float32)
    uniform = np.array([0, rng.random(), ALMOST_ONE], np.float32)
    through = weights.astype(np.float64).cumsum(1)
    slack = vocab * 2.0 ** -(61 - (vocab - 1).bit_length())  # each weight lost less than one unit
    for row, (index, u) in enumerate(zip(run_sample(weights, uniform), uniform.astype(np.float64), strict=True)):
        goal = u * through[row, -1]
        assert weights[row, index] > 0
        assert through[row, index] - weights[row, index] <= goal + slack
        assert through[row, index] > goal - slack


def test_a_row_of_zeros_gives_its_first_token():
    assert run_sample(np.zeros((2, 5000), np.float32), np.array([0, ALMOST_ONE], np.float32)) == [0, 0]


@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_is_no_number_still_gives_a_token_of_the_vocabulary():
    for vocab in (100, 5000):
        for poison in (np.nan, np.inf, -1.0):
            (index,) = run_sample(np.full((1, vocab), poison, np.float32), np.array([0.5], np.float32))
            assert 0 <= index < vocab


def test_the_choices_of_a_step_equal_those_of_the_graph():
    block, vocab, batch = 4, 200, 5
    net = Net("float32", native=True)
    logits = net.input("logits", F32, ("batch", block, vocab))
    sampling = graph.Sampling(
        net.input("temperature", F32, ("batch",)),
        net.input("top_p", F32, ("batch",)),
        net.input("top_k", I64, ("batch",)),
        net.input("uniform", F32, ("batch", block)),
    )
    greedy = net.op("ArgMax", logits, axis=-1, keepdims=0)
    net.output("choice", graph.choose(net, lambda: logits, sampling, vocab, greedy), I64, ("batch", block))
    session = ort.InferenceSession(ir.to_proto(net.model("choose")).SerializeToString())
    rng = np.random.default_rng(7)
    feeds = {
        "logits": rng.normal(0, 3, (batch, block, vocab)).astype(np.float32),
        "temperature": np.array([0.3, 0.7, 1, 1.5, 2], np.float32),
        "top_p": np.ones(batch, np.float32),
        "top_k": np.zeros(batch, np.int64),
        "uniform": rng.random((batch, block), np.float32),
    }
    scaled = feeds["logits"] / feeds["temperature"][:, None, None]
    weights = np.exp(scaled - scaled.max(-1, keepdims=True)).reshape(-1, vocab)
    assert run_sample(weights, feeds["uniform"].reshape(-1)) == session.run(None, feeds)[0].reshape(-1).tolist()


@pytest.mark.parametrize("vocab", [50, 1024, 9001])
def test_launched_as_described_they_give_the_same(vocab):
    rng = np.random.default_rng(vocab)
    made = {(k.op, k.constants.get("V")): k for k in kernel.kernels(Config("any", 1, 1, 64, block=4, vocab=vocab))}
    weights, uniform = rng.random((11, vocab), np.float32), rng.random(11, np.float32)
    tensors = {"weights": as_torch(weights), "uniform": as_torch(uniform), "index": torch.full((11,), -1)}
    if vocab > kernel.CHUNK:
        sums = made["sample_sums", vocab]
        tensors["sums"] = torch.full((11, sums.constants["CHUNKS"]), -1)
        described.launch(sums, {"N": 11}, weights=tensors["weights"], sums=tensors["sums"])
    described.launch(made["sample", vocab], {"N": 11}, **tensors)
    assert tensors["index"].tolist() == run_sample(weights, uniform)

    greedy, sampled, ids = rng.integers(0, 2, (3, 11, 4))
    ones = np.ones(11, np.int64)
    feeds = {"greedy": greedy, "sampled": sampled, "temperature": rng.integers(0, 2, 11).astype(np.float32)}
    feeds |= {"ids": ids, "n_valid": 4 * ones, "n_given": ones, "past_len": rng.integers(0, 99, 11)}
    results = {name: torch.full((11,), -1) for name in ("n_accepted", "next_token", "new_len")}
    tensors = {name: as_torch(x) for name, x in feeds.items()} | results
    described.launch(made["accept", None], {"B": 11, "Q": 4}, **tensors)
    assert [x.tolist() for x in results.values()] == run_accept(feeds)


def test_without_a_vocabulary_there_is_acceptance_alone():
    assert [k.op for k in kernel.kernels(Config("any", 1, 1, 64))] == ["accept"]
