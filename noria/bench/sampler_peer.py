"""`noria bench sampler --peer transformers`: our sampler against `generate`, in turn, in one run, dtype against dtype.

The peer is a process of the reference environment (tests/reference/sampler_transformers.py) that keeps its models. It generates greedily and without
log-probabilities, its cheapest way; ours draws at temperature 1 and gives them, as actors ask for it. Of its kinds of caches the faster one is found
first, on a few tokens, and that one is measured. A group is measured twice: as `generate` does it (several samples of each prompt), and with what its
parts can be made to do by hand, a cache of the prompts that is repeated for their samples.

Before anything is timed, both sides continue the same prompts greedily in float32: unless most of their first tokens are the same, they do not
compute the same, and the measurement is refused.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Final, final

import jax.numpy as jnp
import numpy as np
from rich.table import Table

from noria.bench.bases import base_of
from noria.bench.harness import REPEATS, Bar, Report, Result, Timings, alternate
from noria.bench.peer_process import PeerProcess, require, running
from noria.bench.sampler_cases import FULL, QUICK, Sizes, Workload
from noria.bench.sampler_side import Side, serving
from noria.config import SamplerConfig
from noria.errors import ConfigError
from noria.model.config import ModelConfig
from noria.model.export import write_merged
from noria.model.lora import initial_adapter
from noria.model.weights import LoadedBase
from noria.types import Ids, LoraSpec

DTYPES: Final = ("float32", "bfloat16")
AT_LEAST: Final = {"ratio_batch32": 1.0, "ratio_group": 4.0, "ratio_batch32_bf16": 1.3, "ratio_group_bf16": 3.0}
SUFFIX: Final = {"float32": "", "bfloat16": "_bf16"}

TRIAL_ANSWER: Final = 4
"""New tokens of a trial of one way."""

WAYS: Final = ("dynamic", "static")
"""Of `generate`."""

GROUP_WAY: Final = "shared"
"""By hand, for several samples of a prompt."""

ALIKE: Final = 0.9
"""Of the first greedily chosen tokens of both sides in float32."""

ROOT: Final = Path(__file__).parents[2]
SCRIPT: Final = ROOT / "tests" / "reference" / "sampler_transformers.py"
PYTHON: Final = ROOT / ".venv-ref" / "bin" / "python"
MAKE: Final = ".venv-ref"

_NO_CHANGE: Final = LoraSpec(1, 1.0)


@final
class Theirs:
    """The other side: its process, and the folder through which it gets prompts. One workload at a time."""

    def __init__(self, process: PeerProcess, folder: Path, config: ModelConfig) -> None:
        self._process, self._folder, self._config = process, folder, config
        self._rounds = count(1_000_000)  # prompts that our side never has
        self.about = process.about

    def take(self, workload: Workload, dtype: str, way: str, *, prompts: list[Ids] | None = None) -> tuple[float, list[list[int]]]:
        """One round; its own seconds, and the new ids of every sample. prompts: None for some that no round had."""
        given = workload.prompts(next(self._rounds), self._config) if prompts is None else prompts
        np.savez(self._folder / "round.npz", ids=np.asarray(given, np.int64))
        answer = self._process.ask(f"{dtype} {way} {workload.members} {workload.answer} round")
        return float(answer["seconds"]), answer["ids"]

    def fastest_way(self, workload: Workload, dtype: str) -> tuple[str, dict[str, float]]:
        """The way that takes least for a few tokens of the workload, and the seconds of each, the model loaded before."""
        short = replace(workload, answer=TRIAL_ANSWER)
        self.take(replace(short, num_prompts=1), dtype, WAYS[0])
        seconds = {way: self.take(short, dtype, way)[0] for way in WAYS}
        return min(seconds, key=lambda way: seconds[way]), seconds


@dataclass(frozen=True, slots=True)
class Compared:
    """One workload in one dtype, over one way of theirs. trial_s: of each way of `generate`, for TRIAL_ANSWER tokens."""

    workload: Workload
    dtype: str
    way: str
    trial_s: dict[str, float]
    timings: Timings

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.timings.ratio(self.way, "ours")

    @property
    def key(self) -> str:
        """Of the ratio; empty for workloads without one."""
        named = {"batch 32": "ratio_batch32", "group": "ratio_group"}.get(self.workload.name, "")
        by_hand = "_shared" if self.way == GROUP_WAY else ""
        return f"{named}{by_hand}{SUFFIX[self.dtype]}" if named else ""

    def row(self) -> Result:
        """As it stands in `cases`."""
        ours_s, theirs_s = (self.timings.median(name) for name in ("ours", self.way))
        return {
            "name": f"{self.workload.name}, {self.dtype}",
            "dtype": self.dtype,
            "lanes": self.workload.num_lanes,
            "prompts": self.workload.num_prompts,
            "prompt": self.workload.prompt,
            "answer": self.workload.answer,
            "tokens_per_s": self.workload.num_tokens / ours_s,
            "their_tokens_per_s": self.workload.num_tokens / theirs_s,
            "their_way": self.way,
            "their_trial_s": self.trial_s,
            "ratio": self.ratio,
        }


CASES: Final = ("batch32", "group", "small batches")
"""Of `--case`: the workloads of the ratios, each in both dtypes, and batches 1 and 8 in float32."""


def measure(*, quick: bool = False, repeats: int = REPEATS, case: str | None = None) -> Report:
    """Everything, or one case, dtype after dtype.

    Raises ConfigError: no reference environment, an unknown case, or sides that do not compute the same.
    """
    if case is not None and case not in CASES:
        raise ConfigError(f"the sampler's bench against transformers has no case {case!r}: choose from {', '.join(CASES)}")
    require(PYTHON, SCRIPT, make=MAKE)  # before anything is loaded
    sizes, found = QUICK if quick else FULL, list[Compared]()
    loaded = base_of("smollm2-135m", 1) if quick else base_of(sizes.base)  # the tiny base has no tokenizer that a folder could hold
    with tempfile.TemporaryDirectory() as folder, serving_peer(Path(folder), loaded) as theirs:
        for dtype in DTYPES:
            found += _compare_all(loaded, theirs, sizes, _chosen(sizes, dtype, case), (dtype, repeats))
        about = {key: theirs.about[key] for key in ("torch", "threads", "transformers")}
    values: Result = {one.key: one.ratio for one in found if one.key}
    values["cases"] = [one.row() for one in found]
    return Report("sampler --peer transformers", loaded.config.name, values, bars_of(values), quick, about)


@contextmanager
def serving_peer(folder: Path, loaded: LoadedBase) -> Iterator[Theirs]:
    """The peer with our base; ended afterwards. Raises ConfigError where there is no reference environment."""
    write_merged(folder / "model", loaded, initial_adapter(loaded.config, _NO_CHANGE, 1, 0), _NO_CHANGE)  # a new adapter changes nothing
    with running(PYTHON, SCRIPT, [folder], make=MAKE) as process:
        yield Theirs(process, folder, loaded.config)


def _chosen(sizes: Sizes, dtype: str, case: str | None) -> list[Workload]:
    small = [workload for workload in sizes.batches if workload.num_lanes < sizes.batch32.num_lanes] if dtype == DTYPES[0] else []
    by_case = {"batch32": [sizes.batch32], "group": [sizes.group], "small batches": small}
    return [workload for name in CASES if case in (None, name) for workload in by_case[name]]


def _compare_all(loaded: LoadedBase, theirs: Theirs, sizes: Sizes, workloads: Sequence[Workload], how: tuple[str, int]) -> list[Compared]:
    """how: dtype and repeats. Our engine is a server's without adapters, and is gone before the next dtype's comes."""
    dtype, repeats = how
    if not workloads:
        return []
    side = Side(loaded, SamplerConfig(), dtype=jnp.dtype(dtype), rank_classes=(8,), shapes=sizes.shapes)
    with serving(side):
        if dtype == DTYPES[0]:
            check_sides(side, theirs, sizes.batch32)
        return [compared for workload in workloads for compared in _compare(side, theirs, workload, (dtype, repeats))]


def check_sides(side: Side, theirs: Theirs, workload: Workload) -> None:
    """Both continue the same prompts greedily. Raises ConfigError if too few of the first tokens agree: they do not compute the same."""
    short = replace(workload, answer=1)
    prompts = short.prompts(0, side.config)
    _, their_ids = theirs.take(short, "float32", "dynamic", prompts=prompts)
    ours = side.take(short, is_greedy=True, prompts=prompts)
    alike = np.mean([list(completion.sampled_ids) == ids for completion, ids in zip(ours.completions, their_ids, strict=True)])
    if alike < ALIKE:
        raise ConfigError(f"the two sides do not compute alike: only {alike:.0%} of their first greedy tokens agree")


def _compare(side: Side, theirs: Theirs, workload: Workload, how: tuple[str, int]) -> list[Compared]:
    dtype, repeats = how
    fastest, trial_s = theirs.fastest_way(workload, dtype)
    ways = (fastest, GROUP_WAY) if workload.members > 1 else (fastest,)
    seconds: dict[str, list[float]] = {name: [] for name in ("ours", *ways)}
    works: dict[str, Callable[[], None]] = {"ours": lambda: seconds["ours"].append(side.take(workload).seconds)}
    for way in ways:
        works[way] = lambda way=way: seconds[way].append(theirs.take(workload, dtype, way)[0])  # type: ignore[misc]
    alternate(works, repeats=repeats)
    timings = Timings({name: tuple(values) for name, values in seconds.items()})
    return [Compared(workload, dtype, way, trial_s, timings) for way in ways]


def bars_of(values: Result) -> tuple[Bar, ...]:
    """What the issue asks of these numbers; of a case that was left out, nothing."""
    return tuple(Bar(name, values.get(name), at_least=bound) for name, bound in AT_LEAST.items())


def table(report: Report) -> Table:
    """The measurement for people."""
    shown = Table("workload", "tokens/s", "theirs", "their way", "ratio", title=f"{report.bench}, {report.base}")
    for row in report.values["cases"]:
        own, their = f"{row['tokens_per_s']:.0f}", f"{row['their_tokens_per_s']:.0f}"
        shown.add_row(row["name"], own, their, row["their_way"], f"{row['ratio']:.2f}")
    return shown
