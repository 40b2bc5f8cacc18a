"""A run's recorded episodes as rows, for notebooks, JSON lines and Parquet: one row per path of an episode, which is one row unless it forked.

    ids        all ids of the path       text        of each id's place, special tokens left out
    sampled    1 where the policy acted  trained     1 where the token became an entry of the learner: on the path where it was sampled, once

Deliberately not here: which groups are recorded (buffer/), and the learner's own numbers (service/recorded_step.py).
"""

import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from noria.buffer.sqlite import SettledGroup
from noria.buffer.tables import TRAINED
from noria.config import AlgorithmConfig
from noria.errors import ConfigError
from noria.model.weights import load_base
from noria.protocols import Tokenizer
from noria.report.files import aside
from noria.rl.credit import episode_advantages, trained_turns
from noria.service.archive import open_archive
from noria.types import Turn

COLUMNS: Final = {
    "run": "string",
    "group_id": "string",
    "task_index": "int64",
    "task_seed": "int64",
    "status": "string",
    "reason": "string",
    "trained_version": "int32",
    "episode_id": "string",
    "member": "int32",
    "path": "int32",
    "num_paths": "int32",
    "reward": "float64",
    "reward_parts": "parts",
    "advantage": "float32",
    "truncated": "bool_",
    "ids": "ids",
    "text": "string",
    "sampled": "mask",
    "trained": "mask",
    "behavior_logprobs": "logprobs",
    "versions": "ids",
}
"""Every column, in order, with its type in Parquet. behavior_logprobs and versions are null where nothing was sampled."""


def read_episodes(state_dir: Path, name: str, *, version: int | None = None) -> list[dict[str, Any]]:
    """The rows of a run's settled groups in admission order. version: only of the groups that the step to it trained.

    Raises StateConflictError (no such run, or its episodes were not kept), UnknownVersionError, and what loading the base, for its tokenizer, raises.
    """
    with open_archive(state_dir) as archive:
        config = archive.run(name).config
        if version is not None:
            archive.version(name, str(version))  # there is one
        groups = archive.settled(name, trained_version=version)
    tokenizer = load_base(config.base).tokenizer
    return [row for group in groups for row in _rows(group, config.algorithm, tokenizer)]


def dump(state_dir: Path, name: str, out: Path, *, version: int | None = None) -> int:
    """Write the rows into a .jsonl or .parquet file, whole or not at all; the number of rows.

    Raises as `read_episodes`; ConfigError for another suffix, or for Parquet without pyarrow; StorageError for a place that cannot be written to.
    """
    if out.suffix not in WRITERS:
        raise ConfigError(f"episodes are written as {' or '.join(WRITERS)} (got {out.name!r})")
    if out.suffix == ".parquet":
        _pyarrow()  # before any work
    rows = read_episodes(state_dir, name, version=version)
    with aside(out) as part:
        WRITERS[out.suffix](part, rows)
    return len(rows)


def _rows(settled: SettledGroup, algorithm: AlgorithmConfig, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    group = settled.group
    episodes = sorted(group.episodes, key=lambda e: e.member)
    advantages = episode_advantages(group, algorithm).tolist()
    for episode, advantage, trained in zip(episodes, advantages, trained_turns(group, algorithm), strict=True):
        paths = list(_paths(episode.turns, [is_trained and settled.status == TRAINED for is_trained in trained]))
        for number, tokens in enumerate(paths):
            yield {
                "run": group.run_id,
                "group_id": group.group_id,
                "task_index": group.task.index,
                "task_seed": group.task.seed,
                "status": settled.status,
                "reason": settled.reason,
                "trained_version": settled.trained_version,
                "episode_id": episode.episode_id,
                "member": episode.member,
                "path": number,
                "num_paths": len(paths),
                "reward": episode.reward,
                "reward_parts": dict(episode.reward_parts),
                "advantage": advantage,
                "truncated": episode.truncated,
                "ids": [token[0] for token in tokens],
                "text": tokenizer.decode([token[0] for token in tokens]),
                "sampled": [int(token[1] is not None) for token in tokens],
                "trained": [int(token[3]) for token in tokens],
                "behavior_logprobs": [token[1] for token in tokens],
                "versions": [token[2] for token in tokens],
            }


Token = tuple[int, float | None, int | None, bool]


def _paths(turns: Sequence[Turn], trained: Sequence[bool]) -> Iterator[list[Token]]:
    """(id, behavior_logprob, version, is it an entry here) along each path. trained: whether the tokens sampled in each turn are entries."""
    path: list[Token] = []
    for turn, is_entry in zip(turns, trained, strict=True):
        if turn.keep is not None and turn.keep < len(path):
            yield path
            path = [(token, logprob, version, False) for token, logprob, version, _ in path[: turn.keep]]
        done = turn.completion
        path = [*path, *((token, None, None, False) for token in turn.observation_ids)]
        path += [(*token, is_entry) for token in zip(done.sampled_ids, done.behavior_logprobs, done.versions, strict=True)]
    yield path


def _write_json_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n")


def _write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    pa = _pyarrow()
    nested = {
        "ids": pa.list_(pa.int32()),
        "mask": pa.list_(pa.int8()),
        "logprobs": pa.list_(pa.float32()),
        "parts": pa.map_(pa.string(), pa.float64()),
    }
    schema = pa.schema([(name, nested[kind] if kind in nested else getattr(pa, kind)()) for name, kind in COLUMNS.items()])
    as_maps = [row | {"reward_parts": list(row["reward_parts"].items())} for row in rows]
    importlib.import_module("pyarrow.parquet").write_table(pa.Table.from_pylist(as_maps, schema), path)


WRITERS: Final = {".jsonl": _write_json_lines, ".parquet": _write_parquet}


def _pyarrow() -> Any:
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise ConfigError("Parquet needs the package pyarrow: pip install 'noria[parquet]', or write .jsonl") from error
