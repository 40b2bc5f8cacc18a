"""The nouns that travel round the circle: frozen records, no behaviour beyond small derived values.

Ids in, ids out: between the environment's text and the learner's arrays everything is token ids, and no stage ever renders or tokenizes
text a second time.

Array fields end in shape letters:
    T position of a token tree or microbatch    M entry (one trained token of one episode)
    N node of a token tree                      Q sequence (one path of one episode) of a batch
    X (query block, key block) pair             B attention block = tile (64 positions)
    E tile of 16 entries
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = tuple[int, ...]
IntArray: TypeAlias = npt.NDArray[np.int32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
FloatArray: TypeAlias = npt.NDArray[np.float32]

TILE = 64
"""Positions in a tile. The attention block has the same size, so that no block ever holds two runs (design section 5)."""

ENTRY_TILE = 16
"""Entries in a tile of entries. All belong to one run, so that adapters outside the layers are gathered, and their gradients added, by tile."""

FinishReason: TypeAlias = Literal["stop", "length"]
DropReason: TypeAlias = Literal["no_signal", "deadline", "failed", "stale", "stopped"]
Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
LossKind: TypeAlias = Literal[
    "grpo", "cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "ppo_critic", "dpo", "linear", "stable_reinforce"
]
KlEstimator: TypeAlias = Literal["k1", "k2", "k3"]
Schedule: TypeAlias = Literal["constant", "linear", "cosine"]
Denominator: TypeAlias = Literal["tokens", "episodes", "groups", "none"]


@dataclass(frozen=True, slots=True)
class Task:
    """What the server leases to an actor; the environment maps it to a concrete problem, always the same one for the same pair.

    index: which problem: of a training task 0 <= index < the environment's num_tasks, of a held-out task from num_tasks on. seed: >= 0, differs
    between epochs and between runs.
    """

    index: int
    seed: int


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the policy asked for. arguments: plain JSON values by name. call_id: unique in its conversation."""

    name: str
    arguments: Mapping[str, Any]
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that a prompt offers. parameters: a JSON Schema object, as in OpenAI's function tools."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat. tool_calls: of the assistant.

    call_id: of a tool's answer, the call that it answers, which must have been made. An environment may leave it out where the assistant's last
    message has exactly one call without an answer, which is then filled in, and where it has no calls at all.
    content: without what was parsed out of it. reasoning: text between the policy's thinking marks, "" if there is none.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """How an episode that speaks in messages begins: at least one message, and the tools that its policy may call."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt.

    max_tokens: >= 1. temperature: >= 0; 0 is greedy and its tokens are not trainable. stop_ids: sampling ends after any of these ids, which
    stays in the completion. stop: sampling ends with the token after which the text contains any of these, wherever token borders lie; that token
    stays. seed, sample_index: the random key of a token is fold_in(seed, sample_index, position).
    top_k: draw among the k most likely ids, 0 for all. top_p: among the fewest most likely ids whose probabilities add up to it, in (0, 1]. Both
    after temperature, first top_k, then top_p; behavior_logprobs stay those of the full vocabulary, so such tokens are not trainable.
    """

    max_tokens: int
    temperature: float = 1.0
    stop_ids: Ids = ()
    seed: int = 0
    sample_index: int = 0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()

    @property
    def is_constrained(self) -> bool:
        """Whether ids are left out of the draw."""
        return self.top_k > 0 or self.top_p < 1.0

    @property
    def is_trainable(self) -> bool:
        """Whether what is sampled is a draw from the policy that behavior_logprobs describe."""
        return self.temperature > 0 and not self.is_constrained


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One completion of one prompt by a run's adapter.

    request_id: unique in the server. tenant: who is charged. run_id: whose adapter. episode_id: whose pages.
    version: None follows the run's newest published version, token by token; a number pins that version.
    num_top: return so many of the most likely ids at each sampled token, at most MAX_TOP; with wants_prompt also at each prompt position.
    wants_prompt: return the log-probability of each prompt id but the first, given those before it; temperature 1.
    timeout_s: from submission to the last token; then DeadlineExceededError, which says what the request was waiting for.
    """

    request_id: str
    tenant: str
    run_id: str
    episode_id: str
    prompt_ids: Ids
    params: SamplingParams
    version: int | None = None
    num_top: int = 0
    wants_prompt: bool = False
    timeout_s: float = 600.0


