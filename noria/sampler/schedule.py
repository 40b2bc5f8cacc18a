"""What a scheduler may plan, and what it tells of its plans. Plain Python."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Reason: TypeAlias = Literal["lanes", "pages", "fairness", "prefill", "slot", "decoding"]
"""What a request waits for: a lane; pages; another's turn, or that of its tenant; its prompt's K/V; an adapter slot; nothing but its own tokens."""


class Waiting(NamedTuple):
    """Why a request is not finished. position: how many requests of its tenant are admitted before it (0 if it is admitted)."""

    request_id: str
    tenant: str
    position: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Limits:
    """What a scheduler may plan.

    widths: lanes of the decode programs, multiples of 8, ascending; the last is the most. num_rows: most rows of a prefill dispatch. num_steps: most
    decode steps of one dispatch. fixed: lanes and rows of dispatches with requests of deterministic runs; None: as many as any. max_waiting: requests
    of one tenant. recomputes: after a publish, unfinished requests are prefilled again (`kv_on_publish`). shares_prefixes: lanes may read a prefix
    that they have in common once for all.
    """

    widths: tuple[int, ...]
    num_rows: int
    num_steps: int
    fixed: tuple[int, int] | None = None
    max_waiting: int = 4096
    recomputes: bool = False
    shares_prefixes: bool = True


@dataclass(slots=True)
class ScheduleCounts:
    """What has been scheduled since the start; only ever grows.

    num_asked: positions that admitted requests needed K/V of. num_found: of these, cached, or already being prefilled for another. num_preempted:
    requests; num_recomputed: positions prefilled again because of it.
    """

    num_asked: int = 0
    num_found: int = 0
    num_preempted: int = 0
    num_recomputed: int = 0
