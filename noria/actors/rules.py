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

    seed: the run file's. max_tokens: per turn. temperature: 0 is greedy, for evaluation. stop_ids, stop: ids and texts that end a turn. version: None
    follows the run's newest published version, a number pins that one. reward_weights: by name of a reward component; with any, the reward is their
    weighted sum. top_k, top_p: for evaluation only, since such tokens do not train.
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
    stop: tuple[str, ...] = ()
    top_k: int = 0
    top_p: float = 1.0


def rules_of(config: RunConfig, run_id: str, environment: EnvironmentFactory, tokenizer: Tokenizer) -> EpisodeRules:
    """The rules that a run file states."""
    ids, texts = stops(config.sampling.stop, tokenizer)
    return EpisodeRules(
        tenant=config.tenant,
        run_id=run_id,
        environment=environment,
        seed=config.seed,
        max_tokens=config.sampling.max_tokens,
        temperature=config.sampling.temperature,
        stop_ids=ids,
        max_turns=config.actors.max_turns,
        deadlines=config.deadlines,
        reward_weights=config.environment.rewards,
        stop=texts,
    )


def stops(texts: tuple[str, ...], tokenizer: Tokenizer) -> tuple[Ids, tuple[str, ...]]:
    """What ends a turn: the ids that end one of the base, then that of each stop text that is exactly one token, which ends it on the device; and the
    texts to look for: all but those of special tokens, which no decoded text contains.

    So a text ends a turn however it is spelled: within a longer token, or by several.
    """
    ids, spelled = list(tokenizer.end_ids), []
    for text in texts:
        token_id = _only_id(text, tokenizer)
        if token_id is not None:
            ids.append(token_id)
        if token_id is None or tokenizer.decode((token_id, token_id)):  # twice: some vocabularies drop a first space, and with it a text of one
            spelled.append(text)
    return tuple(dict.fromkeys(ids)), tuple(dict.fromkeys(spelled))


def _only_id(text: str, tokenizer: Tokenizer) -> int | None:
    try:
        return tokenizer.token_id(text)
    except ConfigError:
        return None
