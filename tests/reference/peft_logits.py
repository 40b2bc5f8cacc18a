"""What PEFT makes of adapter folders on a LlamaForCausalLM, float32: run by the reference interpreter, which alone has torch.

usage: python peft_logits.py FOLDER

FOLDER holds config.json and model.safetensors (see llama_logits.py), and folders adapters/NAME in PEFT's format with an ids.npy [T] each. Written
into each: logits.npy [T, V], base_logits.npy with the adapter off, and deltas.npz: scale * B @ A [out, in] of every adapted module by its name.
Fails if PEFT finds a key missing or unexpected in an adapter; it only warns of them itself.
"""

import sys
from pathlib import Path

import numpy as np
from llama_logits import load_model, logits_of
from peft import PeftModel
from peft.tuners.lora import LoraLayer


def main(folder: Path) -> None:
    model = load_model(folder)
    adapted = None
    for path in sorted((folder / "adapters").iterdir()):
        name = path.name
        if adapted is None:
            adapted = PeftModel.from_pretrained(model, path, adapter_name=name)
        found = adapted.load_adapter(path, adapter_name=name)
        if found.missing_keys or found.unexpected_keys:
            sys.exit(f"{name}: missing {found.missing_keys}, unexpected {found.unexpected_keys}")
        adapted.set_adapter(name)
        layers = {key.removeprefix("base_model.model."): m for key, m in adapted.named_modules() if isinstance(m, LoraLayer)}
        np.savez(path / "deltas.npz", **{key: layer.get_delta_weight(name).detach().numpy() for key, layer in layers.items()})
        np.save(path / "logits.npy", logits_of(adapted, path))
        with adapted.disable_adapter():
            np.save(path / "base_logits.npy", logits_of(adapted, path))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
