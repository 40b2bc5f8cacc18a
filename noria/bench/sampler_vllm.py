"""`noria bench sampler --peer vllm`: our sampler against vLLM's CPU build, in turn, in one run, without adapters and with four.

The peers are processes of an environment of their own (tests/reference/sampler_vllm.py), an engine each, that wait while another is timed:

    compiled    the base alone, through torch.compile: vLLM at its fastest
    eager       the same without compilation: the control, since vLLM's CPU build compiles nothing once it serves adapters
    adapters    four adapters of rank 8, of which prompt i has number i modulo 4

Each side's dtype is its faster one of float32 and bfloat16 on this machine, found on a first round of both.
vLLM samples greedily, without log-probabilities and without text, its cheapest way; ours draws at temperature 1 and gives log-probabilities.

Before anything is timed, both sides continue the same prompts greedily: unless most of their first tokens are the same, with adapters too, they do
not compute the same, and the measurement is refused.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, final

import jax.numpy as jnp
import numpy as np
from rich.table import Table

from noria.bench.bases import base_of
from noria.bench.harness import REPEATS, Bar, Report, Result, Timings, alternate
from noria.bench.peer_process import PeerProcess, running
from noria.bench.sampler_cases import FULL, QUICK, Sizes, Workload, adapters_of
from noria.bench.sampler_side import Side, serving
from noria.config import SamplerConfig
from noria.errors import ConfigError
from noria.model.config import ModelConfig
from noria.model.export import write_merged, write_peft
from noria.model.lora import zero_adapter
from noria.model.weights import LoadedBase
from noria.types import Ids

DTYPES: Final = ("bfloat16", "float32")
FOUR_ADAPTERS: Final = 2.0
ALIKE: Final = 0.75
"""Of both sides' first greedy tokens. Their dtypes may differ, so that near ties fall either way; other weights or adapters agree on far fewer."""

CASES: Final[Mapping[str, tuple[str, ...]]] = {"batch32": ("compiled", "eager"), "adapters": ("adapters",)}
"""Of `--case`: the engines that it needs."""

RATIOS: Final = {"compiled": "ratio_vllm_batch32", "eager": "ratio_vllm_eager_batch32", "adapters": "ratio_vllm_4_adapters_batch32"}

ROOT: Final = Path(__file__).parents[2]
SCRIPT: Final = ROOT / "tests" / "reference" / "sampler_vllm.py"
PYTHON: Final = ROOT / ".venv-vllm" / "bin" / "python"


@final
class Theirs:
    """One engine of the other side. One workload at a time. trial_s: seconds of one round in each dtype that was tried."""

    def __init__(self, process: PeerProcess, config: ModelConfig, dtype: str) -> None:
        self._process, self._config, self.dtype = process, config, dtype
        self._rounds = count(1_000_000)  # prompts that our side never has
        self.about, self.trial_s = process.about, dict[str, float]()

    def take(self, workload: Workload, *, prompts: list[Ids] | None = None) -> tuple[float, list[list[int]]]:
        """One round; its own seconds, and the new ids of every sample. prompts: None for some that no round had."""
        given = workload.prompts(next(self._rounds), self._config) if prompts is None else prompts
        answer = self._process.ask(json.dumps({"prompts": given, "members": workload.members, "answer": workload.answer}))
        assert [len(ids) for ids in answer["ids"]] == [workload.answer] * workload.num_lanes, "every sample has all its tokens"
        return float(answer["seconds"]), answer["ids"]


@dataclass(frozen=True, slots=True)
class Compared:
    """One engine of theirs and ours on one workload."""

    mode: str
    workload: Workload
    theirs: Theirs
    our_dtype: str
    timings: Timings

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.timings.ratio(self.mode, f"ours {self.workload.name}")

    def row(self) -> Result:
        """As it stands in `cases`."""
        ours_s, theirs_s = self.timings.median(f"ours {self.workload.name}"), self.timings.median(self.mode)
        return {
            "name": f"{self.workload.name}, {self.mode}",
            "their_mode": self.mode,
            "lanes": self.workload.num_lanes,
            "prompt": self.workload.prompt,
            "answer": self.workload.answer,
            "adapters": self.workload.num_adapters,
            "dtype": self.our_dtype,
            "their_dtype": self.theirs.dtype,
            "their_trial_s": self.theirs.trial_s,
            "tokens_per_s": self.workload.num_tokens / ours_s,
            "their_tokens_per_s": self.workload.num_tokens / theirs_s,
            "ratio": self.ratio,
        }


