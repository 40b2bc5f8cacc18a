"""Adapters in and out: PEFT folders, read strictly and written so that PEFT finds every key, and merged Hugging Face folders.

    PEFT folder ── read_peft ─▶ PeftAdapter ── start_from ─▶ a run's first adapter (warm start)
    PEFT folder ◀─ write_peft ── HostAdapter ── write_merged ─▶ Hugging Face folder (base + delta)

What a format cannot say is refused with a reason. Folders are written whole or not at all. PEFT stores lora_A [r, in] and lora_B [out, r], ours
are a [in, r] and b [r, out]; the scale is never folded into either.
Deliberately not here: a run's own committed versions, which have moments and checksums (`adapters/versions.py`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from noria.errors import (
    AdapterFileCorruptError,
    AdapterFormatError,
    ConfigError,
    ModelFileCorruptError,
    ModelFileMissingError,
    ModelUnsupportedError,
    StateConflictError,
)
from noria.model.config import ModelConfig
from noria.model.durable import whole_folder
from noria.model.hf_folder import CONFIG, LAYOUT
from noria.model.hf_writer import METADATA, SHARD_BYTES, Dtype, config_fields, token_fields, write_json, write_tokenizer, write_weights
from noria.model.lora import (
    HEAD,
    MODULES,
    TOP_MODULES,
    VALUE,
    HostAdapter,
    host_shapes,
    initial_adapter,
    misfit,
    resize_rank,
    trained_modules,
    zero_adapter,
)
from noria.model.params import Params
from noria.model.peft_config import CONFIG_FILE, MODULE_PATHS, TENSORS_FILE, Place, place_path, places, read_peft_config, written_fields
from noria.model.safetensors_file import expand, read_safetensors
from noria.model.weights import LoadedBase
from noria.storage import storing
from noria.types import FloatArray, LoraSpec

_PREFIX: Final = r"(?:(?:base_model|model|module|_orig_mod)\.)*"
"""What wrappers put before a name: PEFT itself, the causal language model, data parallelism, compilation."""

_TENSOR: Final = re.compile(_PREFIX + r"(?:layers\.(\d+)\.(\w+\.\w+)|(lm_head))\.lora_([AB])(?:\.([^.]+))?\.weight")
_BASE_COPY: Final = re.compile(_PREFIX + r"(embed_tokens|lm_head)(?:\.base_layer)?\.weight")
_MODULE_AT: Final = {path: module for module, path in MODULE_PATHS.items()}


class PeftAdapter(NamedTuple):
    """An adapter as a PEFT folder has it. params: at its own rank, zero where it has no module. modules: those it has, in the order of MODULES."""

    params: HostAdapter
    lora: LoraSpec
    modules: tuple[str, ...]


def read_peft(folder: Path, config: ModelConfig, base: Params | None = None) -> PeftAdapter:
    """Read a PEFT LoRA folder for a base of shape `config`; float16 and bfloat16 tensors become float32.

    base: the base's weights. PEFT saves a copy of the (un)embedding beside an adapter of it; it must equal the base's, and without `base`, which
    cannot be known, is refused.

    Raises AdapterFormatError (an adapter that noria cannot have, or of another base; the message says why), AdapterFileCorruptError (files missing
    or damaged, tensors missing, left over or not finite).
    """
    fields, path = read_peft_config(folder / CONFIG_FILE, config), folder / TENSORS_FILE
    found: dict[tuple[str, Place], FloatArray] = {}
    for name, tensor in _tensors(path):
        if copy := _BASE_COPY.fullmatch(name):
            _require_copy_of(base, copy[1], tensor, f"{path}: tensor {name!r}")
            continue
        side, place = _slot_of(name, path)
        if (side, place) in found:
            raise AdapterFileCorruptError(f"{path} has more than one lora_{side.upper()} of {place_path(place)}; one adapter was expected")
        _require_fit(tensor, (side, place), config, fields.lora.rank, f"{path}: tensor {name!r}")
        found[side, place] = tensor
    expected = {(side, place) for side in ("a", "b") for place in fields.targets}
    if found.keys() != expected:
        lacks, extra = (
            [f"lora_{side.upper()} of {place_path(p)}" for side, p in sorted(keys)] for keys in (expected - found.keys(), found.keys() - expected)
        )
        raise AdapterFileCorruptError(f"{path} is not what {CONFIG_FILE} says: it lacks {lacks[:3]} and has {extra[:3]}, which no target names")
    targeted = {module for module, _ in fields.targets}
    modules = tuple(module for module in (*MODULES, HEAD) if module in targeted)
    params = zero_adapter(config, fields.lora.rank, targeted.intersection(TOP_MODULES))
    for (side, (module, layer)), tensor in found.items():
        params[side][module][layer] = tensor.T
    return PeftAdapter(params, fields.lora, modules)


def write_peft(
    folder: Path, params: HostAdapter, lora: LoraSpec, config: ModelConfig, *, base_name: str, modules: Sequence[str] | None = None
) -> None:
    """Write an adapter as a PEFT folder, at its own rank.

    params: of any width. base_name: what PEFT is to load it on. modules: those to write, by default the ones that `lora` trains, and the
    unembedding where `params` has one; others must be zero. With a tied base the unembedding's delta is declared as the unembedding's alone. A value
    head stays behind: it is the critic's, and the policy is the same without it.

    Raises AdapterFormatError (params that do not fit the base, or hold what would not be written), StateConflictError (`folder` is not empty).
    """
    own = _at_own_rank(params, lora, config)
    trained = trained_modules(replace(lora, train_unembed=HEAD in own["a"], train_value=False))
    written = tuple(modules if modules is not None else trained)
    if not written or not own["a"].keys() >= set(written):
        raise AdapterFormatError(f"an adapter of modules {list(written)} cannot be written from one that has {list(own['a'])}")
    if left_out := [m for m in own["a"] if m not in written and (own["a"][m].any() or own["b"][m].any())]:
        raise AdapterFormatError(f"the adapter has values in {left_out}, and would be written as one of {list(written)}")
    tensors = {
        f"base_model.model.{place_path(place)}.lora_{side.upper()}.weight": np.ascontiguousarray(own[side][place[0]][place[1]].T)
        for place in places(written, config)
        for side in ("a", "b")
    }
    with whole_folder(_free(folder)) as aside:
        write_json(aside / CONFIG_FILE, written_fields(lora, written, config, base_name))
        save_file(tensors, aside / TENSORS_FILE, METADATA)


def start_from(folder: Path, config: ModelConfig, spec: LoraSpec, width: int, seed: int, *, base: Params | None = None) -> HostAdapter:
    """A run's first adapter from a PEFT folder (warm start), at the width of the run's rank class. base: as in `read_peft`.

    Modules that the run trains and the folder lacks start as `initial_adapter` has them for this seed.

    Raises ConfigError (the run's rank, scale or modules are not the folder's; the message names what to set), AdapterFormatError and
    AdapterFileCorruptError as `read_peft`.
    """
    given = read_peft(folder, config, base)
    if (given.lora.rank, given.lora.scale) != (spec.rank, spec.scale):
        raise ConfigError(
            f"{folder} has rank {given.lora.rank} and scale {given.lora.scale:g}, the run has {spec.rank} and {spec.scale:g}: set adapter.rank = "
            f"{given.lora.rank}, adapter.alpha = {given.lora.alpha:g} and adapter.use_rslora = {str(given.lora.use_rslora).lower()}"
        )
    if untrained := [module for module in given.modules if module not in trained_modules(spec)]:
        switches = [name for name in ("train_attn", "train_mlp", "train_unembed") if getattr(given.lora, name) and not getattr(spec, name)]
        raise ConfigError(
            f"{folder} adapts {', '.join(untrained)}, which the run does not train: set {' and '.join(f'adapter.{s} = true' for s in switches)}"
        )
    fresh, padded = initial_adapter(config, spec, width, seed), resize_rank(given.params, width)
    return {side: {m: (padded if m in given.modules else fresh)[side][m] for m in fresh[side]} for side in fresh}


def write_merged(
    folder: Path, base: LoadedBase, params: HostAdapter, lora: LoraSpec, *, dtype: Dtype = "float32", shard_bytes: int = SHARD_BYTES
) -> None:
    """Write base + delta as a Hugging Face folder that needs no adapter: config, weights, tokenizer.

    The sums are float32 and rounded once. With dtype "bfloat16" they keep 8 bits: a delta below about 1/256 of its weight is lost in part, below
    1/512 wholly (case 49), so that the merged model may answer as the base does; export such an adapter as PEFT. An adapted unembedding of a tied
    base becomes a matrix of its own, and the embedding stays as it was.

    shard_bytes: largest weight file, > 0.

    Raises AdapterFormatError (params that do not fit, a base or tokenizer that the format cannot say), StateConflictError (`folder` is not empty).
    """
    own = _at_own_rank(params, lora, base.config)
    fields = config_fields(base.config, tie_embeddings=base.config.tie_embeddings and HEAD not in own["a"], dtype=dtype)
    with whole_folder(_free(folder)) as aside:
        write_json(aside / CONFIG, fields | token_fields(base))
        write_tokenizer(aside, base)
        write_weights(aside, _merged(base, own, lora.scale), dtype, shard_bytes)


def _free(folder: Path) -> Path:
    """The folder's full path. Raises StateConflictError if something is there."""
    with storing(folder):
        target = folder.resolve()
        is_taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if is_taken:
        raise StateConflictError(f"{target} exists and is not an empty folder; nothing was written: choose another, or remove it")
    return target


