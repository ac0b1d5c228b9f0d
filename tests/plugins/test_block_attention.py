"""Block attention: the kernels against the float64 reference, with everything that must not matter set to NaN."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.graph.net import Net
from dflash_trt.graph.visibility import Sight, Visibility
from dflash_trt.plugins.kernels import block_attention as kernel
from dflash_trt.plugins.kernels.spec import DTYPES, Config, Kernel
from dflash_trt.plugins.reference.block_attention import block_attention as reference
from dflash_trt.plugins.reference.block_attention import visible
from tests.plugins import described

# the interpreter takes the maximum of a row of NaN, which is dead
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")

GUARD = 512  # elements of no one on each side of a tensor
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
SMALLEST = {"bfloat16": 0.0, "float16": 2.0**-25}  # half the spacing of subnormals


class Guarded:
    """A tensor of NaN between guards of NaN."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype):
        size = int(np.prod(shape))
        self.buffer = torch.full((size + 2 * GUARD,), float("nan"), dtype=dtype)
        self.tensor = self.buffer[GUARD : GUARD + size].view(shape)

    def untouched(self) -> bool:
        return bool(self.buffer[:GUARD].isnan().all() and self.buffer[-GUARD:].isnan().all())


@dataclass(frozen=True)
class Case:
    """Sizes and inputs; heads of the cache are those of layer 1 of 2."""

    config: Config
    start: tuple[int, ...]
    count: tuple[int, ...]
    query: int
    length: int
    loudness: float = 1.0  # of scores
    seed: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        kv = self.config.kv_heads
        return {
            **{"B": len(self.start), "Q": self.query, "S": self.length, "Hc": 4 * kv},
            **{"k_head": kv, "v_head": 3 * kv},
        }

    def inputs(self) -> dict[str, torch.Tensor]:
        """NaN wherever nobody may look: rows from count on, positions from start on, other layers' heads."""
        config, rng = self.config, np.random.default_rng(self.seed)
        dtype, batch = getattr(torch, config.dtype), len(self.start)
        block = (batch, config.kv_heads, self.query, config.head_dim)
        shapes = {
            "q": (batch, config.heads, *block[2:]),
            **{"k_block": block, "v_block": block},
            "cache": (batch, 4 * config.kv_heads, self.length, config.head_dim),
        }
        tensors = {name: Guarded(shape, dtype).tensor for name, shape in shapes.items()}
        for b, (start, count) in enumerate(zip(self.start, self.count, strict=True)):
            for name, tensor in tensors.items():
                for head in range(tensor.shape[1]):
                    if name == "cache" and head // config.kv_heads not in (1, 3):
                        continue
                    rows = tensor[b, head, : max(start if name == "cache" else count, 0)]
                    loud = self.loudness if name == "q" else 1.0
                    rows.copy_(torch.from_numpy(rng.normal(0, loud, rows.shape)))
        tensors |= {"start": torch.tensor(self.start), "count": torch.tensor(self.count)}
        if config.sinks:
            tensors["sinks"] = torch.from_numpy(rng.normal(0, 3, config.heads).astype(np.float32))
        return tensors


