"""`noria bench step`: a training step of the real base, against its matrix products alone in the same run. Decoding: `noria bench sampler`.

What the fraction means: a training step (score and pull) of T positions is made of 2.75 forward passes' layer products (pull recomputes all but the
down projection, and multiplies once by each transposed weight) and three products of the head on its entries. What is missing to 1 is attention,
adapters, norms, and memory traffic.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from noria.bench.ceiling import REPEATS, compare, head_matmul, layer_matmuls
from noria.bench.executors import Subject, pass_gradient, upload
from noria.learner.optimizer import empty_state
from noria.model.placement import BaseParams, place
from noria.model.weights import LoadedBase, load_base
from noria.rl.losses import loss_table
from noria.rl.packing import ENTRY_CHUNK, MicrobatchPlan, PlannedPiece, microbatch_shape, pack
from noria.types import Entries, Piece

FORWARD_PASSES = 2.75
HEAD_PASSES = 3
RANK = 16


def measure(base_name: str = "smollm2-135m") -> dict[str, Any]:
    """Everything, as one JSON-ready object; minutes."""
    loaded = load_base(base_name)
    base = place(loaded.params)
    return {"base": base_name, "train": [_train(loaded, base, positions) for positions in (256, 512)]}


def table(result: dict[str, Any]) -> Table:
    """The measurement for people."""
    shown = Table("work", "size", "per second", "of matmuls alone", title=f"{result['base']}, medians of {REPEATS} pairs")
    for row in result["train"]:
        shown.add_row("train", f"{row['positions']} positions", f"{row['positions_per_s']:.0f} positions", f"{row['fraction_of_matmuls']:.2f}")
    return shown


def _train(loaded: LoadedBase, base: BaseParams, positions: int) -> dict[str, Any]:
    """One microbatch of four causal sequences with an entry on every other position."""
    config, num_slots = loaded.config, 4
    length = positions // 4
    pieces = tuple(PlannedPiece("run", slot, 0, _sequence(length, config.vocab_size, seed=slot)) for slot in range(num_slots))
    microbatch = pack(MicrobatchPlan(microbatch_shape(positions), pieces))
    subject = Subject(config, base.stacked, empty_state(config, num_slots, RANK), jnp.ones(num_slots), loss_table({}, num_slots))
    uploaded, gradient = upload(microbatch), subject.zero_gradient()

    def step() -> None:
        nonlocal gradient
        gradient = jax.block_until_ready(pass_gradient(subject, uploaded, gradient))

    chunks = -(-microbatch.num_entries // ENTRY_CHUNK)
    layers, head = layer_matmuls(base, positions), head_matmul(base, config, ENTRY_CHUNK)

    def ceiling() -> None:
        layers()
        for _ in range(round(chunks * HEAD_PASSES / FORWARD_PASSES)):
            head()

    step()
    ratio = compare(step, ceiling, FORWARD_PASSES)
    return {"positions": positions, "seconds": ratio.seconds, "positions_per_s": positions / ratio.seconds, "fraction_of_matmuls": ratio.fraction}


def _sequence(length: int, vocab_size: int, seed: int) -> Piece:
    rng = np.random.default_rng(seed)
    predict_from = np.arange(0, length - 1, 2, dtype=np.int32)
    count = len(predict_from)
    ids = rng.integers(0, vocab_size, length).astype(np.int32)
    ones, ints = np.ones(count, np.float32), np.zeros(count, np.int32)
    entries = Entries(predict_from, ids[predict_from + 1], ones, -ones, ones, ones, ints, ints)
    return Piece(ids, np.arange(length, dtype=np.int32), np.full(length, length, np.int32), entries)
