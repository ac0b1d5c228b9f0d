"""TensorRT-RTX compiles the step graph without a GPU, into native layers, and says why when it does not."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from dflash_trt.checkpoint import read_tensors
from dflash_trt.engine import build, convert, open_engine, worker
from dflash_trt.engine.card import describe_engine
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.errors import Failure, UserError
from tests.packed import pack
from tests.tiny import make_pair

COMBINATIONS = [
    ("tiny-llama", "bfloat16", 89),
    ("tiny-qwen3", "bfloat16", 120),
    ("tiny-qwen3", "float16", 89),
    ("tiny-llama", "float16", 120),
]
TARGET_LAYERS, DRAFT_LAYERS = 3, 2


def unpacked(target: Path, draft: Path) -> None:
    """Leaves a pair as it is."""


@pytest.fixture
def make_engine(tmp_path):
    """An engine directory of three target layers and a sliding, causal and a full, bidirectional draft layer."""

    def make(base: str = "tiny-qwen3", dtype: str = "bfloat16", pack: Callable[[Path, Path], None] = unpacked) -> Path:
        target = {"num_hidden_layers": TARGET_LAYERS, "head_dim": 64}
        draft = {
            "head_dim": 64,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 32,
            "use_sliding_window": True,
            "dflash_config.target_layer_ids": [0, 2],
        }
        pair = make_pair(tmp_path, base, target_config=target, draft_config=draft)
        pack(*pair)
        limits = {"max_seq_len": 256, "max_query": 32, "max_batch": 4}
        return convert(*pair, tmp_path / "engine", dtype=dtype, **limits).path

    return make


@pytest.fixture
def engine(make_engine) -> Path:
    return make_engine()


@pytest.mark.slow
@pytest.mark.parametrize(("base", "dtype", "sm"), COMBINATIONS)
def test_both_graphs_compile_with_native_cache_updates_and_attention(base, dtype, sm, make_engine):
    path = make_engine(base, dtype)
    seen: list[tuple[str, float]] = []
    built = build(path, sm=sm, progress=lambda what, fraction: seen.append((what, fraction)))

    assert [made.file for made in built] == [f"rank0.sm{sm}.engine", f"rank0-ar.sm{sm}.engine"]
    for made, layers in zip(built, (TARGET_LAYERS + DRAFT_LAYERS, TARGET_LAYERS), strict=True):
        assert (made.sm, made.compiler, made.precision) == (sm, "tensorrt-rtx", dtype)
        assert made.layers["KV_CACHE_UPDATE"] == 2 * layers
        assert made.layers["ATTENTION"] == layers
        assert made.size == (path / made.file).stat().st_size > 1_000_000
    assert {what for what, _ in seen} == {"compiling rank0.onnx", "compiling rank0-ar.onnx"}
    assert all(0 <= fraction <= 1 for _, fraction in seen) and max(fraction for _, fraction in seen) > 0.5
    opened = open_engine(path)
    assert opened.manifest.engines == built
    assert (opened.compiled(sm), opened.compiled(sm, draft=False)) == built


@pytest.mark.slow
@pytest.mark.parametrize("activations", [True, False], ids=["W4A4", "W4A16"])
def test_nvfp4_weights_stay_four_bits_wide_and_activations_are_quantized(activations, make_engine):
    """The drafter in mixed precision. A weight's bytes lie in the engine as in the checkpoint, or, for weights alone,
    in another order of the same size; as a whole it is smaller than those weights unpacked."""

    def pack_both(target: Path, draft: Path) -> None:
        pack(target, "*_proj", activations=activations)
        pack(draft, "*mlp*", "*o_proj", activations=activations)

    path = make_engine(pack=pack_both)
    manifest = open_engine(path).manifest
    assert (manifest.target.nvfp4.weights, manifest.draft.nvfp4.weights) == (7 * TARGET_LAYERS, 4 * DRAFT_LAYERS)
    for model in manifest.models:
        assert model.nvfp4.nbytes <= 0.30 * model.nvfp4.nbytes_bf16
    for made, models in zip(build(path, sm=120), (manifest.models, manifest.models[:1]), strict=True):
        assert made.layers.get("DYNAMIC_QUANTIZE", 0) == activations * (
            4 * TARGET_LAYERS + 3 * DRAFT_LAYERS * (len(models) - 1)  # qkv, o, gate and up, down; the drafter's qkv not
        )
        engine = (path / made.file).read_bytes()
        codes = (path.parent / "target" / "model.safetensors").read_bytes()
        ref = read_tensors(path.parent / "target")["model.layers.0.mlp.down_proj.weight"]
        assert (codes[ref.offset : ref.offset + 64] in engine) == activations


def test_nvfp4_is_refused_for_an_sm_that_cannot_compute_with_it(make_engine):
    path = make_engine(pack=lambda target, draft: pack(draft, "*_proj") and None)
    with pytest.raises(UserError, match=r"draft has NVFP4 weights, which SM89 .* build for SM 100, 103, 110, 120, 121"):
        build(path, sm=89)


@pytest.mark.slow
def test_what_was_compiled_is_kept_until_it_is_damaged_or_force_is_given(pair, tmp_path):
    path = convert(pair[0], None, tmp_path / "engine", max_seq_len=64, max_query=16).path
    built = build(path, sm=120)
    assert [made.file for made in built] == ["rank0-ar.sm120.engine"]
    assert build(path, sm=120) == built
    with (path / built[0].file).open("r+b") as file:
        file.write(b"damaged")
    with pytest.raises(UserError, match=r"was changed: .* — run `dflash-trt build .* --sm 120`") as refused:
        open_engine(path)
    assert describe_engine(path)["problems"] == [str(refused.value)]
    for force in (False, True):
        again = build(path, sm=120, force=force)
        assert again != built
        assert open_engine(path).manifest.engines == again
        built = again


def test_an_sm_without_a_compiler_is_refused_by_its_name_and_the_reasons(engine):
    with pytest.raises(UserError, match=r"SM90 \(Hopper: .*tensorrt-rtx builds for SM 75, 80, 86, 89, 120, 121 only"):
        build(engine, sm=90, backend="tensorrt-rtx")
    with pytest.raises(UserError, match=r"there is no SM91 — --sm — choose one of 75, "):
        build(engine, sm=91)
    with pytest.raises(UserError, match=r"no backend 'onnx' — --backend — .*tensorrt-rtx"):
        build(engine, sm=120, backend="onnx")
    with pytest.raises(UserError, match=r"bfloat16, which TensorRT .* SM75 .* — convert with --dtype float16$"):
        build(engine, sm=75)
    assert read_manifest(engine).engines == ()


def test_a_float32_directory_runs_on_a_cpu_alone(pair, tmp_path):
    engine = convert(*pair, tmp_path / "engine", dtype="float32", max_batch=1, max_seq_len=64, max_query=16)
    with pytest.raises(UserError, match=r"float32, which TensorRT .* — convert with --dtype float16 or bfloat16$"):
        build(engine.path, sm=120)


def test_a_compiler_that_crashes_is_a_failure_that_says_so(engine):
    def crash(what: str, fraction: float) -> None:
        children = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGSEGV)

    before = sorted(engine.iterdir())
    with pytest.raises(Failure, match=r"the compiler crashed \(SIGSEGV\) — .*rank0\.onnx"):
        build(engine, sm=120, progress=crash)
    assert sorted(engine.iterdir()) == before


def test_the_compilers_own_words_are_shown_when_it_refuses(engine):
    with pytest.raises(Failure, match=r"(?s)cannot read .*rank0-ar\.cpu\.onnx\n.*static sequence length"):
        worker.run(_job(engine, "rank0-ar.cpu"), lambda what, fraction: None)


def test_a_cache_that_would_be_copied_is_refused(engine):
    model = onnx.load(engine / "rank0-ar.onnx", load_external_data=False)
    for node in model.graph.node:  # between the cache update and the output goes a multiplication
        for names in (node.input, node.output):
            names[:] = ["updated" if name == "target_k_present.1" else name for name in names]
    one = onnx.helper.make_tensor("one", onnx.TensorProto.BFLOAT16, [1], np.ones(1, np.float32))
    model.graph.initializer.append(one)
    model.graph.node.append(onnx.helper.make_node("Mul", ["updated", "one"], ["target_k_present.1"]))
    onnx.save(model, engine / "copied.onnx")
    with pytest.raises(Failure, match=r"target_k_present\.1 is not what a KV_CACHE_UPDATE layer made"):
        worker.run(_job(engine, "copied"), lambda what, fraction: None)


def test_layers_that_did_not_become_native_are_counted(engine):
    with pytest.raises(Failure, match="the network has 6 KV_CACHE_UPDATE layers, not 8"):
        worker.run(_job(engine, "rank0-ar", layers=4), lambda what, fraction: None)


def test_weights_that_are_not_four_bits_wide_are_counted(engine):
    with pytest.raises(Failure, match="the network has 0 4-bit weights, not 3"):
        worker.run(_job(engine, "rank0-ar", packed_weights=3), lambda what, fraction: None)


def _job(engine: Path, graph: str, layers: int = TARGET_LAYERS, packed_weights: int = 0) -> worker.Job:
    path, limits = str(engine / f"{graph}.onnx"), open_engine(engine).limits
    return worker.Job("tensorrt-rtx", 120, path, layers, packed_weights, limits, str(engine / "output"))
