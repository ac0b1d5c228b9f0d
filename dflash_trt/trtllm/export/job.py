"""Export a pair: checked first, then streamed into a staging folder, which takes its name when it is complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_trt import __version__
from dflash_trt.checkpoint import Draft, Pair, Target, pair, read_draft, read_target
from dflash_trt.errors import UserError
from dflash_trt.progress import Progress, silent
from dflash_trt.trtllm import model_class
from dflash_trt.trtllm.export.config import draft_config, quantization_config, target_config
from dflash_trt.trtllm.export.content import FORMATS, Content, contents
from dflash_trt.trtllm.export.directory import REPORT, check_space, staged
from dflash_trt.trtllm.export.fit import check_inputs, check_pair
from dflash_trt.trtllm.export.instructions import RELEASE, Limits, build_lines, build_script, check_limits, readme
from dflash_trt.trtllm.export.layout import draft_layout, target_layout
from dflash_trt.trtllm.export.write import write_ranks

DTYPES = {spelled: dtype for dtype, spelled in FORMATS.items()}
SEQUENCE = 4096  # tokens, where nobody says


@dataclass(frozen=True)
class Network:
    """One of the two that were written."""

    architecture: str
    quantization: str | None  # NVFP4 if any linear is
    tensors: int
    rank_bytes: int  # of one rank's tensors
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Exported:
    """What `export` made."""

    path: Path
    release: str  # of TensorRT-LLM
    dtype: str
    tp: int
    limits: Limits
    networks: dict[str, Network]  # by role
    version: str = __version__

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


def export_pair(
    target: Path,
    draft: Path,
    output: Path,
    *,
    tp: int = 1,
    dtype: str | None = None,
    block_size: int | None = None,
    max_batch: int = 8,
    max_seq_len: int | None = None,
    max_num_tokens: int = 8192,
    force: bool = False,
    progress: Progress = silent,
) -> Exported:
    """Write TensorRT-LLM checkpoints of a pair, the networks' classes and the build script into `output`.

    `dtype`: of what is not NVFP4; None: as the target stores most of it. Raises UserError for what TensorRT-LLM's
    engine backend cannot hold and for damaged checkpoints; then, and after any other failure, `output` is as it was.
    """
    models = pair(read_target(target), read_draft(draft, block_size))
    assert models.draft
    check_pair(models, tp)
    known = min(models.target.config.max_position, models.draft.config.max_position)
    limits = Limits(max_batch, min(SEQUENCE, known) if max_seq_len is None else max_seq_len, max_num_tokens)
    check_limits(limits, models)
    dtype = dtype or _stored(models.target)

    parts = {"target": target_layout(models.target, tp), "draft": draft_layout(models.draft, models.target, tp)}
    halves: dict[str, Target | Draft] = {"target": models.target, "draft": models.draft}
    tensors = {"target": models.target.tensors, "draft": models.target.tensors | models.draft.tensors}
    packed = {"target": _packed(models.target), "draft": {**_packed(models.target), **_packed(models.draft)}}
    content = {role: contents(parts[role], tensors[role], packed[role], dtype=dtype) for role in parts}
    for role in parts:
        check_inputs(parts[role], tensors[role], packed[role])
    configs = {
        "target": target_config(models.target, models.draft, dtype=dtype, tp=tp),
        "draft": draft_config(models.draft, dtype=dtype, tp=tp),
    }
    for role, config in configs.items():
        config["quantization"] = quantization_config(parts[role], packed[role])
    networks = {}
    with staged(output, force=force) as folder:
        check_space(output, tp * sum(_rank_bytes(items) for items in content.values()))
        read = _Read(sum(item.nbytes_read for items in content.values() for item in items), progress)
        for role, items in content.items():
            read.what = f"writing {role}"
            (folder / role).mkdir()
            made = write_ranks(folder / role, items, tensors[role], tp, read)
            (folder / role / "config.json").write_text(json.dumps(configs[role], indent=2) + "\n", encoding="utf-8")
            notes = made.notes() + ((quantization.notes) if (quantization := halves[role].quantization) else ())
            algo = configs[role]["quantization"]["quant_algo"]
            count = sum(len(item.slots) for item in items)
            networks[role] = Network(configs[role]["architecture"], algo, count, _rank_bytes(items), notes)
        exported = Exported(output.absolute(), RELEASE, dtype, tp, limits, networks)
        _write_beside(folder, models, exported)
    return exported


class _Read:
    """Tells how much of what is to be read was read."""

    def __init__(self, total: int, progress: Progress):
        self.what, self._total, self._done, self._progress = "", max(total, 1), 0, progress

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self.what, self._done / self._total)


def _rank_bytes(items: Sequence[Content]) -> int:
    return sum(slot.nbytes for item in items for slot in item.slots)


def _write_beside(folder: Path, models: Pair, exported: Exported) -> None:
    """The report is what makes a directory ours, and comes last."""
    gemm = {role: "nvfp4" if network.quantization else exported.dtype for role, network in exported.networks.items()}
    lines = build_lines(models, exported.limits, gemm)
    classes = folder / "model_class"
    classes.mkdir()
    for role in exported.networks:
        shutil.copyfile(Path(model_class.__file__).with_name(f"{role}.py"), classes / f"{role}.py")
    (folder / "build.sh").write_text(build_script(lines), encoding="utf-8")
    (folder / "build.sh").chmod(0o755)
    assert models.draft
    what = f"{models.target.path.resolve().name} with {models.draft.path.resolve().name}"
    (folder / "README.md").write_text(readme(lines, what=what, tp=exported.tp), encoding="utf-8")
    (folder / REPORT).write_text(json.dumps(exported.as_json(), indent=2) + "\n", encoding="utf-8")


def _packed(half: Target | Draft) -> Mapping[str, bool]:
    return half.quantization.packed if half.quantization else {}


def _stored(target: Target) -> str:
    """The float type of the embedding, which is never packed."""
    dtype = target.tensors["model.embed_tokens.weight"].dtype
    if dtype not in DTYPES:
        raise UserError(f"the embedding is {dtype}", where=target.path, fix="pass --dtype")
    return DTYPES[dtype]
