"""Write docs/results/convergence.md and its plot from one run of `noria bench convergence`.

usage: python scripts/convergence.py [--quick] [--from RESULT.json]      minutes; --quick tries it out in a folder that it prints
"""

import argparse
import datetime
import json
import tempfile
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from noria.bench import convergence

mpl.use("Agg")
from matplotlib import pyplot as plt

RESULTS = Path(__file__).parents[1] / "docs" / "results"
WINDOW = 5

PANELS = {
    "prefix gradients": ("naive", "exact", "stop"),
    "stale data, corrected": ("stale 0, corrected", "stale 2, corrected", "stale 8, corrected"),
    "stale data, uncorrected": ("stale 0, uncorrected", "stale 2, uncorrected", "stale 8, uncorrected"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--from", dest="source", type=Path, help="a result that was printed before, in place of a new one")
    options = parser.parse_args()
    result = json.loads(options.source.read_text()) if options.source else convergence.measure(quick=options.quick).as_json()
    folder = Path(tempfile.mkdtemp()) if result["sizes"] == "quick" else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    plot(result, folder / "convergence.png")
    (folder / "convergence.md").write_text(page(result), encoding="utf-8")
    print(folder / "convergence.md")


def plot(result: dict[str, Any], path: Path) -> None:
    """Mean curves over the seeds, smoothed, with the range of the seeds behind."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(13, 3.8), sharey=True, layout="constrained")
    for axis, (title, names) in zip(axes, PANELS.items(), strict=True):
        for name, style in zip(names, ("-", "--", ":"), strict=True):
            curves = np.array([np.convolve(curve, np.ones(WINDOW) / WINDOW, "valid") for curve in result["curves"][name]])
            steps = np.arange(curves.shape[1]) + (WINDOW + 1) / 2
            (line,) = axis.plot(steps, curves.mean(0), style, label=name.partition(",")[0])
            axis.fill_between(steps, curves.min(0), curves.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
        axis.set(title=title, xlabel="optimizer step", ylim=(0.4, 1.0))
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right")
    axes[0].set_ylabel("reward")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def page(result: dict[str, Any]) -> str:
    """The page: what was run, the plot, the two tables."""
    found = {difference["arm"]: difference for difference in result["differences"]}
    rows = "\n".join(_row(name, reward, found.get(name)) for name, reward in result["final_reward"].items())
    exact = found["exact"]
    return f"""# Convergence

Does a shared prefix change what is learned, and what does stale data do? {result["seeds"]} seeds of the `tiny` base on a task with rewards
from 0 to 1, {result["steps"]} optimizer steps of {convergence.GROUPS} groups of {convergence.MEMBERS} episodes, sampled by the real sampler and
trained by the real executors (`noria/bench/convergence.py` says how). Runs of one seed share adapters, tasks and random keys. The final
reward is the mean of the last {convergence.LAST} steps; intervals are 95 % bootstrap intervals of the mean paired difference, over all
resamples of the seeds.

![reward curves](convergence.png)

*Lines: means over the seeds, moving average of {WINDOW} steps; bands: all seeds.*

| run | final reward | compared with | difference | 95 % interval |
|---|---|---|---|---|
{rows}

- **naive** trains every row alone, **exact** walks the shared tree with the exact gradient (the default), **stop** takes the prefix for a constant
  (LongStraw's schedule).
- **stale n** samples with the adapter of n optimizer steps ago; corrected by truncated importance weights and the geometric sequence mask (the
  defaults), or trained as if it were on-policy. Being late costs reward at an equal number of steps, with or without correction: the sequence
  mask drops what it does not trust, and on this task nothing diverges without it.
- Exact replay against naive: [{exact["low"]:+.4f}, {exact["high"]:+.4f}], asked for inside ±{convergence.MARGIN}.

Measured on {datetime.datetime.now(tz=datetime.UTC).date()}, {result["device"]}, JAX {result["jax"]}, Python {result["python"]}.
`python scripts/convergence.py` writes this page; `make prove` takes the first comparison again.
"""


def _row(name: str, reward: float, found: dict[str, Any] | None) -> str:
    if found is None:
        return f"| {name} | {reward:.3f} | | | |"
    return f"| {name} | {reward:.3f} | {found['minus']} | {found['mean']:+.4f} | [{found['low']:+.4f}, {found['high']:+.4f}] |"


if __name__ == "__main__":
    main()
