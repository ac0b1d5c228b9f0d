"""What is judged before anything touches a GPU: a YAML for trtllm-serve, the pair it serves, and the GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from dflash_trt.checkpoint.config import read_json
from dflash_trt.checkpoint.shape import DrafterShape, Shape, read_drafter_shape, read_shape
from dflash_trt.checkpoint.weights import read_tensors
from dflash_trt.document import Keys
from dflash_trt.errors import UserError
from dflash_trt.gpus import Gpus
from dflash_trt.published import Published, published, repositories
from dflash_trt.trtllm.settings import Settings

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)
PRECISIONS = ("nvfp4", "mxfp4", "fp8")

AnyShape = TypeVar("AnyShape", bound=Shape)


@dataclass(frozen=True)
class Finding:
    """One thing that a rule has to say about a deployment."""

    rule: str  # "DF012"
    severity: str
    what: str
    why: str
    source: str
    fix: str
    line: int | None = None


@dataclass(frozen=True)
class Source(Generic[AnyShape]):
    """Where a target or a drafter comes from, and what is known of it."""

    name: str | None = None  # a directory, or owner/name
    shape: AnyShape | None = None
    path: Path | None = None  # the directory, if it is on this machine
    size: int | None = None  # bytes of its weights there
    tensors: frozenset[str] = frozenset()  # their names
    precision: str | None = None  # "bf16", "fp8", "mxfp4", "nvfp4", …; None: not known
    fault: str | None = None  # why it could not be read
    fix: str = ""  # of that
    inferred: tuple[str, ...] = ()  # keys of its config that nobody has seen


@dataclass(frozen=True)
class Deployment:
    """All that the rules look at."""

    file: Path
    release: str  # of TensorRT-LLM
    gpus: Gpus
    config: Mapping[str, Any]
    settings: Settings
    target: Source[Shape] = Source()
    drafter: Source[DrafterShape] = Source()
    line: Callable[[Keys], int | None] = field(default=lambda keys: None)  # of a key of `config` in `file`
    goal: str | None = None  # "latency", "interactive" or "throughput"
    trained_on: str | None = None  # answers the drafter was trained on: "thinking", "non-thinking" or "both"
    environment: Mapping[str, str] = field(default_factory=dict)  # of the server's processes

    def has(self, *keys: str) -> bool:
        """Whether the file sets that key."""
        values: Any = self.config
        for key in keys:
            if not isinstance(values, Mapping) or key not in values:
                return False
            values = values[key]
        return True


def find_target(name: str | None, precision: str | None = None) -> Source[Shape]:
    """`name`: a directory or a published checkpoint. Never raises: what is wrong becomes `fault`."""
    return _find(name, precision, read_shape, "target", Published.shape)


def find_drafter(name: str | None, precision: str | None = None) -> Source[DrafterShape]:
    """As `find_target`."""
    return _find(name, precision, read_drafter_shape, "drafter", Published.drafter_shape)


def _find(
    text: str | None,
    precision: str | None,
    read: Callable[[Path], AnyShape],
    role: str,
    shape_of: Callable[[Published], AnyShape],
) -> Source[AnyShape]:
    if text is None:
        return Source(precision=precision)
    path = Path(text)
    if text in repositories() and not path.exists():
        known = published(text)
        if known.role != role:
            return Source(text, fault=f"{text} is a {known.role}, not a {role}", fix="have the two been swapped?")
        shape = shape_of(known)
        return Source(text, shape, precision=precision or _precision(shape), inferred=known.inferred)
    if not path.is_dir():
        return _absent(text, path, precision)
    try:
        shape = read(path)
        tensors = read_tensors(path) if any(path.glob("*.safetensors")) else {}
        drafts = role == "target" and read_drafter_shape(path).target_layer_ids is not None
    except UserError as error:
        return Source(text, None, path, precision=precision, fault=str(error), fix="mend it there, or name another")
    if drafts:
        return Source(text, None, path, fault=f"{text} is a drafter, not a target", fix="have the two been swapped?")
    size = sum(file.stat().st_size for file in path.glob("*.safetensors")) or None
    return Source(text, shape, path, size, frozenset(tensors), _precision(shape))


def _precision(shape: Shape) -> str:
    """`W4A16_NVFP4` and its like are NVFP4 here."""
    said = shape.quantization or "bf16"
    return next((known for known in PRECISIONS if known in said), said)


def _absent(text: str, path: Path, precision: str | None) -> Source[Any]:
    """A name to download (`owner/name`) that is not known here is no fault; a path that does not exist is one."""
    if path.exists():
        return Source(text, precision=precision, fault=f"{text} is no directory", fix="give the checkpoint's folder")
    if not path.is_absolute() and not text.startswith(".") and text.count("/") == 1:
        return Source(text, precision=precision)
    return Source(
        text, precision=precision, fault=f"{text} does not exist", fix="download it first, or correct the path"
    )


def declares_nvfp4_apart(source: Source[Any]) -> bool:
    """Whether hf_quant_config.json, which TensorRT-LLM reads best, lies beside the weights."""
    return source.path is None or bool(_quantization_file(source.path))


def _quantization_file(path: Path) -> Mapping[str, Any]:
    try:
        return read_json(path / "hf_quant_config.json")
    except UserError:
        return {}
