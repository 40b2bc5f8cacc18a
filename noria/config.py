"""Run and server configuration: frozen pydantic models with a doc line per field, and their TOML files.

Unknown keys are errors that name the nearest key. This is the only reader of os.environ.
"""

import difflib
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from noria.errors import ConfigError
from noria.plain_json import storable
from noria.types import MAX_STOP_CHARS, MAX_STOP_TEXTS, MAX_TEMPERATURE, MIN_TEMPERATURE, Denominator, LoraSpec, LossSpec, OptimizerSpec, Schedule

ModelT = TypeVar("ModelT", bound=BaseModel)

BUILTIN_BASES = ("smollm2-135m", "tiny")
"""Names of bases that are not looked for on disk (model/weights.py loads them)."""

MAX_SHOWN = 300
"""Letters of a wrong value that an error shows."""


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class DeadlinesConfig(_Config):
    """Deadline of every wait, in seconds: the one table (design section 8)."""

    reset_s: float = Field(60, gt=0, description="environment reset")
    step_s: float = Field(120, gt=0, description="environment step, reward included")
    episode_s: float = Field(1800, gt=0, description="one episode, sampling included; also the group's deadline, times the tries")
    sample_s: float = Field(600, gt=0, description="one sample request, queueing included")
    train_s: float = Field(3600, gt=0, description="one optimizer step, queueing included: only a device that hangs takes so long")
    publish_s: float = Field(60, gt=0, description="publish and its proof, and other short calls to the device; compilation not included")
    drain_s: float = Field(60, gt=0, description="at the run's end, for what it has under way to let go")


class EnvironmentConfig(_Config):
    """Which environment, and its settings."""

    name: str = Field(description='a built-in name, or "file.py:Class", resolved only in the actors')
    settings: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment")
    rewards: dict[str, float] = Field(
        default_factory=dict, description="weight of each named reward component; given, their weighted sum is the reward, and Step.reward is ignored"
    )

    @field_validator("settings")
    @classmethod
    def _what_a_file_can_say(cls, value: dict[str, Any]) -> dict[str, Any]:
        return {key: storable(item, key) for key, item in value.items()}


_POLICY_LOSSES = ("grpo", "ppo", "cispo", "dro", "gspo", "importance_sampling", "ppo_critic")

_READ_BY: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("clip_low", "clip_high"): ("grpo", "ppo", "cispo", "gspo", "ppo_critic"),
    ("tis_cap", "sequence_mask_c", "icepop_low", "icepop_high", "m2_cap", "dppo_low", "dppo_high", "kl_coeff", "kl", "entropy_coeff"): _POLICY_LOSSES,
    ("proximal_lag",): ("grpo",),
    ("value_coeff", "value_clip", "gae_lambda", "gae_gamma"): ("ppo_critic",),
    ("beta",): ("dro", "dpo"),
    ("pairs",): ("dpo",),
    ("advantage",): ("grpo", "ppo", "cispo", "dro", "gspo", "importance_sampling"),
    ("zero_signal",): ("grpo", "ppo", "cispo", "dro", "gspo", "importance_sampling", "dpo"),
}
"""Settings that only some losses read; given with another, they are a mistake."""


