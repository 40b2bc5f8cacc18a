"""`noria doctor`: every topic has a finding, a sick machine is told what to do, and nothing is left behind."""

import json
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from noria import cli
from noria.report import doctor

ROOT = Path(__file__).parents[1]


def call(*arguments):
    return CliRunner().invoke(cli.app, ["doctor", *map(str, arguments)], env={"COLUMNS": "140", "TERM": "dumb"})


def by_topic(findings):
    return {finding.topic: finding for finding in findings}


def test_a_sound_machine_is_ok_and_every_topic_is_looked_at(tmp_path):
    result = call("--state-dir", tmp_path / "state", "--json")
    findings = {finding["topic"]: finding for finding in json.loads(result.stdout)}
    assert result.exit_code == 0, result.output
    topics = {"python", "noria", "jax", "device", "dtype of auto", "memory", "cores", "disk", "fsync", "clock", "compilation cache", "packages"}
    assert topics <= findings.keys()
    assert {finding["status"] for finding in findings.values()} <= {"ok", "warn"}
    assert all(finding["advice"] for finding in findings.values() if finding["status"] != "ok")


def test_the_table_names_every_topic(tmp_path):
    result = call("--state-dir", tmp_path)
    assert result.exit_code == 0
    assert all(topic in result.output for topic in ("fsync", "clock", "dtype of auto", "base smollm2-135m"))


def test_nothing_is_left_and_no_folder_is_made(tmp_path):
    doctor.examine(tmp_path / "state")
    doctor.examine(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_fsync_latencies_are_real_numbers_in_order(tmp_path):
    found = by_topic(doctor.examine(tmp_path))["fsync"].found
    p50, p99 = map(float, re.findall(r"([\d.]+) ms", found))
    assert 0 < p50 <= p99


def test_a_missing_package_is_a_failure_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    findings = by_topic(doctor.examine(tmp_path))
    assert findings["packages"].status == "fail"
    assert findings["packages"].advice == "pip install optax"
    assert call("--state-dir", tmp_path).exit_code == 1


def test_a_broken_jax_is_a_finding_and_not_a_traceback(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    findings = by_topic(doctor.examine(tmp_path))
    assert findings["device"].status == "fail"
    assert findings["fsync"].status == "ok", "the other topics are looked at all the same"


def test_a_cache_folder_that_cannot_be_used_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("NORIA_CACHE_DIR", str(tmp_path / "file"))
    finding = by_topic(doctor.examine(tmp_path))["compilation cache"]
    assert finding.status == "warn"
    assert "NORIA_CACHE_DIR" in finding.advice


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_state_folder_that_cannot_be_written_to_is_a_failure(tmp_path):
    tmp_path.chmod(0o500)
    try:
        assert by_topic(doctor.examine(tmp_path))["fsync"].status == "fail"
    finally:
        tmp_path.chmod(0o700)


def test_what_is_needed_is_what_the_project_depends_on():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[<>=!~\[; ]", requirement)[0].lower().replace("-", "_") for requirement in project["dependencies"]}
    assert set(doctor.NEEDED) == names
    extras = {re.split(r"[<>=]", r)[0] for rs in project["optional-dependencies"].values() for r in rs}
    assert doctor.OPTIONAL.keys() == extras
