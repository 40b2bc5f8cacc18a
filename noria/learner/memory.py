"""How much memory a pass needs, before anything is allocated: what executors are chosen by. Pure functions, checked against the compiler.

    alive always      base, slots, gradient of the slots
    a packed pass     what score keeps for pull, and what score or pull has beside it
    a walk's visit    the same of one chunk, the path's keys and values, and their gradient

All figures are bytes. The optimizer's moments, which are there whatever runs, count only for what a server can afford.
"""

import os

import jax

from noria.config import LearnerConfig
from noria.errors import ConfigError
from noria.model.attention import SPAN
from noria.model.config import ModelConfig
from noria.model.lora import host_shapes, resident_tops
from noria.rl.packing import ENTRY_CHUNK, MIN_TILES, MicrobatchShape, microbatch_shape
from noria.types import TILE

MIB = 2**20

FLOAT = 4
"""Bytes of a float32."""


def slot_bytes(config: ModelConfig, num_slots: int, width: int, tops: tuple[str, ...] = ()) -> int:
    """The adapters of all slots of a rank class, or their gradients. tops: top modules that there is room for."""
    shapes = host_shapes(config, width, tops)
    return FLOAT * num_slots * sum(layers * rows * columns for leaves in shapes.values() for layers, rows, columns in leaves.values())


def path_bytes(config: ModelConfig, num_blocks: int) -> int:
    """The keys and values of a path of so many blocks; its gradient takes as much."""
    return 2 * FLOAT * config.num_layers * num_blocks * TILE * config.num_kv_heads * config.head_dim


def packed_bytes(config: ModelConfig, shape: MicrobatchShape, *, base: int, slots: int) -> int:
    """The most that a packed pass has alive, the gradient of the slots included. base: of the base's matrices, slots: see `slot_bytes`."""
    return base + 2 * slots + chunk_bytes(config, shape, base=base, slots=slots, has_path=False)


def replay_bytes(config: ModelConfig, shape: MicrobatchShape, num_blocks: int, *, base: int, slots: int, num_constant: int = 0) -> int:
    """The most that a visit of a walk has alive, however many branches the tree has. shape: of its chunks. num_blocks: of the path's axis.
    num_constant: blocks of a constant prefix, which the path's gradient has none of."""
    paths = path_bytes(config, num_blocks) + path_bytes(config, num_blocks - num_constant)
    return base + 2 * slots + paths + chunk_bytes(config, shape, base=base, slots=slots, has_path=True)


def chunk_bytes(config: ModelConfig, shape: MicrobatchShape, *, base: int, slots: int, has_path: bool) -> int:
    """One pass's own: what score keeps, and the most that score or pull has beside it. has_path: it is a chunk of a walk, whose score hands its keys
    and values out."""
    beside = _pull_scratch(config, shape, base=base, slots=slots)
    if has_path:
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        scores = 2 * FLOAT * config.num_heads * shape.num_positions * SPAN * TILE  # of all queries with one span of the path
        of_layer = FLOAT * shape.num_positions * (config.hidden_size + 2 * heads + 4 * kv_heads)
        beside = max(beside, _layer(config, base, slots) + of_layer + scores + path_bytes(config, shape.num_tiles))
    return _kept(config, shape) + beside


def walk_blocks(path_positions: int, shape: MicrobatchShape) -> int:
    """The one size of a learner's paths, so that all walks share their programs: room for a whole chunk behind the longest path."""
    return -(-(path_positions // TILE + shape.num_tiles) // SPAN) * SPAN


def device_bytes() -> int:
    """What the default device has: its own limit, or the machine's memory where it shares that."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    return int(limit) or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def affordable_positions(config: ModelConfig, settings: LearnerConfig, *, base: int, memory: int | None = None) -> int:
    """The longest microbatch, up to `settings.max_positions`, whose passes and visits of walks keep to `settings.memory_mib`.

    Without that setting it is `max_positions`, so that no run's bits depend on how much a machine happens to have. base: of the base's matrices.
    memory: in place of `device_bytes()`. Raises ConfigError: no microbatch keeps to it, or the longest that does leaves out episodes that could have
    been trained, since no path is set aside for them; or, without the setting, the device has too little.
    """
    allowed = settings.memory_mib * MIB or memory or device_bytes()
    first, most = MIN_TILES, settings.max_positions // TILE
    if _needed(config, settings, first, base=base) > allowed:
        raise ConfigError(
            f"the smallest microbatch, of {first * TILE} positions, needs {_needed(config, settings, first, base=base) / MIB:.0f} MiB with base and "
            f"adapters, {allowed / MIB:.0f} are there: lower learner.path_positions, num_slots or rank_classes, or raise learner.memory_mib"
        )
    while first < most:  # the memory grows with the axis
        middle = (first + most + 1) // 2
        first, most = (middle, most) if _needed(config, settings, middle, base=base) <= allowed else (first, middle - 1)
    is_shorter = first * TILE < settings.max_positions
    if is_shorter and (not settings.memory_mib or settings.path_positions < settings.max_positions):
        raise ConfigError(
            f"a microbatch of learner.max_positions = {settings.max_positions} needs "
            f"{_needed(config, settings, settings.max_positions // TILE, base=base) / MIB:.0f} MiB, {allowed / MIB:.0f} are there: set it to "
            f"{first * TILE}, or learner.memory_mib to what it may take and learner.path_positions to {settings.max_positions} for longer episodes"
        )
    return first * TILE


def _needed(config: ModelConfig, settings: LearnerConfig, num_tiles: int, *, base: int) -> int:
    """The most that a learner of these settings has alive with microbatches of so many tiles: the hungriest rank class's pass, and all slots.

    Where there are walks, that is a visit: it needs no less than a packed pass of other runs that goes on between its visits, beside its path.
    """
    shape = microbatch_shape(num_tiles * TILE)
    slots = [slot_bytes(config, settings.num_slots, width, resident_tops(settings)) for width in settings.rank_classes]
    most = packed_bytes(config, shape, base=base, slots=slots[-1])
    if settings.path_positions:
        most = max(most, replay_bytes(config, shape, walk_blocks(settings.path_positions, shape), base=base, slots=slots[-1]))
    return most + 2 * slots[-1] + 4 * sum(slots[:-1])


def _layer_weights(config: ModelConfig) -> int:
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)


def _layer(config: ModelConfig, base: int, slots: int) -> int:
    """One layer's weights and slots, which a scan over layers copies out."""
    return int(base * _layer_weights(config) / config.num_parameters + slots / config.num_layers)


def _kept(config: ModelConfig, shape: MicrobatchShape) -> int:
    """What score keeps for pull: inputs of layers, attention's outputs; and the microbatch itself, its outputs, their cotangents."""
    per_layer = config.hidden_size + config.num_heads * config.head_dim + config.num_heads
    kept = shape.num_positions * (config.num_layers * per_layer + config.hidden_size + 3)
    return FLOAT * (kept + 6 * shape.num_entries + 2 * shape.num_pairs)


def _pull_scratch(config: ModelConfig, shape: MicrobatchShape, *, base: int, slots: int) -> int:
    """What pull has beside it at the most: in a layer, or in the head. Queries, keys, values and their cotangents exist flat and in blocks."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = FLOAT * shape.num_positions * (config.hidden_size + 5 * heads + 8 * kv_heads)
    tile = FLOAT * TILE * (8 * config.intermediate_size + 4 * config.hidden_size)
    head = 4 * FLOAT * ENTRY_CHUNK * config.vocab_size
    return max(_layer(config, base, slots) + layer + tile, head)