MAX_STOP_TEXTS = 8
"""Stop texts of one request: each costs a search in what every dispatch samples."""

MAX_STOP_CHARS = 1024
"""Characters of a stop text: far more than anybody ends a turn with, so few that looking for it costs nothing beside a token."""

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6
"""Between them logits over temperature, and differences of these, are finite float32 numbers for any model; log-probabilities with them."""

MAX_TOP = 20
"""Most likely ids that a request may ask for at each token."""

TopIds: TypeAlias = tuple[tuple[int, float], ...]
"""The most likely ids at one position with their log-probabilities (after temperature, full vocabulary), most likely first; of equals the smaller."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled: per token its id, its log-probability when sampled (natural log, after temperature, full vocabulary), its version.

    finish_reason: "stop" for a stop id or a stop text. top: per token, if asked for. prompt_logprobs, prompt_top: one for each prompt id but the
    first, if asked for. is_trainable: see `SamplingParams`. num_mixed: tokens that attended to keys and values of another version than their own.
    """

    sampled_ids: Ids
    behavior_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    top: tuple[TopIds, ...] = ()
    prompt_logprobs: tuple[float, ...] = ()
    prompt_top: tuple[TopIds, ...] = ()
    is_trainable: bool = True
    num_mixed: int = 0

    def __post_init__(self) -> None:
        assert len(self.sampled_ids) == len(self.behavior_logprobs) == len(self.versions)


