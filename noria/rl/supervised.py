"""Supervised batches: which examples an optimizer step trains, and their token tree. Pure functions: a resumed run needs no cursor.

    (seed, step) ──batch_indices──▶ examples ──example_tree──▶ TokenTree ──cut──▶ pieces (rl/packing.py)

The tree is that of any batch: examples with a common head share its positions, and an example's entries are its trained tokens. The advantage of an
entry is its example's weight, which is what the cross-entropy loss multiplies by (rl/losses.py).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from noria.rl.credit import unit_weights
from noria.rl.tree import Row, tree_of
from noria.seeds import derive_seed
from noria.types import Denominator, Example, TokenTree


def batch_indices(step: int, *, num_examples: int, batch_size: int, seed: int) -> list[int]:
    """Indices of the examples of optimizer step `step` >= 0: the endless sequence of epochs, each a permutation of its own, in stretches.

    Each epoch visits every example once; a batch may span two. num_examples, batch_size >= 1. The same on every machine and in every version of
    NumPy, whose bit generators' streams are fixed (NEP 19) where its permutations are not.
    """
    positions = range(step * batch_size, (step + 1) * batch_size)
    orders = {epoch: _order(epoch, num_examples, seed) for epoch in {position // num_examples for position in positions}}
    return [int(orders[position // num_examples][position % num_examples]) for position in positions]


def _order(epoch: int, num_examples: int, seed: int) -> npt.NDArray[np.intp]:
    keys = np.random.Philox(derive_seed("examples", seed, epoch)).random_raw(num_examples)
    return np.argsort(keys, kind="stable")


def example_tree(examples: Sequence[Example], denominator: Denominator) -> TokenTree:
    """The token tree of one supervised optimizer step. examples: the batch; the same one may be in it twice, as two episodes.

    weight_M is 1 / the denominator of the whole batch: "tokens" its trained tokens; "episodes" and "groups" give each example the same total weight,
    spread evenly over its trained tokens, all together 1; "none" 1. advantage_M is the example's own weight. Temperature 1, behavior_logprobs 0.
    """
    counts = [int(example.is_trained_T.sum()) for example in examples]
    weights = unit_weights(counts, range(len(examples)), denominator)
    rows = [_row(index, example, weight) for index, (example, weight) in enumerate(zip(examples, weights, strict=True))]
    return tree_of(rows, num_episodes=len(examples))


def _row(index: int, example: Example, weight: float) -> Row:
    predictor_depth_M = np.flatnonzero(example.is_trained_T).astype(np.int32) - 1
    count = len(predictor_depth_M)
    ones, zeros = np.ones(count, np.float32), np.zeros(count, np.float32)
    return Row(
        episode=index,
        path_T=example.ids_T[: predictor_depth_M[-1] + 1],
        predictor_depth_M=predictor_depth_M,
        target_M=example.ids_T[predictor_depth_M + 1],
        temperature_M=ones,
        behavior_logprobs_M=zeros,
        advantage_M=np.full(count, example.weight, np.float32),
        weight_M=np.full(count, weight, np.float32),
        version_M=np.zeros(count, np.int32),
    )
