"""`noria bench replay --peer peft`: the GRPO update of one group against torch + PEFT, in turn, in one run.

The peer is a process of the reference environment that keeps its models loaded (tests/reference/peft_step.py) and answers one update at a time, so
that repeats alternate between ours and theirs, and nobody computes while the other is timed. Both sides train the same adapters of the same base on
the same rows: the first updates' gradient norms in float32 have to agree, or the measurement is refused.

    ours        the packed tree, and an optimizer step; float32, and with a bfloat16 base
    baseline    our path without sharing, float32
    theirs      all rows as one batch; float32 and bfloat16
    4 tenants   the update of four adapters: ours in one stream, theirs one after another; the best dtype of each side
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from rich.table import Table

from noria.bench.bases import base_of
from noria.bench.executors import LORA, Subject, best_axis, make_subject, optimizer_step, packed_axis, packed_gradient, runs_gradient
from noria.bench.harness import REPEATS, Bar, Report, Result, Timings, alternate
from noria.bench.peer_process import PeerProcess, require, running
from noria.bench.trees import BEHAVIOR_LOGPROB, group, unshared
from noria.errors import ConfigError
from noria.learner.optimizer import read_slot
from noria.model.export import write_merged, write_peft
from noria.model.lora import initial_adapter
from noria.model.weights import LoadedBase
from noria.types import TokenTree

TENANTS: Final = 4
STEP: Final = 3.0
STEP_F32: Final = 2.6
BASELINE: Final = 0.7
DTYPES: Final = ("float32", "bfloat16")
NORM_TOLERANCE: Final = 1e-3
"""Relative, of the two sides' gradient norms in float32."""

ROOT: Final = Path(__file__).parents[2]
SCRIPT: Final = ROOT / "tests" / "reference" / "peft_step.py"
PYTHON: Final = ROOT / ".venv-ref" / "bin" / "python"
MAKE: Final = ".venv-ref"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the group: P, R, G; and the base, cut to num_layers unless that is None."""

    base: str
    num_layers: int | None
    prompt: int
    answer: int
    members: int


FULL: Final = Sizes("smollm2-135m", None, 512, 32, 8)
QUICK: Final = Sizes("smollm2-135m", 1, 96, 8, 4)


def measure(*, quick: bool = False, repeats: int = REPEATS) -> Report:
    """Everything; minutes. quick: tiny sizes, said in the result. Raises ConfigError where there is no reference environment, or the sides differ."""
    require(PYTHON, SCRIPT, make=MAKE)  # before anything is loaded
    sizes = QUICK if quick else FULL
    loaded = base_of(sizes.base, sizes.num_layers)
    tree = group(loaded.config.vocab_size, prompt=sizes.prompt, answer=sizes.answer, members=sizes.members)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), loaded, tree, sizes) as peer:
        timings, best = _timings(peer, loaded, tree, repeats)
        about = peer.about
    ours, theirs = (f"{side} {best[side]}" for side in ("ours", "theirs"))
    values: Result = {
        "ratio_peft_step": timings.ratio(theirs, ours),
        "ratio_peft_4_tenants": timings.ratio("theirs 4 tenants", "ours 4 tenants"),
        "ratio_peft_step_f32": timings.ratio("theirs float32", "ours float32"),
        "baseline_over_peft": timings.ratio("theirs float32", "baseline float32"),
        "seconds": {name: timings.median(name) for name in timings.seconds},
    }
    return Report("replay --peer peft", loaded.config.name, values, bars_of(values), quick, {**about, "best_dtype": best})


@contextmanager
def serving(folder: Path, loaded: LoadedBase, tree: TokenTree, sizes: Sizes) -> Iterator[PeerProcess]:
    """The peer with our base, our adapters and the group's rows; ended afterwards."""
    write_merged(folder / "model", loaded, initial_adapter(loaded.config, LORA, LORA.rank, 0), LORA)  # a new adapter changes nothing
    subject = make_subject(loaded, num_slots=TENANTS)
    for slot in range(TENANTS):
        params = read_slot(subject.state, slot).params
        write_peft(folder / "adapters" / str(slot), params, LORA, loaded.config, base_name=loaded.config.name)
    np.savez(folder / "batch.npz", **rows_of(tree, sizes))
    with running(PYTHON, SCRIPT, [folder], make=MAKE) as peer:
        yield peer


def _update(peer: PeerProcess, dtype: str, names: list[str]) -> list[float]:
    """One update of each of these adapters; the norms of their gradients."""
    norms: list[float] = peer.ask(f"{dtype} {' '.join(names)}")["grad_norms"]
    return norms


