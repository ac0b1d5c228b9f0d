"""Open an engine directory and make sure that it is still what its manifest says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from dflash_trt.graph.names import graph_file


@dataclass(frozen=True)
class Engine:
    """An engine directory and its manifest."""

    path: Path
    manifest: Manifest

    @property
    def limits(self) -> Limits:
        return self.manifest.limits

    def graph(self, *, rank: int = 0, draft: bool = True, cpu: bool = True) -> Path:
        """The step graph of a rank, without `draft` the autoregressive one; in float32 for a CPU, or as TensorRT
        compiles it.

        Raises UserError if the engine has no drafter but `draft` is asked for.
        """
        if draft and self.manifest.draft is None:
            raise UserError("this engine has no drafter", where=self.path, fix="run it without one (--no-draft)")
        return self.path / graph_file(rank, draft=draft, cpu=cpu)

    def compiled(self, sm: int, *, rank: int = 0, draft: bool = True) -> CompiledEngine:
        """The TensorRT engine of a rank for `sm`. Raises UserError if none was built."""
        graph = self.graph(rank=rank, draft=draft, cpu=False).stem
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
    engine = open_to_compile(path)
    for fault in find_faults(path, engine.manifest.compiled):
        raise fault
    return engine


def open_to_compile(path: Path) -> Engine:
    """As `open_engine`, but whatever was compiled before may be missing or changed."""
    manifest = read_manifest(path)
    for fault in find_faults(path, manifest.given):
        raise fault
    return Engine(path, manifest)


def find_faults(path: Path, files: Mapping[str, File]) -> Iterator[UserError]:
    """What is wrong with files of the directory `path`, one error for each that is not as recorded."""
    for name, recorded in files.items():
        try:
            _verify(path / name, recorded)
        except UserError as fault:
            yield fault


def _verify(file: Path, recorded: File) -> None:
    fix = CONVERT_AGAIN
    if isinstance(recorded, WeightFile):
        link, file = file, Path(recorded.path)
        if not link.is_symlink() or link.resolve() != file.resolve():
            raise UserError(f"does not lead to {file}", where=link, fix=fix)
        fix = f"put it back, or {fix}"
    elif isinstance(recorded, CompiledEngine):
        fix = f"run `dflash-trt build {file.parent} --sm {recorded.sm}`"
    try:
        size = file.stat().st_size
        if size != recorded.size:
            raise UserError(f"has {size} bytes; the manifest says {recorded.size}", where=file, fix=fix)
        found = fingerprint(file)
    except FileNotFoundError:
        raise UserError("the file has moved or is gone", where=file, fix=fix) from None
    except OSError as error:
        raise UserError(f"cannot read the file: {error.strerror}", where=file, fix=fix) from None
    if found != recorded.fingerprint:
        what = f"was changed: fingerprint {found[:12]}…; the manifest says {recorded.fingerprint[:12]}…"
        raise UserError(what, where=file, fix=fix)
