"""What a kernel is to those who compile, launch and register it: arguments, constants, grid. No Triton here.

A `Kernel` is one launch with all its constants fixed. Each `kernels/<op>.py` makes them from a `Config`, the shapes of
one model on one rank, and lists the configs that are shipped as `CONFIGS`.

Rules that TensorRT sets, since it is what launches them (`tensorrt.plugin`, ahead of time):

* One op is one launch. A second pass over partial results is a second op with a name of its own.
* The arguments are the pointers of all inputs, then integers of 32 bits, then the pointers of all outputs. Nothing else
  is passed and no scratch exists: what a kernel wants to keep it declares as an output.
* Outputs are not cleared before the launch, except that an aliased output is its input's buffer. The kernel writes
  through the output's pointer.
* A tensor that a variant does not have is no argument: its parameter is a constant `None`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_trt.errors import UserError

POINTERS = ("*bf16", "*fp16", "*fp32", "*i64", "*i32")
NUMBERS = ("i32", "i64", "fp32")
DTYPES = {"bfloat16": "*bf16", "float16": "*fp16"}  # of activations and caches, with their pointers
HEAD_DIMS = (64, 128, 256)
LARGEST_BLOCK = 16  # columns of a drafter's block, as bounds the tiles of attention


@dataclass(frozen=True)
class Argument:
    """One parameter of the PTX entry, under the name that the kernel's source gives it."""

    name: str
    type: str  # of POINTERS or NUMBERS
    output: bool = False
    alias: str = ""  # of an output: the input whose buffer it is
    value: str = ""  # of a number: an expression over the sizes of the grid; not given: the size of the same name

    def __post_init__(self) -> None:
        if self.type not in POINTERS + NUMBERS:
            raise ValueError(f"argument {self.name} has type {self.type!r}, none of {POINTERS + NUMBERS}")

    @property
    def pointer(self) -> bool:
        return self.type.startswith("*")


@dataclass(frozen=True, eq=False)
class Kernel:
    """One launch: a Triton function with its constants."""

    op: str
    name: str  # of the variant, for people to read
    function: Any  # triton.JITFunction (or the interpreter's); its other parameters are `constants`
    arguments: tuple[Argument, ...]  # in the order of the function: inputs, numbers, outputs
    constants: Mapping[str, object]
    grid: tuple[str, str, str]  # expressions over named sizes: + - * // and cdiv(a, b), min(a, b), max(a, b)
    num_warps: int = 4
    num_stages: int = 2
    tensor_core: bool = False  # whether it must use the tensor cores of every SM
    config: Config | None = None

    def __post_init__(self) -> None:
        place = [0 if a.pointer and not a.output else 1 if not a.pointer else 2 for a in self.arguments]
        if place != sorted(place):
            raise ValueError(f"{self.op}/{self.name}: arguments are not inputs, numbers, outputs in this order")

    @property
    def identity(self) -> str:
        """What tells two kernels apart: everything but their names."""
        constants = sorted(self.constants.items())
        return str((self.op, self.arguments, constants, self.grid, self.num_warps, self.num_stages))

    @property
    def inputs(self) -> tuple[Argument, ...]:
        return tuple(a for a in self.arguments if a.pointer and not a.output)

    @property
    def numbers(self) -> tuple[Argument, ...]:
        return tuple(a for a in self.arguments if not a.pointer)

    @property
    def outputs(self) -> tuple[Argument, ...]:
        return tuple(a for a in self.arguments if a.output)


@dataclass(frozen=True)
class Config:
    """The shapes of one model on one rank. Ops read what concerns them."""

    name: str
    heads: int  # query heads on this rank
    kv_heads: int
    head_dim: int
    layers: int = 1  # whose K and V one launch of kv_inject writes
    rotated: int | None = None  # pairs that RoPE turns; None: all, head_dim / 2
    dtype: str = "bfloat16"
    block: int = 16  # columns Q at most
    window: int = 0  # 0: none
    both_sides: bool = False
    causal: bool = False
    sinks: bool = False
    k_norm: bool = True
    vocab: int = 0  # rows of this rank's vocabulary shard
    eps: float = 1e-6
    scale: float | None = None  # of scores; None: head_dim ** -0.5

    @property
    def pointer(self) -> str:
        """The pointer type of activations and caches."""
        return DTYPES[self.dtype]

    def replace(self, **changes: Any) -> Config:
        return dataclasses.replace(self, **changes)

    def shard(self, ranks: int) -> Config:
        """The same model on one of `ranks` tensor-parallel ranks."""
        return self.replace(
            name=f"{self.name}-tp{ranks}",
            heads=self.heads // ranks,
            kv_heads=max(self.kv_heads // ranks, 1),
            vocab=-(-self.vocab // ranks),
        )


# Drafter and target of each pair have the same heads. TP8 of 8 K/V heads leaves one on each rank.
QWEN3_8B = Config("qwen3-8b", 32, 8, 128, layers=5, block=16, vocab=151936)
LLAMA31_8B = Config("llama3.1-8b", 32, 8, 128, layers=5, block=10, vocab=128256, eps=1e-5)
GPT_OSS_120B = Config("gpt-oss-120b", 64, 8, 64, layers=8, block=10, vocab=201088, eps=1e-5)
MODELS = (QWEN3_8B, LLAMA31_8B, GPT_OSS_120B)
SHIPPED = tuple(rank for model in MODELS for rank in (model, model.shard(8)))


def check(config: Config) -> None:
    """Refuse what no kernel here computes. Raises UserError that names what is supported."""
    wrong, fix = "", ""
    rotated = config.head_dim // 2 if config.rotated is None else config.rotated
    if config.dtype not in DTYPES:
        wrong, fix = f"plugins do not compute in {config.dtype}", f"use {' or '.join(DTYPES)}"
    elif config.head_dim not in HEAD_DIMS:
        wrong, fix = f"plugins do not take heads of {config.head_dim}", f"they take {', '.join(map(str, HEAD_DIMS))}"
    elif config.kv_heads < 1 or config.heads % config.kv_heads:
        wrong = f"{config.heads} query heads do not divide into {config.kv_heads} key/value heads"
    elif not 1 <= rotated <= config.head_dim // 2:
        wrong = f"RoPE turns {rotated} pairs of a head of {config.head_dim}"
        fix = f"plugins turn 1 to {config.head_dim // 2}"
    elif config.window < 0 or (config.both_sides and not config.window):
        wrong = f"there is no attention window of {config.window}" + " on both sides" * config.both_sides
        fix = "plugins take 0 (no window), or a positive one to the left or on both sides"
    if wrong:
        raise UserError(wrong, where=config.name, fix=f"{fix}, or convert with --ops native" if fix else "--ops native")