class AlgorithmConfig(_Config):
    """Loss, batch shape and staleness."""

    group_size: int = Field(8, ge=2, description="episodes per group")
    groups_per_batch: int = Field(4, ge=1, description="groups per optimizer step")
    steps: int = Field(ge=0, description="optimizer steps of reinforcement learning, after those of a supervised phase; 0 = only evaluate")
    max_staleness: int = Field(1, ge=0, description="largest (learner version - oldest version that sampled a token of the group) at its training")
    advantage: Literal["mean", "mean_std", "leave_one_out"] = Field("mean_std", description="group baseline and scale")
    zero_signal: Literal["skip", "train", "resample"] = Field(
        "skip", description="groups whose rewards are all equal: settle untrained, train, or settle and wait for another task in their place"
    )
    max_batches_without_signal: int = Field(20, ge=1, description="batches in a row without any signal after which the run ends early")
    truncated: Literal["mask", "penalize", "keep"] = Field(
        "mask", description="episodes cut by max_tokens in any turn, or by max_turns: no entries, reward 0, or as they are"
    )
    denominator: Denominator = Field("tokens", description="global normalization of a batch's loss; in dpo pairs stand for tokens")
    loss: Literal["grpo", "ppo", "cispo", "dro", "gspo", "importance_sampling", "ppo_critic", "dpo"] = Field(
        "grpo", description="what a token costs; grpo: decoupled PPO with the proximal policy at the step, which needs no second forward pass"
    )
    clip_low: float | None = Field(
        None, ge=0, description="the clipped ratio is at least 1 - this; by default 0.2 of grpo, ppo and ppo_critic, 1 of cispo, 3e-4 of gspo"
    )
    clip_high: float | None = Field(
        None, ge=0, description="the clipped ratio is at most 1 + this; by default 0.28 of grpo, 0.2 of ppo and ppo_critic, 3 of cispo, 4e-4 of gspo"
    )
    tis_cap: float | None = Field(
        None, ge=0, description="cap of the truncated importance weight exp(learner - behavior); 0 = off; by default 2 of grpo, else off"
    )
    sequence_mask_c: float | None = Field(
        None, ge=0, description="mask sequences whose geometric mean ratio leaves [1/c, c]; 0 = off, else 1 or more; by default 1.2 of grpo, else off"
    )
    icepop_low: float = Field(0.0, ge=0, description="mask tokens whose ratio exp(learner - behavior) is below; 0.5 in the IcePop paper")
    icepop_high: float = Field(0.0, ge=0, description="mask tokens whose ratio is above; 5 in the IcePop paper; 0 = both bounds are off")
    m2_cap: float = Field(0.0, ge=0, description="mask the batch's largest squared log-ratios until the rest's mean is this; 0.04 in M2PO; 0 = off")
    dppo_low: float = Field(0.0, ge=0, description="mask tokens of negative advantage that lost more probability than this, such as 0.2; 0 = off")
    dppo_high: float = Field(0.0, ge=0, description="mask tokens of positive advantage that gained more probability than this, such as 0.2; 0 = off")
    proximal_lag: int = Field(0, ge=0, description="of grpo: versions that the proximal policy is behind, interpolated log-linearly; 0 = the learner")
    kl_coeff: float = Field(0.0, ge=0, description="weight of the KL divergence from the base; 0 = off, and no second forward pass")
    kl: Literal["k1", "k2", "k3", "reward"] = Field(
        "k3", description="a penalty in the loss, reported by this estimator (all have the gradient of the KL), or one in the reward"
    )
    entropy_coeff: float = Field(0.0, ge=0, description="weight of an entropy bonus; 0 = off")
    value_coeff: float = Field(0.5, ge=0, description="of ppo_critic: weight of the squared error of the values")
    value_clip: float = Field(0.2, ge=0, description="of ppo_critic: how far a value may move in a step before its error is clipped; 0 = any")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="of ppo_critic: decay of the advantage's trace per sampled token")
    gae_gamma: float = Field(1.0, ge=0, le=1, description="of ppo_critic: discount per sampled token")
    beta: float | None = Field(None, gt=0, description="of dro: weight of the squared log-ratio, by default 0.05; of dpo: of the margin, 0.1")
    pairs: Literal["best_worst", "all"] = Field("best_worst", description="of dpo: a group's best against its worst, or all whose rewards differ")
    prefix_gradient: Literal["exact", "stop"] = Field(
        "exact", description="stop: what precedes the first trained token is a constant; cheaper, another gradient; needs learner.path_positions"
    )
    stale_rate_k: float = Field(0.0, ge=0, description="divide a step's learning rate by 1 + this * the staleness of its batch; 0 = off")

    @field_validator("sequence_mask_c")
    @classmethod
    def _off_or_a_ratio(cls, value: float | None) -> float | None:
        if value is not None and 0 < value < 1:
            raise ValueError(f"must be 0 (off) or at least 1: {value} would mask every episode")
        return value

    @model_validator(mode="after")
    def _the_loss_reads_its_settings(self) -> "AlgorithmConfig":
        for names, losses in _READ_BY.items():
            for name in names:
                if self.loss not in losses and getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"loss = {self.loss!r} does not read {name} = {getattr(self, name)!r}: leave it out; {', '.join(losses)} does")
        if 0 < self.icepop_high < self.icepop_low:
            raise ValueError(f"icepop_low = {self.icepop_low} is above icepop_high = {self.icepop_high}: every token would be masked")
        if self.icepop_low and not self.icepop_high:
            raise ValueError(f"icepop_low = {self.icepop_low} does nothing without icepop_high: set it too, for example to 5")
        return self

    @model_validator(mode="after")
    def _every_setting_has_an_effect(self) -> "AlgorithmConfig":
        if self.kl != type(self).model_fields["kl"].default and not self.kl_coeff:
            raise ValueError(f"kl = {self.kl!r} does nothing without kl_coeff: set it too, for example to 0.01")
        if self.loss == "dpo" and self.zero_signal == "train":
            raise ValueError('loss = "dpo" cannot train a group whose rewards are all equal: zero_signal = "skip" or "resample"')
        if self.loss == "dpo" and self.denominator == "episodes":
            raise ValueError('loss = "dpo" weighs pairs: denominator = "tokens" gives each the same weight, "groups" each group, "none" 1 to each')
        return self

    @property
    def loss_spec(self) -> LossSpec:
        """The loss as the learner takes it. A penalty in the reward is none of the loss's."""
        return LossSpec(
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            tis_cap=self.tis_cap,
            sequence_mask_c=self.sequence_mask_c,
            kind=self.loss,
            beta=self.beta,
            icepop_low=self.icepop_low,
            icepop_high=self.icepop_high,
            m2_cap=self.m2_cap,
            dppo_low=self.dppo_low,
            dppo_high=self.dppo_high,
            proximal_lag=float(self.proximal_lag),
            kl_coeff=0.0 if self.kl == "reward" else self.kl_coeff,
            kl_estimator=None if self.kl == "reward" else self.kl,
            entropy_coeff=self.entropy_coeff,
            value_coeff=self.value_coeff,
            value_clip=self.value_clip,
        )

    @property
    def num_places(self) -> int:
        """Groups that may be between admission and settlement (design section 8)."""
        return (self.max_staleness + 1) * self.groups_per_batch


