"""What actors are given: the seams they act through, and the rules that a run's episodes are played by."""

from dataclasses import dataclass

from noria.actors.loops import EnvironmentLoops
from noria.actors.threads import AbandonableThreads
from noria.config import DeadlinesConfig, RunConfig
from noria.errors import ConfigError
from noria.protocols import Clock, EnvironmentFactory, Sampler, Spans, Tokenizer
from noria.types import Ids


@dataclass(frozen=True, slots=True)
class Seams:
    """The rest of the system, as actors see it."""

    sampler: Sampler
    tokenizer: Tokenizer
    clock: Clock
    spans: Spans
    threads: AbandonableThreads
    loops: EnvironmentLoops


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """How a run's episodes are played.

    seed: the run file's. max_tokens: per turn. temperature: 0 is greedy, for evaluation. stop_ids: end a turn. version: None follows the run's
    newest published version, a number pins that one.
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
    )


def stop_ids(texts: tuple[str, ...], tokenizer: Tokenizer) -> Ids:
    """The end-of-text id, then the id of each stop text. Raises ConfigError for a text that is not exactly one token."""
    try:
        return tuple(dict.fromkeys((tokenizer.eos_id, *(tokenizer.token_id(text) for text in texts))))
    except ConfigError as error:
        raise ConfigError(f"sampling.stop: {error}") from error
