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


def main(folder: Path) -> None:
    config = LlamaConfig(**json.loads((folder / "config.json").read_text()), attn_implementation="eager")
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    weights = load_file(folder / "model.safetensors")
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are computed, not loaded
    ids = torch.from_numpy(np.load(folder / "ids.npy").astype(np.int64))[None]
    with torch.inference_mode():
        logits = model.float().eval()(ids).logits[0]
    np.save(folder / "logits.npy", logits.numpy())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
