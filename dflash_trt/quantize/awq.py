"""AWQ, all of it ModelOpt's: it rescales weights by its simulated forward and writes the checkpoint itself.

Needs CUDA and has never been run: what comes out carries `pre_quant_scale` tensors, which TensorRT-LLM reads and our
own converter does not.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from dflash_trt.checkpoint import read_tensors
from dflash_trt.progress import Progress
from dflash_trt.quantize.calibrate import TARGET, calibrate
from dflash_trt.quantize.modelopt import load, quiet
from dflash_trt.quantize.plan import Plan
from dflash_trt.quantize.resume import resumable
from dflash_trt.quantize.write import Written

TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)


def export_awq(plan: Plan, output: Path, texts: Sequence[Sequence[int]], force: bool, progress: Progress) -> Written:
    """Calibrate the target of `plan` and have ModelOpt write it to `output`, whole or not at all.

    What `force` replaces goes when its replacement is complete.
    """
    pair, _ = calibrate({TARGET: plan}, plan.source, None, texts, progress=progress)
    progress("writing", 0)
    with resumable(output, f"{plan.preset}", source=plan.source, force=force) as work:  # from the start, each time
        with quiet():
            load("modelopt.torch.export").export_hf_checkpoint(pair.target.model, export_dir=str(work.folder))
        for pattern in TOKENIZER:
            for file in plan.source.glob(pattern):
                shutil.copyfile(file, work.folder / file.name)
    before, after = (sum(ref.nbytes for ref in read_tensors(folder).values()) for folder in (plan.source, output))
    return Written(output, (), before, after, resumed=0)
