"""What `noria debug step` shows of a step that was taken again (service/recorded_step.py): plain data, and tables of it."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from noria.report.tokens import spell_one
from noria.service.recorded_step import RetakenStep, summary_of

NUM_SHOWN = 40
"""Entries in the table, those with the largest cotangents; --json has all."""

COMPARED = ("loss", "grad_norm", "learning_rate", "num_entries", "num_positions", "mismatch_kl", "nll_mean")
"""Metrics that a step has again, and that should be the recorded ones."""


def as_json(step: RetakenStep) -> dict[str, Any]:
    """The step as plain data. entries: one object each, in the order of the batch's pieces."""
    record = step.recorded.record
    entries = step.entries
    columns = {
        "token": [spell_one(step.tokenizer, token) for token in entries.target_M.tolist()],
        "id": entries.target_M.tolist(),
        "position": entries.depth_M.tolist(),
        "sequence": entries.sequence_M.tolist(),
        "behavior_logprob": entries.behavior_logprobs_M.tolist(),
        "learner_logprob": entries.learner_logprobs_M.tolist(),
        "ratio": entries.ratio_M.tolist(),
        "advantage": entries.advantage_M.tolist(),
        "weight": entries.weight_M.tolist(),
        "cotangent": entries.cotangent_M.tolist(),
    }
    return {
        "run": record.run_id,
        "version": record.version,
        "loss": step.loss,
        "num_groups": step.num_groups,
        "num_positions": step.num_positions,
        "is_equal": step.is_equal,
        "checksum": {"recorded": record.checksum, "now": step.retaken.checksum},
        "moments_checksum": {"recorded": record.moments_checksum, "now": step.retaken.moments_checksum},
        "metrics": {name: {"recorded": recorded, "now": now} for name, (recorded, now) in _compared(step).items()},
        "grad_norms": dict(step.grad_norms),
        "ratio": summary_of(entries.ratio_M),
        "log_ratio": summary_of(entries.learner_logprobs_M - entries.behavior_logprobs_M),
        "entries": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
    }


def render(step: RetakenStep) -> RenderableType:
    """The step for people."""
    data = as_json(step)
    head = f"run {data['run']}, the step to version {data['version']}: {data['loss']}, {data['num_groups']} groups or examples, "
    parts: list[RenderableType] = [Text(f"{head}{data['num_positions']} positions, {len(data['entries'])} entries", style="bold")]
    parts.append(_verdict(step))
    parts.append(_grid("metric", {name: (recorded, now) for name, (recorded, now) in _compared(step).items()}, ("recorded", "now")))
    parts.append(_grid("gradient of", {module: (norm,) for module, norm in step.grad_norms.items()}, ("norm",)))
    if step.loss != "cross_entropy":
        parts.append(_grid("ratio", {name: (value,) for name, value in data["ratio"].items()}, ("learner / behavior",)))
    parts.append(_entries(data))
    return Group(*(part for each in parts for part in (each, Text())))


def _verdict(step: RetakenStep) -> Text:
    if step.is_equal:
        return Text(f"adapter and moments are the recorded ones, bit for bit (checksum {step.retaken.checksum})", style="green")
    return Text(
        f"adapter or moments differ: checksums {step.retaken.checksum} and {step.retaken.moments_checksum}, recorded "
        f"{step.recorded.record.checksum} and {step.recorded.record.moments_checksum}. "
        "Equal bits need the same machine, JAX and server file (--server-config)",
        style="bold red",
    )


def _compared(step: RetakenStep) -> dict[str, tuple[float, float]]:
    now = {
        **step.result.metrics,
        "grad_norm": step.result.grad_norm,
        "learning_rate": step.result.learning_rate,
        "num_positions": float(step.result.num_positions),
    }
    recorded: Mapping[str, float] = step.recorded.metrics
    return {name: (recorded[name], now[name]) for name in COMPARED if name in recorded and name in now}


def _grid(heading: str, rows: Mapping[str, tuple[float, ...]], columns: tuple[str, ...]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="bold dim")
    table.add_column(heading)
    for column in columns:
        table.add_column(column, justify="right")
    for name, values in rows.items():
        table.add_row(name, *(f"{value:.6g}" for value in values))
    return table


def _entries(data: Mapping[str, Any]) -> RenderableType:
    entries = sorted(data["entries"], key=lambda entry: -abs(entry["cotangent"]))[:NUM_SHOWN]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold dim")
    for column in ("sequence", "position", "token", "behavior", "learner", "ratio", "advantage", "weight", "cotangent"):
        table.add_column(column, justify="left" if column == "token" else "right", no_wrap=True)
    for entry in sorted(entries, key=lambda entry: (entry["sequence"], entry["position"])):
        numbers = (entry["behavior_logprob"], entry["learner_logprob"], entry["ratio"], entry["advantage"], entry["weight"], entry["cotangent"])
        table.add_row(str(entry["sequence"]), str(entry["position"]), Text(entry["token"]), *(f"{number:.4g}" for number in numbers))
    note = f"the {len(entries)} entries with the largest cotangents of {len(data['entries'])}; --json has all"
    return Group(table, Text(note, style="dim"))