class AdapterConfig(_Config):
    """LoRA shape and its optimizer."""

    rank: int = Field(8, ge=1, description="LoRA rank")
    alpha: float = Field(16.0, gt=0, description="the delta is scaled by alpha / rank")
    train_attn: bool = Field(True, description="adapt q, k, v, o")
    train_mlp: bool = Field(True, description="adapt gate, up, down")
    train_unembed: bool = Field(False, description="adapt the unembedding too, tied or not; the server needs learner.has_unembed")
    use_rslora: bool = Field(False, description="scale by alpha / sqrt(rank) instead of alpha / rank")
    warm_start: str | None = Field(None, description="PEFT adapter folder to start from, relative to the run file; its rank and scale must be these")
    learning_rate: float = Field(5e-4, gt=0, description="AdamW rate; LoRA wants about ten times the full fine-tuning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW second moment; short runs want less than 0.999")
    eps: float = Field(1e-8, gt=0, description="AdamW epsilon")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    grad_clip_norm: float = Field(1.0, ge=0, description="clip the run's gradient to this norm; 0 = off")
    warmup_steps: int = Field(0, ge=0, description="linear warm-up steps")
    schedule: Schedule = Field("constant", description="of the rate after warm-up: constant, or linear or cosine decay until the last step")
    final_fraction: float = Field(0.1, ge=0, le=1, description="of the rate, at the last step of a decay; at 0 that step changes nothing")

    @property
    def lora(self) -> LoraSpec:
        """The adapter's shape as model and learner take it."""
        return LoraSpec(self.rank, self.alpha, self.train_attn, self.train_mlp, self.use_rslora, self.train_unembed)


class SamplingConfig(_Config):
    """How the policy acts."""

    max_tokens: int = Field(64, ge=1, description="per turn")
    temperature: float = Field(1.0, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE, description="of training episodes; evaluation.temperature is its own")
    stop: tuple[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)], ...] = Field(
        (), strict=False, max_length=MAX_STOP_TEXTS, description="texts that end a turn wherever they occur; a special token's by its id"
    )


