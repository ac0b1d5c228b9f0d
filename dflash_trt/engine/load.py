"""Open an engine directory and make sure that it is still what its manifest says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.engine.fingerprint import fingerprint
from dflash_trt.engine.manifest import (
    CONVERT_AGAIN,
    CompiledEngine,
    File,
    Limits,
    Manifest,
    WeightFile,
    read_manifest,
)
from dflash_trt.errors import UserError


@dataclass(frozen=True)
class Engine:
    """An engine directory and its manifest."""

    path: Path
    manifest: Manifest

    @property
    def limits(self) -> Limits:
        return self.manifest.limits

    def graph(self, *, draft: bool = True, cpu: bool = True) -> Path:
        """The step graph, without `draft` the autoregressive one; in float32 for a CPU, or as TensorRT compiles it.

        Raises UserError if the engine has no drafter but `draft` is asked for.
        """
        if draft and self.manifest.draft is None:
            raise UserError("this engine has no drafter", where=self.path, fix="run it without one (--no-draft)")
        return self.path / f"rank0{'' if draft else '-ar'}{'.cpu' if cpu else ''}.onnx"

    def compiled(self, sm: int, *, draft: bool = True) -> CompiledEngine:
        """The TensorRT engine for `sm`. Raises UserError if none was built."""
        graph = self.graph(draft=draft, cpu=False).stem
        for engine in self.manifest.engines:
            if (engine.graph, engine.sm) == (graph, sm):
                return engine
        built = sorted({engine.sm for engine in self.manifest.engines})
        raise UserError(
            f"no engine for SM{sm} (built: {', '.join(map(str, built)) or 'none'})",
            where=self.path,
            fix=f"run `dflash-trt build {self.path} --sm {sm}`",
        )


def open_engine(path: Path) -> Engine:
    """Open an engine directory; every file it names, checkpoints included, is compared with its fingerprint.

    Raises UserError for a directory that is none, and for files that are missing or have changed.
    """
    manifest = read_manifest(path)
    for link, weights in manifest.weights.items():
        where = Path(weights.path)
        if not where.is_file():
            fix = f"put it back or {CONVERT_AGAIN}"
            raise UserError("a checkpoint file has moved or is gone", where=where, fix=fix)
        if not (path / link).is_symlink() or (path / link).resolve() != where.resolve():
            raise UserError(f"does not lead to {where}", where=path / link, fix=CONVERT_AGAIN)
        _verify(where, weights)
    _verify_all(path, manifest.files, CONVERT_AGAIN)
    _verify_all(path, {engine.file: engine for engine in manifest.engines}, f"run `dflash-trt build {path}` again")
    return Engine(path, manifest)


def _verify_all(path: Path, files: Mapping[str, File | CompiledEngine], fix: str) -> None:
    for name, file in files.items():
        if not (path / name).is_file():
            raise UserError("a file of the engine directory is missing", where=path / name, fix=fix)
        _verify(path / name, file, fix)


def _verify(file: Path, expected: File | WeightFile | CompiledEngine, fix: str = CONVERT_AGAIN) -> None:
    size = file.stat().st_size
    if size != expected.size:
        raise UserError(f"has {size} bytes; the manifest says {expected.size}", where=file, fix=fix)
    found = fingerprint(file)
    if found != expected.fingerprint:
        what = f"was changed: fingerprint {found[:12]}…; the manifest says {expected.fingerprint[:12]}…"
        raise UserError(what, where=file, fix=fix)
