"""The store's tables: evaluations come back as they went in, and a database of an older release opens, keeps its rows, and takes new ones."""

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
