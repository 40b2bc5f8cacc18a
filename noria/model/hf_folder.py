"""Hugging Face folders: what config.json means, and where each weight lies in one or several safetensors files.

    config.json                                      architecture, shape, rotary positions (both spellings)
    model.safetensors                                all tensors, or
    model.safetensors.index.json + its shards        {"weight_map": {tensor: file}}

Whatever noria does not implement is refused by name. A field that is left out means what it means to transformers, or is refused.
Deliberately not here: tokenizers and chat templates (`text/tokenizer_files.py`), writing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from noria.errors import ModelFileCorruptError, ModelFileMissingError, ModelUnsupportedError
from noria.model.config import FAMILIES, Family, ModelConfig
from noria.model.params import Layout, Params, StoredTensor, load_params
from noria.model.rope import read_rope, read_settings
from noria.model.safetensors_file import SafeTensor, expand, read_safetensors
from noria.plain_json import parse_json

LAYOUT: Final = Layout(
    layer="model.layers.{}.",
    in_layer={
        "attn_norm": "input_layernorm.weight",
        "q": "self_attn.q_proj.weight",
        "k": "self_attn.k_proj.weight",
        "v": "self_attn.v_proj.weight",
        "o": "self_attn.o_proj.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        "gate": "mlp.gate_proj.weight",
        "up": "mlp.up_proj.weight",
        "down": "mlp.down_proj.weight",
        "q_bias": "self_attn.q_proj.bias",
        "k_bias": "self_attn.k_proj.bias",
        "v_bias": "self_attn.v_proj.bias",
        "o_bias": "self_attn.o_proj.bias",
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
    },
    top={"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"},
)
CONFIG: Final = "config.json"
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

_COMPUTED: Final = ".rotary_emb.inv_freq"  # a buffer that old checkpoints carry; its numbers follow from the configuration
_DEFAULT_EPS: Final = 1e-6  # of transformers, for every family
_EXPERT_KEYS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "num_experts_per_tok")


def read_config(folder: Path, name: str) -> ModelConfig:
    """The configuration that config.json states. name: for messages.

    Raises ModelFileMissingError, ModelFileCorruptError (no JSON object, a field missing, of the wrong type or out of range), ModelUnsupportedError
    (another architecture, activation, RoPE type, a quantization, attention windows, experts, biases in the MLP).
    """
    fields = _Fields(read_json(folder / CONFIG), str(folder / CONFIG))
    name_of_family = _family(fields)
    family = FAMILIES[name_of_family]
    _refuse_extras(fields)
    hidden_size, num_heads, max_context = (fields.integer(k) for k in ("hidden_size", "num_attention_heads", "max_position_embeddings"))
    _refuse_windows(fields, family, max_context)
    head_dim = fields.integer("head_dim", family.head_dim, derived=hidden_size // max(num_heads, 1))
    has_bias = fields.flag("attention_bias")
    if has_bias and not family.reads_attention_bias:
        raise ModelUnsupportedError(f"{fields.source}: attention_bias is true, which {name_of_family} does not have")
    return ModelConfig(
        name=name,
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", family.num_kv_heads, derived=num_heads),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        rope=read_rope(read_settings(fields.values, source=fields.source), head_dim, source=fields.source),
        rms_norm_eps=fields.number("rms_norm_eps", _DEFAULT_EPS),
        max_context=max_context,
        tie_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=family.has_qkv_bias or has_bias,
        o_bias=has_bias,
        qk_norm=family.has_qk_norm,
        family=name_of_family,
    )


def read_params(folder: Path, config: ModelConfig) -> Params:
    """All weights, as float32.

    Raises ModelFileMissingError (no weights, a shard missing), ModelFileCorruptError (a damaged file or index, a tensor missing, of the wrong shape
    or not finite), ModelUnsupportedError (a dtype that noria does not read, a tensor that it would ignore).
    """
    tensors = {name: tensor for name, tensor in _read_tensors(folder).items() if not name.endswith(_COMPUTED)}
    if config.tie_embeddings and (head := tensors.pop(LAYOUT.top["head"], None)) is not None:
        embed = tensors.get(LAYOUT.top["embed"])
        if embed is None or head.shape != embed.shape or not np.array_equal(expand(head), expand(embed)):
            raise ModelFileCorruptError(
                f"{folder} has a {head.name} that differs from the embeddings, which config.json says it is tied to; set tie_word_embeddings to false"
            )
    stored = {name: StoredTensor(tensor.shape, partial(expand, tensor)) for name, tensor in tensors.items()}
    return load_params(config, LAYOUT, stored, source=str(folder))


def is_complete(folder: Path) -> bool:
    """Whether the files that the folder itself asks for are all there. Raises ModelFileCorruptError for an index that cannot be read."""
    if not (folder / CONFIG).is_file():
        return False
    if (folder / WEIGHTS).is_file():
        return True
    return (folder / INDEX).is_file() and all((folder / file).is_file() for file in read_index(folder).values())


def read_index(folder: Path) -> dict[str, str]:
    """File of each tensor, by the index. Raises ModelFileMissingError, ModelFileCorruptError."""
    shards = read_json(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(file, str) and Path(file).name == file for file in shards.values()):
        raise ModelFileCorruptError(f"{folder / INDEX} has no weight_map of tensor names to files of its folder; download it again")
    return shards


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelFileMissingError, ModelFileCorruptError."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFileMissingError(f"{path} is missing; a model folder has {CONFIG}, safetensors files and a tokenizer") from error
    except (OSError, ValueError) as error:
        raise ModelFileCorruptError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileCorruptError(f"{path} is no JSON object")
    return value


def _read_tensors(folder: Path) -> dict[str, SafeTensor]:
    """Every tensor of the folder; what is in both forms is read from the single file, as transformers does."""
    if (folder / WEIGHTS).is_file():
        return read_safetensors(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        raise ModelFileMissingError(f"{folder} has neither {WEIGHTS} nor {INDEX}; noria reads no pickled weights: save the model as safetensors")
    file_of = read_index(folder)
    shards = {file: read_safetensors(folder / file) for file in sorted(set(file_of.values()))}
    stored = {(name, file) for file, shard in shards.items() for name in shard}
    if wrong := sorted(stored ^ set(file_of.items())):
        name, file = wrong[0]
        raise ModelFileCorruptError(f"{folder / INDEX} and {file} disagree on tensor {name!r}; download them again")
    return {name: shards[file][name] for name, file in file_of.items()}


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of config.json. Each raises ModelFileCorruptError for a value of another type, and for null where null means nothing."""

    values: Mapping[str, Any]
    source: str

    def integer(self, key: str, default: int | None = None, *, derived: int | None = None) -> int:
        """default: where it is absent. derived: where it is absent without a default; so it is where null has the same meaning."""
        value = self.values.get(key, default)
        return int(self._typed(key, derived if value is None and default is None else value, (int,), "an integer"))

    def number(self, key: str, default: float) -> float:
        return float(self._typed(key, self.values.get(key, default), (int, float), "a number"))

    def flag(self, key: str) -> bool:
        """false where it is absent."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise ModelFileCorruptError(f"{self.source}: {key} is {value!r}, expected true or false")
        return value

    def _typed(self, key: str, value: Any, kinds: tuple[type, ...], expected: str) -> Any:
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ModelFileCorruptError(f"{self.source}: {key} is {value!r}, expected {expected}")
        return value


def _family(fields: _Fields) -> str:
    """The architecture, or where config.json names none, that of its model_type."""
    named = fields.values.get("architectures") or [name for name, f in FAMILIES.items() if f.model_type == fields.values.get("model_type")]
    if not isinstance(named, list) or len(named) != 1 or named[0] not in FAMILIES:
        kind = fields.values.get("model_type")
        raise ModelUnsupportedError(f"{fields.source}: architectures {named!r}, model_type {kind!r}; noria reads {', '.join(FAMILIES)}")
    return str(named[0])


def _refuse_extras(fields: _Fields) -> None:
    values = fields.values
    if values.get("quantization_config"):
        how = values["quantization_config"]
        raise ModelUnsupportedError(f"{fields.source}: quantized weights ({how!r}); noria reads float32, float16, bfloat16, and quantized GGUF files")
    if (activation := values.get("hidden_act", "silu")) != "silu":
        raise ModelUnsupportedError(f"{fields.source}: hidden_act {activation!r}; noria reads 'silu'")
    if fields.flag("mlp_bias"):
        raise ModelUnsupportedError(f"{fields.source}: mlp_bias is true; noria reads biases of attention only")
    if expert_key := next((key for key in _EXPERT_KEYS if values.get(key)), None):
        raise ModelUnsupportedError(f"{fields.source}: {expert_key} is {values[expert_key]!r}; noria reads dense models, no mixtures of experts")


def _refuse_windows(fields: _Fields, family: Family, max_context: int) -> None:
    """Attention is full in every layer, or the model is refused."""
    kinds = fields.values.get("layer_types") or []
    if fields.flag("use_sliding_window") or not isinstance(kinds, list) or set(map(str, kinds)) - {"full_attention"}:
        raise ModelUnsupportedError(f"{fields.source}: sliding windows (use_sliding_window, layer_types); noria reads full attention in every layer")
    if family.window_needs_flag or fields.values.get("sliding_window", family.sliding_window) is None:  # null: no window
        return
    window = fields.integer("sliding_window", family.sliding_window)
    if window < max_context:
        absent = "" if "sliding_window" in fields.values else ", which it is where the file states none (null says that there is no window),"
        raise ModelUnsupportedError(
            f"{fields.source}: sliding_window {window}{absent} is smaller than max_position_embeddings {max_context}; noria reads full attention. "
            "Lower max_position_embeddings to the window in a copy of the file if your texts fit in it"
        )
