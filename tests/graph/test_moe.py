"""Mixtures of experts: the function against float64 and ml_dtypes, and what TensorRT-RTX makes of its own forms."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from safetensors.numpy import save_file

from dflash_trt.checkpoint import mxfp4, nvfp4, read_tensors
from dflash_trt.checkpoint.model import Experts
from dflash_trt.engine import worker
from dflash_trt.engine.backends import load_backend
from dflash_trt.engine.manifest import Limits
from dflash_trt.engine.watch import make_logger
from dflash_trt.errors import Failure
from dflash_trt.graph.moe import moe
from dflash_trt.graph.net import Net
from dflash_trt.graph.weights import Weights
from dflash_trt.measure.rounded import rounded

ALPHA, LIMIT = 1.702, 1.0
STORAGES = ("float", "mxfp4", "nvfp4", "nvfp4 W4A4")
E2M1, E4M3, E8M0 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu


@dataclass(frozen=True)
class Layer:
    """One layer's mixture as a rank holds it: tensors of the experts in `held`."""

    count: int
    top_k: int
    hidden: int
    ffn: int
    storage: str
    held: range
    seed: int = 0
    down_bias: bool = True

    def tensors(self, broken: frozenset[int] = frozenset()) -> dict[str, np.ndarray]:
        """Of experts in `broken` every number is NaN that can be."""
        rng = np.random.default_rng(self.seed)
        bias = (2 * rng.standard_normal(self.count)).astype(np.float32)
        tensors = {"mlp.router.weight": normal(rng, self.count, self.hidden), "mlp.router.bias": bias}
        for name, out, width in (("gate_up_proj", 2 * self.ffn, self.hidden), ("down_proj", self.hidden, self.ffn)):
            weight, bias = normal(rng, self.count, out, width), normal(rng, self.count, out)
            for expert in broken:
                bias[expert] = np.nan
            held = {f"{name}_bias": bias[self.held.start : self.held.stop]}
            held |= self._stored(name, weight, broken)
            tensors |= {f"mlp.experts.{key}": array for key, array in held.items()}
        return tensors

    def _stored(self, name: str, weight: np.ndarray, broken: frozenset[int]) -> dict[str, np.ndarray]:
        held, lost = slice(self.held.start, self.held.stop), sorted(broken)
        if self.storage == "float":
            weight[lost] = np.nan
            return {name: weight[held].swapaxes(1, 2).astype(ml_dtypes.bfloat16).copy()}
        if self.storage == "mxfp4":
            blocks, scales = mxfp4.encode(weight)
            scales[lost] = mxfp4.NAN
            return {f"{name}_blocks": blocks[held], f"{name}_scales": scales[held]}
        scale = nvfp4.global_scale(float(np.abs(weight).max()))
        codes, scales = nvfp4.encode(weight, scale)
        scales[lost] = np.nan
        tensors = {name: codes[held], f"{name}_weight_scale": scales[held], f"{name}_weight_scale_2": np.array(scale)}
        if self.storage == "nvfp4 W4A4":
            tensors[f"{name}_input_scale"] = np.array(nvfp4.global_scale(4.0))
        return tensors

    def build(self, net: Net, x: ir.Value, directory: Path) -> ir.Value:
        storage: Any = self.storage.partition(" ")[0]
        experts = Experts(self.count, self.top_k, storage, ALPHA, LIMIT)
        config: Any = SimpleNamespace(experts=experts, hidden=self.hidden, ffn=self.ffn)
        weights = Weights(net, "target", dict(read_tensors(directory)))
        return moe(net, config, weights, x, experts=self.held, down_bias=self.down_bias)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)


def write(directory: Path, tensors: Mapping[str, np.ndarray]) -> None:
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, directory / "model.safetensors")


def run(layer: Layer, x: np.ndarray, broken: frozenset[int] = frozenset()) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), layer.tensors(broken))
        net = Net("float32", native=False)
        y = layer.build(net, net.input("x", ir.DataType.FLOAT, ("rows", layer.hidden)), Path(folder))
        net.output("y", y, ir.DataType.FLOAT, ("rows", layer.hidden))
        session = session_of(net)
    (result,) = session.run(None, {"x": x})
    return result


