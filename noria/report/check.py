"""What `noria check` shows of a run that was tried out (service/trial.py): plain data, and tables of it."""

import asyncio
import resource
import sys
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from noria.actors.group import EpisodeFailure
from noria.report.plan import Plan
from noria.report.tokens import marked, spell
from noria.rl.credit import trained_turns
from noria.service.build import open_server
from noria.service.trial import Trial, try_run
from noria.types import Episode, Example

MIB, GIB = 2**20, 2**30
NUM_IDS_SHOWN = 64


def check_run(plan: Plan) -> tuple[Trial, int]:
    """Try the plan's one run in a state folder that is removed; what came of it, and the process's largest resident size in bytes.

    Raises what `trial.try_run` and `open_server` raise.
    """
    (planned,) = plan.runs

    async def run() -> Trial:
        with TemporaryDirectory(prefix="noria-check-") as scratch:
            server_config = plan.server.model_copy(update={"state_dir": scratch, "warm_up": False})
            async with open_server(server_config) as server:
                return await try_run(server, planned.config, folder=planned.folder, environment=planned.environment)

    return asyncio.run(run()), peak_rss_bytes()


def peak_rss_bytes() -> int:
    """Largest resident size of this process so far. Linux counts in KiB, macOS in bytes (getrusage(2))."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def as_json(checked: tuple[Trial, int]) -> dict[str, Any]:
    """The trial as plain data."""
    trial, rss_bytes = checked
    episode, trained = _shown(trial)
    statistics, timing, estimate = trial.batch.statistics, trial.timing, trial.estimate
    return {
        "run": trial.config.name,
        "task": {"index": trial.group.task.index, "seed": trial.group.task.seed},
        "prompt": spell(trial.tokenizer, episode.turns[0].observation_ids),
        "prompt_ids": list(episode.turns[0].observation_ids),
        "episode": {
            "member": episode.member,
            "ids": list(_ids(episode)),
            "sampled": [int(flag) for flag in _mask(episode, [True] * len(trained))],
            "trained": [int(flag) for flag in _mask(episode, trained)],
            "text": spell(trial.tokenizer, _ids(episode)),
            "num_turns": len(episode.turns),
            "num_paths": len(episode.paths),
        },
        "episodes": [
            {
                "member": e.member,
                "reward": e.reward,
                "reward_parts": dict(e.reward_parts),
                "advantage": advantage,
                "num_sampled": e.num_sampled,
                "truncated": e.truncated,
            }
            for e, advantage in zip(_by_member(trial), trial.advantages, strict=True)
        ],
        "failures": [_failure(failure) for failure in trial.failures],
        "num_entries": statistics.num_entries,
        "num_positions": statistics.num_positions,
        "num_positions_unshared": statistics.num_positions_unshared,
        "example": _example(trial),
        "num_examples": len(trial.examples),
        "memory_bytes": dict(trial.memory),
        "peak_rss_bytes": rss_bytes,
        "timing_s": {
            "play": timing.play_s,
            "sample": timing.sample_s,
            "wait": timing.wait_s,
            "learn": timing.learn_s,
            "publish": timing.publish_s,
            "position": timing.position_s,
        },
        "estimate": {
            "step_s": estimate.step_s,
            "supervised_s": estimate.supervised_s,
            "evaluation_s": estimate.evaluation_s,
            "total_s": estimate.total_s,
            "bound": estimate.bound,
        },
        "notes": list(trial.notes),
    }


def render(checked: tuple[Trial, int]) -> RenderableType:
    """The trial for people."""
    trial, rss_bytes = checked
    episode, trained = _shown(trial)
    prompt_ids = episode.turns[0].observation_ids
    shown = ", ".join(map(str, prompt_ids[:NUM_IDS_SHOWN])) + (", ..." if len(prompt_ids) > NUM_IDS_SHOWN else "")
    sections: list[tuple[str, RenderableType]] = [
        (f"Prompt of task {trial.group.task.index} ({len(prompt_ids)} ids)", Text(spell(trial.tokenizer, prompt_ids))),
        ("Its ids", Text(shown, style="dim")),
        (
            f"The episode of member {episode.member}; between ⟦ ⟧ what the policy sampled and the learner trains, between ⟨ ⟩ what it only sampled",
            marked(trial.tokenizer, _ids(episode), _mask(episode, trained), _mask(episode, [not trains for trains in trained])),
        ),
        ("Its group", _group_table(trial)),
        ("Entries and positions", Text(_sharing(trial))),
    ]
    if trial.examples:
        first = trial.examples[0]
        text = marked(trial.tokenizer, first.ids_T.tolist(), first.is_trained_T.tolist())
        sections.append((f"The first of {len(trial.examples)} examples of the supervised phase", text))
    sections += [("Memory", _memory_table(trial, rss_bytes)), ("Time", _time_table(trial))]
    if trial.notes:
        sections.append(("Look at this", Text("\n".join(f"- {note}" for note in trial.notes), style="yellow")))
    return Group(*(part for title, body in sections for part in (Text(title, style="bold"), body, Text())))


def _by_member(trial: Trial) -> list[Episode]:
    return sorted(trial.group.episodes, key=lambda e: e.member)


def _ids(episode: Episode) -> tuple[int, ...]:
    """All turns one after another, however the episode forked: what was said, in that order."""
    return tuple(i for turn in episode.turns for part in (turn.observation_ids, turn.completion.sampled_ids) for i in part)


def _shown(trial: Trial) -> tuple[Episode, tuple[bool, ...]]:
    """The first episode that trains, or the first if none does, and which of its turns train."""
    trained = trained_turns(trial.group, trial.config.algorithm)
    number = next((i for i, turns in enumerate(trained) if any(turns)), 0)
    return _by_member(trial)[number], trained[number]


def _mask(episode: Episode, chosen: Sequence[bool]) -> list[bool]:
    """Which of `_ids` were sampled in the chosen turns."""
    turns = zip(episode.turns, chosen, strict=True)
    parts = ((len(turn.observation_ids), len(turn.completion.sampled_ids), is_chosen) for turn, is_chosen in turns)
    return [flag for num_read, num_sampled, is_chosen in parts for flag in (*(False,) * num_read, *(is_chosen,) * num_sampled)]


def _group_table(trial: Trial) -> RenderableType:
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="bold dim")
    for heading in ("member", "sampled", "reward", "advantage", "parts", ""):
        table.add_column(heading, justify="left" if heading in ("parts", "") else "right")
    for episode, advantage in zip(_by_member(trial), trial.advantages, strict=True):
        parts = ", ".join(f"{name} {value:g}" for name, value in episode.reward_parts)
        cut = "truncated" if episode.truncated else ""
        table.add_row(str(episode.member), str(episode.num_sampled), f"{episode.reward:g}", f"{advantage:+.3f}", parts, cut)
    failed = [Text(f"episode {f.member} failed after {f.num_tries} tries; {f.code}: {f.message}", style="red") for f in trial.failures]
    return Group(table, *failed)


def _sharing(trial: Trial) -> str:
    statistics = trial.batch.statistics
    saved = 1 - statistics.num_positions / statistics.num_positions_unshared if statistics.num_positions_unshared else 0.0
    return (
        f"{statistics.num_entries} trained tokens on {statistics.num_positions} positions in {len(trial.batch.pieces)} pieces; "
        f"{statistics.num_positions_unshared} positions without prefix sharing, which saves {saved:.0%}"
    )


def _memory_table(trial: Trial, rss_bytes: int) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, show_header=False)
    for name, size in trial.memory.items():
        if size:
            table.add_row(name, _size(size))
    table.add_row("sum of these arrays", _size(sum(trial.memory.values())), style="bold")
    table.add_row("measured, largest so far", f"{_size(rss_bytes)}, with Python, programs and their temporaries")
    return table


def _size(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB / 10 else f"{size_bytes / MIB:.2f} MiB"


def _time_table(trial: Trial) -> RenderableType:
    timing, estimate, config = trial.timing, trial.estimate, trial.config
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, show_header=False)
    groups = config.algorithm.groups_per_batch
    rows = {
        f"{groups} groups, {timing.num_timed_groups} at once": f"{timing.play_s:.2f} s, the sampler busy for {timing.sample_s:.2f} s",
        "learner": f"{timing.learn_s:.2f} s, {1000 * timing.position_s:.2f} ms a position",
        "publish": f"{timing.publish_s:.2f} s",
        "a step": f"{estimate.step_s:.2f} s: {estimate.bound}",
        f"{config.algorithm.steps} steps": f"{config.algorithm.steps * estimate.step_s:.0f} s",
    }
    if config.num_supervised_steps:
        rows[f"{config.num_supervised_steps} supervised steps"] = f"{estimate.supervised_s:.0f} s"
    rows["evaluations"] = f"{estimate.evaluation_s:.0f} s"
    rows["the whole run"] = f"{estimate.total_s:.0f} s, after loading and compiling"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _failure(failure: EpisodeFailure) -> dict[str, Any]:
    return {"member": failure.member, "num_tries": failure.num_tries, "code": failure.code, "message": failure.message}


def _example(trial: Trial) -> dict[str, Any] | None:
    if not trial.examples:
        return None
    first: Example = trial.examples[0]
    return {
        "ids": first.ids_T.tolist(),
        "trained": [int(flag) for flag in first.is_trained_T],
        "text": spell(trial.tokenizer, first.ids_T.tolist()),
        "weight": first.weight,
    }
