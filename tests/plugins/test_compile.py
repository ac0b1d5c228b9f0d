"""Kernels compile ahead of time for every SM, and their PTX takes what TensorRT passes and nothing else."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflash_trt.errors import Failure, UserError
from dflash_trt.plugins import compile as compiler
from dflash_trt.plugins import kernels, ptx
from dflash_trt.plugins.compile import SMS, Compiled, compile_kernel
from dflash_trt.plugins.kernels import accept
from dflash_trt.plugins.kernels.spec import QWEN3_8B, Argument, Kernel, check
from dflash_trt.plugins.report import LIMITS, occupancy
from dflash_trt.plugins.tensorrt.launch import launch
from tests.plugins.process import run

TENSOR_CORE = {90: "wgmma", 100: "tcgen05.mma", 103: "tcgen05.mma", 120: "mma.sync"}
ARGUMENTS = (Argument("x", "*bf16"), Argument("n", "i32"), Argument("y", "*fp32", output=True))
PTX = """
.version 8.8
.target sm_90a
.visible .entry add(
	.param .u64 .ptr .global .align 1 add_param_0,
	.param .u32 add_param_1,
	.param .u64 .ptr .global .align 1 add_param_2,
	.param .u64 .ptr .global .align 1 add_param_3,
	.param .u64 .ptr .global .align 1 add_param_4
)
.reqntid 128
{
	ld.param.b64 	%rd1, [add_param_0];
	ld.param.b32 	%r1, [add_param_1];
	ld.param.b64 	%rd2, [add_param_2];
	ret;
}
"""


@pytest.fixture(scope="module")
def cache(request, tmp_path_factory) -> Path:
    """Kept between runs: a file's name tells everything that it depends on."""
    kept = getattr(request.config, "cache", None)
    return Path(kept.mkdir("kernels")) if kept else tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def everything(cache) -> list[tuple[Kernel, Compiled]]:
    """Every shipped kernel for every SM."""
    halves = [["--sm", "90", "--sm", "100"], ["--sm", "103", "--sm", "120"]]  # a process for each of two cores
    with ThreadPoolExecutor() as pool:
        for done in pool.map(lambda options: run("compile", *options, cache=cache), halves):
            assert done.returncode == 0, done.stderr
    return [(kernel, compile_kernel(kernel, sm, cache)) for kernel in kernels.shipped() for sm in SMS]


@pytest.mark.slow
def test_every_shipped_kernel_compiles_for_every_sm_without_spills(everything):
    assert {compiled.sm for _, compiled in everything} == {90, 100, 103, 120}
    spilled = [(k.op, k.name, c.sm) for k, c in everything if c.spill_stores or c.spill_loads or c.stack]
    assert not spilled


@pytest.mark.slow
def test_the_entry_takes_the_arguments_of_the_plugin_and_nothing_else(everything):
    for kernel, compiled in everything:
        entry = ptx.read_entry(compiled.ptx)
        assert entry.name == compiled.entry
        assert [p.name.removeprefix("param_") for p in entry.parameters] == [a.name for a in kernel.arguments]
        for parameter, argument in zip(entry.parameters, kernel.arguments, strict=True):
            assert parameter.pointer == argument.type.startswith("*")
            assert parameter.type == ("u64" if parameter.pointer else {"i32": "u32"}[argument.type])
        places = ["input" if a in kernel.inputs else "output" if a.output else "number" for a in kernel.arguments]
        assert places == sorted(places, key=["input", "number", "output"].index)


@pytest.mark.slow
def test_kernels_that_multiply_matrices_use_the_newest_tensor_cores_of_each_sm(everything):
    wanting = [(kernel, compiled) for kernel, compiled in everything if kernel.tensor_core]
    assert wanting
    for kernel, compiled in wanting:
        assert compiled.tensor_core == TENSOR_CORE[compiled.sm], (kernel.op, kernel.name, compiled.sm)


@pytest.mark.slow
def test_every_kernel_fits_the_multiprocessor(everything):
    for kernel, compiled in everything:
        assert compiled.shared <= LIMITS[compiled.sm].shared_block, (kernel.op, kernel.name, compiled.sm)
        assert occupancy(compiled).blocks >= 1, (kernel.op, kernel.name, compiled.sm)


