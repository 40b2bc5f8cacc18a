"""The page is well-formed, self-contained, and names every run; the pictures are drawn for any session, a finished one or one that failed at once."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from report_builders import progress, run_config, run_report, session

from noria.config import SupervisedConfig
from noria.observe import Span
from noria.report.curves import DARK, LIGHT, Theme, draw_curves, draw_timeline, runs_figure
from noria.report.page import write_report
from noria.report.summary import SessionReport, summarize
from noria.service.progress import RunProgress

PNG = b"\x89PNG\r\n\x1a\n"


def write(report: SessionReport, folder: Path) -> ElementTree.Element:
    page, curves, timeline = write_report(report, summarize(report, install_s=12.0, wall_s=130.0), folder)
    assert (page, curves, timeline) == (folder / "report.html", folder / "curves.png", folder / "timeline.json")
    assert "traceEvents" in json.loads(timeline.read_text(encoding="utf-8"))
    assert curves.read_bytes().startswith(PNG)
    assert sorted(path.name for path in folder.iterdir()) == ["curves.png", "report.html", "timeline.json"]
    return ElementTree.fromstring(page.read_text(encoding="utf-8"))


def text_of(page: ElementTree.Element) -> str:
    return " ".join(page.itertext())


def test_the_page_holds_every_run_its_numbers_and_its_settings(tmp_path: Path) -> None:
    page = write(session(), tmp_path)
    rows = [[" ".join(cell.itertext()) for cell in row] for row in page.findall("body/div/table/tbody/tr")]
    assert [row[:5] for row in rows] == [
        ["largest", "amber", "largest", "8", "0.0005"],
        ["first_letter", "birch", "first_letter", "4", "0.0005"],
        ["addition", "cedar", "addition", "16", "0.0005"],
    ]
    assert all("0.28 → 0.84" in row for row in rows)
    assert len(page.findall(".//details")) == 3
    for words in ("algorithm.max_staleness", "62%", "31%", "130 s", "12 s"):
        assert words in text_of(page)


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    page = write(session(), tmp_path)
    links = [value for element in page.iter() for key, value in element.items() if key in ("src", "srcset", "href")]
    assert len(links) == 4
    assert all(link.startswith("data:image/png;base64,iVBOR") for link in links)
    assert not page.findall(".//script")


def test_what_a_run_says_cannot_change_the_page(tmp_path: Path) -> None:
    config = run_config(environment="env.py:<b>&\"'")
    state = RunProgress(0, "failed", "environment_failed: <script>alert('&')</script>")
    page = write(session([run_report(config, state=state)]), tmp_path)
    assert not page.findall(".//script")
    assert "<script>alert('&')</script>" in text_of(page)
    assert "<b>&\"'" in text_of(page)


def test_a_session_without_a_single_step_has_a_page(tmp_path: Path) -> None:
    page = write(session([run_report(state=RunProgress())], spans=()), tmp_path)
    assert "– → –" in text_of(page)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
@pytest.mark.parametrize("num_runs", [0, 1, 2, 4, 7])
def test_curves_are_drawn_for_any_number_of_runs(num_runs: int, theme: Theme) -> None:
    configs = [run_config(f"r{i}", max_staleness=i % 3, steps=5 * i + 1) for i in range(num_runs)]
    runs = [run_report(config, state=progress(config, num_steps=i)) for i, config in enumerate(configs)]
    assert draw_curves(session(runs), theme).startswith(PNG)


def test_curves_hold_rewards_of_any_scale() -> None:
    state = RunProgress(3, "finished", "", {0: 0.0, 1: 0.2, 3: 0.1}, [-40.0, 3.0, 1000.0])
    assert draw_curves(session([run_report(run_config(steps=3), state=state)])).startswith(PNG)


def test_a_timeline_shows_stages_that_worked_and_cuts_spans_at_its_window() -> None:
    beyond = (
        Span("sampler", "decode", "", False, 0.0, 200.0),
        Span("learner", "batch", "a", True, 95.0, 99.0),
        Span("odd", "x", "", False, 95.0, 99.0),
    )
    assert draw_timeline(session(spans=beyond), 10.0).startswith(PNG)
    assert draw_timeline(session(spans=()), 10.0).startswith(PNG)
    assert draw_timeline(session(), 10.0) != draw_timeline(session(spans=()), 10.0)


def test_rewards_stand_after_a_supervised_phase() -> None:
    config = run_config(steps=3).model_copy(update={"supervised": SupervisedConfig(file="chats.jsonl", steps=4)})
    state = RunProgress(version=7, rewards=[0.1, 0.2, 0.3], supervised_losses=[4.0, 3.0, 2.0, 1.0])
    figure = runs_figure([run_report(config, state=state)])
    rewards = figure.axes[0].get_lines()[0]
    assert list(rewards.get_xdata()) == [5, 6, 7]
    assert list(rewards.get_ydata()) == [0.1, 0.2, 0.3]
