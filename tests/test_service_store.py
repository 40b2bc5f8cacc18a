"""The store's tables: evaluations come back as they went in, and a database of an older release opens, keeps its rows, and takes new ones."""

from service_builders import run_config
from sqlalchemy import select

from noria.buffer.database import open_database
from noria.service import store

OLD_EVALUATIONS = """
CREATE TABLE evaluations (
    run_id VARCHAR NOT NULL, version INTEGER NOT NULL, accuracy FLOAT NOT NULL, mean_reward FLOAT NOT NULL, num_tasks INTEGER NOT NULL,
    num_failed INTEGER NOT NULL, evaluated_at_s FLOAT NOT NULL, PRIMARY KEY (run_id, version))
"""


def row(version, accuracy=0.5, mean_reward=0.5, **changes):
    return store.EvaluationRow(version, accuracy, mean_reward, 8, 1, **changes)


def test_a_database_without_the_newer_columns_gets_them_and_keeps_its_rows(tmp_path):
    database = open_database(tmp_path / "noria.sqlite")
    with database.begin() as connection:
        connection.exec_driver_sql(OLD_EVALUATIONS)
        connection.exec_driver_sql("INSERT INTO evaluations VALUES ('run', 0, 0.25, 0.3, 64, 2, 100.0)")
    for _ in range(2):
        store.create_tables(database)
    new = row(1, pass_at={1: 0.5, 2: 0.75})
    with database.begin() as connection:
        store.add_evaluation(connection, "run", new, 200.0)
        assert store.evaluations(connection, "run") == [store.EvaluationRow(0, 0.25, 0.3, 64, 2), new]
        assert connection.execute(select(store.RUNS)).all() == [], "the other tables were made"
    database.dispose()


OLD_RUNS = """
CREATE TABLE runs (
    run_id VARCHAR NOT NULL, config VARCHAR NOT NULL, status VARCHAR NOT NULL, message VARCHAR NOT NULL, created_at_s FLOAT NOT NULL,
    PRIMARY KEY (run_id))
"""


def test_a_run_of_an_older_release_has_no_record_of_its_examples_and_a_new_one_has(tmp_path):
    database, old, new = open_database(tmp_path / "noria.sqlite"), run_config("old"), run_config("new")
    with database.begin() as connection:
        connection.exec_driver_sql(OLD_RUNS)
        connection.exec_driver_sql("INSERT INTO runs VALUES ('old', ?, 'stopped', '', 1.0)", (old.model_dump_json(),))
    store.create_tables(database)
    with database.begin() as connection:
        store.create_run(connection, new, 2.0, examples_sha256="ab" * 32)
        assert store.find_run(connection, "old") == store.RunRow("old", old, "stopped", "", None)
        assert store.find_run(connection, "new") == store.RunRow("new", new, "running", "", "ab" * 32)
    database.dispose()


def test_a_database_that_lacks_nothing_is_not_written(tmp_path):
    """A reader waits for no writer: opening the folder beside a long transaction takes no lock."""
    database, other = open_database(tmp_path / "noria.sqlite"), open_database(tmp_path / "noria.sqlite")
    store.create_tables(database)
    with other.begin():  # BEGIN IMMEDIATE: a second writer would fail after its timeout
        store.create_tables(database)
    for engine in (database, other):
        engine.dispose()


def test_an_evaluation_comes_back_as_it_went_in_and_takes_the_place_of_an_earlier_one(tmp_path):
    database = open_database(tmp_path / "noria.sqlite")
    store.create_tables(database)
    with database.begin() as connection:
        for one in (row(3, 0.1), row(3, 1 / 3, pass_at={1: 1 / 3, 2: 0.1 + 0.2, 4: 1.0})):
            store.add_evaluation(connection, "run", one, 1.0)
        assert store.evaluations(connection, "run") == [one]
    database.dispose()


def test_the_best_evaluation_is_the_most_accurate_then_the_best_rewarded_then_the_oldest():
    rows = [row(4, 0.5, 0.9), row(2, 0.75, 0.5), row(6, 0.75, 0.6), row(5, 0.75, 0.6), row(8, 0.7, 1.0)]
    assert store.best_evaluation(rows).version == 5
    assert store.best_evaluation(rows[:2]).version == 2
    assert store.best_evaluation([]) is None
