"""What transformers and PEFT make of our folders, and adapters of PEFT's own making, float32: run by the reference interpreter, which has torch.

usage: python peft_logits.py FOLDER

    FOLDER/bases/BASE/model            Hugging Face folder
    FOLDER/bases/BASE/adapters/NAME    PEFT folder with ids.npy [T]
    FOLDER/bases/BASE/made/NAME        spec.json (fields of LoraConfig, and a dtype) and ids.npy: PEFT makes and saves an adapter here
    FOLDER/merged/NAME                 Hugging Face folder with ids.npy and text.txt

Written into each adapter's folder: logits.npy [T, V], base_logits.npy with the adapter off, and deltas.npz: scale * B @ A [out, in] of every adapted
module by its name. Into each merged one: logits.npy, and text_ids.npy of the text. Fails if a key is missing or unexpected anywhere; both libraries
only warn of it themselves.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def main(folder: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for base in sorted((folder / "bases").glob("*")):
        for path in sorted((base / "made").glob("*")):
            make(load(base / "model"), path)
        if paths := sorted((base / "adapters").glob("*")):
            read_all(load(base / "model"), paths)
    for path in sorted((folder / "merged").glob("*")):
        np.save(path / "logits.npy", logits_of(load(path), path))
        np.save(path / "text_ids.npy", AutoTokenizer.from_pretrained(path)((path / "text.txt").read_text()).input_ids)


def load(folder: Path) -> PreTrainedModel:
    """A model of which nothing is missing, left over or of another shape."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    if problems := {key: value for key, value in info.items() if value}:
        sys.exit(f"{folder}: {problems}")
    return model.eval()


def read_all(model: PreTrainedModel, paths: list[Path]) -> None:
    """One model for all, with one adapter at a time beside the first: PEFT goes through all it holds at every turn."""
    adapted = PeftModel.from_pretrained(model, paths[0], adapter_name="first")
    for path in paths:
        found = adapted.load_adapter(path, adapter_name=path.name)
        if found.missing_keys or found.unexpected_keys:
            sys.exit(f"{path}: missing {found.missing_keys}, unexpected {found.unexpected_keys}")
        adapted.set_adapter(path.name)
        write(adapted, path, path.name)
        adapted.delete_adapter(path.name)


def make(model: PreTrainedModel, path: Path) -> None:
    fields = json.loads((path / "spec.json").read_text())
    dtype = getattr(torch, fields.pop("dtype", "float32"))
    adapted = get_peft_model(model, LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **fields)).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype).float()
    adapted.save_pretrained(path)
    saved = load_file(path / "adapter_model.safetensors")
    save_file({name: tensor.to(dtype).contiguous() for name, tensor in saved.items()}, path / "adapter_model.safetensors")
    write(adapted, path, "default")


def write(adapted: PeftModel, path: Path, name: str) -> None:
    layers = {key.removeprefix("base_model.model."): m for key, m in adapted.named_modules() if isinstance(m, LoraLayer) and name in m.lora_A}
    np.savez(path / "deltas.npz", **{key: layer.get_delta_weight(name).detach().numpy() for key, layer in layers.items()})
    np.save(path / "logits.npy", logits_of(adapted, path))
    with adapted.disable_adapter():
        np.save(path / "base_logits.npy", logits_of(adapted, path))


def logits_of(model: torch.nn.Module, folder: Path) -> np.ndarray:
    """Logits [T, V] of ids.npy."""
    ids = torch.from_numpy(np.load(folder / "ids.npy").astype(np.int64))[None]
    with torch.inference_mode():
        return model(ids).logits[0].numpy()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
