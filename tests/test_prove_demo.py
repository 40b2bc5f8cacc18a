"""What the README promises of `make demo`, measured on this machine with nothing prepared but the installation."""

import json
import os
import subprocess
import sys

import pytest

WALL_S = {True: 300, False: 480}
"""Bound on the demo's wall time: with Python 3.12 or newer (and so JAX 0.12), and with 3.11."""


@pytest.mark.prove
def test_the_demo_teaches_three_tenants_on_the_real_base_in_minutes(tmp_path):
    command = [sys.executable, "-m", "noria.cli", "demo", "--json", "--state-dir", str(tmp_path / "state")]
    environment = os.environ | {"NORIA_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    line = done.stdout.strip().splitlines()[-1]
    print(line)
    result = json.loads(line)
    assert set(result) == {"runs", "sampler_busy", "learner_busy", "install_s", "wall_s"}
    assert len(result["runs"]) == 3
    for run in result["runs"]:
        assert run["eval_after"] - run["eval_before"] >= 0.2, run
        assert run["reward_last5"] > run["reward_first5"]
        assert run["max_staleness_seen"] <= run["max_staleness"]
        assert run["dropped_stale"] == 0
        assert run["tokens_trained"] > 0
    assert result["wall_s"] <= WALL_S[sys.version_info >= (3, 12)]
    assert (tmp_path / "state" / "report.html").exists()
    assert (tmp_path / "state" / "curves.png").exists()
