"""Tiny random pairs: real checkpoints, written the way transformers and z-lab write them.

    target, draft = make_pair(tmp_path)                                      # tiny-qwen3
    target, draft = make_pair(tmp_path, "tiny-llama", target_config={"num_key_value_heads": 1}, dtype="float32")
    target, draft = make_pair(tmp_path, "tiny-gptoss", experts="mxfp4")      # 8 experts, top 2, window 16, sinks
    oracle = dequantized(target)                                             # the same values as floats
    edit_config(draft, set={"dflash_config.block_size": 16}, remove=["block_size"])
    edit_tensors(draft, rename={"layers.*": "model.layers.*"}, split=2)

`make_*` build consistent checkpoints from a config (dotted keys; REMOVE drops one); `edit_*` then say or damage
anything. The same arguments give the same bytes.
"""

from __future__ import annotations

import copy
import fnmatch
import itertools
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint import load_tensor, mxfp4, nvfp4, read_tensors

REMOVE: Any = object()
VOCAB = 256
EOS = 2
TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I32": torch.int32, "I64": torch.int64,
         "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}  # fmt: skip

WIDTHS = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
}

TARGETS: dict[str, dict[str, Any]] = {
    base: WIDTHS
    | {
        "model_type": family,
        "num_hidden_layers": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    for base, family, theta in [("tiny-qwen3", "qwen3", 1e6), ("tiny-llama", "llama", 5e5)]
}

ROPE = {"rope_type": "yarn", "rope_theta": 150000, "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}  # fmt: skip

TARGETS["tiny-gptoss"] = TARGETS["tiny-qwen3"] | {
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 96,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "swiglu_limit": 1.5,  # published: 7, which random weights hardly reach
    "sliding_window": 16,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "rope_parameters": ROPE,
}

MXFP4 = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}

DRAFT: dict[str, Any] = WIDTHS | {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "attention_bias": False,
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 2,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "block_size": 8,
    "num_target_layers": 6,
    "dflash_config": {"mask_token_id": 250, "target_layer_ids": [1, 3, 4]},
    "dtype": "bfloat16",
}


def make_pair(
    root: Path,
    base: str = "tiny-qwen3",
    *,
    target_config: Mapping[str, Any] = {},
    draft_config: Mapping[str, Any] = {},
    seed: int = 0,
    dtype: str = "bfloat16",
    words: int = VOCAB,
    experts: str = "float",
) -> tuple[Path, Path]:
    """Write `root/target` and `root/draft`; the drafter follows the target's width, vocabulary and depth.

    `words` (even) is the number of token ids that occur in text, counted from "a". With the default nearly every draft
    of a random drafter is rejected; with words=2 all accepted lengths occur, richest under seed 6 (tiny-qwen3),
    seeds 4 and 5 (tiny-llama) and seeds 1, 2 and 6 (tiny-gptoss).
    """
    target = make_target(root / "target", base, target_config, seed=seed, dtype=dtype, words=words, experts=experts)
    config = json.loads((target / "config.json").read_text())
    followed = {"hidden_size": config["hidden_size"], "vocab_size": config["vocab_size"],
                "num_target_layers": config["num_hidden_layers"],
                "rope_theta": config["rope_parameters"]["rope_theta"]}  # fmt: skip
    if base == "tiny-gptoss":
        scaling = {key: value for key, value in config["rope_parameters"].items() if key != "rope_theta"}
        followed |= {"model_type": "gpt_oss", "attention_bias": True, "num_attention_heads": 8, "rms_norm_eps": 1e-5,
                     "dflash_config.target_layer_ids": [0, 1, 2], "rope_scaling": scaling}  # fmt: skip
    return target, make_draft(root / "draft", followed | dict(draft_config), seed=seed + 1, dtype=dtype)


def make_target(
    directory: Path,
    base: str = "tiny-qwen3",
    config: Mapping[str, Any] = {},
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    words: int = VOCAB,
    experts: str = "float",
) -> Path:
    """Save a random target through transformers, with a byte-level tokenizer: token id = byte value.

    `experts`: "float" as transformers saves them, or "mxfp4" as gpt-oss's publisher has them.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # slow to import; the drafter needs none of it

    settings = _edited(TARGETS[base], config)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(settings.pop("model_type"), **settings), dtype=getattr(torch, dtype)
    )
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random(name, parameter.shape, rng))
        if words < VOCAB:
            _silence_all_but(model.get_output_embeddings().weight, words)
    model.save_pretrained(directory)
    _byte_tokenizer().save_pretrained(directory)
    if experts == "mxfp4":
        _pack_experts(directory)
    return directory


def dequantized(directory: Path) -> Path:
    """A sibling of a target with packed weights that holds the same values in float32; for oracles."""
    other = directory.with_name(f"{directory.name}-float32")
    shutil.copytree(directory, other, dirs_exist_ok=True)
    file, packed = other / "model.safetensors", load_tensors(directory)
    for name in [name for name in packed if name.endswith(("_blocks", "weight_scale"))]:
        if name.endswith("_blocks"):
            module = name.removesuffix("_blocks")
            values = mxfp4.decode(packed.pop(name), packed.pop(f"{module}_scales")).swapaxes(1, 2)
            packed[module] = values  # [E, in, out]
            continue
        scales, scale = packed.pop(name), packed.pop(f"{name}_2")
        packed.pop(name.replace("weight_scale", "input_scale"), None)
        if name.endswith(".weight_scale"):
            weight = name.removesuffix("_scale")
            packed[weight] = nvfp4.decode(packed[weight], scales, scale)
        else:
            weight = name.removesuffix("_weight_scale")
            packed[weight] = nvfp4.decode(packed[weight].swapaxes(1, 2), scales.swapaxes(1, 2), scale).swapaxes(1, 2)
    for old in other.glob("*.safetensors*"):
        old.unlink()
    (other / "hf_quant_config.json").unlink(missing_ok=True)
    floats = {name: torch.from_numpy(np.ascontiguousarray(v.astype(np.float32))) for name, v in packed.items()}
    save_file(floats, file, metadata={"format": "pt"})
    edit_config(other, set={"dtype": "float32"}, remove=["quantization_config"])
    return other


def load_tensors(directory: Path) -> dict[str, np.ndarray]:
    return {name: load_tensor(ref) for name, ref in read_tensors(directory).items()}


def _pack_experts(directory: Path) -> None:
    """As openai/gpt-oss-120b has its experts, blocks along the inputs."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = mxfp4.encode(tensors.pop(name).transpose(1, 2).float().numpy())
        tensors |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
    save_file(tensors, file, metadata={"format": "pt"})
    edit_config(directory, set={"quantization_config": MXFP4})


def make_draft(directory: Path, config: Mapping[str, Any] = {}, *, seed: int = 1, dtype: str = "bfloat16") -> Path:
    """Save a random drafter in the z-lab layout: `fc`, `hidden_norm`, `layers.N.*`, `norm`; no embedding, no head."""
    settings = _edited(DRAFT, {"dtype": dtype} | dict(config))
    rng = torch.Generator().manual_seed(seed)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: _random(name, shape, rng).to(getattr(torch, dtype)) for name, shape in draft_shapes(settings).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", settings)
    return directory


def draft_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    nested = config.get("dflash_config") or {}
    taps = nested["target_layer_ids"] if "target_layer_ids" in nested else config["target_layer_ids"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(taps) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    if config.get("attention_bias"):
        layer |= {f"self_attn.{n}_proj.bias": (size,) for n, size in zip("qkvo", (q, kv, kv, hidden), strict=True)}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def edit_config(directory: Path, *, set: Mapping[str, Any] = {}, remove: Iterable[str] = ()) -> None:
    """Set and remove dotted keys of `config.json`, with no regard for what the weights are."""
    file = directory / "config.json"
    changes = dict.fromkeys(remove, REMOVE) | dict(set)
    _write_json(file, _edited(json.loads(file.read_text()), changes))


def edit_tensors(
    directory: Path,
    *,
    remove: Iterable[str] = (),
    add: Mapping[str, Mapping[str, Any]] = {},
    rename: Mapping[str, str] = {},
    split: int = 1,
) -> None:
    """Rewrite the tensors of a checkpoint.

    Names may hold `*`, and `add` also `{a,b}`; "by projection" as a shape means one entry per output of the
    projection. `split` spreads the tensors over so many files and writes the index.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    rng = torch.Generator().manual_seed(7)
    for pattern in remove:
        for name in fnmatch.filter(list(tensors), pattern):
            del tensors[name]
    for pattern, spec in add.items():
        for name in _spelled_out(pattern, tensors):
            by_projection = spec["shape"] == "by projection"
            shape = tensors[name.replace(".bias", ".weight")].shape[:1] if by_projection else tuple(spec["shape"])
            tensors[name] = _random(name, shape, rng).to(TORCH[spec["dtype"]])
    for old, new in rename.items():
        for name in fnmatch.filter(list(tensors), old):
            tensors[new.replace("*", name[len(old.partition("*")[0]) :])] = tensors.pop(name)
    _write_shards(directory, tensors, split)


def _write_shards(directory: Path, tensors: dict[str, torch.Tensor], count: int) -> None:
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    if count == 1:
        return save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    weight_map = {}
    for part in range(count):
        file = f"model-{part + 1:05}-of-{count:05}.safetensors"
        shard = dict(itertools.islice(tensors.items(), part, None, count))
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)


def _random(name: str, shape: Iterable[int], rng: torch.Generator) -> torch.Tensor:
    """Weights under which every layer matters and greedy text does not fall into a loop at once."""
    values = torch.randn(tuple(shape), generator=rng)
    if name.endswith("norm.weight"):
        return 1 + 0.2 * values
    if name.endswith(("_bias", ".bias")):
        return 0.2 * values
    if name.endswith("sinks"):
        return 1 + values
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):  # [E, in, out]
        return values * (1.5 / max(values.shape[-2], 1) ** 0.5)
    if "embed_tokens" in name:
        return values
    return values * (1.5 / max(values.shape[-1:], default=1) ** 0.5)


def _silence_all_but(head: torch.Tensor, words: int) -> None:
    """Rows of likely tokens come in opposite pairs, so that one of them always beats the silent ones."""
    first = ord("a")
    likely = head[first : first + words].clone()
    likely[1::2] = -likely[::2]
    head *= 0.01
    head[first : first + words] = likely


def _spelled_out(pattern: str, tensors: Iterable[str]) -> list[str]:
    """`layers.*.self_attn.{q,k}_proj.bias` → every such name; `*` runs over the layers that exist."""
    layers = sorted({m[1] for name in tensors if (m := re.search(r"layers\.(\d+)\.", name))}, key=int)
    names = [pattern]
    for group in re.findall(r"\{[^}]*\}|\*", pattern):
        choices = layers if group == "*" else group[1:-1].split(",")
        names = [name.replace(group, choice, 1) for name in names for choice in choices]
    return names


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}  # GPT-2
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=letters[1],
        eos_token=letters[EOS],
        chat_template="{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}",
    )


def _edited(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(dict(config))
    for dotted, value in changes.items():
        *parents, key = dotted.split(".")
        node = result
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is REMOVE:
            node.pop(key, None)
        else:
            node[key] = value
    return result


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