def session_of(net: Net) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    files = [np.fromfile(file, np.uint8) for file in net.links.values()]
    options.add_external_initializers_from_files_in_memory([*net.links], files, [len(file) for file in files])
    return ort.InferenceSession(ir.to_proto(net.model("moe")).SerializeToString(), options)


# -- the reference ----------------------------------------------------------------------------------------------------


def values(layer: Layer, tensors: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """float64 [E, out, in]"""
    if layer.storage == "float":
        return tensors[name].astype(np.float64).swapaxes(1, 2)
    codes = tensors[f"{name}_blocks" if layer.storage == "mxfp4" else name]
    codes = codes.reshape(*codes.shape[:2], -1)
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:2], -1)
    if layer.storage == "mxfp4":
        factors = tensors[f"{name}_scales"].view(E8M0).astype(np.float64)
    else:
        factors = tensors[f"{name}_weight_scale"].astype(np.float64) * tensors[f"{name}_weight_scale_2"]
    blocks = nibbles.view(E2M1).astype(np.float64).reshape(*factors.shape, -1)
    return (blocks * factors[..., None]).reshape(nibbles.shape)


def reference(layer: Layer, x: np.ndarray) -> np.ndarray:
    """One row and one expert at a time, in float64."""
    tensors = {name.removeprefix("mlp.experts."): array for name, array in layer.tensors().items()}
    gate_up, down = values(layer, tensors, "gate_up_proj"), values(layer, tensors, "down_proj")

    def rounding(rows: np.ndarray, name: str) -> np.ndarray:
        scale = tensors.get(f"{name}_input_scale")
        return rows if scale is None else rounded(rows.astype(np.float32)[None], np.float32(scale))[0].astype(float)

    result = np.zeros(x.shape)
    for row, out in zip(x.astype(np.float64), result, strict=True):
        logits = tensors["mlp.router.weight"].astype(np.float64) @ row + tensors["mlp.router.bias"]
        chosen = np.argsort(-logits)[: layer.top_k]
        weights = np.exp(logits[chosen] - logits[chosen].max())
        for expert, share in zip(chosen, weights / weights.sum(), strict=True):
            if expert not in layer.held:
                continue
            e = expert - layer.held.start
            y = gate_up[e] @ rounding(row, "gate_up_proj") + tensors["gate_up_proj_bias"][e]
            gate, up = np.minimum(y[::2], LIMIT), np.clip(y[1::2], -LIMIT, LIMIT)
            y = (up + 1) * gate / (1 + np.exp(-ALPHA * gate))
            y = down[e] @ rounding(y, "down_proj")
            out += share * (y + layer.down_bias * tensors["down_proj_bias"][e])
    return result


def chosen(layer: Layer, x: np.ndarray) -> set[int]:
    tensors = layer.tensors()
    logits = x @ tensors["mlp.router.weight"].T + tensors["mlp.router.bias"]
    return set(np.argsort(-logits, axis=1)[:, : layer.top_k].ravel().tolist())


def check(layer: Layer, x: np.ndarray, broken: frozenset[int] = frozenset()) -> None:
    """Sums of some hundred float32 products. An activation on the border of two 4-bit values may fall to either side:
    then a whole row differs a little."""
    ours, expected = run(layer, x, broken), reference(layer, x)
    if layer.storage == "nvfp4 W4A4":
        assert np.linalg.norm(ours - expected) <= 0.01 * np.linalg.norm(expected) + 1e-6
    else:
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)


# -- the function -----------------------------------------------------------------------------------------------------


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    count = draw(st.integers(1, 12))
    first = draw(st.integers(0, count - 1))
    return Layer(
        count=count,
        top_k=draw(st.integers(1, count)),
        hidden=draw(st.sampled_from([32, 64, 96])),
        ffn=draw(st.sampled_from([32, 96])),
        storage=draw(st.sampled_from(STORAGES)),
        held=range(first, draw(st.integers(first + 1, count))),
        seed=draw(st.integers(0, 2**32 - 1)),
        down_bias=draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None)
