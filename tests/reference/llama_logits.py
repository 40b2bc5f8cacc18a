"""Logits of transformers' LlamaForCausalLM, float32: run by the reference interpreter, which alone has torch.

usage: python llama_logits.py FOLDER

FOLDER holds config.json (LlamaConfig fields), model.safetensors (Hugging Face names) and ids.npy [T]; logits.npy [T, V] is written into it.
Fails if a weight is missing from the file, or in the file and unused.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM


def load_model(folder: Path) -> LlamaForCausalLM:
    """The model of config.json with the weights of model.safetensors."""
    config = LlamaConfig(**json.loads((folder / "config.json").read_text()), attn_implementation="eager")
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    weights = load_file(folder / "model.safetensors")
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are computed, not loaded
    return model.float().eval()


def logits_of(model: torch.nn.Module, folder: Path) -> np.ndarray:
    """Logits [T, V] of ids.npy."""
    ids = torch.from_numpy(np.load(folder / "ids.npy").astype(np.int64))[None]
    with torch.inference_mode():
        return model(ids).logits[0].numpy()


if __name__ == "__main__":
    where = Path(sys.argv[1])
    np.save(where / "logits.npy", logits_of(load_model(where), where))