class ActorsConfig(_Config):
    """The run's actors."""

    max_turns: int = Field(1, ge=1, description="turns per episode; an episode that needs more is truncated")
    episode_tries: int = Field(3, ge=1, description="attempts per episode before it is recorded as failed")
    task_tries: int = Field(3, ge=1, description="failed groups of a task before the task is quarantined")
    max_failed_groups: int = Field(10, ge=1, description="failed groups in a row after which the run fails: its environment is broken")


class EvaluationConfig(_Config):
    """Held-out evaluation of pinned versions. It never trains."""

    num_tasks: int = Field(64, ge=0, description="held-out tasks; 0 = no evaluation")
    every: int = Field(0, ge=0, description="also every n versions; training waits for evaluations slower than that; 0 = only before and after")
    samples: int = Field(1, ge=1, description="episodes per task; pass@k is reported for k = 1, 2, 4, ... up to it")
    temperature: float = Field(0.0, ge=0, le=MAX_TEMPERATURE, description="of its episodes; 0 is greedy, more than one sample needs more than 0")
    top_k: int = Field(0, ge=0, description="of its episodes: draw among the k most likely tokens; 0 = all")
    top_p: float = Field(1.0, gt=0, le=1, description="of its episodes: draw among the fewest tokens with this much probability, after top_k")
    solved_at: float = Field(1.0, description="a sample solves its task from this reward on: what accuracy and pass@k count")
    keep_best: bool = Field(True, description="the version with the best accuracy stays on disk, whatever its age")

    @model_validator(mode="after")
    def _samples_differ(self) -> "EvaluationConfig":
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(f"temperature = {self.temperature} is below {MIN_TEMPERATURE:g}, and not 0, which is greedy")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(f"samples = {self.samples} at temperature 0 would all be the same; set evaluation.temperature, for example to 1.0")
        return self


class SupervisedConfig(_Config):
    """A phase of cross-entropy on examples before reinforcement learning, on the same adapter."""

    file: str = Field(
        description="JSON lines, relative to the run file, fixed until the phase is over: {messages} with a chat template, or {prompt, completion}"
    )
    steps: int = Field(ge=1, description="optimizer steps of the phase; the examples are shuffled anew in each epoch")
    examples_per_batch: int = Field(8, ge=1, description="examples per optimizer step")
    learning_rate: float = Field(2e-4, gt=0, description="AdamW rate of the phase; all else is the adapter's")
    warmup_steps: int = Field(0, ge=0, description="linear warm-up steps of the phase")
    too_long: Literal["error", "skip", "truncate"] = Field("error", description="examples longer than the learner's largest microbatch")


class RunConfig(_Config):
    """One training run: one tenant, one base, one adapter, one loss."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$", description="unique within its server")
    tenant: str = Field("local", pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$", description="who owns and pays for it")
    base: str = Field(
        "smollm2-135m", description="resident base: built-in name, Hugging Face folder, GGUF file (both relative to the run file), or hub name"
    )
    seed: int = Field(0, ge=0, lt=2**31, description="of the task order and of every random key")
    weight: float = Field(1.0, gt=0, description="fair-share weight in the learner; in the sampler a tenant has the sum over its active runs")
    environment: EnvironmentConfig
    algorithm: AlgorithmConfig
    adapter: AdapterConfig = AdapterConfig()
    sampling: SamplingConfig = SamplingConfig()
    actors: ActorsConfig = ActorsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    supervised: SupervisedConfig | None = Field(None, description="a supervised phase before RL; none without the section")
    deterministic: bool = Field(False, description="same files and seed, same curve and bytes, alone or beside others; needs max_staleness = 0")
    deadlines: DeadlinesConfig = DeadlinesConfig()

    @model_validator(mode="after")
    def _deterministic_is_on_policy(self) -> "RunConfig":
        if self.deterministic and self.algorithm.max_staleness:
            raise ValueError(
                f"deterministic = true needs algorithm.max_staleness = 0 (got {self.algorithm.max_staleness}): which version samples a token "
                "would depend on how fast the machine is"
            )
        return self

    @property
    def lora(self) -> LoraSpec:
        """The shape of all that the run trains: its adapter's, and the value head that a loss with a critic needs."""
        return replace(self.adapter.lora, train_value=self.algorithm.loss == "ppo_critic")

    @property
    def num_supervised_steps(self) -> int:
        """Versions 1 to this one are made by the supervised phase."""
        return self.supervised.steps if self.supervised else 0

    @property
    def num_steps(self) -> int:
        """Versions of the whole run."""
        return self.num_supervised_steps + self.algorithm.steps

    @property
    def optimizer(self) -> OptimizerSpec:
        """The optimizer of reinforcement learning, as the learner takes it; its schedule begins after a supervised phase."""
        a = self.adapter
        return OptimizerSpec(
            learning_rate=a.learning_rate,
            beta1=a.beta1,
            beta2=a.beta2,
            eps=a.eps,
            weight_decay=a.weight_decay,
            grad_clip_norm=a.grad_clip_norm,
            warmup_steps=a.warmup_steps,
            schedule=a.schedule,
            decay_steps=self.algorithm.steps,
            final_fraction=a.final_fraction,
            first_step=self.num_supervised_steps,
        )

    @property
    def supervised_optimizer(self) -> OptimizerSpec:
        """The optimizer of the supervised phase."""
        assert self.supervised is not None
        s = self.supervised
        return replace(self.optimizer, learning_rate=s.learning_rate, warmup_steps=s.warmup_steps, schedule="constant", first_step=0)