@dataclass(frozen=True, slots=True)
class Tokens:
    """What one dispatch sampled for a request that streams; together the items are its completion. At least one token.

    top: per token, if asked for. completion: the whole of it, in the last item only, with what no item has (prompt_logprobs, finish_reason).
    """

    sampled_ids: Ids
    behavior_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    top: tuple[TopIds, ...] = ()
    completion: Completion | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why sampling ended, in the last item; None before it."""
        return None if self.completion is None else self.completion.finish_reason


@dataclass(frozen=True, slots=True)
class Turn:
    """Observation ids as fed to the sampler, then what was sampled after them. A multi-turn episode extends ids and never renders history again.

    keep: how many ids of the path so far stay before the observation. None: all of them. Fewer: the episode forked here, since its chat template
    rewrote history (it strips reasoning, say); what was sampled on the path before stays trained on that path.
    """

    observation_ids: Ids
    completion: Completion
    temperature: float
    keep: int | None = None

    @property
    def is_trainable(self) -> bool:
        """Whether it has tokens that may train: draws, at a temperature above 0, from the policy that their behavior_logprobs describe."""
        return bool(self.completion.sampled_ids) and self.temperature > 0 and self.completion.is_trainable


@dataclass(frozen=True, slots=True)
class Episode:
    """One try at a task.

    episode_id: unique. member: index in its group, 0-based. reward: finite, raw (advantages are computed once, by the learner's side).
    truncated: max_tokens cut a turn of it, the last or another, or the turn limit or the context ended it and not the environment. reward_parts:
    named components, for metrics only.
    """

    episode_id: str
    member: int
    turns: tuple[Turn, ...]
    reward: float
    truncated: bool = False
    reward_parts: tuple[tuple[str, float], ...] = ()

    @property
    def paths(self) -> tuple[Ids, ...]:
        """Exactly what the sampler saw and produced: one sequence of ids, and one more for every turn that forked (`Turn.keep`)."""
        paths: list[Ids] = []
        for turn in self.turns:
            path = paths[-1] if paths else ()
            is_fork = turn.keep is not None and turn.keep < len(path)
            extended = path[: turn.keep] + turn.observation_ids + turn.completion.sampled_ids
            paths = [*(paths if is_fork else paths[:-1]), extended]
        return tuple(paths)

    @property
    def ids(self) -> Ids:
        """The ids of the episode's last path: of all of it, unless it forked."""
        return self.paths[-1] if self.turns else ()

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(len(turn.completion.sampled_ids) for turn in self.turns)

    @property
    def oldest_version(self) -> int | None:
        """Oldest version of any sampled token, None if nothing was sampled."""
        return min((v for turn in self.turns for v in turn.completion.versions), default=None)


@dataclass(frozen=True, slots=True)
class EpisodeGroup:
    """Episodes of one task, compared with each other. group_id: unique. num_failed: episodes that failed for good and are not in `episodes`."""

    group_id: str
    run_id: str
    task: Task
    episodes: tuple[Episode, ...]
    num_failed: int = 0

    @property
    def oldest_version(self) -> int | None:
        """Oldest version of any sampled token of the group."""
        return min((v for e in self.episodes if (v := e.oldest_version) is not None), default=None)


@dataclass(frozen=True, slots=True)
class Example:
    """One example of a supervised phase. ids_T; is_trained_T: whether the id is a target, never of the first; at least one is. weight: finite, of
    each of its targets.
    """

    ids_T: IntArray
    is_trained_T: BoolArray
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Entries:
    """Trained tokens: an axis of its own, since several episodes may have an entry on one position.

    predict_from_M: position whose hidden state predicts the token. target_M: the token. temperature_M > 0.
    behavior_logprobs_M: by the sampler. advantage_M. weight_M: 1 / the run's global denominator (0 for padding). version_M: adapter version that
    sampled it. sequence_M: index of its sequence, the path of its episode on which it was sampled (a fork begins another one), unique within the
    arrays' owner (a batch, or a microbatch).
    """

    predict_from_M: IntArray
    target_M: IntArray
    temperature_M: FloatArray
    behavior_logprobs_M: FloatArray
    advantage_M: FloatArray
    weight_M: FloatArray
    version_M: IntArray
    sequence_M: IntArray

    def __len__(self) -> int:
        return len(self.target_M)


@dataclass(frozen=True, slots=True)
class TokenTree:
    """All episodes of a run's batch as one trie over token ids, laid out depth first (design section 5).

    ids_T; depth_T: distance from the root, the RoPE position; end_T: where (exclusive) the subtree below the position ends in the layout, so
    that i attends to j if and only if j <= i < end_T[j]. Nodes are maximal unbranched stretches in depth-first order: node n owns positions
    node_start_N[n]:node_stop_N[n], and node_parent_N[n] < n is its parent (-1 for a root; a tree may have several roots). episode_Q: the episode of
    each sequence, an index into all num_episodes episodes of the batch; ascending.
    """

    ids_T: IntArray
    depth_T: IntArray
    end_T: IntArray
    node_start_N: IntArray
    node_stop_N: IntArray
    node_parent_N: IntArray
    entries: Entries
    episode_Q: IntArray
    num_episodes: int

    def __len__(self) -> int:
        return len(self.ids_T)


@dataclass(frozen=True, slots=True)
class Piece:
    """A self-contained subtree of a run's batch that fits in one microbatch: the unit of packing. Depends only on the run's own batch.

    Positions are relative to the piece; num_tiles * TILE >= len(ids_T); entries.sequence_M keeps the batch's sequence indices.
    """

    ids_T: IntArray
    depth_T: IntArray
    end_T: IntArray
    entries: Entries

    @property
    def num_tiles(self) -> int:
        """Tiles the piece occupies."""
        return -(-len(self.ids_T) // TILE)

    @property
    def num_entry_tiles(self) -> int:
        """Tiles of entries the piece occupies."""
        return -(-len(self.entries) // ENTRY_TILE)


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """Where a piece lies in a microbatch: its owner's slot and ranges of positions and entries. first_entry is a multiple of 16."""

    run_id: str
    slot: int
    piece_index: int
    first_tile: int
    num_tiles: int
    first_entry: int
    num_entries: int


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One fixed-shape pass of the learner: pieces of many runs on one flat axis of T positions, each starting on a tile border.

    Padding positions have id 0, depth 0 and end_T[j] = j + 1. slot_tile_B[T / TILE]: the adapter slot of each tile (0 for padding tiles).
    pair_query_X, pair_key_X: the (query block, key block) pairs that the mask rule leaves non-empty, sorted by query block then key block, of which
    the first num_pairs count. entries: each piece's begin with a tile of their own, slot_entry_tile_E[M / 16]: the slot of each tile; slot_M: of each
    entry; the last of a piece is number num_entries - 1. Padding entries have weight_M 0, slot_M 0, and predict from
    the piece before them, which also owns the tiles after the last piece. entries.sequence_M is renumbered to be unique in the microbatch.
    """

    ids_T: IntArray
    depth_T: IntArray
    end_T: IntArray
    slot_tile_B: IntArray
    pair_query_X: IntArray
    pair_key_X: IntArray
    num_pairs: int
    entries: Entries
    slot_M: IntArray
    slot_entry_tile_E: IntArray
    num_entries: int
    placed: tuple[PlacedPiece, ...]


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Shape of a run's adapter. rank >= 1; alpha > 0; use_rslora: scaled by alpha / sqrt(rank) (Kalajdzievski 2023), else by alpha / rank.

    train_value: it has a value head, for losses with a critic; the policy does not use it.
    """

    rank: int
    alpha: float
    train_attn: bool = True
    train_mlp: bool = True
    use_rslora: bool = False
    train_unembed: bool = False
    train_value: bool = False

    @property
    def scale(self) -> float:
        """The factor of the delta, applied at use and never folded in. The one place that computes it."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """AdamW of one run; every field is an array element of its slot, never static. grad_clip_norm 0 means no clipping.

    The rate of the run's step number n, counted from first_step, is learning_rate times a factor: it rises linearly over warmup_steps; then the
    schedule holds it ("constant"), or lets it fall to final_fraction at decay_steps along a line or half a cosine, and holds that.
    """

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 1.0
    warmup_steps: int = 0
    schedule: Schedule = "constant"
    decay_steps: int = 0
    final_fraction: float = 0.0
    first_step: int = 0


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The loss of a batch: its kind, and settings that are array elements and never static. What each kind computes, which settings it reads and its
    defaults (None here): `rl/losses.py`. A kind ignores the settings that it does not read.

    clip_low, clip_high >= 0: the clipped ratio stays in [1 - clip_low, 1 + clip_high]. beta > 0: of dro and dpo.

    Corrections of a policy loss for data that another policy sampled; all but the first are masks, and 0 switches each off:
        tis_cap            token importance weights are min(exp(proximal - behavior), tis_cap)
        sequence_mask_c    drop a sequence whose exp(mean(learner - behavior)) leaves [1/c, c]; at least 1
        icepop_low, _high  drop a token whose exp(proximal - behavior) leaves [low, high]; off if high is 0
        m2_cap             drop the tokens with the largest (learner - behavior)^2 of the batch, until the mean of the rest is at most this
        dppo_low, _high    drop a token whose probability already fell by more than low (advantage < 0), or rose by more than high (> 0)
    proximal_lag: of grpo, how many versions the proximal policy is behind the learner; 0: it is the learner at the step.

    kl_coeff, kl_estimator: a penalty on the divergence from the reference policy. entropy_coeff: a bonus. value_coeff, value_clip: of the critic's
    squared error; value_clip 0 = not clipped.
    """

    clip_low: float | None = None
    clip_high: float | None = None
    tis_cap: float | None = None
    sequence_mask_c: float | None = None
    kind: LossKind = "grpo"
    beta: float | None = None
    icepop_low: float = 0.0
    icepop_high: float = 0.0
    m2_cap: float = 0.0
    dppo_low: float = 0.0
    dppo_high: float = 0.0
    proximal_lag: float = 0.0
    kl_coeff: float = 0.0
    kl_estimator: KlEstimator | None = None
    entropy_coeff: float = 0.0
    value_coeff: float = 0.5
    value_clip: float = 0.2


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One committed state of a run's adapter. version = number of optimizer steps.

    checksum: integer over the adapter's bytes, equal in learner and sampler. moments_checksum: over those of its AdamW moments.
    """

    run_id: str
    version: int
    checksum: int
    moments_checksum: int
    path: str
