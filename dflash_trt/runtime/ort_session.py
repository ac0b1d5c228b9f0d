"""The step graph on ONNX Runtime's CPU provider, with the KV caches bound in place.

Every cache is one buffer `[max_batch, Hkv, S, D]`. A call on slots i … j binds the view of those rows both as input
and as output, so `TensorScatter` updates it without a copy. ONNX Runtime's attention works over all S positions of
what it is given, whatever the sequences' lengths, so S follows the longest sequence at hand in steps of `BUCKET`
instead of standing at the engine's limit. Position 0 belongs to attention sinks, where a model has them: zero keys and
values that nobody overwrites. Token p lies at position p + 1.
"""

from __future__ import annotations

import mmap
import platform
from pathlib import Path

import numpy as np
import onnxruntime as ort

from dflash_trt.engine import Limits
from dflash_trt.errors import Failure, UserError
from dflash_trt.graph.names import LINKS, weights_file
from dflash_trt.runtime import collective_op
from dflash_trt.runtime.session import OVERFLOW, StepInputs, StepOutputs, check_overflow
from dflash_trt.runtime.world import World

OLDEST = (1, 32)  # ONNX Runtime with TensorScatter and Attention of opset 24
BUCKET = 128  # cache positions; a multiple keeps the number of reallocations over a request's life small

_SMALL = ("input_ids", "n_valid", "n_given", "past_len", "temperature", "top_p", "top_k", "uniform")
_DECIDED = ("n_accepted", "next_token", "next_block")


class OrtSession:
    """Runs one step graph (float32) in this process, together with the other ranks of `world`, if any."""

    def __init__(self, graph: Path, limits: Limits, *, threads: int | None = None, world: World = World()):
        """`graph`: an .onnx file as `graph.write_step` leaves it; `threads`: of one operator, default all cores."""
        _require_opset()
        self.limits = limits
        options = ort.SessionOptions()
        options.log_severity_level = 3
        if threads:
            options.intra_op_num_threads = threads
        if world.size > 1:
            collective_op.register(options, world)
            options.log_severity_level = 4  # what follows from a failed collective is not worth a line a rank
        with _MappedWeights(graph, world.rank) as weights:
            options.add_external_initializers_from_files_in_memory(*weights)
            try:
                self._session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
            except Exception as error:  # the binding raises a family of types without a common base
                raise Failure(f"ONNX Runtime cannot load {graph}: {error}") from error
        shapes = {i.name: i.shape for i in self._session.get_inputs()}
        if (block := shapes["uniform"][1]) != limits.block_size:
            what = f"limits.block_size is {limits.block_size}, but the graph drafts blocks of {block}"
            raise UserError(what, where=graph, fix="convert again")
        outputs = [output.name for output in self._session.get_outputs()]
        self._further = [name for name in outputs if name in ("logits", "hidden", "draft_logits", OVERFLOW)]
        self._presents = {name: name.replace("_cache.", "_present.") for name in shapes if "_cache." in name}
        self._dims = {name: (shapes[name][1], shapes[name][3]) for name in self._presents}  # Hkv, D
        self._caches: dict[str, np.ndarray] = {}
        self._cache_len = 0
        self._extent = np.zeros(limits.max_batch, np.int64)  # cache positions each slot needs

    @property
    def cache_bytes(self) -> int:
        """Bytes the KV caches take now."""
        return sum(cache.nbytes for cache in self._caches.values())

    def step(self, inputs: StepInputs) -> StepOutputs:
        return self.debug_step(inputs)[0]

    def debug_step(self, inputs: StepInputs) -> tuple[StepOutputs, dict[str, np.ndarray]]:
        """As `step`, with the debug outputs of a graph that has them."""
        batch, query = inputs.input_ids.shape
        slots = slice(inputs.first, inputs.first + batch)
        self._extent[slots] = 1 + inputs.past_len + max(query, self.limits.block_size) + self.limits.block_size
        self._fit(int(self._extent.max()))
        binding = self._session.io_binding()
        for name in _SMALL:
            binding.bind_cpu_input(name, np.ascontiguousarray(getattr(inputs, name)))
        for name, present in self._presents.items():
            view = self._caches[name][slots]
            where = ("cpu", 0, view.dtype, view.shape, view.ctypes.data)
            binding.bind_input(name, *where)
            binding.bind_output(present, *where)
        for name in (*_DECIDED, *self._further):
            binding.bind_output(name)
        with collective_op.faults():
            self._session.run_with_iobinding(binding)
        results = [value.numpy() for value in binding.get_outputs()[len(self._presents) :]]
        more = dict(zip(self._further, results[3:], strict=True))
        if OVERFLOW in more:
            check_overflow(int(more[OVERFLOW][0]), inputs)
        return StepOutputs(*results[:3]), more

    def move_slot(self, source: int, target: int, length: int) -> None:
        for cache in self._caches.values():
            cache[target, :, : 1 + length] = cache[source, :, : 1 + length]
        self._extent[target] = 1 + length

    def free_slot(self, slot: int) -> None:
        self._extent[slot] = 0

    def _fit(self, needed: int) -> None:
        """Make every cache hold `needed` positions; give memory back once less than half is needed."""
        wanted = -(-needed // BUCKET) * BUCKET
        if wanted <= self._cache_len <= 2 * wanted:
            return
        for name, (heads, dim) in self._dims.items():
            grown = np.zeros((self.limits.max_batch, heads, wanted, dim), np.float32)
            if name in self._caches:
                kept = min(wanted, self._cache_len)
                grown[:, :, :kept] = self._caches[name][:, :, :kept]
            self._caches[name] = grown
        self._cache_len = wanted


def _require_opset() -> None:
    if tuple(int(part) for part in ort.__version__.split(".")[:2]) < OLDEST:
        raise UserError(
            f"ONNX Runtime {ort.__version__} does not run opset 24",
            where=f"Python {platform.python_version()}",
            fix=f"use Python 3.11 or newer, for which ONNX Runtime {'.'.join(map(str, OLDEST))} exists",
        )


class _MappedWeights:
    """The files that hold a graph's weights, mapped for as long as ONNX Runtime needs to read them.

    They are the checkpoint files behind the links and, for a rank, a file of what no checkpoint has as it needs it.

    ONNX Runtime refuses external data outside the model's folder, links included; handed over as memory, the files'
    pages are read on demand and stay the system's to drop.
    """

    def __init__(self, graph: Path, rank: int):
        links, own = graph.parent / LINKS, weights_file(rank)
        self._files = {f"{LINKS}/{link.name}": link for link in (sorted(links.iterdir()) if links.is_dir() else ())}
        if (graph.parent / own).is_file():
            self._files[own] = graph.parent / own
        self._maps: list[mmap.mmap] = []

    def __enter__(self) -> tuple[list[str], list[np.ndarray], list[int]]:
        for path in self._files.values():
            with path.open("rb") as file:
                self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        views = [np.frombuffer(mapped, np.uint8) for mapped in self._maps]
        return list(self._files), views, [len(mapped) for mapped in self._maps]

    def __exit__(self, *_: object) -> None:
        self._maps.clear()  # unmapped once ONNX Runtime's last view is gone