class SamplerConfig(_Config):
    """Static sizes of the sampler."""

    num_lanes: int = Field(64, ge=8, multiple_of=8, description="largest decode width; lanes come in tiles of 8 of one run")
    num_pages: int = Field(1024, ge=2, description="KV pages of 16 positions in the pool")
    host_mib: int = Field(1024, ge=0, description="MiB of host memory for pages of episodes that wait for a tool; beyond it they are computed again")
    max_context: int = Field(1024, ge=32, multiple_of=32, description="longest prompt plus completion served")
    steps_per_dispatch: int = Field(4, ge=1, description="most decode steps of one dispatch")
    num_slots: int = Field(8, ge=2, description="adapter versions on the device at once; slot 0 is the base; others wait in host memory")
    max_waiting: int = Field(4096, ge=1, description="requests of one tenant that may wait; more are refused, with the reason")
    kv_on_publish: Literal["keep", "recompute"] = Field(
        "keep", description="what becomes of the K/V of unfinished requests when a run publishes: kept, or computed anew under the new version"
    )


class LearnerConfig(_Config):
    """Static sizes of the learner."""

    max_positions: int = Field(1024, ge=128, multiple_of=64, description="largest microbatch axis T")
    path_positions: int = Field(0, ge=0, multiple_of=64, description="longest path of the replay executor; 0 = none, longer episodes are refused")
    is_path_on_host: bool = Field(False, description="keep a path's keys, values and their gradient in host memory while other work has the device")
    num_slots: int = Field(8, ge=1, description="runs resident at once in each rank class; idle ones beyond it wait in host memory, or on disk")
    rank_classes: tuple[int, ...] = Field(
        (8, 32),
        strict=False,
        description="widths of the slots, ascending; a run computes at the smallest that holds its rank, and its bits may depend on that width: "
        "take them from 8, 32 and 128, as a session without a server file does, or keep them with the run's seed",
    )
    has_unembed: bool = Field(False, description="compile room for adapters on the unembedding into every program")
    has_values: bool = Field(False, description="compile room for value heads into every program; for losses with a critic")
    max_quantum_s: float = Field(10.0, gt=0, description="longest that one run's batch goes first while other runs wait")
    memory_mib: int = Field(
        0,
        ge=0,
        description="MiB that base, adapters and the largest pass may take, by estimate: microbatches are as long as it allows, and what fits in "
        "none is walked; 0 = max_positions whatever it takes, refused if the device has too little",
    )
    host_mib: int = Field(4096, ge=0, description="MiB of host memory for runs that hold no slot; beyond it they wait on disk")

    @field_validator("rank_classes")
    @classmethod
    def _ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or list(value) != sorted(set(value)) or value[0] < 1:
            raise ValueError(f"must be one or more ranks, ascending (got {value})")
        return value

    @property
    def max_rank(self) -> int:
        """The widest class."""
        return self.rank_classes[-1]

    def class_of(self, rank: int) -> int:
        """The smallest class that holds `rank`. Raises ConfigError if none does."""
        found = next((width for width in self.rank_classes if width >= rank), None)
        if found is None:
            raise ConfigError(f"rank {rank} exceeds this server's rank classes {self.rank_classes}: lower it, or add a class to learner.rank_classes")
        return found


