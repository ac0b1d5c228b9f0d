"""Top-1 over a vocabulary shard: the token that ArgMax picks, however the vocabulary is cut."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.graph.net import Net
from dflash_trt.plugins.kernels import draft_head as kernel
from dflash_trt.plugins.kernels.spec import Config
from dflash_trt.plugins.reference import draft_head as reference
from tests.plugins import described
from tests.plugins.poisoned import as_torch, outputs

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN")  # numpy, in the interpreter
VOCABULARIES = [1, 7, 1000, 8191, 8192, 8193, 20001]


@pytest.fixture(scope="module")
def arg_max():
    net = Net("float32", native=True)
    logits = net.input("logits", ir.DataType.FLOAT, ("n", "v"))
    net.output("index", net.op("ArgMax", logits, axis=-1, keepdims=0), ir.DataType.INT64, ("n",))
    return ort.InferenceSession(ir.to_proto(net.model("head")).SerializeToString())


def run(logits: np.ndarray, offset: int) -> tuple[np.ndarray, np.ndarray]:
    with outputs(kernel):
        value, index = kernel.launch(as_torch(logits), torch.tensor([offset]))
    return value.numpy(), index.numpy()


def draw_logits(data: st.DataObject, vocab: int) -> np.ndarray:
    """Few different values, so that most maxima are shared; some rows hold infinities, or nothing else."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    count = data.draw(st.integers(1, 4), "N")
    levels = data.draw(st.sampled_from([1, 3, 2**16]), "levels")
    logits = (rng.integers(-levels, levels, (count, vocab)) / 8).astype(DTYPES[data.draw(st.sampled_from([*DTYPES]))])
    masked = data.draw(st.sampled_from([0, 0.5, 1.0]), "masked")
    logits[rng.random((count, vocab)) < masked] = -np.inf
    return logits


@settings(max_examples=60)
@given(st.data())
def test_the_best_token_is_the_one_that_arg_max_picks(arg_max, data):
    vocab = data.draw(st.sampled_from(VOCABULARIES), "V")
    logits = draw_logits(data, vocab)
    offset = data.draw(st.sampled_from([0, 18992, 2**33]), "offset")
    value, index = run(logits, offset)
    want, token = reference.draft_head(logits, offset)
    assert index.tolist() == token.tolist()
    assert value.astype(np.float64).tolist() == want.tolist()
    assert (index - offset).tolist() == arg_max.run(None, {"logits": logits.astype(np.float32)})[0].tolist()


@settings(max_examples=40)
@given(st.data())
def test_it_does_not_matter_how_ranks_share_the_vocabulary_nor_in_which_order_they_answer(arg_max, data):
    vocab = data.draw(st.sampled_from([8, 999, 20001]), "V")
    logits = draw_logits(data, vocab)
    cuts = sorted({0, vocab, *data.draw(st.lists(st.integers(1, vocab - 1), max_size=7), "cuts")})
    with outputs(kernel):
        parts = [
            kernel.launch_parts(as_torch(np.ascontiguousarray(logits[:, first:last])), torch.tensor([first]))
            for first, last in pairwise(cuts)
        ]
        parts = data.draw(st.permutations(parts), "order")
        value, index = kernel.launch_combine(*(torch.cat(column) for column in zip(*parts, strict=True)))
    assert index.tolist() == arg_max.run(None, {"logits": logits.astype(np.float32)})[0].tolist()
    assert value.tolist() == logits.astype(np.float64).max(1).tolist()


@pytest.mark.parametrize("parts, count", [(1, 1), (32, 16), (33, 17), (70, 40)])
def test_combining_equals_the_reference_for_any_number_of_parts(parts, count):
    rng = np.random.default_rng(parts)
    value = rng.integers(-2, 3, (parts, count)).astype(np.float32)
    value[:, ::3] = -np.inf
    index = rng.permuted(np.arange(2**40, 2**40 + parts * count).reshape(parts, count))
    with outputs(kernel):
        best, token = kernel.launch_combine(as_torch(value), as_torch(index))
    want, wanted = reference.combine(value, index)
    assert best.tolist() == want.tolist()
    assert token.tolist() == wanted.tolist()


@pytest.mark.parametrize("vocab", [7, 8192, 8193])
def test_what_is_no_number_still_gives_a_token_of_the_shard(vocab):
    index = run(np.full((2, vocab), np.nan, np.float32), 100)[1]
    assert ((index >= 100) & (index < 100 + vocab)).all()


def test_a_best_token_is_found_among_what_is_no_number():
    logits = np.full((1, 20001), np.nan, np.float32)
    logits[0, 9000] = -3
    assert run(logits, 0)[1].tolist() == [9000]


@pytest.mark.parametrize("dtype", DTYPES)
def test_launched_as_described_they_give_the_same(dtype):
    vocab, count = 20001, 19
    logits = as_torch(np.random.default_rng(0).integers(-9, 9, (count, vocab)).astype(DTYPES[dtype]))
    model = Config("any", 1, 1, 64, dtype="float16" if dtype == "float16" else "bfloat16", vocab=vocab)
    *heads, combine = kernel.kernels(model)
    head = next(k for k in heads if k.name.endswith(dtype))
    parts = kernel.chunks(vocab)
    value, index = torch.full((parts, count), torch.nan), torch.full((parts, count), -1)
    described.launch(head, {"N": count}, logits=logits, offset=torch.tensor([5]), value=value, index=index)
    best = {"best_value": torch.full((count,), torch.nan), "best_index": torch.full((count,), -1)}
    described.launch(combine, {"C": parts, "N": count}, value=value, index=index, **best)
    want, token = kernel.launch(logits, torch.tensor([5]))
    assert best["best_value"].tolist() == want.tolist()
    assert best["best_index"].tolist() == token.tolist()