def expected(case: Case, tensors: dict[str, torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """The result, and how far from it a kernel may be.

    Both the weights (once for the product with the values) and the result are rounded to T: twice its unit roundoff,
    of the result with |v| for v. Scores are float32 sums of D exact products, so off by at most (D + 4) * 2^-24 times
    |q| |k|; this is the relative error of a weight, in the numerator and in the sum below it. 2^-19 covers exp2 and
    the sums over keys. The smallest float16 weights are rounded to a grid.
    """
    config = case.config
    arrays = {name: x.to(torch.float64).numpy() if x.is_floating_point() else x.numpy() for name, x in tensors.items()}
    scale = config.head_dim**-0.5 if config.scale is None else config.scale
    options = {"k_head": config.kv_heads, "v_head": 3 * config.kv_heads, "scale": scale}
    options |= {"causal": config.causal, "window": config.window, "both_sides": config.both_sides}
    result = reference(**arrays, **options)
    absolute = arrays | {"v_block": np.abs(arrays["v_block"]), "cache": arrays["cache"].copy()}
    absolute["cache"][:, 3 * config.kv_heads :] = np.abs(absolute["cache"][:, 3 * config.kv_heads :])
    weighed = reference(**absolute, **options)

    def longest(*xs: np.ndarray) -> float:
        return max(float(np.sqrt(np.nansum(x * x, axis=-1)).max()) for x in xs)

    keys = longest(arrays["cache"][:, config.kv_heads : 2 * config.kv_heads], arrays["k_block"])
    score = (config.head_dim + 4) * 2.0**-24 * scale * longest(arrays["q"]) * keys
    grid = SMALLEST[config.dtype] * (case.length + case.query) * 6
    return result, 1.02 * (2 * ROUNDOFF[config.dtype] + 2 * score + 2.0**-19) * weighed + grid


def run(case: Case, splits: int = 1) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Launch as TensorRT does, with outputs of NaN; check what is touched."""
    tensors = case.inputs()
    before = {name: x.clone() for name, x in tensors.items()}
    single, split, combine = kernel.kernels(case.config)
    assert [k.op.removeprefix("block_attention") for k in (single, split, combine)] == ["", "_split", "_combine"]
    out = Guarded(tuple(tensors["q"].shape), tensors["q"].dtype)
    if splits == 1:
        described.launch(single, case.sizes, **tensors, out=out.tensor)
    else:
        split = dataclasses.replace(split, grid=(split.grid[0], str(splits), split.grid[2]))
        partial = Guarded((splits, *out.tensor.shape), torch.float32)
        lse = Guarded(partial.tensor.shape[:-1], torch.float32)
        launch_with(split, case, tensors, partial=partial.tensor, lse=lse.tensor)
        assert partial.untouched() and lse.untouched()
        shares_are_whole(case, partial.tensor, lse.tensor)
        sizes = case.sizes | {"splits": splits}
        described.launch(
            combine, sizes, **{name: tensors[name] for name in ("count", "sinks") if name in tensors},
            partial=partial.tensor, lse=lse.tensor, out=out.tensor,
        )  # fmt: skip
    assert out.untouched()
    for name, tensor in tensors.items():
        assert torch.equal(tensor.nan_to_num(-7), before[name].nan_to_num(-7)), name
    return out.tensor.to(torch.float64).numpy(), tensors


def launch_with(split: Kernel, case: Case, tensors: dict[str, torch.Tensor], **outputs: torch.Tensor) -> None:
    taken = {argument.name for argument in split.inputs}
    described.launch(split, case.sizes, **{n: x for n, x in tensors.items() if n in taken}, **outputs)


def shares_are_whole(case: Case, partial: torch.Tensor, lse: torch.Tensor) -> None:
    """Rows of live columns have a level, and a value where it is not -inf; nothing else is written."""
    for b, count in enumerate(case.count):
        count = min(max(count, 0), case.query)
        assert not lse[:, b, :, :count].isnan().any() and lse[:, b, :, count:].isnan().all()
    written = lse > float("-inf")
    assert partial[written].isfinite().all() and partial[~written].isnan().all()


def assert_right(case: Case, splits: int = 1) -> None:
    result, tensors = run(case, splits)
    want, tolerance = expected(case, tensors)
    assert np.isfinite(result).all()
    for b, count in enumerate(case.count):
        assert (result[b, :, max(count, 0) :] == 0).all()
    worst = np.abs(result - want) - tolerance
    assert (worst <= 0).all(), (float(np.abs(result - want).max()), float(tolerance.min()))


@st.composite
def cases(draw) -> Case:
    query = draw(st.integers(1, 16))
    group, kv = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([1, 1, 2]))
    length = draw(st.integers(query, 200))
    last = length - query
    batch = draw(st.integers(1, 3))
    window = draw(st.sampled_from([0, 0, 1, 3, 17, 64, 100]))
    causal = draw(st.booleans())
    return Case(
        Config(
            "test", group * kv, kv, draw(st.sampled_from([64, 64, 128, 256])), dtype=draw(st.sampled_from([*DTYPES])),
            block=query, window=window, both_sides=bool(window) and draw(st.booleans()), causal=causal,
            sinks=draw(st.booleans()), scale=draw(st.sampled_from([None, 0.3])),
        ),
        start=tuple(draw(st.one_of(st.sampled_from([0, last]), st.integers(0, last))) for _ in range(batch)),
        count=tuple(draw(st.one_of(st.sampled_from([0, query]), st.integers(0, query))) for _ in range(batch)),
        query=query, length=length, loudness=draw(st.sampled_from([0.1, 1.0, 6.0])), seed=draw(st.integers(0, 99)),
    )  # fmt: skip


@settings(max_examples=60)
@given(cases())
def test_one_launch_equals_the_reference(case):
    assert_right(case)


@settings(max_examples=20)
@given(cases(), st.integers(2, 5))
def test_shares_of_the_keys_add_up_to_the_reference(case, splits):
    assert_right(case, splits)


MODES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": 50},
    "causal-window": {"window": 50, "causal": True},
    "both-sides": {"window": 50, "both_sides": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_chunks_longer_than_a_tile_of_rows_equal_the_reference(mode):
    config = Config("chunk", 2, 1, 64, dtype="float16", block=100, sinks=True, **MODES[mode])
    assert_right(Case(config, start=(90, 0), count=(100, 81), query=100, length=200))


def test_chunks_may_be_split_too():
    config = Config("chunk", 2, 1, 64, dtype="float16", block=100, causal=True, window=50)
    assert_right(Case(config, start=(90, 0), count=(100, 60), query=100, length=200), splits=2)


def test_a_window_may_begin_anywhere_in_a_tile():
    config = Config("edges", 1, 1, 64, dtype="float16", window=100, causal=True)
    starts = tuple(range(130, 194))
    assert_right(Case(config, start=starts, count=(16,) * len(starts), query=16, length=210))


@pytest.mark.parametrize("splits", [1, 2])
def test_tiles_outside_the_window_are_never_read(splits):
    """Values there are NaN, which a weight of zero would not hide."""
    config = Config("window", 4, 1, 64, window=40, causal=True)
    case = Case(config, start=(600,), count=(16,), query=16, length=640)
    tensors, inputs = case.inputs(), Case.inputs
    tensors["cache"][:, :, : (600 - 39) // 64 * 64] = float("nan")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Case, "inputs", lambda self: tensors)
        result, _ = run(case, splits)
    want, tolerance = expected(case, inputs(case))
    assert (np.abs(result - want) <= tolerance).all()


@pytest.mark.parametrize("splits", [1, 2])
def test_lengths_out_of_range_are_cut_to_the_cache_and_the_block(splits):
    config = Config("lengths", 4, 2, 64, causal=True, sinks=True)
    case = Case(config, start=(90, 2**40, -5, 30), count=(99, 3, 4, -1), query=8, length=64)
    result, tensors = run(case, splits)
    tensors["start"][2] = 0
    tensors["count"] = torch.tensor([8, 3, 4, 0])
    want, tolerance = expected(case, tensors)
    assert (np.abs(result - want) <= tolerance).all()


@pytest.mark.parametrize("batch", [1, 3])
def test_the_launcher_splits_as_the_plugin_does(batch, monkeypatch):
    monkeypatch.setattr(kernel, "PROGRAMS", 31)
    config = Config("launcher", 8, 4, 64, causal=True, sinks=True, block=4)
    case = Case(config, start=(70, 0, 12)[:batch], count=(4, 4, 1)[:batch], query=4, length=80)
    tensors = case.inputs()
    result = kernel.launch(**tensors, k_head=4, v_head=12, causal=True)
    want, tolerance = expected(case, tensors)
    assert (np.abs(result.to(torch.float64).numpy() - want) <= tolerance).all()
    _, split, _ = kernel.kernels(config)
    assert described.evaluate(split.grid[1], case.sizes) == 31 // (4 * batch)


@pytest.mark.parametrize("causal, window", [(False, None), (True, None), (True, 5), (False, 5)])
def test_keys_are_visible_as_in_the_step_graph(causal, window):
    """z-lab's rule: a window without a causal mask reaches to both sides."""
    net = Net("float32", native=False)
    positions = net.input("positions", ir.DataType.INT64, ("batch", "query"))
    length = net.input("length", ir.DataType.INT64, ("batch",))
    mask = Visibility(net, positions, length, net.const(20))(Sight(causal, window))
    net.output("mask", net.op("Identity", mask), ir.DataType.BOOL, ("batch", 1, "query", 20))
    model = ir.to_proto(net.model("mask")).SerializeToString()
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    columns = np.arange(9, 17)
    (graph,) = session.run(None, {"positions": columns[None], "length": np.array([17])})
    distance = np.arange(17) - columns[:, None]
    ours = visible(distance, causal=causal, window=window or 0, both_sides=bool(window) and not causal)
    assert (graph[0, 0, :, :17] == ours).all() and not graph[0, 0, :, 17:].any()
