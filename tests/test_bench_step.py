"""`noria bench step` measures what it says, on the tiny base."""

import json

import pytest

from noria.bench.step import measure, table


@pytest.mark.slow
def test_the_measurement_has_every_size_and_compares_within_one_run():
    result = measure("tiny")
    assert json.loads(json.dumps(result)) == result
    assert [row["positions"] for row in result["train"]] == [256, 512]
    for row in result["train"]:
        assert row["positions_per_s"] == pytest.approx(row["positions"] / row["seconds"])
    assert all(row["fraction_of_matmuls"] > 0 for row in result["train"])
    assert table(result).row_count == 2
