"""PEFT's adapter_config.json: what it says of an adapter that noria can have, and a reason for everything that it cannot.

Read strictly. A setting that changes what the tensors mean and that noria does not have is refused by name; so is a setting that is not known
here, unless it is off: newer versions of PEFT add settings, and ignoring one would give another model without a word.

    place     (module, layer): one matrix that carries a delta; the unembedding is ("head", 0)
"""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from noria.errors import AdapterFileCorruptError, AdapterFormatError
from noria.model.config import ModelConfig
from noria.model.hf_folder import LAYOUT
from noria.model.lora import HEAD, MODULES
from noria.model.name_pattern import PatternError, name_matcher
from noria.plain_json import parse_json
from noria.types import LoraSpec

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"

MODULE_PATHS: Final = {m: LAYOUT.in_layer[m].removesuffix(".weight") for m in MODULES} | {HEAD: "lm_head"}
"""Hugging Face's name of each module, within its layer; the same in every family."""

Place: TypeAlias = tuple[str, int]

_PEFT_RANK, _PEFT_ALPHA = 8, 8
"""PEFT's defaults, which stand where the file leaves them out."""

_WITHOUT_MEANING: Final = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),  # whose adapter, and of what
        *("lora_dropout", "megatron_core", "qalora_group_size"),  # of training, or of a method that is off
        *("corda_config", "eva_config", "loftq_config", "lora_ga_config"),  # of an initialization, see `_INITIALIZATIONS`
    )
)
_READ_HERE: Final = frozenset(
    (
        *("peft_type", "r", "lora_alpha", "use_rslora", "init_lora_weights", "rank_pattern", "alpha_pattern"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    )
)
_INITIALIZATIONS: Final = (None, True, False, "gaussian", "eva", "orthogonal")
"""Those that leave the base as it is. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change it, so that their adapters belong to another base."""

_REASONS: Final = {
    "alora_invocation_tokens": "it acts on part of a sequence only",
    "bias": "it trains biases of the base",
    "ensure_weight_tying": "it adapts the embedding together with the unembedding",
    "fan_in_fan_out": "its matrices are transposed, for a model of another kind",
    "layer_replication": "it repeats layers of the base",
    "lora_bias": "its deltas have biases",
    "modules_to_save": "it replaces whole modules of the base",
    "target_parameters": "it adapts parameters that are not linear layers",
    "trainable_token_indices": "it replaces rows of the embedding",
    "use_dora": "its deltas have magnitudes (DoRA)",
}


class PeftConfig(NamedTuple):
    """What the file says. lora: the adapter's shape; targets: every place that it names."""

    lora: LoraSpec
    targets: frozenset[Place]


def read_peft_config(path: Path, config: ModelConfig) -> PeftConfig:
    """Read adapter_config.json for the given base.

    Raises AdapterFileCorruptError (missing, unreadable, values of a wrong kind), AdapterFormatError (anything noria cannot have; the message says
    which setting and why).
    """
    fields = _read_fields(path)
    if (kind := fields.get("peft_type")) != "LORA":
        raise AdapterFormatError(f"{path}: peft_type is {kind!r}; noria reads 'LORA'")
    for name in sorted(fields.keys() - _WITHOUT_MEANING - _READ_HERE):
        if fields[name] not in (None, False, 0, "", "none", [], {}):
            reason = _REASONS.get(name, "noria does not know this setting, and it is not off")
            raise AdapterFormatError(f"{path}: {name} is {fields[name]!r}, which noria cannot have: {reason}")
    if (start := fields.get("init_lora_weights", True)) not in _INITIALIZATIONS:
        raise AdapterFormatError(
            f"{path}: init_lora_weights is {start!r}, which may have changed the base's own weights; save the adapter for the unchanged base "
            "(PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=...))"
        )
    targets = _targets(fields, config, path)
    modules = {module for module, _ in targets}
    return PeftConfig(_lora(fields, modules, path), targets)


def place_path(place: Place) -> str:
    """Hugging Face's name of a place: `model.layers.3.self_attn.q_proj`, or `lm_head`."""
    module, layer = place
    return LAYOUT.name_of(module, -1 if module == HEAD else layer).removesuffix(".weight")


def places(modules: Iterable[str], config: ModelConfig) -> list[Place]:
    """Every place of some modules."""
    return [(module, layer) for module in modules for layer in range(1 if module == HEAD else config.num_layers)]


def written_fields(lora: LoraSpec, modules: Iterable[str], config: ModelConfig, base_name: str) -> dict[str, Any]:
    """What adapter_config.json says of an adapter with these modules, so that PEFT and every server that reads its format agree on it."""
    targets = sorted(MODULE_PATHS[module].rsplit(".", 1)[-1] for module in modules)
    fields: dict[str, Any] = {
        "alpha_pattern": {},
        "base_model_name_or_path": base_name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "rank_pattern": {},
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": lora.use_rslora,
    }
    is_tied_head = HEAD in modules and config.tie_embeddings
    return fields | ({"ensure_weight_tying": False} if is_tied_head else {})  # the delta is the unembedding's alone


def _read_fields(path: Path) -> dict[str, Any]:
    try:
        fields = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterFileCorruptError(f"cannot read {path}: {error}") from error
    if not isinstance(fields, dict):
        raise AdapterFileCorruptError(f"{path} holds {type(fields).__name__}, expected an object")
    return fields


def _lora(fields: dict[str, Any], modules: set[str], path: Path) -> LoraSpec:
    rank, alpha, use_rslora = fields.get("r", _PEFT_RANK), fields.get("lora_alpha", _PEFT_ALPHA), fields.get("use_rslora", False)
    if type(rank) is not int or rank < 1:
        raise AdapterFileCorruptError(f"{path}: r is {rank!r}, expected a whole number >= 1")
    if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise AdapterFileCorruptError(f"{path}: lora_alpha is {alpha!r}, expected a number > 0")
    if type(use_rslora) is not bool:
        raise AdapterFileCorruptError(f"{path}: use_rslora is {use_rslora!r}, expected true or false")
    for name, common in (("rank_pattern", rank), ("alpha_pattern", alpha)):
        pattern = fields.get(name) or {}
        if not isinstance(pattern, dict):
            raise AdapterFileCorruptError(f"{path}: {name} is {pattern!r}, expected an object")
        if others := {key: value for key, value in pattern.items() if value != common}:
            raise AdapterFormatError(
                f"{path}: {name} is {others}, beside {common}; an adapter in noria has one rank and one scale for all its modules"
            )
    attention, mlp = (bool(modules.intersection(part)) for part in (MODULES[:4], MODULES[4:]))
    return LoraSpec(rank, float(alpha), train_attn=attention, train_mlp=mlp, use_rslora=use_rslora, train_unembed=HEAD in modules)


def _targets(fields: dict[str, Any], config: ModelConfig, path: Path) -> frozenset[Place]:
    """The places that target_modules names, as PEFT matches them (`check_target_module_exists`), less those of exclude_modules."""
    wanted, layers = fields.get("target_modules"), fields.get("layers_to_transform")
    if isinstance(wanted, str) and wanted.lower() == "all-linear":
        named = places(MODULES, config)
    else:
        named = _named(wanted, places(MODULE_PATHS, config), path)
    if isinstance(wanted, list) and (strange := [t for t in wanted if not _named([t], named, path)]):
        raise AdapterFormatError(
            f"{path}: target_modules names {strange}, which noria cannot adapt in base {config.name}; it adapts {', '.join(MODULE_PATHS.values())}"
        )
    if layers not in (None, []):
        chosen = layers if isinstance(layers, list) else [layers]
        named = [place for place in named if place_path(place) in (wanted or ()) or (place[0] != HEAD and place[1] in chosen)]
    if excluded := fields.get("exclude_modules"):
        left_out = set(_named(excluded, named, path))
        named = [place for place in named if place not in left_out]
    targets = frozenset(named)
    for module in MODULES:
        if 0 < (count := sum(m == module for m, _ in targets)) < config.num_layers:
            raise AdapterFormatError(
                f"{path}: adapts {module!r} in {count} of {config.num_layers} layers; an adapter in noria has every layer or none"
            )
    if not targets:
        raise AdapterFormatError(f"{path}: target_modules is {wanted!r}, which names no module of base {config.name}")
    return targets


def _named(wanted: Any, among: list[Place], path: Path) -> list[Place]:
    """The places that are named: a string is an expression for the whole name; a list has names, or ends of names."""
    if isinstance(wanted, str):
        try:
            matches = name_matcher(wanted)
            return [place for place in among if matches(place_path(place))]
        except PatternError as error:
            raise AdapterFormatError(f"{path}: modules are named by {_short(wanted)}: {error}; list the modules' names instead") from error
        except re.error as error:
            raise AdapterFileCorruptError(f"{path}: {_short(wanted)} is not a regular expression: {error}") from error
    if not isinstance(wanted, list) or not all(isinstance(item, str) for item in wanted):
        raise AdapterFileCorruptError(f"{path}: modules are named by {wanted!r}, expected a list of names or one regular expression")
    ends = tuple(f".{item}" for item in wanted)
    return [place for place in among if f".{place_path(place)}".endswith(ends)]


def _short(pattern: str, limit: int = 80) -> str:
    return repr(pattern if len(pattern) <= limit else f"{pattern[:limit]}...")
