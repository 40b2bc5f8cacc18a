"""The seams between stages: a stage knows nouns and these interfaces, never another stage.

Who waits for whom (design section 3):
    actor    its environment, its completion       never the learner, never other episodes
    sampler  any request                           never environments, never a publish
    learner  any run with a full batch             never actors of other runs, never other runs' batches
"""

from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from noria.types import Completion, DropReason, EpisodeGroup, Ids, Message, Prompt, SampleRequest, Task, Tokens

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment answers to an action.

    reward: finite; of this step, the episode's reward is their sum. done: the episode is over. observation: what the policy reads next, needed
    unless done: text, or, in an episode that began with a `Prompt`, one or more messages, of which none is the assistant's. reward_parts: named
    components, summed over steps; where the run file weighs them (`environment.rewards`), the weighted sum replaces the rewards.
    """

    reward: float
    done: bool = True
    observation: str | Message | Sequence[Message] | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One episode's world. An object serves one episode: `reset` once, then `step` until done. Both may be plain or `async` methods.

    Plain methods run in threads and must not block for ever: each call has a deadline, after which the episode is failed and retried.
    An exception, a hang or a non-finite reward fails the episode; it is never a reward of 0.
    """

    def reset(self, task: Task) -> str | Prompt | Awaitable[str | Prompt]:
        """The prompt of the problem that `task` stands for, the same for the same task: plain text, or messages and tools for the chat template."""

    def step(self, action: Any) -> Step | Awaitable[Step]:
        """Judge what the policy did. action: the sampled text, the stop token or stop text that ended it left out (str); in an episode that began
        with a `Prompt`, the assistant's `Message`, with its tool calls parsed, and with a stop text that ended it."""


class EnvironmentFactory(Protocol):
    """Makes one environment per episode and says how many tasks there are.

    num_tasks: training tasks, indices [0, num_tasks). num_held_out: tasks that are only evaluated, indices [num_tasks, num_tasks + num_held_out).
    """

    num_tasks: int
    num_held_out: int

    def __call__(self) -> Environment:
        """A fresh environment for one episode."""


class Clock(Protocol):
    """The only source of time. Every wait names what it waits for and has a deadline."""

    def now(self) -> float:
        """Seconds on a monotonic axis; only differences mean anything."""

    def wall(self) -> float:
        """Seconds since the Unix epoch, for records that outlive the process."""

    async def sleep(self, seconds: float) -> None:
        """Let `seconds` pass."""

    async def wait_for(self, awaitable: Awaitable[T], timeout_s: float, waiting_for: str) -> T:
        """The awaitable's result. On timeout it is cancelled and DeadlineExceededError names `waiting_for`."""


class Spans(Protocol):
    """Records which stage did what, when: utilization and timelines are made of it."""

    def span(self, stage: str, name: str, run_id: str = "", *, is_wait: bool = False) -> AbstractContextManager[None]:
        """Measure the block's duration. is_wait: the stage waited and did not work. Callable from any thread."""


class Sampler(Protocol):
    """Continues prompts. Callable from the event loop; cancel the awaiting task to cancel the request, which frees its lane and pages at once."""

    async def sample(self, request: SampleRequest) -> Completion:
        """Raises PromptTooLongError, InvalidRequestError, UnknownVersionError, RequestCancelledError, StageStoppedError; DeadlineExceededError after
        the request's `timeout_s`, which says what it was waiting for."""


class TokenStreams(Protocol):
    """A sampler that gives out tokens as they are sampled."""

    def stream(self, request: SampleRequest) -> AsyncIterator[Tokens]:
        """Items as they come, of which the last has the completion. A slow reader holds up nobody; closing the iterator cancels the request.

        Raises as `Sampler.sample`, from the first item on.
        """


class Tokenizer(Protocol):
    """Text to ids and back. Never applied to sampled ids on their way to training.

    bos_id: what every plain-text prompt of this model begins with, None if nothing. eos_id: ends a turn. end_ids: all ids that do, eos_id first.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int
    end_ids: Ids

    def encode(self, text: str) -> Ids:
        """Ids of `text`; adds no special token. Raises InvalidRequestError for a character that the vocabulary cannot spell.

        A lone surrogate, which no encoding of Unicode has, is no character: it is read as U+FFFD.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens are left out; bytes that are not valid UTF-8 become U+FFFD."""

    def token_id(self, text: str) -> int:
        """The id of a text that is exactly one token (a stop text). Raises ConfigError otherwise."""

    def name_of(self, token_id: int) -> str:
        """How the vocabulary writes a token, special ones too: for people. An id that has no token is its number."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right, until the deadline, to run one admitted group.

    group_id; task; admission: the run's admission number, 0-based and increasing; version: the run's published version when admitted;
    deadline_s: wall-clock time (Unix seconds) at which the group is dropped if it is not ready.
    """

    group_id: str
    run_id: str
    task: Task
    admission: int
    version: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Outstanding:
    """One group that holds a place, as the batch former sees it. oldest_version: of its tokens when ready, else the version at admission."""

    group_id: str
    admission: int
    oldest_version: int
    is_ready: bool


class Buffer(Protocol):
    """Life of a group: admitted -> ready -> leased -> trained(version) | dropped(reason). Nothing is lost, nothing trains twice.

    A group holds one of its run's places from admission until it is trained or dropped; places in use are counted from the store.
    """

    async def admit(self, run_id: str, *, version: int, deadline_s: float) -> Lease | None:
        """Take a place and the next task of the run's seeded cursor, in one transaction. None if no place is free."""

    async def put(self, group: EpisodeGroup, *, drop: DropReason | None = None) -> bool:
        """admitted -> ready. Idempotent on the group id: False if the group was ready before, or is settled (its deadline passed).

        drop: instead, record the group and settle it as dropped, in the same transaction; its place is free again.
        """

    async def drop(self, group_id: str, reason: DropReason) -> bool:
        """Settle without training and give the place back. Idempotent: False if the group was settled before."""

    async def outstanding(self, run_id: str) -> list[Outstanding]:
        """Groups that are admitted or ready, oldest admission first; groups past their deadline are dropped on the way."""

    async def lease(self, run_id: str, group_ids: Sequence[str]) -> list[EpisodeGroup]:
        """ready -> leased, all or none, in the order asked."""