@pytest.mark.slow
def test_tensorrt_launches_as_many_threads_as_the_ptx_has(everything, cache, monkeypatch):
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(cache))
    sizes = {"B": 3, "Q": 10, "S": 512, "N": 30, "C": 4, "Hc": 80, "splits": 7, "k_head": 0, "v_head": 8}
    for kernel, compiled in everything:
        ready = launch(kernel, compiled.sm, sizes)
        assert ready.compiled == compiled and len(ready.numbers) == len(kernel.numbers)
        assert compiled.threads == ptx.read_entry(compiled.ptx).threads >= 32 * kernel.num_warps
        assert all(isinstance(size, int) and size > 0 for size in ready.grid)


@pytest.mark.slow
def test_the_ptx_does_not_depend_on_where_the_source_lies(everything):
    for kernel, compiled in everything:
        assert Path(kernel.function.fn.__code__.co_filename).name not in compiled.ptx
        assert ".version 8.8\n" in compiled.ptx


def test_scratch_pointers_go_and_the_others_get_the_arguments_names():
    fitted = ptx.fit(PTX, ARGUMENTS)
    assert [p.name for p in ptx.read_entry(fitted).parameters] == ["param_x", "param_n", "param_y"]
    assert "[param_x]" in fitted and "[param_n]" in fitted and "[param_y]" in fitted and "add_param" not in fitted
    assert ptx.read_entry(fitted).threads == 128


def test_scratch_that_is_used_is_refused():
    for use in ("ld.param.b64 %rd3, [add_param_3];", "mov.b64 %rd3, add_param_4;"):
        with pytest.raises(Failure, match="add uses scratch memory, which TensorRT does not give"):
            ptx.fit(PTX.replace("\tret;", f"\t{use}\n\tret;"), ARGUMENTS)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (ARGUMENTS[:2], "5 parameters, not its 2 arguments"),
        ((*ARGUMENTS, Argument("z", "*fp32", output=True)), "5 parameters, not its 4 arguments"),
        ((ARGUMENTS[0], Argument("n", "i64"), ARGUMENTS[2]), "its arguments are"),
        ((Argument("n", "i32"), ARGUMENTS[0], ARGUMENTS[2]), "its arguments are"),
        ((ARGUMENTS[0], Argument("n", "fp32"), ARGUMENTS[2]), "its arguments are"),
    ],
)
def test_an_entry_with_other_arguments_is_refused(arguments, words):
    with pytest.raises(Failure, match=words):
        ptx.fit(PTX, arguments)


@pytest.mark.parametrize(
    "old, new, words",
    [
        (".reqntid 128", "", "how many threads"),
        (".reqntid 128", ".reqntid 128\n.reqnctapercluster 2", "cluster"),
        (".visible .entry add(", ".entry other()\n{\n}\n.visible .entry add(", "2 entries"),
        (".param .u32 add_param_1", ".param .align 8 .b8 add_param_1[16]", "not understood"),
    ],
)
def test_ptx_that_is_not_understood_is_refused(old, new, words):
    with pytest.raises(Failure, match=words):
        ptx.fit(PTX.replace(old, new), ARGUMENTS)


@pytest.mark.parametrize(
    "line, name",
    [
        ("\t@%p19 tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd18, %rd19, %r60, %p18;", "tcgen05.mma"),
        ("\twgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, 1, 1, 1, 0, 1;", "wgmma"),
        ("\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1}, {%r2}, {%r3}, {%r4};", "mma.sync"),
        ("\ttcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r13], 128; // tcgen05.mma follows", "none"),
    ],
)
def test_tensor_cores_are_recognized_by_the_instruction_that_multiplies(line, name):
    assert ptx.tensor_core(PTX.replace("\tret;", line)) == name


def small() -> Kernel:
    return next(kernel for kernel in accept.kernels(QWEN3_8B) if kernel.op == "accept")


