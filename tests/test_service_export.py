"""Versions of real runs as PEFT folders: the modules that they have, and the base as others find it."""

import asyncio
import json
import random

import numpy as np
import pytest
from export_builders import random_adapter
from family_models import CASES, write_folder, write_tokenizer
from safetensors.numpy import load_file
from service_builders import Letters, add, run_config, server_config

from noria.config import AdapterConfig
from noria.model.export import write_peft
from noria.model.hf_folder import read_config
from noria.model.weights import public_name
from noria.service.build import open_server
from noria.service.export import export_version
from noria.types import LoraSpec

ATTENTION, EVERY = ("q", "k", "v", "o"), ("q", "k", "v", "o", "gate", "up", "down")


class Uneven(Letters):
    """As good as every group has signal."""

    def reward(self, action, answer):
        return random.Random(action).random()


def tensor_bytes(folder):
    return {name: tensor.tobytes() for name, tensor in load_file(folder / "adapter_model.safetensors").items()}


def settings_of(folder):
    return json.loads((folder / "adapter_config.json").read_text())


def write_adapter(folder, base, modules, *, has_delta=True):
    """A PEFT folder of rank 4 with these modules only."""
    config, lora = read_config(base, "base"), LoraSpec(4, 8.0, train_mlp="up" in modules)
    params = random_adapter(config, lora)
    for module in set(EVERY) - set(modules):
        params["a"][module][:], params["b"][module][:] = 0, 0
    for module in modules:
        params["b"][module] *= has_delta
    write_peft(folder, params, lora, config, base_name="base", modules=modules)


def trained(folder, base, modules, *, steps):
    """The state folder of a run that starts from folder/theirs and makes `steps` steps."""
    adapter = AdapterConfig(rank=4, alpha=8.0, train_mlp="up" in modules, warm_start="theirs")
    algorithm = {"steps": steps, "zero_signal": "train"}
    config = run_config(num_tasks=0, algorithm=algorithm).model_copy(update={"base": base, "adapter": adapter})

    async def main():
        async with open_server(server_config(folder / "state").model_copy(update={"base": base})) as server:
            await add(server, config, Uneven, folder=folder)
            assert await server.finished() == {}

    asyncio.run(main())
    return folder / "state"


@pytest.fixture
def base(tmp_path):
    """A small Qwen3 in a folder, named as people do it."""
    write_tokenizer(write_folder(tmp_path / "small", CASES["qwen3-bias"]))
    return f"{tmp_path / 'small'}/"


@pytest.mark.parametrize("modules", [EVERY, ("q", "v"), ("k", "up")])
@pytest.mark.parametrize("has_delta", [True, False])
def test_what_a_run_of_no_steps_started_from_is_exported_byte_for_byte(tmp_path, base, modules, has_delta):
    write_adapter(tmp_path / "theirs", tmp_path / "small", modules, has_delta=has_delta)
    state_dir = trained(tmp_path, base, modules, steps=0)
    assert export_version(state_dir, "run", version="newest", kind="peft", out=tmp_path / "ours") == 0
    assert tensor_bytes(tmp_path / "ours") == tensor_bytes(tmp_path / "theirs")
    ours, theirs = settings_of(tmp_path / "ours"), settings_of(tmp_path / "theirs")
    assert ours == theirs | {"base_model_name_or_path": base}


def test_modules_that_the_folder_lacked_are_exported_once_a_step_has_trained_them(tmp_path, base):
    write_adapter(tmp_path / "theirs", tmp_path / "small", ("q", "v"))
    state_dir = trained(tmp_path, base, ("q", "v"), steps=1)
    export_version(state_dir, "run", version="newest", kind="peft", out=tmp_path / "ours")
    assert settings_of(tmp_path / "ours")["target_modules"] == sorted(f"{module}_proj" for module in ATTENTION)
    tensors = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    assert all(np.any(tensor) for tensor in tensors.values())


def test_a_base_is_named_as_others_find_it():
    assert public_name("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    for name in ("org/model", "../models/small/", "~/small.gguf", "tiny"):
        assert public_name(name) == name
