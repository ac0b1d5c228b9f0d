"""NVFP4 on the CPU: the rounding is ml_dtypes', the logits those of models that round so, and of ModelOpt's own."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dflash_trt.checkpoint import load_tensor, nvfp4, pair, read_draft, read_target, read_tensors
from dflash_trt.graph import build_step
from dflash_trt.graph.net import Net
from dflash_trt.graph.nvfp4 import round_rows, unpack
from dflash_trt.measure.rounded import rounded
from tests.graph.drive import Row, inputs, load
from tests.graph.oracle import Oracle
from tests.packed import pack
from tests.tiny import make_pair

E2M1, E4M3 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn


# -- an emulation of its own: ml_dtypes rounds, numpy multiplies ------------------------------------------------------


def unpacked(tensors: dict[str, np.ndarray], module: str) -> np.ndarray:
    codes, scales = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    values = nibbles.view(E2M1).astype(np.float32).reshape(*scales.shape, 16)
    return (values * (scales.astype(np.float32) * tensors[f"{module}.weight_scale_2"])[..., None]).reshape(
        nibbles.shape
    )


class Emulated(torch.nn.Module):
    """A linear layer over packed weights; W4A4 if there is an input scale."""

    def __init__(self, tensors: dict[str, np.ndarray], module: str, bias: torch.Tensor | None):
        super().__init__()
        self.weight, self.bias = unpacked(tensors, module), bias
        self.scale = tensors.get(f"{module}.input_scale")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numpy().astype(np.float32)
        rows = rows if self.scale is None else rounded(rows, np.float32(self.scale))
        y = torch.from_numpy(rows @ self.weight.T)
        return y if self.bias is None else y + self.bias


def emulate(model: torch.nn.Module, directory: Path, modules: list[str]) -> None:
    tensors = {name: load_tensor(ref) for name, ref in read_tensors(directory).items()}
    for module in modules:
        parent, _, name = module.rpartition(".")
        linear = model.get_submodule(module)
        setattr(model.get_submodule(parent), name, Emulated(tensors, module, linear.bias))


# -- the two operations -----------------------------------------------------------------------------------------------


def session_of(net: Net, result: ir.Value) -> ort.InferenceSession:
    net.output("y", result, ir.DataType.FLOAT, ("rows", "columns"))
    model = ir.to_proto(net.model("test")).SerializeToString()
    return ort.InferenceSession(model, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def round_session() -> ort.InferenceSession:
    net = Net("float32", native=False)
    x = net.input("x", ir.DataType.FLOAT, ("rows", "columns"))
    return session_of(net, round_rows(net, x, net.input("scale", ir.DataType.FLOAT, ())))


HARD = np.array([0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -2.5, -5, 1e-30, 7], np.float32)
NUMBERS = st.floats(-1e6, 1e6, width=32) | st.sampled_from([*HARD.tolist(), 1e30, -1e-38, 2.0**-40])


@settings(max_examples=200, deadline=None)
@given(arrays(np.float32, (3, 32), elements=NUMBERS), st.sampled_from([1 / 2688, 1.0, 1e-3, 1e3, 2.0**-9]))
def test_activations_round_as_ml_dtypes_rounds_them(round_session, x, scale):
    scale = np.float32(scale)
    (ours,) = round_session.run(None, {"x": x, "scale": np.array(scale)})
    np.testing.assert_array_equal(ours, rounded(x, scale))


def test_blocks_of_zeros_stay_zeros_and_ties_go_to_even(round_session):
    x = np.stack([np.zeros(16, np.float32), np.minimum(np.abs(HARD), 6)])
    (ours,) = round_session.run(None, {"x": x, "scale": np.array(1, np.float32)})
    assert not ours[0].any()
    assert ours[1].tolist() == [0, 0, 0, 1, 1, 2, 2, 4, 4, 6, 0, 1, 2, 4, 0, 6]


@pytest.mark.parametrize("seed", range(3))
def test_weights_unpack_to_what_the_codec_decodes(seed):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (5, 24), dtype=np.uint8)
    scales = np.arange(1, 16, dtype=np.uint8).reshape(5, 3).view(E4M3) if seed else rng.random((5, 3)).astype(E4M3)
    scale = np.float32(rng.lognormal(-6))
    net = Net("float32", native=False)
    values = [
        net.input(name, dtype, shape)
        for name, dtype, shape in [
            ("codes", ir.DataType.UINT8, (5, 24)),
            ("scales", ir.DataType.FLOAT8E4M3FN, (5, 3)),
            ("scale", ir.DataType.FLOAT, ()),
        ]
    ]
    session = session_of(net, unpack(net, *values))
    f8 = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(scales.view(np.uint8), 17)
    (ours,) = session.run_with_ort_values(
        None, {"codes": ort.OrtValue.ortvalue_from_numpy(codes), "scales": f8,
               "scale": ort.OrtValue.ortvalue_from_numpy(np.array(scale))},
    )  # fmt: skip
    np.testing.assert_array_equal(ours.numpy(), nvfp4.decode(codes, scales, scale))


# -- whole pairs ------------------------------------------------------------------------------------------------------

PRECISIONS = {
    "W4A4 everywhere": (("*_proj",), ("*_proj",), True),
    "W4A16 everywhere": (("*_proj",), ("*_proj",), False),
    "W4A4, MLP and o_proj of the drafter": ((), ("*mlp*", "*o_proj"), True),
    "W4A4, one layer of the target, k_proj and fc of the drafter": (("*layers.2.*_proj",), ("*k_proj", "fc"), True),
    "W4A16 with lm_head": (("*_proj", "lm_head"), (), False),
}


@pytest.mark.parametrize("base", ["tiny-qwen3", "tiny-llama"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_logits_equal_those_of_models_that_round_in_every_linear_layer(base, name, tmp_path):
    """Both sides compute in float32 and differ in the order of sums, by 1e-6 of a value; where such a difference falls
    on a tie between two 4-bit values, that one activation moves by a step. No tie happens in these texts.
    """
    in_target, in_draft, activations = PRECISIONS[name]
    biases = {"attention_bias": True} if base == "tiny-llama" else {}
    target, draft = make_pair(tmp_path, base, target_config=biases, draft_config=biases, dtype="float32")
    oracle = Oracle(target, draft)
    for model, directory, patterns in ((oracle.target, target, in_target), (oracle.draft, draft, in_draft)):
        if patterns:
            emulate(model, directory, pack(directory, *patterns, activations=activations))
    session = load(target, draft, tmp_path / "engine")
    K, text = session.limits.block_size, [int(t) for t in np.random.default_rng(5).integers(0, 250, 30)]
    out, debug = session.debug_step(inputs(K, [Row(text, len(text))]))
    text.append(int(oracle.logits(text)[-1].argmax()))
    assert out.next_token[0] == text[-1]
    close(debug["draft_logits"][0], oracle.draft_logits(text, K))
    block = out.next_block[0].tolist()
    _, debug = session.debug_step(inputs(K, [Row(block, 1, len(text) - 1)]))
    close(debug["logits"][0], oracle.logits([*text, *block[1:]])[-K:])


def close(ours: np.ndarray, reference: np.ndarray) -> None:
    error = np.linalg.norm(ours - reference) / np.linalg.norm(reference)
    assert error < 1e-3, error


def test_weights_alone_give_the_logits_of_modelopts_compressed_model(tmp_path):
    """Its weights are really packed, and unpacked in every forward."""
    import modelopt.torch.quantization as mtq

    target, draft = make_pair(tmp_path, dtype="float32")
    oracle = Oracle(target, draft)
    mtq.quantize(oracle.target, mtq.W4A16_NVFP4_CFG, forward_loop=None)
    mtq.compress(oracle.target)
    pack(target, "*_proj", activations=False)
    session = load(target, draft, tmp_path / "engine")
    K, text = session.limits.block_size, [int(t) for t in np.random.default_rng(5).integers(0, 250, 30)]
    _, debug = session.debug_step(inputs(K, [Row(text, len(text))]))
    close(debug["logits"][0][:1], oracle.logits(text)[-1:])


def test_tensorrts_form_refers_to_the_same_bytes_as_four_bit_values(tmp_path):
    target, draft = make_pair(tmp_path)
    modules = pack(target, "*_proj")
    checked = pair(read_target(target), read_draft(draft))
    forms = [build_step(checked, dtype="bfloat16", cache_len=64), build_step(checked, dtype="float32")]
    for module in modules:
        native, cpu = (net.initializers[f"target.{module}.weight"].const_value for net in forms)
        assert (native.dtype, cpu.dtype) == (ir.DataType.FLOAT4E2M1, ir.DataType.UINT8)
        assert (native.location, native.offset, native.length) == (cpu.location, cpu.offset, cpu.length)
        assert native.shape[1] == 2 * cpu.shape[1]
