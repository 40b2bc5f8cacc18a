"""Builder of small GGUF files with the reference package, and what a right reader makes of them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from noria.model.config import ModelConfig
from noria.model.rope import plain_rope

CONFIG = ModelConfig(
    name="small",
    num_layers=2,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=264,
    rope=plain_rope(10_000.0, 16),
    rms_norm_eps=1e-5,
    max_context=512,
    tie_embeddings=True,
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello"]
KINDS = {name: getattr(gguf.GGMLQuantizationType, name) for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")}


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in of each byte (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    extra = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(extra)) for b in range(256)]


def tokens() -> list[str]:
    """SPECIAL, the bytes, then what MERGES make."""
    return SPECIAL + byte_alphabet() + [merge.replace(" ", "") for merge in MERGES]


def metadata(config: ModelConfig = CONFIG) -> dict[str, Any]:
    """What a file of this model says about itself; change it to make a damaged file."""
    return {
        "general.architecture": "llama",
        "llama.block_count": config.num_layers,
        "llama.context_length": config.max_context,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": 10_000.0,
        "llama.rope.dimension_count": config.head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens(),
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (config.vocab_size - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": 2,
    }


def hugging_face_weights(config: ModelConfig = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under GGUF's names, [out, in], with q and k in Hugging Face's order of rows."""
    rng = np.random.default_rng(seed)
    d, f, n, k = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {"attn_q": (n, d), "attn_k": (k, d), "attn_v": (k, d), "attn_output": (d, n), "ffn_gate": (f, d), "ffn_up": (f, d), "ffn_down": (d, f)}
    weights = {"token_embd.weight": rng.normal(size=(config.vocab_size, d)), "output_norm.weight": rng.normal(size=d)}
    for layer in range(config.num_layers):
        weights |= {f"blk.{layer}.{name}.weight": rng.normal(size=shape) for name, shape in shapes.items()}
        weights |= {f"blk.{layer}.{name}.weight": rng.normal(size=d) for name in ("attn_norm", "ffn_norm")}
    return {name: w.astype(np.float32) for name, w in weights.items()}


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a q or k matrix as llama.cpp's converter lays them out: written with loops, as a reference."""
    rows, half = len(weight), len(weight) // num_heads // 2
    out = np.empty_like(weight)
    for row in range(rows):
        head, inside = divmod(row, 2 * half)
        pair, which = divmod(inside, 2)
        out[row] = weight[head * 2 * half + which * half + pair]
    return out


def write_gguf(path: Path, info: dict[str, Any], tensors: dict[str, np.ndarray], kind_of: Any = lambda name: "F32") -> Path:
    """Write with the reference package. kind_of: tensor name -> name in KINDS; vectors are always F32."""
    writer = gguf.GGUFWriter(path, info["general.architecture"])
    for key, value in info.items():
        if key != "general.architecture":
            _add(writer, key, value)
    for name, tensor in tensors.items():
        kind = KINDS["F32" if tensor.ndim == 1 else kind_of(name)]
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_llama(
    path: Path, *, info: dict[str, Any] | None = None, tensors: dict[str, np.ndarray] | None = None, kind_of: Any = lambda name: "F32"
) -> Path:
    """A whole model file of CONFIG; `tensors` are in Hugging Face's order and are permuted on the way."""
    ours = hugging_face_weights() if tensors is None else tensors
    heads = {"attn_q": CONFIG.num_heads, "attn_k": CONFIG.num_kv_heads}
    laid_out = {name: permuted(w, heads[part]) if (part := name.split(".")[-2]) in heads else w for name, w in ours.items()}
    return write_gguf(path, metadata() if info is None else info, laid_out, kind_of)


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    kinds[type(value)](key, value)
