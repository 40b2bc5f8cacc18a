"""The supervised phase: a run's first versions, made by cross-entropy on examples, on the same learner and with the same moments. Pure functions.

Version v of the phase, 1 <= v <= num_supervised_steps, is made of a batch that depends on the run's seed, v and the file only, so that a restart and
a replay need nothing that was not committed.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from noria.config import RunConfig
from noria.errors import DatasetError, StateConflictError
from noria.learner.batches import BatchPlanner, PlannedBatch
from noria.learner.operations import StepResult
from noria.observe import log_event
from noria.protocols import Tokenizer
from noria.rl.supervised import batch_indices, example_tree
from noria.text.chat import ChatFormat
from noria.text.examples import ExampleFile, read_examples
from noria.types import Example, LossSpec, Piece

log = logging.getLogger(__name__)

SUPERVISED_LOSS: Final = LossSpec(kind="cross_entropy")

NO_EXAMPLES: Final = ExampleFile(())
"""Of a run without a supervised phase, or whose phase is over."""


@dataclass(frozen=True, slots=True)
class SupervisedBatch:
    """Examples, ready to train. epoch: of the first of them, from 0. num_positions_unshared: of the same examples laid out one by one."""

    planned: PlannedBatch
    num_examples: int
    epoch: int
    num_positions_unshared: int

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What the learner visits one after another."""
        return self.planned.parts


def load_examples(
    config: RunConfig, tokenizer: Tokenizer, chat: ChatFormat | None, *, folder: Path, max_positions: int, sha256: str | None = None
) -> ExampleFile:
    """The examples of the run's supervised phase, none if it has no such phase. folder: where the run file's relative paths start.
    max_positions: of the longest sequence that the learner trains.

    sha256: of the file that the run was created with; None for a new run, and for one of a release that did not record it.

    Raises DatasetError (see `text.examples.read_examples`), StateConflictError if it is another file than the run was created with: its versions
    would be made of other examples, without a word.
    """
    if config.supervised is None:
        return NO_EXAMPLES
    path = folder / config.supervised.file
    read = read_examples(path, tokenizer, chat, max_positions=max_positions, too_long=config.supervised.too_long)
    if sha256 not in (None, read.sha256):
        raise StateConflictError(
            f"{path} is not the file that run {config.name} was started with (SHA-256 {read.sha256[:12]}..., it was {sha256[:12]}...): put that file "
            "back, or train a run of another name from the start"
        )
    counts = {"examples": len(read.examples), "skipped": read.num_skipped, "truncated": read.num_truncated}
    level = logging.WARNING if read.num_skipped or read.num_truncated else logging.INFO
    log_event(log, level, "examples read", run_id=config.name, file=str(path), **counts)
    return read


def prepare_examples(examples: Sequence[Example], config: RunConfig, version: int, planner: BatchPlanner) -> SupervisedBatch:
    """The batch that makes `version` of the run, as the learner takes it (with SUPERVISED_LOSS and `config.supervised_optimizer`).

    examples: all of the file. version: 1 to config.num_supervised_steps. planner: the learner's own. Raises TreeTooLargeError: examples that were
    read for a learner of longer sequences.
    """
    assert config.supervised is not None
    assert 1 <= version <= config.supervised.steps
    if not examples:
        raise DatasetError(f"run {config.name} has no examples to make version {version} of")
    size, step = config.supervised.examples_per_batch, version - 1
    chosen = [examples[i] for i in batch_indices(step, num_examples=len(examples), batch_size=size, seed=config.seed)]
    tree = example_tree(chosen, config.algorithm.denominator)
    unshared = sum(int(example.is_trained_T.nonzero()[0][-1]) for example in chosen)
    return SupervisedBatch(planner.plan(tree), len(chosen), step * size // len(examples), unshared)


def supervised_metrics(batch: SupervisedBatch, result: StepResult) -> dict[str, float]:
    """What is stored with the version that a step of the phase made: plain numbers."""
    return {
        **result.metrics,
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        "num_examples": batch.num_examples,
        "epoch": batch.epoch,
        "num_positions": result.num_positions,
        "num_positions_unshared": batch.num_positions_unshared,
        "device_s": result.device_s,
    }