@pytest.mark.slow
def test_a_kernel_is_compiled_once(tmp_path):
    def times() -> dict[str, int]:
        return {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}

    assert run("compile", "--op", "accept", "--sm", "90", cache=tmp_path).returncode == 0
    first = times()
    assert first and not any(name.endswith(".part") for name in first)
    assert run("compile", "--op", "accept", "--sm", "90", cache=tmp_path).returncode == 0
    assert times() == first
    damaged = sorted(tmp_path.iterdir())[0]
    whole = damaged.read_text()
    damaged.write_text(whole[: len(whole) // 2])
    assert run("compile", "--op", "accept", "--sm", "90", cache=tmp_path).returncode == 0
    assert json.loads(damaged.read_text()) == json.loads(whole)


def test_whatever_changes_the_ptx_changes_the_name_in_the_cache(monkeypatch):
    kernel = small()
    names = {compiler._key(kernel, sm) for sm in SMS}
    assert len(names) == len(SMS)
    changed = [
        dataclasses.replace(kernel, constants=kernel.constants | {"ROWS": 16}),
        dataclasses.replace(kernel, num_warps=8),
        dataclasses.replace(kernel, num_stages=5),
        dataclasses.replace(kernel, arguments=(Argument("greedy", "*i32"), *kernel.arguments[1:])),
    ]
    names |= {compiler._key(other, 90) for other in changed}
    assert len(names) == len(SMS) + len(changed)
    assert compiler._key(dataclasses.replace(kernel, name="another name", op="other"), 90) in names
    monkeypatch.setattr(compiler, "_ptxas", lambda: ("ptxas", "99.9"))
    assert compiler._key(kernel, 90) not in names
    monkeypatch.undo()
    import triton

    monkeypatch.setattr(triton, "__version__", "9.9.9")
    assert compiler._key(kernel, 90) not in names


def test_a_change_of_the_source_changes_the_name_in_the_cache(tmp_path):
    def key(text: str) -> str:
        file = tmp_path / "changing.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location("dflash_trt.plugins.kernels.changing", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return compiler._key(Kernel("op", "name", module.f, ARGUMENTS, {}, ("1", "1", "1")), 90)

    source = "import triton\n\n@triton.jit\ndef g(x):\n    return x + 1\n\n@triton.jit\ndef f(x, n, y):\n    pass\n"
    assert key(source) == key(source)
    assert key(source) != key(source.replace("x + 1", "x + 2"))


def test_a_process_that_interprets_kernels_does_not_compile_them(tmp_path):
    done = run("compile", "--op", "accept", "--sm", "90", cache=tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 1 and "unset TRITON_INTERPRET" in done.stderr


def test_an_unknown_sm_is_refused_with_those_that_are_supported():
    with pytest.raises(UserError, match=r"not compiled for SM89 .* 90, 100, 103, 120"):
        compile_kernel(small(), 89)


def test_without_triton_the_way_to_it_is_told(monkeypatch):
    monkeypatch.delitem(sys.modules, "dflash_trt.plugins.kernels.accept")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UserError, match=r"need triton, which is not installed .* pip install 'dflash-trt\[plugins\]'"):
        kernels.load("accept", QWEN3_8B)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"dtype": "float32"}, "do not compute in float32 .* bfloat16 or float16"),
        ({"head_dim": 80}, "heads of 80 .* 64, 128, 256"),
        ({"kv_heads": 5}, "32 query heads do not divide into 5"),
        ({"rotated": 65}, "65 pairs of a head of 128 .* 1 to 64"),
        ({"window": -1}, "window of -1 .* 0 .no window."),
        ({"both_sides": True}, "window of 0 on both sides"),
    ],
)
def test_a_model_that_no_kernel_computes_is_refused_with_what_is_supported(changes, words):
    with pytest.raises(UserError, match=words) as error:
        check(QWEN3_8B.replace(**changes))
    assert "--ops native" in str(error.value)


def compiled(**facts: int) -> Compiled:
    used = {"threads": 128, "shared": 0, "tensor_memory": 0, "registers": 32}
    none = dict.fromkeys(("stack", "spill_stores", "spill_loads", "cubin_bytes"), 0)
    return Compiled(entry="f", ptx="", **{"sm": 90, **used, **none, **facts})


@pytest.mark.parametrize(
    "facts, blocks, bound",
    [
        ({}, 16, "warps"),
        ({"threads": 32}, 32, "blocks"),
        ({"registers": 128}, 4, "registers"),
        ({"registers": 129}, 3, "registers"),  # 136 of them: they come in units of 256 a warp
        ({"shared": 100 << 10}, 2, "shared memory"),
        ({"sm": 120, "shared": 50 << 10}, 1, "shared memory"),
        ({"sm": 100, "tensor_memory": 256}, 2, "tensor memory"),
        ({"sm": 120, "shared": 100 << 10}, 0, "shared memory"),
    ],
)
def test_the_scarcest_resource_bounds_the_occupancy(facts, blocks, bound):
    most = occupancy(compiled(**facts))
    assert (most.blocks, most.bound) == (blocks, bound)
