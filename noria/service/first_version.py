"""Version 0 of a run: a fresh adapter, or one that starts from a PEFT folder, whose missing modules start fresh."""

from pathlib import Path

import numpy as np

from noria.config import LearnerConfig, RunConfig
from noria.model.config import ModelConfig
from noria.model.export import start_from
from noria.model.lora import MODULES, AdapterState, HostAdapter, fresh_state, initial_adapter, initial_state, trained_modules
from noria.model.weights import LoadedBase
from noria.seeds import derive_seed


def first_state(config: RunConfig, base: LoadedBase, sizes: LearnerConfig, warm_start: Path | None) -> AdapterState:
    """The state of version 0, in the run's rank class. warm_start: a PEFT adapter folder to start from.

    Raises what `model.export.start_from` raises.
    """
    width = sizes.class_of(config.adapter.rank)
    if warm_start is None:
        return initial_state(base.config, config.lora, width, _seed(config))
    return fresh_state(start_from(warm_start, base.config, config.lora, width, _seed(config), base=base.params))


def own_modules(config: RunConfig, base: ModelConfig, params: HostAdapter) -> tuple[str, ...]:
    """The modules that make a version's adapter what it is: those that the run trains, in the order of MODULES.

    Of a run that started from a folder, without those that the folder lacked and that no step has changed since: they do nothing, and an adapter that
    is exported before it was trained has the modules that it came with. params: of the version, in any rank class.
    """
    trained = trained_modules(config.adapter.lora)
    if config.adapter.warm_start is None:
        return trained
    fresh = initial_adapter(base, config.adapter.lora, params["a"][MODULES[0]].shape[-1], _seed(config))
    return tuple(m for m in trained if any(not np.array_equal(params[side][m], fresh[side][m]) for side in ("a", "b"))) or trained


def _seed(config: RunConfig) -> int:
    return derive_seed("adapter", config.seed, bits=63)