def measure(*, quick: bool = False, repeats: int = REPEATS, case: str | None = None) -> Report:
    """Everything, or one case. quick: short prompts on the first layer of the base, said in the result.

    Raises ConfigError: no environment of vLLM, an unknown case, or sides that do not compute the same.
    """
    if case is not None and case not in CASES:
        raise ConfigError(f"the sampler's bench against vLLM has no case {case!r}: choose from {', '.join(CASES)}")
    require_environment()
    sizes = QUICK if quick else FULL
    loaded = base_of("smollm2-135m", 1) if quick else base_of(sizes.base)  # the tiny base has no tokenizer that a folder could hold
    modes = [mode for name, needed in CASES.items() if case in (None, name) for mode in needed]
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), loaded, sizes)
        found = _compare_all(Path(folder), loaded, sizes, modes, repeats)
    values: Result = {RATIOS[one.mode]: one.ratio for one in found}
    if {"compiled", "eager"} <= set(modes):
        values["vllm_compiled_over_eager"] = found[0].timings.ratio("eager", "compiled")
    values["cases"] = [one.row() for one in found]
    return Report("sampler --peer vllm", loaded.config.name, values, bars_of(values), quick, found[0].theirs.about)


def require_environment() -> None:
    """Raises ConfigError, before anything is loaded, where vLLM is not installed."""
    if not PYTHON.exists():
        raise ConfigError("vLLM's CPU build runs in an environment of a checkout, which is not there: run `make .venv-vllm` in the checkout")


def write_folder(folder: Path, loaded: LoadedBase, sizes: Sizes) -> None:
    """What the peers read: our base, the adapters, and how large an engine has to be."""
    plain, adapted = sizes.vllm
    write_merged(folder / "model", loaded, zero_adapter(loaded.config, adapted.rank), adapted.spec)
    for index, adapter in enumerate(adapters_of(adapted, loaded.config)):
        write_peft(folder / "adapters" / str(index), adapter, adapted.spec, loaded.config, base_name=loaded.config.name)
    longest = max(workload.prompt + workload.answer for workload in (plain, adapted))
    needed = {"lanes": max(plain.num_lanes, adapted.num_lanes), "context": longest, "rank": adapted.rank}
    (folder / "sizes.json").write_text(json.dumps(needed))


def _compare_all(folder: Path, loaded: LoadedBase, sizes: Sizes, modes: list[str], repeats: int) -> list[Compared]:
    """All works by turns, after a round of each that is not counted."""
    plain, adapted = sizes.vllm
    workloads, our_dtype = {mode: adapted if mode == "adapters" else plain for mode in modes}, our_fastest(loaded, sizes)
    side = _side(loaded, sizes, our_dtype)
    seconds: dict[str, list[float]] = {}
    works: dict[str, Callable[[], None]] = {}

    def add(name: str, take: Callable[[], float]) -> None:
        works[name] = lambda: seconds.setdefault(name, []).append(take())

    with serving(side), ExitStack() as stack:
        engines: dict[str, Theirs] = {}
        for mode, workload in workloads.items():
            # the control is for the engine that it controls: the same dtype
            dtypes = (engines["compiled"].dtype,) if mode == "eager" and "compiled" in engines else DTYPES
            engines[mode] = fastest(stack, folder, (mode, dtypes), workload, loaded.config)
            check_sides(side, engines[mode], workload)
            add(f"ours {workload.name}", partial(_our_seconds, side, workload))
            add(mode, partial(_their_seconds, engines[mode], workload))
        for work in works.values():
            work()
        seconds.clear()
        alternate(works, repeats=repeats)
    timings = Timings({name: tuple(values) for name, values in seconds.items()})
    return [Compared(mode, workloads[mode], engines[mode], our_dtype, timings) for mode in modes]


