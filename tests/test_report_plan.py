"""Plans: every TOML file of the project loads, and what cannot train together is refused before anything is loaded."""

import subprocess
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.config import BUILTIN_BASES, RunConfig, ServerConfig, load_toml, parse
from noria.errors import ConfigError
from noria.report.plan import DEMO_RUNS, demo_plan, server_for, train_plan

ROOT = Path(__file__).parents[1]
RUN = {"base": "tiny", "environment": {"name": "addition"}, "algorithm": {"steps": 3}}


def toml_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "*.toml"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split()]


def run_file(folder: Path, name: str = "a", *, base: str = "tiny", rank: int = 8, more: str = "") -> Path:
    path = folder / f"{name}.toml"
    text = f'name = "{name}"\nbase = "{base}"\n[environment]\nname = "addition"\n[algorithm]\nsteps = 3\n[adapter]\nrank = {rank}\n{more}'
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", toml_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_toml_file_of_the_project_loads(path: Path) -> None:
    if path.name == "pyproject.toml":
        tomllib.loads(path.read_text(encoding="utf-8"))
    else:
        load_toml(path, ServerConfig if path.stem.startswith("server") else RunConfig)


def test_the_demo_is_three_tenants_with_three_tasks_on_one_base() -> None:
    plan = demo_plan(state_dir=None, resume=False, steps=None)
    configs = [run.config for run in plan.runs]
    assert len({config.tenant for config in configs}) == len({config.environment.name for config in configs}) == len(configs) == 3
    assert tuple(config.name for config in configs) == DEMO_RUNS
    assert {config.base for config in configs} == {plan.server.base}
    assert plan.state_dir == Path(".noria/demo")
    assert max(config.adapter.rank for config in configs) <= plan.server.learner.max_rank
    assert len(configs) <= plan.server.learner.num_slots


def test_the_demos_files_are_all_packaged() -> None:
    names = {path.stem for path in (ROOT / "noria" / "demo").glob("*.toml")}
    assert names == {*DEMO_RUNS, "server"}
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]["noria"]
    assert "demo/*.toml" in packaged


def test_steps_and_folder_of_the_command_come_before_the_files(tmp_path: Path) -> None:
    plan = demo_plan(state_dir=tmp_path, resume=True, steps=2)
    assert {run.config.algorithm.steps for run in plan.runs} == {2}
    assert plan.runs[0].config.sampling.stop == ("\n",)
    assert (plan.state_dir, plan.resume) == (tmp_path, True)


def test_without_a_server_file_the_server_fits_its_runs(tmp_path: Path) -> None:
    files = [run_file(tmp_path, f"r{i}", rank=64 if i == 3 else 4) for i in range(12)]
    plan = train_plan(files)
    assert plan.server.base == "tiny"
    assert plan.server.learner.rank_classes == (8, 128)
    assert plan.server.learner.num_slots == 12
    assert plan.server.sampler.num_slots > 2 * 12
    assert {run.folder for run in plan.runs} == {tmp_path}


@pytest.mark.parametrize(
    ("ranks", "classes"),
    [
        ((1,), (8,)),
        ((16,), (32,)),
        ((4, 8, 5), (8,)),
        ((8, 9), (8, 32)),
        ((33, 128), (128,)),
        ((8, 64, 32, 128), (8, 32, 128)),
        ((200, 8), (8, 200)),
    ],
)
def test_a_server_has_the_canonical_rank_classes_that_its_runs_need(tmp_path: Path, ranks: tuple[int, ...], classes: tuple[int, ...]) -> None:
    plan = train_plan([run_file(tmp_path, f"r{i}", rank=rank) for i, rank in enumerate(ranks)])
    assert plan.server.learner.rank_classes == classes


@given(rank=st.integers(1, 256), others=st.lists(st.integers(1, 256), max_size=6))
def test_a_runs_rank_class_does_not_depend_on_other_runs(rank: int, others: list[int]) -> None:
    configs = [parse(RUN | {"name": f"r{i}", "adapter": {"rank": each}}, RunConfig, source="test") for i, each in enumerate([rank, *others])]
    assert server_for(configs).learner.class_of(rank) == server_for(configs[:1]).learner.class_of(rank)


def test_a_server_has_room_for_the_top_modules_that_a_run_trains_and_for_no_other(tmp_path: Path) -> None:
    plain, head = run_file(tmp_path, "plain"), run_file(tmp_path, "head", more="train_unembed = true\n")
    critic = run_file(tmp_path, "critic")
    critic.write_text(critic.read_text(encoding="utf-8").replace("steps = 3", 'steps = 3\nloss = "ppo_critic"'), encoding="utf-8")
    for files, room in (((plain,), (False, False)), ((plain, head), (True, False)), ((critic, plain), (False, True))):
        learner = train_plan(files).server.learner
        assert (learner.has_unembed, learner.has_values) == room


def test_a_server_file_is_taken_as_it_is(tmp_path: Path) -> None:
    server = tmp_path / "server.toml"
    server.write_text('base = "tiny"\nstate_dir = "there"\n[learner]\nnum_slots = 2\n', encoding="utf-8")
    plan = train_plan([run_file(tmp_path)], server_config=server)
    assert plan.server.learner.num_slots == 2
    assert plan.state_dir == Path("there")


def test_runs_that_cannot_share_a_server_are_refused(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    first, same_name = run_file(tmp_path), run_file(tmp_path / "again")
    with pytest.raises(ConfigError, match="2 run files have the name 'a'"):
        train_plan([first, same_name])
    with pytest.raises(ConfigError, match=r"run b wants base 'smollm2-135m', the server holds 'tiny'"):
        train_plan([first, run_file(tmp_path, "b", base="smollm2-135m")])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.toml"):
        train_plan([tmp_path / "nowhere.toml"])


def test_a_base_on_disk_lies_beside_the_file_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "model").mkdir(parents=True)
    server = tmp_path / "server.toml"
    server.write_text('base = "runs/model"\n', encoding="utf-8")
    files = [
        run_file(tmp_path / "runs", name, base=base) for name, base in (("a", "model"), ("b", "../runs/model/"), ("c", str(tmp_path / "runs/model")))
    ]
    monkeypatch.chdir(tmp_path)
    for plan in (train_plan(files), train_plan([Path("runs/a.toml")]), train_plan(files, server_config=Path("server.toml"))):
        assert {plan.server.base, *(run.config.base for run in plan.runs)} == {str(tmp_path / "runs" / "model")}


@pytest.mark.parametrize("base", ["tiny", "smollm2-135m", "org/model", "nobody-knows"])
def test_a_name_of_a_base_is_left_as_it_is(tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BUILTIN_BASES:
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert train_plan([run_file(tmp_path, base=base)]).server.base == base


def test_a_path_that_leads_somewhere_only_from_the_current_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="relative to the file that names it"):
        train_plan([run_file(tmp_path / "runs", base="model")])
    assert train_plan([run_file(tmp_path / "runs", base="./model")]).server.base == str(tmp_path / "runs" / "model"), "which loading finds missing"


def test_a_base_that_can_be_no_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can be neither a name nor a path"):
        train_plan([run_file(tmp_path, base="x" * 5000)])


def test_steps_of_the_command_may_be_none_at_all(tmp_path: Path) -> None:
    assert train_plan([run_file(tmp_path)], steps=0).runs[0].config.algorithm.steps == 0
