"""Cases 102, 104, 105, 106 and 109: what noria writes, transformers and PEFT read whole and compute alike, and the other way round, in every family.

Float32; logits within 1e-4 of the largest. The reference fails if a key is missing, unexpected or of another shape anywhere.
"""

import itertools
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from export_builders import FAMILIES, a_base, lora_of, random_adapter, write_base
from safetensors.numpy import load_file

from noria.model.export import read_peft, write_merged, write_peft
from noria.model.lora import HEAD, resize_rank, zero_adapter
from noria.model.peft_config import MODULE_PATHS, place_path, places
from noria.model.transformer import forward_logits

pytestmark = pytest.mark.slow

IDS = np.random.default_rng(0).integers(0, 250, 100, dtype=np.int32)  # past the original context of every base
TEXT = "Wörter, and 12 numbers"
RANKS, ALPHAS, KINDS = (4, 8, 16, 64), (8.0, 16.0, 32.0), ("all", "attn", "mlp", "head")
CASES = {
    f"{family}-{kind}-r{rank}-a{alpha:g}{'-rslora' * use_rslora}": (family, kind, lora_of(kind, rank, alpha, use_rslora))
    for family, kind, rank, alpha in itertools.product(FAMILIES, KINDS, RANKS, ALPHAS)
    for use_rslora in ((False, True) if kind == "all" else (False,))
}
"""The whole product in every family; rsLoRA, which is the scale alone, with all modules."""

MADE = {
    "queries and values": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "all linear": {"r": 8, "lora_alpha": 12, "target_modules": "all-linear", "use_rslora": True},
    "an expression": {"r": 2, "lora_alpha": 5, "target_modules": r".*\.mlp\.(gate|down)_proj"},
    "bfloat16": {"r": 4, "lora_alpha": 8, "target_modules": ["o_proj", "up_proj"], "dtype": "bfloat16"},
    "float16": {"r": 4, "lora_alpha": 8, "target_modules": ["k_proj"], "dtype": "float16"},
    "every layer by number": {"r": 4, "lora_alpha": 8, "target_modules": ["k_proj"], "layers_to_transform": [0, 1]},
    "unembedding": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"]},
}
MADE_IN = [(family, name) for family in FAMILIES for name in MADE if family in ("llama", "qwen3") or name in ("bfloat16", "unembedding")]
MERGED = {f"{family}-{kind}": (family, kind) for family in FAMILIES for kind in ("all", "head")}


@pytest.fixture(scope="module")
def world(tmp_path_factory, run_reference):
    """Every case in a folder, with what the reference made of it."""
    folder = tmp_path_factory.mktemp("peft")
    bases = {family: a_base(config, seed) for seed, (family, config) in enumerate(FAMILIES.items())}
    for family, base in bases.items():
        write_base(folder / "bases" / family / "model", base)
    for family, name in MADE_IN:
        path = folder / "bases" / family / "made" / name
        path.mkdir(parents=True)
        (path / "spec.json").write_text(json.dumps(MADE[name]))
        np.save(path / "ids.npy", IDS)
    adapters = {name: random_adapter(FAMILIES[family], lora, head=kind == HEAD, max_rank=64) for name, (family, kind, lora) in CASES.items()}
    for name, (family, _, lora) in CASES.items():
        path = folder / "bases" / family / "adapters" / name
        write_peft(path, adapters[name], lora, FAMILIES[family], base_name=str(folder / "bases" / family / "model"))
        np.save(path / "ids.npy", IDS)
    for name, (family, kind) in MERGED.items():
        write_merged(folder / "merged" / name, bases[family], *merged_case(family, kind), shard_bytes=20_000)
        np.save(folder / "merged" / name / "ids.npy", IDS)
        (folder / "merged" / name / "text.txt").write_text(TEXT)
    run_reference("peft_logits.py", folder)
    return SimpleNamespace(folder=folder, bases=bases, adapters=adapters)


def merged_case(family, kind):
    lora = lora_of(kind, 8, 32.0)
    return random_adapter(FAMILIES[family], lora, 1, head=kind == HEAD), lora


def close(ours, reference):
    return np.abs(np.asarray(ours) - reference).max() <= 1e-4 * np.abs(reference).max()


compiled = jax.jit(forward_logits, static_argnums=1)


def logits_of(base, adapter, lora):
    return np.asarray(compiled(base.params, base.config, IDS, resize_rank(adapter, 64), lora.scale))


@pytest.mark.parametrize("name", CASES)
def test_an_exported_adapter_is_to_peft_what_it_is_to_us(world, name):
    family, kind, lora = CASES[name]
    base, path = world.bases[family], world.folder / "bases" / family / "adapters" / name
    adapter, logits, base_logits = world.adapters[name], np.load(path / "logits.npy"), np.load(path / "base_logits.npy")
    assert close(logits_of(base, adapter, lora), logits)
    assert close(compiled(base.params, base.config, IDS), base_logits), "the base is not touched, the embedding of a tied one neither"
    assert np.abs(logits - base_logits).max() > 1e-2, "an adapter that PEFT left out would show"
    modules = [m for m in MODULE_PATHS if m in adapter["a"] and adapter["a"][m].any()]
    deltas = np.load(path / "deltas.npz")
    assert set(deltas) == {place_path(place) for place in places(modules, base.config)}
    assert (HEAD in modules) == (kind == HEAD)
    for module, layer in places(modules, base.config):
        expected = deltas[place_path((module, layer))]
        ours = lora.scale * (adapter["a"][module][layer] @ adapter["b"][module][layer])
        assert np.abs(ours.T - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(("family", "name"), MADE_IN)
def test_an_adapter_of_pefts_own_making_gives_pefts_logits(world, family, name):
    base, path = world.bases[family], world.folder / "bases" / family / "made" / name
    read = read_peft(path, base.config, base.params)
    assert close(logits_of(base, read.params, read.lora), np.load(path / "logits.npy"))
    assert {place_path(place) for place in places(read.modules, base.config)} == set(np.load(path / "deltas.npz"))
    if name != "unembedding":  # which needs the base, to compare PEFT's copy of the embedding with
        assert read_peft(path, base.config).modules == read.modules


@pytest.mark.parametrize("name", ["queries and values", "all linear", "an expression", "every layer by number"])
def test_what_peft_saved_is_written_again_byte_for_byte(world, name, tmp_path):
    config, path = FAMILIES["qwen3"], world.folder / "bases" / "qwen3" / "made" / name
    read = read_peft(path, config)
    write_peft(tmp_path / "again", read.params, read.lora, config, base_name="base", modules=read.modules)
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "again", path))
    assert {key: value.tobytes() for key, value in ours.items()} == {key: value.tobytes() for key, value in theirs.items()}


@pytest.mark.parametrize("name", MERGED)
def test_a_merged_folder_is_to_transformers_what_base_and_adapter_are_to_us(world, name):
    family, kind = MERGED[name]
    base, path = world.bases[family], world.folder / "merged" / name
    adapter, lora = merged_case(family, kind)
    logits = np.load(path / "logits.npy")
    assert close(logits_of(base, adapter, lora), logits)
    assert np.abs(logits_of(base, zero_adapter(base.config, 1), lora) - logits).max() > 1e-2
    assert np.load(path / "text_ids.npy").tolist() == [base.tokenizer.bos_id, *base.tokenizer.encode(TEXT)]
    assert len(list(path.glob("*.safetensors"))) > 1
    assert json.loads((path / "config.json").read_text())["tie_word_embeddings"] == (base.config.tie_embeddings and kind != HEAD)
