"""Independent references in float32 on the CPU: transformers for the target, z-lab's `dflash` wheel for the drafter.

Neither keeps a cache here: every answer is computed from the whole text. Both need torch, so they are imported when a
check runs and not before.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dflash_trt.checkpoint import Draft
from dflash_trt.errors import UserError

INSTALL = {
    "transformers": "pip install -r requirements-dev.txt",
    "torch": "pip install -r requirements-dev.txt",
    "dflash.model": "pip install --no-deps -r requirements-nodeps.txt",
}


def load_oracle(name: str) -> ModuleType:
    """Raises UserError that says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        what = f"the reference {name.partition('.')[0]} cannot be imported ({error})"
        raise UserError(what, where="verify", fix=INSTALL[name]) from None


class TargetOracle:
    """The target as transformers runs it."""

    def __init__(self, path: Path):
        self._torch = load_oracle("torch")
        transformers = load_oracle("transformers")
        transformers.utils.logging.disable_progress_bar()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=self._torch.float32).eval()

    def read(self, text: Sequence[int]) -> tuple[np.ndarray, Any]:
        """Logits after each token, [T, V] float32, and the hidden states of every layer."""
        with self._torch.inference_mode():
            output = self.model(self._torch.tensor([list(text)]), output_hidden_states=True)
        return output.logits[0].numpy(), output.hidden_states


class DraftOracle:
    """The drafter as z-lab's wheel runs it, on the hidden states of a `TargetOracle`."""

    def __init__(self, draft: Draft, target: TargetOracle):
        self._torch = torch = load_oracle("torch")
        self._dflash = load_oracle("dflash.model")
        transformers, safetensors = load_oracle("transformers"), importlib.import_module("safetensors.torch")
        config = transformers.Qwen3Config.from_pretrained(draft.path, attention_bias=draft.config.attention_bias)
        self.model = self._dflash.DFlashDraftModel(config).float().eval()
        files = sorted({ref.file for ref in draft.tensors.values()})
        stored = {name: tensor for file in files for name, tensor in safetensors.load_file(file).items()}
        self.model.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in stored.items()})
        self.model.block_size = draft.config.block_size
        self._target = target.model
        self._masks = torch.full((1, draft.config.block_size - 1), draft.config.mask_token_id)
        self._scale = draft.config.embedding_scale

    def draft(self, states: Any, certain: int, anchor: int) -> np.ndarray:
        """Draft logits [K-1, V] float32 for the block that starts with `anchor` behind `certain` tokens of a text whose
        hidden states are `states`."""
        torch = self._torch
        block = torch.cat([torch.tensor([[anchor]]), self._masks], dim=1)
        features = self._dflash.extract_context_feature(states, self.model.target_layer_ids)
        with torch.inference_mode():
            hidden = self.model(
                target_hidden=features[:, :certain],
                noise_embedding=self._target.get_input_embeddings()(block) * self._scale,
                position_ids=torch.arange(certain + block.shape[1])[None],
            )
            return self.model.compute_logits(hidden[:, 1:], self._target.get_output_embeddings())[0].numpy()
