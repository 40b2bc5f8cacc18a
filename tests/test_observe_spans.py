"""Spans: utilization against a naive count, bounded memory, timelines that can be read; logs that do not carry long texts."""

import io
import json
import logging
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.clock import RealClock, VirtualClock
from noria.observe import MAX_TOTALS, Span, SpanRecorder, configure_logging, log_event, union_length, write_chrome_trace


def record(recorder: SpanRecorder, clock: VirtualClock, seconds: float, **span) -> None:
    with recorder.span(**{"stage": "learner", "name": "step", **span}):
        clock.advance(seconds)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12), st.integers(0, 40), st.integers(0, 40))
def test_union_length_equals_counting_unit_cells(intervals, low, width):
    high = low + width
    cells = sum(any(start <= cell < end for start, end in intervals) for cell in range(low, high))
    assert union_length(intervals, low, high) == cells


def test_busy_is_the_union_of_work_over_the_window():
    clock = VirtualClock()
    recorder = SpanRecorder(clock)
    record(recorder, clock, 2)
    record(recorder, clock, 3, is_wait=True)
    record(recorder, clock, 1, run_id="a")
    record(recorder, clock, 4, stage="sampler")
    assert recorder.busy("learner", 10) == pytest.approx(0.3)
    assert recorder.busy("learner", 10, run_id="a") == pytest.approx(0.1)
    assert recorder.busy("sampler", 4) == pytest.approx(1.0)
    assert recorder.busy("adapters", 10) == 0.0


def test_overlapping_work_is_counted_once_and_open_work_counts():
    clock = VirtualClock()
    recorder = SpanRecorder(clock)
    with recorder.span("actor", "outer"):
        clock.advance(1)
        with recorder.span("actor", "inner"):
            clock.advance(1)
        clock.advance(2)
        assert recorder.busy("actor", 8) == pytest.approx(0.5)


def test_a_window_longer_than_the_ring_shrinks_to_what_is_known():
    clock = VirtualClock()
    recorder = SpanRecorder(clock, capacity=4)
    for _ in range(50):
        record(recorder, clock, 1)
        clock.advance(1)
    assert recorder.busy("learner", 100) == pytest.approx(3 / 7)
    assert len(recorder.spans()) == 4


def test_totals_count_every_span_even_those_out_of_the_ring():
    clock = VirtualClock()
    recorder = SpanRecorder(clock, capacity=2)
    for seconds in (1, 5, 2):
        record(recorder, clock, seconds)
    (total,) = recorder.snapshot()
    assert (total.num_spans, total.total_s, total.longest_s) == (3, pytest.approx(8), pytest.approx(5))


def test_totals_are_bounded_however_many_names_there_are():
    clock = VirtualClock()
    recorder = SpanRecorder(clock, capacity=10)
    for index in range(MAX_TOTALS + 500):
        record(recorder, clock, 0.001, run_id=f"run-{index}")
    totals = recorder.snapshot()
    assert len(totals) == MAX_TOTALS + 1
    assert sum(total.num_spans for total in totals) == MAX_TOTALS + 500


def test_a_span_ends_when_its_block_raises():
    clock = VirtualClock()
    recorder = SpanRecorder(clock)
    with pytest.raises(KeyError), recorder.span("actor", "x"):
        raise KeyError
    assert recorder.snapshot()[0].num_spans == 1


def test_threads_may_record_at_the_same_time():
    recorder = SpanRecorder(RealClock(), capacity=100)

    def work() -> None:
        for _ in range(500):
            with recorder.span("sampler", "dispatch"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.snapshot()[0].num_spans == 2000


def test_a_chrome_trace_puts_spans_of_one_time_side_by_side(tmp_path):
    spans = [
        Span("actor", "a", "r", False, 0, 3),
        Span("actor", "b", "r", False, 1, 2),
        Span("actor", "c", "r", True, 3, 4),
        Span("learner", "d", "r", False, 0, 1),
    ]
    write_chrome_trace(tmp_path / "trace.json", spans)
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["name"]: (e["pid"], e["tid"]) for e in events} == {"a": (1, 0), "d": (2, 0), "b": (1, 1), "c": (1, 0)}
    assert next(e for e in events if e["name"] == "b")["dur"] == 1e6


@pytest.fixture
def log_lines():
    stream = io.StringIO()
    yield stream
    logging.getLogger("noria").handlers.clear()
    logging.getLogger("noria").propagate = True


def test_json_logs_hold_the_named_values(log_lines):
    configure_logging(as_json=True, stream=log_lines)
    log_event(logging.getLogger("noria.test"), logging.INFO, "group settled", run_id="r", num_episodes=8)
    line = json.loads(log_lines.getvalue())
    assert (line["event"], line["run_id"], line["num_episodes"], line["level"]) == ("group settled", "r", 8, "info")


@pytest.mark.parametrize("as_json", [True, False])
def test_logs_cut_long_texts_and_hold_no_traceback(log_lines, as_json):
    configure_logging(as_json=as_json, stream=log_lines)
    secret = "x" * 5000
    try:
        raise ValueError(secret)
    except ValueError:
        logging.getLogger("noria.test").exception("failed", extra={"fields": {"prompt": secret}})
    assert "ValueError" in log_lines.getvalue()
    assert len(log_lines.getvalue()) < 1200
    assert log_lines.getvalue().count("\n") == 1


def test_configuring_twice_logs_once(log_lines):
    configure_logging(stream=log_lines)
    configure_logging(stream=log_lines)
    log_event(logging.getLogger("noria.test"), logging.INFO, "once", value=1)
    assert log_lines.getvalue().count("once value=1") == 1