@given(layers(), st.integers(1, 6))
def test_the_function_computes_what_numpy_does(layer, rows):
    check(layer, np.random.default_rng(layer.seed).standard_normal((rows, layer.hidden)).astype(np.float32))


@pytest.mark.parametrize("storage", STORAGES)
def test_experts_that_nobody_chose_are_not_even_looked_at(storage):
    layer = Layer(16, 2, 64, 32, storage, range(16))
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    broken = frozenset(range(16)) - chosen(layer, x)
    assert len(broken) >= 10
    check(layer, x, broken)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_rank_with_none_of_the_chosen_experts_adds_nothing(storage):
    layer = Layer(16, 2, 64, 32, storage, range(16))
    x = np.random.default_rng(1).standard_normal((1, 64)).astype(np.float32)
    first = max(chosen(layer, x)) + 1
    assert first < 16
    assert not run(replace(layer, held=range(first, 16)), x).any()


def test_ranks_that_share_the_experts_sum_up_to_the_whole():
    layer = Layer(12, 4, 64, 32, "mxfp4", range(12))
    x = np.random.default_rng(2).standard_normal((5, 64)).astype(np.float32)
    parts = [run(replace(layer, held=range(first, first + 3)), x) for first in range(0, 12, 3)]
    np.testing.assert_allclose(sum(parts), run(layer, x), rtol=0, atol=1e-5)


def test_all_rows_may_choose_one_expert():
    layer = Layer(8, 1, 64, 32, "mxfp4", range(8))
    x = np.random.default_rng(3).standard_normal((1, 64)).astype(np.float32)
    check(layer, np.repeat(x, 7, axis=0) * np.linspace(0.9, 1.1, 7, dtype=np.float32)[:, None])


LOAD = """
import json, sys
from pathlib import Path
import numpy as np, onnx_ir as ir
from dflash_trt.graph.net import Net
from tests.graph.test_moe import Layer, session_of
def megabytes(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) / 1e3
net = Net("float32", native=False)
layer = Layer(128, 4, 512, 512, "mxfp4", range(128))
x = net.input("x", ir.DataType.FLOAT, ("rows", 512))
net.output("y", layer.build(net, x, Path(sys.argv[1])), ir.DataType.FLOAT, ("rows", 512))
before = megabytes("VmHWM")
session = session_of(net)
peak, loaded = megabytes("VmHWM"), megabytes("VmRSS")
session.run(None, {"x": np.ones((1, 512), np.float32)})
print(json.dumps([peak - before, megabytes("VmRSS") - loaded]))
"""


def test_loading_and_running_leaves_the_experts_packed(tmp_path):
    """128 experts of 512 x 512 take 54 MB of MXFP4 and would take 403 MB unpacked."""
    tensors, rng = Layer(1, 1, 512, 512, "mxfp4", range(1)).tensors(), np.random.default_rng(0)
    for name in [*tensors]:
        tensors[name] = np.repeat(tensors[name], 128, axis=0)
    for name in [name for name in tensors if name.endswith("_blocks")]:
        tensors[name] = np.frombuffer(rng.bytes(tensors[name].nbytes), np.uint8).reshape(tensors[name].shape)
    write(tmp_path, tensors)
    assert 50e6 < sum(array.nbytes for array in tensors.values()) < 60e6
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    loading, running = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert loading < 200  # the file as read here, ONNX Runtime's copy, and change
    assert running < 30


# -- TensorRT's forms -------------------------------------------------------------------------------------------------

NATIVE = Layer(12, 3, 64, 96, "mxfp4", range(4, 9))


def graph(layer: Layer, directory: Path, dtype: str, form: str) -> Path:
    """The layer alone, as TensorRT's parser reads it."""
    write(directory, layer.tensors())
    net = Net(dtype, native=True, moe=form, beside=directory)
    y = layer.build(net, net.input("x", net.dtype, ("batch", layer.hidden)), directory)
    net.output("y", y, net.dtype, ("batch", layer.hidden))
    ir.save(net.model("moe"), directory / "moe.onnx")
    return directory / "moe.onnx"


