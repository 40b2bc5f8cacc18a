"""Logits and rotary angles of transformers, float32: run by the reference interpreter, which alone has torch.

usage: python family_logits.py FOLDER

Each folder in FOLDER is a Hugging Face folder. Where it has weights and ids.npy [T], logits.npy [T, V] is written into it; always, angles.npz: cos
and sin [P, H] at positions.npy [P] of FOLDER. Fails if a weight is missing from a file, or in it and unused.
"""

import importlib
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig


def logits_of(folder: Path) -> np.ndarray:
    """Logits [T, V] of ids.npy."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), (folder, report)
    ids = torch.from_numpy(np.load(folder / "ids.npy").astype(np.int64))[None]
    with torch.inference_mode():
        return model.eval()(ids).logits[0].numpy()


def angles_of(config: PreTrainedConfig, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [P, H] of the family's own rotary embedding."""
    family = config.architectures[0].removesuffix("ForCausalLM")
    module = importlib.import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}")
    rotary = getattr(module, f"{family}RotaryEmbedding")(config)
    cos, sin = rotary(torch.zeros(1), torch.from_numpy(positions.astype(np.int64))[None])
    return cos[0].numpy(), sin[0].numpy()


if __name__ == "__main__":
    where = Path(sys.argv[1])
    asked = np.load(where / "positions.npy")
    for one in sorted(path.parent for path in where.glob("*/config.json")):
        cos_PH, sin_PH = angles_of(AutoConfig.from_pretrained(one), asked)
        np.savez(one / "angles.npz", cos=cos_PH, sin=sin_PH)
        if (one / "model.safetensors").exists():
            np.save(one / "logits.npy", logits_of(one))