def rows_of(tree: TokenTree, sizes: Sizes) -> dict[str, Any]:
    """The group as a rectangle: ids [G, P + R], and of the answers behavior log-probabilities [G, R] and advantages [G]."""
    rows, shape = unshared(tree), (sizes.members, sizes.answer)
    entries = rows.entries
    targets = entries.target_M.reshape(shape)
    ids = np.concatenate([rows.ids_T.reshape(sizes.members, -1), targets[:, -1:]], axis=1).astype(np.int64)
    advantages = entries.advantage_M.reshape(shape)[:, 0]
    return {"ids": ids, "behavior_logprobs": np.full(shape, BEHAVIOR_LOGPROB, np.float32), "advantages": advantages}


def _timings(peer: PeerProcess, loaded: LoadedBase, tree: TokenTree, repeats: int) -> tuple[Timings, dict[str, str]]:
    """All works by turns, and the best dtype of each side, which the four tenants' updates are made in."""
    rows = unshared(tree)
    subjects = {dtype: make_subject(loaded, dtype=_numpy_dtype(dtype)) for dtype in DTYPES}
    axes = {"ours": packed_axis(tree), "baseline": best_axis(rows)}
    names = [str(slot) for slot in range(TENANTS)]

    def step(dtype: str, layout: TokenTree, axis: int) -> None:
        subject = subjects[dtype]
        optimizer_step(subject, 0, packed_gradient(subject, layout, axis))

    _check_sides(peer, subjects["float32"], tree)
    works: dict[str, Any] = {f"ours {dtype}": lambda dtype=dtype: step(dtype, tree, axes["ours"]) for dtype in DTYPES}
    works |= {f"theirs {dtype}": lambda dtype=dtype: _update(peer, dtype, names[:1]) for dtype in DTYPES}
    for work in works.values():
        work()
    first = alternate(works, repeats=1)
    best = {side: min(DTYPES, key=lambda dtype: first.median(f"{side} {dtype}")) for side in ("ours", "theirs")}
    many = make_subject(loaded, num_slots=TENANTS, dtype=_numpy_dtype(best["ours"]))

    def tenants() -> None:
        gradient = runs_gradient(many, [(slot, tree) for slot in range(TENANTS)], axes["ours"], many.state.gradient)
        for slot in range(TENANTS):
            optimizer_step(many, slot, gradient)
            gradient = many.state.gradient

    works["baseline float32"] = lambda: step("float32", rows, axes["baseline"])
    works["ours 4 tenants"] = tenants
    works["theirs 4 tenants"] = lambda: _update(peer, best["theirs"], names)
    for name in ("baseline float32", "ours 4 tenants", "theirs 4 tenants"):
        works[name]()
    return alternate(works, repeats=repeats), best


def _check_sides(peer: PeerProcess, subject: Subject, tree: TokenTree) -> None:
    """Both sides' first gradients have one norm. Raises ConfigError: they do not compute the same."""
    gradient = packed_gradient(subject, tree, packed_axis(tree))
    ours = float(np.sqrt(sum(float((np.asarray(leaf, np.float64) ** 2).sum()) for leaf in jax.tree.leaves(gradient))))
    (theirs,) = _update(peer, "float32", ["0"])
    if abs(ours - theirs) > NORM_TOLERANCE * theirs:
        raise ConfigError(f"the two sides do not train alike: our gradient's norm is {ours:.6g}, the peer's {theirs:.6g}")


def _numpy_dtype(name: str) -> npt.DTypeLike:
    return jnp.dtype(name)


def bars_of(values: Result) -> tuple[Bar, ...]:
    """What the issue asks of these numbers."""
    return (
        Bar("ratio_peft_step", values["ratio_peft_step"], at_least=STEP),
        Bar("ratio_peft_4_tenants", values["ratio_peft_4_tenants"], at_least=STEP),
        Bar("ratio_peft_step_f32", values["ratio_peft_step_f32"], at_least=STEP_F32),
        Bar("baseline_over_peft", values["baseline_over_peft"], at_least=BASELINE),
    )


def table(report: Report) -> Table:
    """The measurement for people."""
    shown = Table("measured", "value", title=f"{report.bench}, {report.base}")
    for key, value in report.values.items():
        if key != "seconds":
            shown.add_row(key, f"{value:.2f}")
    for name, seconds in report.values["seconds"].items():
        shown.add_row(f"seconds of {name}", f"{seconds:.2f}")
    return shown
