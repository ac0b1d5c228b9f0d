"""`build.sh` and `README.md` of an export: the command lines for the machine that has TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dflash_trt.checkpoint import Pair
from dflash_trt.errors import UserError
from dflash_trt.trtllm.export.config import DRAFTER, TARGET_CLASSES
from dflash_trt.trtllm.export.directory import REPORT

RELEASE = "1.2.1"
DOCS = "docs/trtllm-build.md"


@dataclass(frozen=True)
class Limits:
    """What the engines are built for."""

    batch: int
    sequence: int  # tokens, prompt and answer
    tokens: int  # of one step, over all sequences; of the drafter, new context of one sequence in one run


def check_limits(limits: Limits, models: Pair) -> None:
    """Raises UserError naming the first option that cannot be built."""
    assert models.draft
    block = models.draft.config.block_size
    for option, value in {"--max-batch": limits.batch, "--max-seq-len": limits.sequence}.items():
        if value < 1:
            raise UserError(f"{value} is too small", where=option, fix="give 1 or more")
    for half in (models.target, models.draft):
        if limits.sequence > half.config.max_position:
            what = f"{limits.sequence} tokens, but {half.path} knows {half.config.max_position} positions"
            raise UserError(what, where="--max-seq-len", fix=f"give {half.config.max_position} or less")
    if limits.sequence < block:
        what = f"{limits.sequence} tokens do not hold a block of {block}"
        raise UserError(what, where="--max-seq-len", fix=f"give {block} or more")
    if limits.tokens < limits.batch * block:
        what = f"{limits.tokens} tokens are fewer than a step takes: {limits.batch} sequences x a block of {block}"
        raise UserError(what, where="--max-num-tokens", fix=f"give {limits.batch * block} or more")


def build_lines(models: Pair, limits: Limits, gemm: Mapping[str, str]) -> dict[str, list[str]]:
    """Role → words of its command line, in which $here and $engines are the script's. `gemm`: role → GEMM plugin."""
    assert models.draft
    sizes = ["--max_batch_size", str(limits.batch), "--max_input_len", str(min(limits.tokens, limits.sequence)),
             "--max_seq_len", str(limits.sequence), "--max_num_tokens", str(limits.tokens)]  # fmt: skip
    names = {"target": TARGET_CLASSES[models.target.config.model_type], "draft": DRAFTER}
    lines = {
        role: [
            "trtllm-build",
            *("--checkpoint_dir", f'"$here/{role}"', "--output_dir", f'"$engines/{role}"'),
            *("--model_cls_file", f'"$here/model_class/{role}.py"', "--model_cls_name", name),
            *sizes,
            *("--gemm_plugin", gemm[role], "--workers", "1"),
        ]
        for role, name in names.items()
    }
    # The target's logits of a whole block, and a cache that the next block is checked against.
    lines["target"] += ["--speculative_decoding_mode", "draft_tokens_external", "--max_draft_len",
                        str(models.draft.config.block_size - 1), "--gpt_attention_plugin", "auto",
                        "--use_paged_context_fmha", "enable", "--reduce_fusion", "disable",
                        "--norm_quant_fusion", "disable"]  # fmt: skip
    return lines


def build_script(lines: dict[str, list[str]]) -> str:
    commands = "\n\n".join(f'{_wrapped(words)} \\\n  "$@"' for words in lines.values())
    return f"""#!/bin/sh
# Build both engines with TensorRT-LLM {RELEASE}. Made by `dflash-trt export`; never executed there.
#   sh build.sh ENGINES [more options of trtllm-build]
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
engines=${{1:?"where to: sh build.sh ENGINES [more options of trtllm-build]"}}
shift
if [ -e "$engines/{REPORT}" ]; then  # an engine has a config.json, too
  echo "$engines is an export, whose checkpoints engines would overwrite; name another folder" >&2
  exit 2
fi

{commands}
"""


def readme(lines: dict[str, list[str]], *, what: str, tp: int) -> str:
    commands = "\n\n".join(_wrapped(words) for words in lines.values())
    ranks = "one rank" if tp == 1 else f"{tp} ranks"
    return f"""# {what}

TensorRT-LLM checkpoints of a DFlash pair, for the TensorRT engine backend of TensorRT-LLM {RELEASE}, {ranks}.

    target/ draft/     config.json and rank0.safetensors …
    model_class/       the networks, for --model_cls_file
    build.sh           builds both engines: sh build.sh ENGINES
    export.json        what was exported, with notes

What `build.sh` runs, with $here for this folder:

```sh
{commands}
```

This was never executed with TensorRT-LLM: {DOCS} of dflash-trt says what was checked instead.
"""


def _wrapped(words: list[str]) -> str:
    """One option a line."""
    lines, options = words[:1], iter(words[1:])
    lines += [f"  {option} {value}" for option, value in zip(options, options, strict=True)]
    return " \\\n".join(lines)
