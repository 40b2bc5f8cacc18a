"""A group as bytes and back, exactly: a JSON header, then the flat arrays of all turns one after another.

    magic | header size (uint32) | header (JSON) | observation ids | sampled ids | versions (int32 each) | behavior_logprobs (float32 or float64)

Little endian throughout. log-probabilities take 4 bytes where all of them are float32 numbers, as a sampler's are, else 8: nothing is rounded. A
turn's header ends with what few turns have (`_RARE`), as far as this one has any of it: so what an earlier release stored still decodes. What was
likely instead (`Completion.top`), and the log-probabilities of a prompt, are answers to whoever asked, and not stored.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from noria.errors import StateConflictError
from noria.types import Completion, Episode, EpisodeGroup, Task, Turn

_MAGIC = b"NGR1"
_PREFIX_BYTES = len(_MAGIC) + 4

_RARE = (None, True, 0)
"""What a turn has unless its header says otherwise: `keep`, and of its completion `is_trainable` and `num_mixed`. New ones come last."""


def encode_group(group: EpisodeGroup) -> bytes:
    """The group as bytes. Ids and versions must fit in int32."""
    turns = [turn for episode in group.episodes for turn in episode.turns]
    logprobs = np.array([p for turn in turns for p in turn.completion.behavior_logprobs], "<f8")
    with np.errstate(over="ignore"):
        narrow = logprobs.astype("<f4")
    is_float32 = bool(np.array_equal(narrow.astype("<f8"), logprobs))
    arrays = [
        _int32(i for turn in turns for i in turn.observation_ids),
        _int32(i for turn in turns for i in turn.completion.sampled_ids),
        _int32(v for turn in turns for v in turn.completion.versions),
        narrow if is_float32 else logprobs,
    ]
    header = json.dumps(
        {
            "group_id": group.group_id,
            "run_id": group.run_id,
            "task": [group.task.index, group.task.seed],
            "num_failed": group.num_failed,
            "is_float32": is_float32,
            "num_observed": len(arrays[0]),
            "num_sampled": len(arrays[1]),
            "episodes": [_episode_header(episode) for episode in group.episodes],
        },
        separators=(",", ":"),
    ).encode()
    return b"".join([_MAGIC, len(header).to_bytes(4, "little"), header, *(array.tobytes() for array in arrays)])


def decode_group(data: bytes) -> EpisodeGroup:
    """The group that `encode_group` wrote. Raises StateConflictError for bytes that it did not write."""
    if data[: len(_MAGIC)] != _MAGIC:
        raise StateConflictError(f"a stored group starts with {data[:4]!r} and not with {_MAGIC!r}: the state folder is of another version")
    body = _PREFIX_BYTES + int.from_bytes(data[len(_MAGIC) : _PREFIX_BYTES], "little")
    header = json.loads(data[_PREFIX_BYTES:body])
    num_observed, num_sampled = header["num_observed"], header["num_sampled"]
    float_type = "<f4" if header["is_float32"] else "<f8"
    observed = np.frombuffer(data, "<i4", num_observed, body)
    sampled = np.frombuffer(data, "<i4", num_sampled, body + 4 * num_observed)
    versions = np.frombuffer(data, "<i4", num_sampled, body + 4 * (num_observed + num_sampled))
    logprobs = np.frombuffer(data, float_type, num_sampled, body + 4 * (num_observed + 2 * num_sampled))
    flat = _Reader(*(iter(array.tolist()) for array in (observed, sampled, versions, logprobs)))
    return EpisodeGroup(
        group_id=header["group_id"],
        run_id=header["run_id"],
        task=Task(*header["task"]),
        episodes=tuple(flat.episode(item) for item in header["episodes"]),
        num_failed=header["num_failed"],
    )


def _int32(values: Iterable[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(list(values), "<i4")


def _episode_header(episode: Episode) -> list[Any]:
    turns = [_turn_header(turn) for turn in episode.turns]
    return [episode.episode_id, episode.member, episode.reward, episode.truncated, episode.reward_parts, turns]


def _turn_header(turn: Turn) -> list[Any]:
    header = [len(turn.observation_ids), len(turn.completion.sampled_ids), turn.completion.finish_reason, turn.temperature]
    rare = [turn.keep, turn.completion.is_trainable, turn.completion.num_mixed]
    return header + rare[: max((place for place, value in enumerate(rare, 1) if value != _RARE[place - 1]), default=0)]


class _Reader:
    """Hands out the flat arrays turn by turn. The order of reading is the order of writing."""

    def __init__(self, observed: Iterator[int], sampled: Iterator[int], versions: Iterator[int], logprobs: Iterator[float]) -> None:
        self._observed, self._sampled, self._versions, self._logprobs = observed, sampled, versions, logprobs

    def episode(self, header: list[Any]) -> Episode:
        episode_id, member, reward, truncated, parts, turns = header
        return Episode(episode_id, member, tuple(self._turn(*turn) for turn in turns), reward, truncated, tuple((k, v) for k, v in parts))

    def _turn(self, num_observed: int, num_sampled: int, finish_reason: Any, temperature: float, *rare: Any) -> Turn:
        keep, is_trainable, num_mixed = rare + _RARE[len(rare) :]
        observed = tuple(islice(self._observed, num_observed))
        sampled = tuple(islice(self._sampled, num_sampled))
        logprobs = tuple(islice(self._logprobs, num_sampled))
        versions = tuple(islice(self._versions, num_sampled))
        completion = Completion(sampled, logprobs, versions, finish_reason, is_trainable=is_trainable, num_mixed=num_mixed)
        return Turn(observed, completion, temperature, keep)
