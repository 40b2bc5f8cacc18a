"""Builders for the tests of the researcher's tools: a task that the tiny base can be trained on in a second, and its run file."""

from pathlib import Path

import noria
from noria.envs.single_turn import SingleTurn

SERVER = {
    "sampler": {"num_lanes": 32, "num_pages": 256, "max_context": 128},
    "learner": {"max_positions": 256, "num_slots": 4, "rank_classes": (8,)},
    "warm_up": False,
    "dtype": "float32",
    "keep_versions": 9,
}

SERVER_FILE = """
base = "tiny"
warm_up = false
dtype = "float32"
[sampler]
num_lanes = 32
num_pages = 256
max_context = 128
[learner]
max_positions = 256
num_slots = 4
rank_classes = [8]
"""

SECTIONS = {
    "algorithm": {"group_size": 4, "groups_per_batch": 2, "truncated": "keep"},
    "adapter": {"rank": 4, "learning_rate": 1e-2},
    "sampling": {"max_tokens": 4},
    "evaluation": {"num_tasks": 4},
}

ENVIRONMENT = """
from noria.envs.single_turn import SingleTurn


class Low(SingleTurn):
    def problem(self, rng):
        return "".join(rng.choices("abcdef", k=6)), ""

    def reward(self, action, answer):
        return sum(byte < 100 for byte in action.encode()) / max(1, len(action.encode()))


class Equal(Low):
    def reward(self, action, answer):
        return 0.5


class Broken(Low):
    def reward(self, action, answer):
        raise ValueError("out of order")


class Long(Low):
    def problem(self, rng):
        return rng.choice("abcdef") * 300, ""
"""

RUN_FILE = """
name = "low"
base = "tiny"
[environment]
name = "env.py:Low"
[algorithm]
steps = 3
group_size = 4
groups_per_batch = 2
truncated = "keep"
[adapter]
rank = 4
learning_rate = 1e-2
[sampling]
max_tokens = 4
[evaluation]
num_tasks = 4
"""


class Low(SingleTurn):
    """Rewarded for low bytes: something that a random tiny model can learn at once."""

    letters: str = "abcdef"

    def problem(self, rng):
        return "".join(rng.choices(self.letters, k=6)), ""

    def reward(self, action, answer):
        return sum(byte < 100 for byte in action.encode()) / max(1, len(action.encode()))


def train(folder: Path, environment=Low, *, steps=3, server=None, model="tiny", **changes):
    """`noria.train`, on the tiny base unless told otherwise; changes: sections, merged with the small ones."""
    sections = {name: {**SECTIONS.get(name, {}), **(changes.pop(name, {}))} for name in SECTIONS}
    return noria.train(environment, model=model, steps=steps, folder=folder, server=SERVER | (server or {}), progress=False, **sections, **changes)


def write_run(folder: Path, text: str = RUN_FILE) -> Path:
    """A run file with its environments and a server file beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "env.py").write_text(ENVIRONMENT, encoding="utf-8")
    (folder / "server.toml").write_text(SERVER_FILE, encoding="utf-8")
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path
