"""Independent references in float32 on the CPU: transformers for the target, z-lab's `dflash` wheel for the drafter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from dflash.model import DFlashDraftModel, extract_context_feature
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config


class Oracle:
    """The pair, or a target alone, as its authors run it, without any cache: every answer comes from the whole text."""

    def __init__(self, target: Path, draft: Path | None = None):
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        if draft:
            self.draft = _load_drafter(draft)

    @torch.inference_mode()
    def logits(self, text: list[int]) -> np.ndarray:
        """Target logits after every token, [len(text), V]."""
        return self.target(torch.tensor([text])).logits[0].numpy()

    def continue_greedily(self, text: list[int], count: int) -> list[int]:
        """`text` and the target's next `count` tokens."""
        for _ in range(count):
            text = [*text, int(self.logits(text)[-1].argmax())]
        return text

    @torch.inference_mode()
    def draft_logits(self, text: list[int], block_size: int) -> np.ndarray:
        """Draft logits [K-1, V] for the block that starts with the last token of `text`."""
        start = len(text) - 1
        states = self.target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        block = torch.tensor([[text[-1]] + [self.draft.mask_token_id] * (block_size - 1)])
        hidden = self.draft(
            target_hidden=extract_context_feature(states, self.draft.target_layer_ids),
            noise_embedding=self.target.get_input_embeddings()(block),
            position_ids=torch.arange(start + block_size)[None],
        )
        return self.target.lm_head(hidden[:, 1:])[0].numpy()


def _load_drafter(path: Path) -> DFlashDraftModel:
    drafter = DFlashDraftModel(Qwen3Config.from_pretrained(path)).float().eval()
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= {name.removeprefix("model."): tensor.float() for name, tensor in load_file(file).items()}
    drafter.load_state_dict(tensors)
    return drafter