class TRT_MoE(OpRun):
    """As the documentation of TensorRT's MoE layer has it, in float64."""

    op_domain = "trt"

    def _run(self, x, ids, scores, gate, up, down, gate_bias, up_bias, down_bias, **attributes):
        assert attributes["activation_type"] == 1
        limit, alpha, beta = (attributes[f"swiglu_{name}"] for name in ("limit", "alpha", "beta"))
        result = np.zeros(x.shape)
        for place in np.ndindex(ids.shape):
            e, row = ids[place], x[place[:2]].astype(np.float64)
            g = np.minimum(row @ gate[e] + gate_bias[e], limit)
            u = np.clip(row @ up[e] + up_bias[e], -limit, limit)
            y = (u + beta) * g / (1 + np.exp(-alpha * g))
            result[place[:2]] += scores[place] * (y @ down[e] + down_bias[e])
        return (result.astype(x.dtype),)


@pytest.mark.parametrize("down_bias", [True, False])
@pytest.mark.parametrize("storage", ["float", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("form", ["native", "layer"])
def test_tensorrts_forms_say_the_same_in_onnxs_own_words(form, storage, down_bias, tmp_path):
    """By ONNX's reference, which has 4-bit types but not the rounding of activations."""
    layer = replace(NATIVE, storage=storage, down_bias=down_bias)
    model = onnx.load(graph(layer, tmp_path, "float32", form))
    x = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
    (ours,) = ReferenceEvaluator(model, new_ops=[TRT_MoE]).run(None, {"x": x})
    np.testing.assert_allclose(ours, reference(layer, x), rtol=0, atol=1e-5)


def compile_for_sm120(path: Path, packed: int) -> dict[str, int]:
    job = worker.Job("tensorrt-rtx", 120, str(path), 0, packed, Limits(8, 96, 1, 32), str(path.parent / "engine"))
    return worker.run(job, lambda what, fraction: None)


@pytest.mark.slow
@pytest.mark.parametrize(("storage", "dtype"), [*((storage, "bfloat16") for storage in STORAGES), ("mxfp4", "float16")])
def test_the_native_form_compiles_with_weights_of_four_bits(storage, dtype, tmp_path):
    path = graph(replace(NATIVE, storage=storage), tmp_path, dtype, "native")
    layers = compile_for_sm120(path, 0 if storage == "float" else 2)
    assert layers["MATRIX_MULTIPLY"] == 3  # router, gate and up, down
    assert layers.get("DYNAMIC_QUANTIZE", 0) == (2 if storage == "nvfp4 W4A4" else 0)


@pytest.mark.parametrize("storage", STORAGES)
def test_the_layer_form_is_read_as_a_moe_layer_with_clamped_swiglu(storage, tmp_path):
    backend = load_backend("tensorrt-rtx")
    assert backend
    trt = backend.module
    logger = make_logger(trt, lambda text: None)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    path = graph(replace(NATIVE, storage=storage), tmp_path, "bfloat16", "layer")
    assert trt.OnnxParser(network, logger).parse_from_file(str(path))
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    (layer,) = (layer for layer in layers if layer.type.name == "MOE")
    layer.__class__ = trt.IMoELayer  # get_layer returns the base class
    limit, alpha, beta = layer.swiglu_param_limit, layer.swiglu_param_alpha, layer.swiglu_param_beta
    assert (limit, beta, layer.activation_type.name) == (LIMIT, 1, "SILU") and alpha == np.float32(ALPHA)
    shapes = [tuple(layer.get_input(i).shape) for i in range(layer.num_inputs)]
    assert shapes == [
        (1, -1, 64), (1, -1, 3), (1, -1, 3), (5, 64, 96), (5, 64, 96), (5, 96, 64), (5, 96), (5, 96), (5, 64)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["float", "mxfp4"])
def test_the_compiler_has_no_kernels_for_the_layer_form_yet(storage, tmp_path):
    path = graph(replace(NATIVE, storage=storage), tmp_path, "bfloat16", "layer")
    with pytest.raises(Failure, match=r"(?s)refuses the network for SM120.*moe_lowering.*Cannot decompose.*moe_fc1"):
        compile_for_sm120(path, 0 if storage == "float" else 2)
