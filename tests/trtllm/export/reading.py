"""An independent reader of TensorRT-LLM checkpoints: ranks joined, scales looked up one by one, weights as floats.

It knows nothing of how they are written: names, tiles and cuts are spelled out again here, from `config.json` alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
OURS = {"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm",
        "attention.q_layernorm": "self_attn.q_norm", "attention.k_layernorm": "self_attn.k_norm"}  # fmt: skip
LINEARS = {"attention.dense": "self_attn.o_proj", "mlp.fc": "mlp.gate_proj", "mlp.gate": "mlp.up_proj",
           "mlp.proj": "mlp.down_proj"}  # fmt: skip


def tile_offset(row, column, columns: int):
    """Where the scale of (row, column), or of arrays of them, lies; `columns`: of the matrix, padded to 4."""
    tile = (row // 128) * (columns // 4) + column // 4
    return 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4


def untiled(tiled: np.ndarray, rows: int, columns: int) -> np.ndarray:
    return tiled.reshape(-1)[tile_offset(*np.indices((rows, columns)), tiled.shape[1])]


@dataclass(frozen=True)
class Network:
    """A checkpoint directory: `config.json`, and the tensors of every rank."""

    config: dict
    ranks: list[dict[str, torch.Tensor]]

    @property
    def tp(self) -> int:
        return len(self.ranks)

    def weight(self, rank: int, name: str) -> np.ndarray:
        """A linear's weight on one rank, float32. Its two forms of block scales must agree."""
        tensors = self.ranks[rank]
        weight = tensors[f"{name}.weight"]
        if weight.dtype != torch.uint8:
            return weight.float().numpy()
        codes = weight.numpy()
        plain = tensors[f"{name}.weights_block_scaling_factor"].view(torch.uint8).numpy()
        tiled = tensors[f"{name}.weights_block_scaling_factor_interleaved"].view(torch.uint8).numpy()
        bits = untiled(tiled, *plain.shape)
        assert (bits == plain).all(), name
        scales = torch.from_numpy(bits.astype(np.uint8)).view(torch.float8_e4m3fn).float().numpy()
        scales = scales * tensors[f"{name}.weights_global_scaling_factor"].numpy()
        values = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1).reshape(len(codes), -1, 16)
        return (values * scales[:, :, None]).reshape(len(codes), -1)

    def rows(self, name: str) -> np.ndarray:
        """Of a linear that is cut by outputs."""
        return np.concatenate([self.weight(rank, name) for rank in range(self.tp)])

    def columns(self, name: str) -> np.ndarray:
        """Of a linear that is cut by inputs."""
        return np.concatenate([self.weight(rank, name) for rank in range(self.tp)], axis=1)

    def same(self, name: str) -> np.ndarray:
        """Of a tensor that every rank has whole."""
        first = self.ranks[0][name]
        assert all(torch.equal(tensors[name], first) for tensors in self.ranks), name
        return first.float().numpy()

    def qkv(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        """q, k and v of what each rank holds: its heads of q, then those of k, then those of v."""
        size, heads, kv_heads = (self.config[k] for k in ("head_size", "num_attention_heads", "num_key_value_heads"))
        q, kv, reps = heads // self.tp * size, max(1, kv_heads // self.tp) * size, max(1, self.tp // kv_heads)
        assert all(len(part) == q + 2 * kv for part in parts)
        cut = [np.split(part, [q, q + kv]) for part in parts]
        for rank, part in enumerate(cut):  # ranks that share a head hold the same
            assert all((part[i] == cut[rank - rank % reps][i]).all() for i in (1, 2))
        return [np.concatenate([part[i] for part in cut[:: reps if i else 1]]) for i in range(3)]

    def as_published(self, prefix: str) -> dict[str, np.ndarray]:
        """Under the names of transformers, or of z-lab with an empty prefix; float32."""
        found: dict[str, np.ndarray] = {}
        for layer in range(self.config["num_hidden_layers"]):
            theirs, ours = f"transformer.layers.{layer}.", f"{prefix}layers.{layer}."
            for name, other in OURS.items():
                if f"{theirs}{name}.weight" in self.ranks[0]:
                    found[f"{ours}{other}.weight"] = self.same(f"{theirs}{name}.weight")
            for name, other in LINEARS.items():
                by_inputs = name in ("attention.dense", "mlp.proj")
                found[f"{ours}{other}.weight"] = (self.columns if by_inputs else self.rows)(theirs + name)
                if f"{theirs}{name}.bias" in self.ranks[0]:
                    whole = [t[f"{theirs}{name}.bias"].float().numpy() for t in self.ranks]
                    found[f"{ours}{other}.bias"] = (
                        self.same(f"{theirs}{name}.bias") if by_inputs else np.concatenate(whole)
                    )
            qkv = f"{theirs}attention.qkv"
            joined = {"weight": [self.weight(rank, qkv) for rank in range(self.tp)]}
            if f"{qkv}.bias" in self.ranks[0]:
                joined["bias"] = [tensors[f"{qkv}.bias"].float().numpy() for tensors in self.ranks]
            for kind, parts in joined.items():
                for letter, value in zip("qkv", self.qkv(parts), strict=True):
                    found[f"{ours}self_attn.{letter}_proj.{kind}"] = value
        vocab = self.config["vocab_size"]
        assert self.config["use_parallel_embedding"] == (self.tp > 1)
        for name, other in {"transformer.vocab_embedding": "model.embed_tokens", "lm_head": "lm_head"}.items():
            value = self.rows(name)
            assert not value[vocab:].any()
            found[f"{other}.weight"] = value[:vocab]
        found[f"{prefix}norm.weight"] = self.same("transformer.ln_f.weight")
        if "transformer.fc.weight" in self.ranks[0]:
            assert all(
                torch.equal(t["transformer.fc.weight"], self.ranks[0]["transformer.fc.weight"]) for t in self.ranks
            )
            found["fc.weight"] = self.weight(0, "transformer.fc")
            found["hidden_norm.weight"] = self.same("transformer.hidden_norm.weight")
        return found


def read_network(directory: Path) -> Network:
    config = json.loads((directory / "config.json").read_text())
    mapping = config["mapping"]
    assert mapping["world_size"] == mapping["tp_size"] and mapping["pp_size"] == 1
    files = sorted(path.name for path in directory.iterdir())
    assert files == sorted(["config.json", *(f"rank{rank}.safetensors" for rank in range(mapping["tp_size"]))])
    ranks = [load_file(directory / f"rank{rank}.safetensors") for rank in range(mapping["tp_size"])]
    signatures = [{name: (t.dtype, t.shape) for name, t in tensors.items()} for tensors in ranks]
    assert all(signature == signatures[0] for signature in signatures), "a network has one shape on all ranks"
    return Network(config, ranks)


def save(directory: Path, tensors: dict[str, np.ndarray]) -> Path:
    """Put float32 tensors in place of a checkpoint's own."""
    for file in [*directory.glob("*.safetensors*"), directory / "hf_quant_config.json"]:
        file.unlink(missing_ok=True)
    save_file(
        {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.loads((directory / "config.json").read_text())
    config.pop("quantization_config", None)
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return directory