def _tensors(path: Path) -> Iterator[tuple[str, FloatArray]]:
    """Every tensor of the file by name, in float32."""
    if not path.exists() and (pickled := path.with_suffix(".bin")).exists():
        raise AdapterFormatError(f"{pickled} is a pickle, which can run code when it is read; save the adapter as {TENSORS_FILE}")
    try:
        for name, tensor in read_safetensors(path).items():
            yield name, expand(tensor)
    except (ModelFileMissingError, ModelFileCorruptError) as error:
        raise AdapterFileCorruptError(f"{path}: {error}") from error
    except ModelUnsupportedError as error:
        raise AdapterFormatError(str(error)) from error


def _slot_of(name: str, path: Path) -> tuple[str, Place]:
    """Which side of which place a tensor is, by its name."""
    match = _TENSOR.fullmatch(name)
    module = match and _MODULE_AT.get(match[2] or match[3])
    if not match or not module:
        known = {
            "lora_embedding": "it adapts the embedding",
            "lora_magnitude": "it belongs to DoRA",
            "modules_to_save": "it replaces a module of the base",
        }
        reason = next((why for part, why in known.items() if part in name), "no module of this kind carries an adapter in noria")
        raise AdapterFormatError(f"{path}: tensor {name!r} cannot be read: {reason}")
    return match[4].lower(), (module, int(match[1] or 0))


