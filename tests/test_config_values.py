"""Values of run files: what is accepted comes back from the state folder as it was, and what could not is refused with its key."""

import datetime
import json
import math
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.buffer.database import open_database
from noria.config import BUILTIN_BASES, RunConfig, ServerConfig, load_toml, parse
from noria.errors import ConfigError
from noria.model import weights
from noria.plain_json import MAX_STORED_DEPTH
from noria.service import store

RUN = {"name": "a", "base": "tiny", "environment": {"name": "addition"}, "algorithm": {"steps": 3}}

NUMBERS = st.floats() | st.integers(-(2**70), 2**70) | st.sampled_from([math.inf, -math.inf, math.nan, 10**400, 5e-324, 1.7e308])
SETTINGS = st.recursive(
    NUMBERS | st.none() | st.booleans() | st.text() | st.dates() | st.binary(max_size=3),
    lambda below: st.lists(below, max_size=3) | st.tuples(below) | st.dictionaries(st.text(max_size=3), below, max_size=3),
    max_leaves=8,
)
FLOATS = [
    ("weight",),
    ("algorithm", "clip_low"),
    ("algorithm", "clip_high"),
    ("algorithm", "tis_cap"),
    ("algorithm", "sequence_mask_c"),
    ("adapter", "alpha"),
    ("adapter", "learning_rate"),
    ("adapter", "weight_decay"),
    ("adapter", "grad_clip_norm"),
    ("sampling", "temperature"),
    ("evaluation", "solved_at"),
    ("deadlines", "train_s"),
    ("environment", "rewards", "called"),
    ("environment", "settings", "scale"),
]


def run_with(path, value):
    data = {key: dict(part) if isinstance(part, dict) else part for key, part in RUN.items()}
    place = data
    for key in path[:-1]:
        place = place.setdefault(key, {})
    place[path[-1]] = value
    return data


def stored(folder: Path, config: RunConfig) -> RunConfig:
    database = open_database(folder / "noria.sqlite")
    try:
        store.create_tables(database)
        with database.begin() as connection:
            connection.execute(store.RUNS.delete())
            store.create_run(connection, config, 1.0)
            row = store.find_run(connection, config.name)
    finally:
        database.dispose()
    assert row is not None
    return row.config


@pytest.mark.parametrize("path", FLOATS, ids=".".join)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_is_refused_with_its_key(path, value):
    with pytest.raises(ConfigError, match=path[-1]):
        parse(run_with(path, value), RunConfig, source="run")


@given(path=st.sampled_from(FLOATS), number=NUMBERS, settings=st.dictionaries(st.text(max_size=3), SETTINGS, max_size=3))
def test_what_is_accepted_is_read_again_as_it_was(path, number, settings):
    data = run_with(path, number)
    data["environment"] = {**data["environment"], "settings": {**settings, **data["environment"].get("settings", {})}}
    try:
        config = parse(data, RunConfig, source="run")
    except ConfigError:
        return
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    json.dumps(config.model_dump(mode="json"), allow_nan=False)


def test_settings_come_back_from_the_store_with_tuples_as_lists(tmp_path):
    settings = {"words": ("a", "b"), "table": {"x": [1, 2.5, True, None]}, "big": 2**63 - 1, "empty": {}}
    config = parse(run_with(("environment", "settings"), settings), RunConfig, source="run")
    assert stored(tmp_path, config) == config
    assert config.environment.settings["words"] == ["a", "b"]


def deep(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", [datetime.date(2026, 1, 1), object(), b"x", {1: 2}, "\ud800", {"\udfff": 1}, 2**63, deep(MAX_STORED_DEPTH + 1), deep(20_000)]
)
def test_a_setting_that_no_state_folder_keeps_is_refused(value):
    with pytest.raises(ConfigError, match=r"environment\.settings.*scale"):
        parse(run_with(("environment", "settings", "scale"), value), RunConfig, source="run")


def test_every_float_of_a_server_file_is_finite():
    with pytest.raises(ConfigError, match="drain_s"):
        parse({"drain_s": math.inf}, ServerConfig, source="server")


def test_a_byte_order_mark_before_a_run_file_is_no_part_of_it(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('name = "a"\n[environment]\nname = "addition"\n[algorithm]\nsteps = 1\n', encoding="utf-8-sig")
    assert load_toml(path, RunConfig).name == "a"


@pytest.mark.parametrize("text", ["x = " + "1" * 5000, "x = " + "[" * 5000, "x = \x00"])
def test_a_file_that_no_reader_takes_is_named(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.toml"):
        load_toml(path, RunConfig)


@pytest.mark.parametrize(
    ("key", "words"), [("nmae", "did you mean 'name'"), ("zzzzzzz", "known keys: name, tenant, base"), ("algoritm", "did you mean 'algorithm'")]
)
def test_an_unknown_key_is_answered_with_the_nearest_or_with_all(key, words):
    with pytest.raises(ConfigError, match=words):
        parse({**RUN, key: 1}, RunConfig, source="run")


@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"top_k": 40}, {"top_p": 1.0}])
def test_a_run_that_would_train_on_constrained_draws_is_refused_with_the_reason(setting):
    """Case 21."""
    (name,) = setting
    with pytest.raises(ConfigError, match=rf"sampling\.{name} cannot train.*evaluation\.{name}"):
        parse({**RUN, "sampling": setting}, RunConfig, source="run")
    assert getattr(parse({**RUN, "evaluation": setting}, RunConfig, source="run").evaluation, name) == setting[name]


@pytest.mark.parametrize(("stop", "words"), [([""], "at least 1"), (["a", ""], "at least 1"), (list("abcdefghi"), "at most 8")])
def test_stop_texts_that_can_not_be_looked_for_are_refused(stop, words):
    with pytest.raises(ConfigError, match=words):
        parse({**RUN, "sampling": {"stop": stop}}, RunConfig, source="run")
    assert parse({**RUN, "sampling": {"stop": ["</answer>", "é"]}}, RunConfig, source="run").sampling.stop == ("</answer>", "é")


def test_the_built_in_bases_are_those_that_load():
    assert set(BUILTIN_BASES) == set(weights._BASES)


def test_a_date_is_what_a_toml_file_may_hold_and_a_run_may_not():
    data = tomllib.loads("day = 2026-01-01\nclock = 10:00:00\n")
    for value in data.values():
        with pytest.raises(ConfigError, match="must be text"):
            parse(run_with(("environment", "settings", "day"), value), RunConfig, source="run")


@pytest.mark.parametrize("name", ["x" * 5000, "a/" * 2500, "a\0b", "~no-such-user-here/model"])
def test_a_base_that_can_be_no_path_is_a_config_error(name):
    with pytest.raises(ConfigError, match="base"):
        weights.load_base(name)
