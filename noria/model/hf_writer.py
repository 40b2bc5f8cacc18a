"""Hugging Face folders out: config.json as transformers 5 reads it, weights in one file or in shards with an index, and the tokenizer.

The opposite direction of `model/hf_folder.py`. Deliberately not here: adapters; what is written is a base (`model/export.py` adds the deltas).
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from noria.errors import AdapterFormatError
from noria.model.config import FAMILIES, ModelConfig
from noria.model.hf_folder import INDEX, WEIGHTS
from noria.model.weights import LoadedBase
from noria.text.tokenizer import FastTokenizer
from noria.types import FloatArray

Dtype: TypeAlias = Literal["float32", "bfloat16"]

SHARD_BYTES: Final = 5_000_000_000
"""Largest weight file, unless one tensor is larger: the shards of Hugging Face's own tools."""

METADATA: Final = {"format": "pt"}
"""transformers and PEFT refuse a safetensors file without it."""

_GENERATION_FILE: Final = "generation_config.json"
_TOKENIZER_FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
)


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    """Write a settings file as people read them."""
    path.write_text(json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def config_fields(config: ModelConfig, *, tie_embeddings: bool, dtype: Dtype) -> dict[str, Any]:
    """The fields of config.json, without the tokenizer's.

    tie_embeddings, dtype: of the weights as they are written.

    Raises AdapterFormatError for a model that its family in transformers cannot be.
    """
    family = FAMILIES[config.family]
    has_bias_everywhere = family.reads_attention_bias and config.o_bias
    can_be = (family.has_qkv_bias or has_bias_everywhere, has_bias_everywhere, family.has_qk_norm)
    if (config.qkv_bias, config.o_bias, config.qk_norm) != can_be:
        raise AdapterFormatError(
            f"base {config.name} has q, k, v biases: {config.qkv_bias}, an o bias: {config.o_bias}, head norms: {config.qk_norm}; "
            f"a {config.family} of transformers cannot have them so"
        )
    if config.rope.settings is None:
        raise AdapterFormatError(f"base {config.name} has rotary frequencies that no setting of config.json gives")
    fields = {
        "architectures": [config.family],
        "dtype": dtype,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_context,
        "model_type": family.model_type,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": dict(config.rope.settings),
        "sliding_window": None,
        "tie_word_embeddings": tie_embeddings,
        "vocab_size": config.vocab_size,
    }
    fields |= {"attention_bias": has_bias_everywhere} if family.reads_attention_bias else {}
    return fields | ({"use_sliding_window": False} if family.window_needs_flag else {})


def token_fields(base: LoadedBase) -> dict[str, Any]:
    """The tokenizer's fields of config.json and generation_config.json."""
    end_ids = list(base.tokenizer.end_ids)
    return {"bos_token_id": base.tokenizer.bos_id, "eos_token_id": end_ids[0] if len(end_ids) == 1 else end_ids}


def write_tokenizer(folder: Path, base: LoadedBase) -> None:
    """Write the tokenizer, its chat template and generation_config.json: copies where the base came from a Hugging Face folder.

    Raises AdapterFormatError if the tokenizer cannot be written as a tokenizer.json.
    """
    if base.folder is not None:
        for name in (*_TOKENIZER_FILES, _GENERATION_FILE):
            if (source := base.folder / name).is_file():
                shutil.copyfile(source, folder / name)
    else:
        _save_tokenizer(folder, base)
    if not (folder / _GENERATION_FILE).exists():
        write_json(folder / _GENERATION_FILE, token_fields(base))


def write_weights(folder: Path, tensors: Iterator[tuple[str, FloatArray]], dtype: Dtype, shard_bytes: int) -> None:
    """Write model.safetensors, or, above `shard_bytes`, model-00001-of-0000N.safetensors and so on with their index. Holds one shard in memory."""
    parts: list[tuple[str, ...]] = []
    total_bytes = 0
    for shard in _shards(tensors, np.dtype(jnp.dtype(dtype)), shard_bytes):
        save_file(shard, folder / f"{len(parts)}.part", METADATA)
        parts.append(tuple(shard))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))] if len(parts) > 1 else [WEIGHTS]
    for i, name in enumerate(names):
        (folder / f"{i}.part").rename(folder / name)
    if len(parts) > 1:
        weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def _shards(tensors: Iterator[tuple[str, FloatArray]], dtype: npt.DTypeLike, shard_bytes: int) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Tensors in their order and dtype, as many together as fit."""
    shard: dict[str, npt.NDArray[Any]] = {}
    for name, tensor in tensors:
        stored = np.ascontiguousarray(tensor, dtype)
        if shard and stored.nbytes + sum(other.nbytes for other in shard.values()) > shard_bytes:
            yield shard
            shard = {}
        shard[name] = stored
    yield shard


def _save_tokenizer(folder: Path, base: LoadedBase) -> None:
    """tokenizer.json of a base that did not come as a Hugging Face folder, and what transformers needs beside it."""
    if not isinstance(base.tokenizer, FastTokenizer):
        raise AdapterFormatError(f"the tokenizer of base {base.config.name} cannot be written as a tokenizer.json; export the adapter as PEFT")
    base.tokenizer.save(folder / "tokenizer.json")
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    texts = {token["id"]: token["content"] for token in stored["added_tokens"]}
    ends = {"bos_token": base.tokenizer.bos_id, "eos_token": base.tokenizer.eos_id}
    fields: dict[str, Any] = {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    fields |= {"model_max_length": base.config.max_context} | {key: texts[i] for key, i in ends.items() if i in texts}
    write_json(folder / "tokenizer_config.json", fields)
    if base.chat is not None:
        (folder / "chat_template.jinja").write_text(base.chat.template, encoding="utf-8")
