"""Run and server configuration: frozen pydantic models with a doc line per field, and their TOML files.

Unknown keys are errors that name the nearest key. This is the only reader of os.environ.
"""

import difflib
import math
import os
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from noria.errors import ConfigError
from noria.types import Denominator, LoraSpec, LossSpec, OptimizerSpec, Schedule

ModelT = TypeVar("ModelT", bound=BaseModel)

BUILTIN_BASES = ("smollm2-135m", "tiny")
"""Names of bases that are not looked for on disk (model/weights.py loads them)."""

MAX_SHOWN = 300
"""Letters of a wrong value that an error shows."""

MAX_SETTING_DEPTH = 32
"""Tables and lists within one another in an environment's settings."""


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
        return {key: _storable(item, key) for key, item in value.items()}


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
    denominator: Denominator = Field("tokens", description="global normalization of a batch's loss")
    clip_low: float = Field(0.2, ge=0, description="lower clip distance of the proximal ratio")
    clip_high: float = Field(0.28, ge=0, description="upper clip distance of the proximal ratio")
    tis_cap: float = Field(2.0, gt=0, description="cap of the truncated importance weight exp(learner - behavior)")
    sequence_mask_c: float = Field(1.2, ge=0, description="mask sequences whose geometric mean ratio leaves [1/c, c]; 0 = off, else at least 1")

    @field_validator("sequence_mask_c")
    @classmethod
    def _off_or_a_ratio(cls, value: float) -> float:
        if 0 < value < 1:
            raise ValueError(f"must be 0 (off) or at least 1: {value} would mask every episode")
        return value

    @property
    def loss(self) -> LossSpec:
        """The loss as the learner takes it."""
        return LossSpec(clip_low=self.clip_low, clip_high=self.clip_high, tis_cap=self.tis_cap, sequence_mask_c=self.sequence_mask_c)

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
        return LoraSpec(self.rank, self.alpha, self.train_attn, self.train_mlp, self.use_rslora)


class SamplingConfig(_Config):
    """How the policy acts."""

    max_tokens: int = Field(64, ge=1, description="per turn")
    temperature: float = Field(1.0, gt=0, description="of training episodes; evaluation.temperature is its own")
    stop: tuple[str, ...] = Field((), strict=False, description="texts that are one token each and end a turn, beside the end-of-text token")


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
    temperature: float = Field(0.0, ge=0, description="of its episodes; 0 is greedy, more than one sample needs more than 0")
    solved_at: float = Field(1.0, description="a sample solves its task from this reward on: what accuracy and pass@k count")
    keep_best: bool = Field(True, description="the version with the best accuracy stays on disk, whatever its age")

    @model_validator(mode="after")
    def _samples_differ(self) -> "EvaluationConfig":
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(f"samples = {self.samples} at temperature 0 would all be the same; set evaluation.temperature, for example to 1.0")
        return self


class SupervisedConfig(_Config):
    """A phase of cross-entropy on examples before reinforcement learning, on the same adapter."""

    file: str = Field(
        description="JSON lines, relative to the run file, the same until the phase is over: {messages: [...]} with a chat template, or "
        "{prompt: ..., completion: ...}"
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
    max_context: int = Field(1024, ge=32, multiple_of=32, description="longest prompt plus completion served")
    steps_per_dispatch: int = Field(4, ge=1, description="most decode steps of one dispatch")
    num_slots: int = Field(8, ge=2, description="adapter versions resident at once; slot 0 is the base")


class LearnerConfig(_Config):
    """Static sizes of the learner."""

    max_positions: int = Field(1024, ge=128, multiple_of=64, description="largest microbatch axis T")
    num_slots: int = Field(8, ge=1, description="runs resident at once")
    max_rank: int = Field(16, ge=1, description="the rank class: smaller ranks are padded with zeros and masked")


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
        if self.sampler.max_context > self.learner.max_positions:
            raise ValueError(
                f"sampler.max_context = {self.sampler.max_context} is more than learner.max_positions = {self.learner.max_positions}: "
                "an episode of that length could be sampled and never trained; raise max_positions, or lower max_context"
            )
        return self


def _storable(value: Any, where: str, depth: int = 0) -> Any:
    """A setting as the state folder gives it back: JSON's types, tuples as lists. Raises ValueError for anything else."""
    if depth > MAX_SETTING_DEPTH:
        raise ValueError(f"{where[:80]} is nested more than {MAX_SETTING_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value):
        return str(value)
    if isinstance(value, list | tuple):
        return [_storable(item, f"{where}[{number}]", depth + 1) for number, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {_storable(key, where): _storable(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    raise ValueError(f"{where} must be text, a finite number of at most 64 bits, true or false, or a list or table of these (got {value!r:.80})")


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