class ServerConfig(_Config):
    """One server: one base, one sampler, one learner."""

    state_dir: str = Field(".noria", description="folder of the database, adapters and reports")
    base: str = Field(
        "smollm2-135m", description="resident base: built-in name, Hugging Face folder, GGUF file (both relative to this file), or hub name"
    )
    sampler: SamplerConfig = SamplerConfig()
    learner: LearnerConfig = LearnerConfig()
    max_stall_ms: int = Field(2000, ge=1, description="longest a learner dispatch should hold up decoding on a shared device; 250 suits accelerators")
    max_episodes: int = Field(256, ge=1, description="episodes played at once by the actors of this process")
    sampler_share: float = Field(0.5, gt=0, lt=1, description="device share of the sampler when both stages want a shared device")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of base matrices; auto: bfloat16 on accelerators and on CPUs with amx_bf16 under JAX 0.12, else float32"
    )
    warm_up: bool = Field(True, description="compile every program at start, so that no request waits for the compiler later")
    keep_versions: int = Field(
        2, ge=1, description="newest committed versions of a run kept on disk, beside its best one and those that wait for their evaluation"
    )
    keep_episodes: bool = Field(True, description="keep the episodes of settled groups, for `noria runs episodes` and `noria debug step`; costs disk")
    drain_s: float = Field(60, gt=0, description="orderly stop of the server: seconds for its runs, then its actors, then the device")

    @model_validator(mode="after")
    def _what_is_sampled_can_train(self) -> "ServerConfig":
        if self.sampler.max_context > max(self.learner.max_positions, self.learner.path_positions):
            raise ValueError(
                f"sampler.max_context = {self.sampler.max_context} is more than learner.max_positions = {self.learner.max_positions}: "
                "an episode of that length could be sampled and never trained; raise max_positions or learner.path_positions, or lower max_context"
            )
        return self


def load_toml(path: Path, model: type[ModelT]) -> ModelT:
    """Read a TOML file into a configuration model.

    Raises ConfigError: no such file, not TOML, an unknown key (with the nearest known one), a wrong type or range.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, UnicodeDecodeError, an integer of thousands of digits, a path with a NUL
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return parse(data, model, source=str(path))


def parse(data: dict[str, Any], model: type[ModelT], *, source: str) -> ModelT:
    """Validate plain data as `model`; `source` names its origin in errors. Raises ConfigError."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(_explain(model, item["loc"], item["type"], item["msg"], item.get("input")) for item in error.errors())
        raise ConfigError(f"{source}: {problems}") from error


def _explain(model: type[BaseModel], loc: tuple[int | str, ...], kind: str, message: str, value: Any) -> str:
    where = ".".join(str(part) for part in loc)
    if not where:
        return message.removeprefix("Value error, ")
    if kind != "extra_forbidden":
        return f"{where}: {message}" + ("" if kind == "missing" else f" (got {_shown(value)})")
    if where in ("sampling.top_k", "sampling.top_p"):
        return f"{where} cannot train: such tokens are not drawn from the policy that the loss corrects; leave it out, or set evaluation.{loc[-1]}"
    known = _fields_at(model, loc[:-1])
    close = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
    return f"unknown key {where!r}; {hint}"


def _shown(value: Any) -> str:
    """The value in an error, cut where it is long."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _fields_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    for part in loc:
        field = model.model_fields.get(str(part))
        inner = field.annotation if field else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return list(model.model_fields)


def cache_dir() -> Path:
    """Folder for compiled programs: $NORIA_CACHE_DIR, else $XDG_CACHE_HOME/noria, else ~/.cache/noria."""
    explicit = os.environ.get("NORIA_CACHE_DIR")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "noria"


def install_seconds() -> float:
    """Seconds that the installation took, as `make demo` measured them: $NORIA_INSTALL_S, else 0. Raises ConfigError unless it is a number >= 0."""
    text = os.environ.get("NORIA_INSTALL_S", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"NORIA_INSTALL_S must be a number of seconds, at least 0 (got {text!r})")
    return seconds
