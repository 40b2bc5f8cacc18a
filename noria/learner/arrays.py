"""Arrays that callers bring, made exact: one dimension, the dtype that the learner's own have, every number as it was. Or refused, by name.

A stray dtype is no style: a neighbour's column, or a whole program, would take it over. Pure NumPy; any thread. Deliberately not here: which numbers
make sense to a learner (`learner/checks.py`).

    M entry   T position   N node
"""

from dataclasses import fields, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from noria.errors import InvalidRequestError
from noria.types import Entries, Piece, TokenTree

_FLOATS: Final = ("temperature_M", "behavior_logprobs_M", "advantage_M", "weight_M")
"""Fields of Entries that are float32; all others, and those of pieces and trees, are int32."""


def exact(name: str, given: object, dtype: npt.DTypeLike, length: int | None = None) -> npt.NDArray[Any]:
    """`given` as a one-dimensional array of `dtype`: itself, if it is one. length: that it must have, if there is one.

    Raises InvalidRequestError, which says what was there: no numbers, another number of dimensions or of numbers, integers or truths that would not
    be the same, finite floats that would be infinite. A NaN stays one: a loss that trains it says so.
    """
    try:
        array = np.asarray(given)
    except (ValueError, TypeError) as error:  # a ragged list
        raise InvalidRequestError(f"{name} is no array: {error}") from error
    if array.dtype.kind not in "biuf":
        raise InvalidRequestError(f"{name} must be numbers, got {array.dtype} ({type(given).__name__})")
    if array.ndim != 1:
        raise InvalidRequestError(f"{name} must have one dimension, got shape {array.shape}")
    if length is not None and len(array) != length:
        raise InvalidRequestError(f"{name} has {len(array)} numbers, {length} are needed")
    if array.dtype == dtype:
        return array
    with np.errstate(all="ignore"):  # what does not survive is found below
        made: npt.NDArray[Any] = array.astype(dtype)
    survives = np.isfinite(made) | ~np.isfinite(array) if made.dtype.kind == "f" else made == array
    if not survives.all():
        raise InvalidRequestError(f"{name} must be {made.dtype}, which {array[np.argmin(survives)]} ({array.dtype}) is not")
    return made


def is_exact(array: object, dtype: npt.DTypeLike, length: int | None = None) -> bool:
    """Whether `exact` would return it as it is."""
    return isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == 1 and length in (None, len(array))


def entry_dtype(field: str) -> type[np.float32] | type[np.int32]:
    """Of a field of Entries."""
    return np.float32 if field in _FLOATS else np.int32


def exact_entries(entries: object) -> Entries:
    """Entries of one length, their dtypes exact. Raises InvalidRequestError: they are not."""
    if not isinstance(entries, Entries):
        raise InvalidRequestError(f"entries must be Entries, got {type(entries).__name__}")
    targets = exact("entries.target_M", entries.target_M, np.int32)
    return Entries(**{f.name: exact(f"entries.{f.name}", getattr(entries, f.name), entry_dtype(f.name), len(targets)) for f in fields(Entries)})


def exact_piece(piece: object) -> Piece:
    """A piece, its dtypes exact. Raises InvalidRequestError: it is none."""
    if not isinstance(piece, Piece):
        raise InvalidRequestError(f"a batch must be a TokenTree, Pieces or a PlannedBatch, got {type(piece).__name__} in place of a Piece")
    ids_T = exact("ids_T", piece.ids_T, np.int32)
    depth_T, end_T = (exact(name, getattr(piece, name), np.int32, len(ids_T)) for name in ("depth_T", "end_T"))
    return Piece(ids_T, depth_T, end_T, exact_entries(piece.entries))


def exact_tree(tree: TokenTree) -> TokenTree:
    """A tree, its dtypes exact. Raises InvalidRequestError: no depth-first tree, entries of a sequence apart, one that is predicted from nowhere."""
    ids_T = exact("ids_T", tree.ids_T, np.int32)
    made: dict[str, Any] = {name: exact(name, getattr(tree, name), np.int32, len(ids_T)) for name in ("depth_T", "end_T")}
    starts_N = exact("node_start_N", tree.node_start_N, np.int32)
    made |= {name: exact(name, getattr(tree, name), np.int32, len(starts_N)) for name in ("node_stop_N", "node_parent_N")}
    exacted = replace(tree, ids_T=ids_T, node_start_N=starts_N, entries=exact_entries(tree.entries), **made)
    if problem := _misgrown(exacted):
        raise InvalidRequestError(f"a batch is no depth-first tree: {problem}")
    return exacted


def _misgrown(tree: TokenTree) -> str | None:
    """What keeps a tree from being one."""
    start_N, stop_N, parent_N, entries = tree.node_start_N, tree.node_stop_N, tree.node_parent_N, tree.entries
    count = len(tree)
    if not np.array_equal(np.append(start_N, count), np.append(0, stop_N)) or (start_N >= stop_N).any():
        return f"its nodes do not follow each other from 0 to {count}"
    if (entries.predict_from_M < 0).any() or (entries.predict_from_M >= count).any():
        return f"predict_from_M is in [{np.min(entries.predict_from_M)}, {np.max(entries.predict_from_M)}], outside its {count} positions"
    if len(entries) and ((np.diff(entries.sequence_M) < 0).any() or entries.sequence_M[0] < 0):
        return "sequence_M is not ascending from 0 on"
    end_N = _ends(parent_N.tolist(), stop_N.tolist())
    if end_N is None:
        return "a node's parent is not on the path to the node before it"
    above_N = np.where(parent_N >= 0, np.append(tree.depth_T[stop_N - 1], 0)[parent_N] + 1, 0)
    depth_T = np.arange(count) + np.repeat(above_N - start_N, stop_N - start_N)
    if not np.array_equal(depth_T, tree.depth_T):
        return "depth_T is not the distance from the root"
    return None if np.array_equal(np.repeat(end_N, stop_N - start_N), tree.end_T) else "end_T is not where each subtree ends"


def _ends(parent_N: list[int], stop_N: list[int]) -> list[int] | None:
    """Where the subtree below each node stops; None if the nodes are not in depth-first order."""
    end_N, path = list(stop_N), list[int]()
    for node, parent in enumerate(parent_N):
        while path and path[-1] != parent:
            path.pop()
        if not path and parent != -1:
            return None
        path.append(node)
    for node in range(len(parent_N) - 1, -1, -1):  # descendants first
        if parent_N[node] >= 0:
            end_N[parent_N[node]] = max(end_N[parent_N[node]], end_N[node])
    return end_N
