"""The built-in bases against transformers, on the same weights in float32: relative error at most 1e-4 of the largest logit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from noria.model.transformer import forward_logits
from noria.model.weights import LoadedBase, Params, load_base

PROSE = (
    "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is named after the engineer Gustave Eiffel, whose "
    "company designed and built the tower from 1887 to 1889. It is one of the most recognizable structures in the world and the most visited "
    "monument with an entrance fee in the world."
)
HUGGING_FACE = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
BASES = ["tiny", "smollm2-135m"]


def save_for_transformers(folder: Path, base: LoadedBase, ids_T: np.ndarray) -> None:
    config = base.config
    fields = {
        "architectures": [config.family],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": dict(config.rope.settings or ()),
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(fields))
    np.save(folder / "ids.npy", ids_T)
    save_file(hugging_face_state(base.params), folder / "model.safetensors", metadata={"format": "pt"})


def hugging_face_state(params: Params) -> dict[str, np.ndarray]:
    state = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["final_norm"]}
    for ours, theirs in HUGGING_FACE.items():
        for layer, weight in enumerate(params["layers"][ours]):
            state[f"model.layers.{layer}.{theirs}.weight"] = np.ascontiguousarray(weight.T)
    return state


def mean_nll(logits_TV: np.ndarray, ids_T: np.ndarray) -> float:
    shifted = logits_TV - logits_TV.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return float(-logprobs[np.arange(len(ids_T) - 1), ids_T[1:]].mean())


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, run_reference: Any) -> Path:
    """Both bases as folders, each with what transformers makes of it."""
    folder = tmp_path_factory.mktemp("bases")
    np.save(folder / "positions.npy", np.arange(2))
    for name in BASES:
        base = load_base(name)
        (folder / name).mkdir()
        save_for_transformers(folder / name, base, np.array(base.tokenizer.encode(PROSE), np.int32))
    run_reference("family_logits.py", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", BASES)
def test_logits_are_those_of_transformers(name: str, reference: Path) -> None:
    base, expected = load_base(name), np.load(reference / name / "logits.npy")
    ids_T = np.load(reference / name / "ids.npy")
    if name == "smollm2-135m":
        assert mean_nll(expected, ids_T) < 2.3  # 1.92; 3.30 when the rows of q and k are left in GGUF's order, which a chat prompt would not show
    ours = np.asarray(forward_logits(base.params, base.config, ids_T))
    assert np.abs(ours - expected).max() <= 1e-4 * np.abs(expected).max()
