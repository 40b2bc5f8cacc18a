"""What the sampler is measured on: the workloads that `noria bench sampler` and its peers share, with prompts and adapters. No engine, no clock.

    workload      prompts x samples of each, ids a prompt, new tokens a sample, adapters (lane i uses adapter i modulo their number)
    batches       1, 8, 32, 64 prompts of 64 ids, 64 new tokens each
    group         4 prompts of 512 ids x 8 samples x 32 new tokens
    adapters      32 prompts of 32 ids, 32 new tokens each, with 1, 4, 32 adapters of rank 8 and 64
    vllm          batch 32 without adapters, and with 4 of rank 8: 8 lanes each

Every sample has exactly `answer` new tokens: end of text ends nothing, on either side. Every round of a workload has prompts of its own, so that no
cache carries over from one repeat to the next; within a round, samples of one prompt may share whatever a system can share. Prompts are random ids
from FIRST_ID on, and cost what any text costs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from noria.model.config import ModelConfig
from noria.model.lora import HostAdapter, initial_adapter
from noria.sampler.runner import Shapes
from noria.types import Ids, LoraSpec

FIRST_ID: Final = 20
"""Ids below it are special in SmolLM2's vocabulary."""

ADAPTER_SIZE: Final = 0.01
"""Standard deviation of an adapter's b: large enough to change what is sampled."""


@dataclass(frozen=True, slots=True)
class Workload:
    """num_prompts different prompts of `prompt` ids, `members` samples of each, `answer` new tokens per sample, no more and no fewer.

    num_adapters: 0 for the base alone; else lane i uses adapter i % num_adapters, all of this rank. top_k, top_p: of every lane.
    """

    name: str
    num_prompts: int
    prompt: int
    members: int
    answer: int
    num_adapters: int = 0
    rank: int = 8
    top_k: int = 0
    top_p: float = 1.0

    @property
    def num_lanes(self) -> int:
        """Samples under way at once."""
        return self.num_prompts * self.members

    @property
    def num_tokens(self) -> int:
        """New tokens of all samples: what tokens/s count."""
        return self.num_lanes * self.answer

    @property
    def spec(self) -> LoraSpec:
        """Of its adapters."""
        return LoraSpec(self.rank, 2.0 * self.rank)

    def prompts(self, round_number: int, config: ModelConfig) -> list[Ids]:
        """The round's different prompts, each for `members` samples."""
        rng = np.random.default_rng([round_number, self.num_prompts, self.prompt])
        ids = rng.integers(FIRST_ID, config.vocab_size, (self.num_prompts, self.prompt))
        return [tuple(row) for row in ids.tolist()]


@dataclass(frozen=True, slots=True)
class Sizes:
    """All workloads of one run of the bench, and the base that they run on.

    publishing: decoded with and without a publish every `publish_every` steps. beside_training: decoded alone and beside the learner, which trains
    groups of (prompt, answer, members) on axes of up to max_positions. long_*: episodes, positions of each and turns of each.
    shapes: of the sampler's programs, None for a server's own.
    """

    base: str
    shapes: Shapes | None
    batches: tuple[Workload, ...]
    group: Workload
    adapters: tuple[Workload, ...]
    free: Workload
    publishing: Workload
    publish_every: int
    beside_training: Workload
    trained: tuple[int, int, int]
    max_positions: int
    long_episodes: int
    long_context: int
    long_turns: int

    @property
    def batch32(self) -> Workload:
        """The batch of the ratios: 32 lanes, or as many as the quick sizes have."""
        return next(batch for batch in self.batches if batch.name == "batch 32")

    @property
    def constrained(self) -> Workload:
        """`free`, with ids left out of every lane's draw."""
        return replace(self.free, name="constrained", top_k=50, top_p=0.9)

    @property
    def vllm(self) -> tuple[Workload, Workload]:
        """Batch 32 without adapters, and with 4 of rank 8."""
        return self.batch32, replace(self.batch32, name="batch 32, 4 adapters", num_adapters=4, rank=8)

    @property
    def rank_classes(self) -> tuple[int, ...]:
        """Widths of the sampler's slots."""
        return tuple(sorted({workload.rank for workload in self.adapters}))


def _batches(sizes: tuple[int, ...], prompt: int, answer: int) -> tuple[Workload, ...]:
    return tuple(Workload(f"batch {size}", size, prompt, 1, answer) for size in sizes)


def _adapters(lanes: int, prompt: int, answer: int, ranks: tuple[int, ...]) -> tuple[Workload, ...]:
    return tuple(Workload(f"{n} adapters of rank {r}", lanes, prompt, 1, answer, num_adapters=n, rank=r) for r in ranks for n in (1, 4, 32))


FULL: Final = Sizes(
    base="smollm2-135m",
    shapes=None,
    batches=_batches((1, 8, 32, 64), 64, 64),
    group=Workload("group", 4, 512, 8, 32),
    adapters=_adapters(32, 32, 32, (8, 64)),
    free=Workload("free", 32, 32, 1, 32),
    publishing=Workload("publishing", 32, 32, 1, 104, num_adapters=1),
    publish_every=50,
    beside_training=Workload("beside training", 8, 64, 1, 64, num_adapters=1),
    trained=(256, 32, 8),
    max_positions=512,
    long_episodes=16,
    long_context=16_384,
    long_turns=3,
)
"""What is compared."""

QUICK: Final = Sizes(
    base="tiny",
    shapes=Shapes(lanes=(32,), rows=(16,)),
    batches=_batches((1, 32), 16, 12),
    group=Workload("group", 2, 48, 4, 8),
    adapters=_adapters(32, 16, 8, (8,)),
    free=Workload("free", 32, 16, 1, 8),
    publishing=Workload("publishing", 32, 16, 1, 24, num_adapters=1),
    publish_every=10,
    beside_training=Workload("beside training", 8, 16, 1, 24, num_adapters=1),
    trained=(48, 8, 4),
    max_positions=128,
    long_episodes=16,
    long_context=512,
    long_turns=3,
)
"""Sizes that only show that everything runs."""


def adapters_of(workload: Workload, config: ModelConfig, *, first_seed: int = 1) -> Iterator[HostAdapter]:
    """The workload's adapters, one after another: those of one rank are the same whatever the workload, and none of their deltas is zero."""
    for seed in range(first_seed, first_seed + workload.num_adapters):
        adapter, rng = initial_adapter(config, workload.spec, workload.rank, seed), np.random.default_rng(seed)
        for leaf in adapter["b"].values():
            leaf[...] = rng.normal(0, ADAPTER_SIZE, leaf.shape)
        yield adapter