def _require_fit(tensor: FloatArray, slot: tuple[str, Place], config: ModelConfig, rank: int, what: str) -> None:
    side, (module, layer) = slot
    num_layers, num_rows, num_columns = host_shapes(config, rank)[side][module]
    if layer >= num_layers or tensor.shape != (num_columns, num_rows):
        raise AdapterFormatError(
            f"{what} has shape {tensor.shape}, and is for another base or rank: at rank {rank}, base {config.name} takes {(num_columns, num_rows)} "
            f"in each of {num_layers} layers"
        )


def _require_copy_of(base: Params | None, module: str, tensor: FloatArray, what: str) -> None:
    if base is None:
        raise AdapterFormatError(f"{what} is a copy of the base's own, which may differ; save the adapter with save_embedding_layers=False")
    own: FloatArray = base["head" if module == "lm_head" and "head" in base else "embed"]
    if not any(np.array_equal(tensor, own.astype(stored).astype(np.float32)) for stored in (np.float32, np.float16, jnp.bfloat16)):
        raise AdapterFormatError(f"{what} is not the base's own: the adapter was made for a base with another {module}")


def _at_own_rank(params: HostAdapter, lora: LoraSpec, config: ModelConfig) -> HostAdapter:
    """The policy's adapter without the padding of its rank class and without a value head.

    Raises AdapterFormatError if it does not fit the base, or is not finite.
    """
    rank_class = params["a"][MODULES[0]].shape[-1]
    problem = misfit(params, config, rank_class, TOP_MODULES)
    if not problem and not all(np.isfinite(leaf).all() for leaves in params.values() for leaf in leaves.values()):
        problem = "it has values that are not finite"
    beyond = slice(lora.rank, None)
    if not problem and any(params["a"][m][:, :, beyond].any() or params["b"][m][:, beyond].any() for m in params["a"]):
        problem = f"it has values beyond rank {lora.rank}"
    if problem or rank_class < lora.rank:
        raise AdapterFormatError(f"the adapter does not fit base {config.name}: {problem or f'its rank is {rank_class}, not {lora.rank}'}")
    return resize_rank({side: {m: leaf for m, leaf in leaves.items() if m != VALUE} for side, leaves in params.items()}, lora.rank)


def _merged(base: LoadedBase, own: HostAdapter, scale: float) -> Iterator[tuple[str, FloatArray]]:
    """(Hugging Face's name, weight with its delta as it is stored there), one at a time."""

    def delta(module: str, layer: int) -> FloatArray:
        product: FloatArray = own["a"][module][layer] @ own["b"][module][layer]
        return product * np.float32(scale)

    tops: dict[str, FloatArray] = {name: base.params[name] for name in base.config.top_shapes}
    if HEAD in own["a"]:
        tops[HEAD] = tops.get(HEAD, tops["embed"]) + delta(HEAD, 0).T
    for name, weight in tops.items():
        yield LAYOUT.name_of(name, -1), weight
    for layer in range(base.config.num_layers):
        for name, stacked in base.params["layers"].items():
            merged = stacked[layer] + delta(name, layer) if name in MODULES else stacked[layer]
            yield LAYOUT.name_of(name, layer), merged.T