def _our_seconds(side: Side, workload: Workload) -> float:
    return side.take(workload).seconds


def _their_seconds(engine: Theirs, workload: Workload) -> float:
    return engine.take(workload)[0]


def our_fastest(loaded: LoadedBase, sizes: Sizes) -> str:
    """Our faster dtype."""
    seconds = {}
    for dtype in DTYPES:
        side = _side(loaded, sizes, dtype)
        with serving(side):
            side.take(sizes.vllm[0])
            seconds[dtype] = side.take(sizes.vllm[0]).seconds
    return min(seconds, key=lambda dtype: seconds[dtype])


def _side(loaded: LoadedBase, sizes: Sizes, dtype: str) -> Side:
    return Side(loaded, SamplerConfig(), dtype=jnp.dtype(dtype), rank_classes=(sizes.vllm[1].rank,), shapes=sizes.shapes)


def fastest(stack: ExitStack, folder: Path, tried: tuple[str, tuple[str, ...]], workload: Workload, config: ModelConfig) -> Theirs:
    """An engine in the fastest of these dtypes, under way until the stack is closed; the others are gone. tried: mode, dtypes."""
    mode, dtypes = tried
    found: list[tuple[float, Theirs, ExitStack]] = []
    for dtype in dtypes:
        own = stack.enter_context(ExitStack())
        engine = Theirs(own.enter_context(running(PYTHON, SCRIPT, [folder, mode, dtype], make=".venv-vllm")), config, dtype)
        engine.take(workload)  # what compiles at first use has
        found.append((engine.take(workload)[0], engine, own))
    _, best, _ = min(found, key=lambda one: one[0])
    best.trial_s = {engine.dtype: seconds for seconds, engine, _ in found}
    for _, engine, own in found:
        if engine is not best:
            own.close()
    return best


def check_sides(side: Side, theirs: Theirs, workload: Workload) -> None:
    """Both continue the same prompts greedily. Raises ConfigError if too few of the first tokens agree: they do not compute the same."""
    short = replace(workload, answer=1)
    prompts = short.prompts(0, side.config)
    _, their_ids = theirs.take(short, prompts=prompts)
    ours = side.take(short, is_greedy=True, prompts=prompts)
    alike = np.mean([list(completion.sampled_ids) == ids for completion, ids in zip(ours.completions, their_ids, strict=True)])
    if alike < ALIKE:
        raise ConfigError(f"the two sides do not compute alike on {workload.name}: only {alike:.0%} of their first greedy tokens agree")


def bars_of(values: Result) -> tuple[Bar, ...]:
    """What the issue asks of these numbers; of a case that was left out, nothing."""
    name = RATIOS["adapters"]
    return (Bar(name, values.get(name), at_least=FOUR_ADAPTERS),)


def table(report: Report) -> Table:
    """The measurement for people, with what of the gap compilation makes."""
    shown = Table("workload", "tokens/s", "vLLM's", "its dtype", "ratio", title=f"{report.bench}, {report.base}", caption=gap(report.values))
    for row in report.values["cases"]:
        own, their = f"{row['tokens_per_s']:.0f}", f"{row['their_tokens_per_s']:.0f}"
        shown.add_row(row["name"], own, their, row["their_dtype"], f"{row['ratio']:.2f}")
    return shown


def gap(values: Result) -> str | None:
    """The gap to vLLM without adapters in words; None where it was not measured whole."""
    factor = values.get("vllm_compiled_over_eager")
    if factor is None:
        return None
    compiled, eager = values[RATIOS["compiled"]], values[RATIOS["eager"]]
    return (
        f"Without adapters ours is {compiled:.2f} times as fast as vLLM, and {eager:.2f} times as fast as vLLM without compilation, "
        f"which makes vLLM {factor:.2f} times as fast, and which it leaves out once it serves adapters."
    )
