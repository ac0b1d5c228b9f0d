"""The target as transformers runs it: its own activations, and the features that the drafter reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.config import read_config
from dflash_trt.checkpoint.draft import check_target_layer_ids
from dflash_trt.checkpoint.model import DraftConfig
from dflash_trt.checkpoint.weights import read_tensors
from dflash_trt.errors import UserError
from dflash_trt.quantize.modelopt import load, quiet

WITHOUT = "give --input-amax to do without calibration, or calibrate on a larger machine"
MXFP4_GROWTH = 4  # transformers unpacks MXFP4 experts to bfloat16


def load_tokenizer(path: Path) -> Any:
    """Raises UserError if the target has none that transformers can read."""
    transformers = load("transformers")
    try:
        with quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # every tokenizer class raises its own
        fix = "copy the target's tokenizer files there"
        raise UserError(f"the tokenizer cannot be read: {_line(error)}", where=path, fix=fix) from None
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # what some classes make of no file at all
        raise UserError("there is no tokenizer", where=path, fix="copy the target's tokenizer files there")
    return tokenizer


def check_fits(draft: DraftConfig, path: Path) -> None:
    """Raises UserError unless the drafter's features are those of the target in `path`; of any family."""
    config = read_config(path)
    for key, ours in (("hidden_size", draft.hidden), ("vocab_size", draft.vocab)):
        if (theirs := config.integer(key)) != ours:
            fix = "give the target this drafter was trained for"
            raise UserError(f"{key} of the drafter is {ours}, the target has {theirs}", where=path, fix=fix)
    check_target_layer_ids(draft.target_layer_ids, config.integer("num_hidden_layers"), path)


class TargetModel:
    """A target in its checkpoint's dtype, on the GPU if torch has one, else on the CPU.

    On a GPU it is spread over all of them by accelerate; that has never been run.
    """

    def __init__(self, path: Path):
        torch, transformers = load("torch"), load("transformers")
        _check_memory(path, on_gpu=torch.cuda.is_available())
        options: dict[str, Any] = {"device_map": "auto"} if torch.cuda.is_available() else {}
        if "quantization_config" in read_config(path):
            options["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
        try:
            with quiet():
                # Experts one after the other: ModelOpt does not see into the batched forms.
                self.model = transformers.AutoModelForCausalLM.from_pretrained(
                    path, dtype="auto", local_files_only=True, experts_implementation="eager", **options
                )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            what = f"transformers cannot load the target: {_line(error)}"
            raise UserError(what, where=path, fix=WITHOUT) from None
        self.model.eval().requires_grad_(False)
        self.device = self.model.device
        self.vocab: int = self.model.get_input_embeddings().weight.shape[0]

    def read(self, ids: Any, taps: tuple[int, ...], *, head: bool) -> Any:
        """Features [T, taps * H] of the text `ids` [T], None without taps; `head` runs the output head as well."""
        torch = load("torch")
        model = self.model if head else self.model.base_model
        with torch.no_grad(), quiet():
            output = model(ids[None].to(self.device), use_cache=False, output_hidden_states=bool(taps))
        states = output.hidden_states if taps else ()
        # Entry 0 is the embedding. The last one has been through the final norm, as drafters know it from training.
        return torch.cat([states[tap + 1][0].to(self.device) for tap in taps], dim=-1) if taps else None

    def embed(self, ids: Any) -> Any:
        """Rows of the embedding table, without what some targets do to them next."""
        return load("torch").nn.functional.embedding(ids.to(self.device), self.model.get_input_embeddings().weight)


def _check_memory(path: Path, *, on_gpu: bool) -> None:
    """Refuse what cannot fit before it fills the memory; a GPU's memory is left to accelerate."""
    if on_gpu or not hasattr(os, "sysconf"):
        return
    size = sum(
        ref.nbytes * (MXFP4_GROWTH if ref.name.endswith("_blocks") else 1) for ref in read_tensors(path).values()
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        what = f"the target needs {size / 2**30:.1f} GiB, this machine has {memory / 2**30:.1f} GiB of memory"
        raise UserError(what, where=path, fix=WITHOUT)


def _line(error: Exception) -> str:
    """The first line of a library's message, which may be a page."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
