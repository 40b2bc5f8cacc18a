"""What actors are given: the seams they act through, and the rules that a run's episodes are played by."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from noria.actors.loops import EnvironmentLoops
from noria.actors.threads import AbandonableThreads
from noria.config import DeadlinesConfig, RunConfig
from noria.errors import ConfigError
from noria.protocols import Clock, EnvironmentFactory, Sampler, Spans, Tokenizer
from noria.text.chat import ChatFormat
from noria.types import Ids


@dataclass(frozen=True, slots=True)
class Seams:
    """The rest of the system, as actors see it. chat: the base's chat template; None for a base that has none."""

    sampler: Sampler
    tokenizer: Tokenizer
    clock: Clock
    spans: Spans
    threads: AbandonableThreads
    loops: EnvironmentLoops
    chat: ChatFormat | None = None


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """How a run's episodes are played.

    seed: the run file's. max_tokens: per turn. temperature: 0 is greedy, for evaluation. stop_ids: end a turn. version: None follows the run's
    newest published version, a number pins that one. reward_weights: by name of a reward component; with any, the reward is their weighted sum.
    """

    tenant: str
    run_id: str
    environment: EnvironmentFactory
    seed: int
    max_tokens: int
    temperature: float
    stop_ids: Ids
    max_turns: int
    deadlines: DeadlinesConfig
    version: int | None = None
    reward_weights: Mapping[str, float] = field(default_factory=dict)


def rules_of(config: RunConfig, run_id: str, environment: EnvironmentFactory, tokenizer: Tokenizer) -> EpisodeRules:
    """The rules that a run file states. Raises ConfigError for a stop text that is not one token."""
    return EpisodeRules(
        tenant=config.tenant,
        run_id=run_id,
        environment=environment,
        seed=config.seed,
        max_tokens=config.sampling.max_tokens,
        temperature=config.sampling.temperature,
        stop_ids=stop_ids(config.sampling.stop, tokenizer),
        max_turns=config.actors.max_turns,
        deadlines=config.deadlines,
        reward_weights=config.environment.rewards,
    )


def stop_ids(texts: tuple[str, ...], tokenizer: Tokenizer) -> Ids:
    """The ids that end a turn of the base, then the id of each stop text. Raises ConfigError for a text that is not exactly one token."""
    try:
        return tuple(dict.fromkeys((*tokenizer.end_ids, *(tokenizer.token_id(text) for text in texts))))
    except ConfigError as error:
        raise ConfigError(f"sampling.stop: {error}") from error
