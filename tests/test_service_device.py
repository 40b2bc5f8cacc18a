"""The shared device thread: fair by deficit, never idle beside work, calls between steps, a failed stage leaves the other one going."""

import threading

import pytest

from noria.errors import StageStoppedError
from noria.service.device import SharedDevice


class TickingClock:
    """Time that a stage's step moves by hand."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time


class Work:
    """A stage with a number of steps to do, each of which takes `seconds` of the clock."""

    def __init__(self, name, clock, seconds, steps, log, *, fails_at=None):
        self.name, self.clock, self.seconds, self.left, self.log, self.fails_at = name, clock, seconds, steps, log, fails_at
        self.failure = None
        self.done = threading.Event()

    @property
    def has_work(self):
        return self.left > 0

    def step(self):
        self.left -= 1
        self.log.append(self.name)
        self.clock.time += self.seconds
        if self.left == self.fails_at:
            raise RuntimeError("broken")
        if self.left == 0:
            self.done.set()
        return True

    def fail(self, error):
        self.failure, self.left = error, 0
        self.done.set()


def run(*stages, shares, max_stall_s=10.0):
    failures = []
    device = SharedDevice({s.name: s for s in stages}, shares, stages[0].clock, max_stall_s)
    device.start(lambda name, error: failures.append((name, error)))
    for stage in stages:
        assert stage.done.wait(5)
    assert device.stop(5)
    return device, failures


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_two_busy_stages_get_their_shares_of_the_device(share):
    clock, log = TickingClock(), []
    sampler, learner = Work("sampler", clock, 0.1, 400, log), Work("learner", clock, 0.5, 400, log)
    run(sampler, learner, shares={"sampler": share, "learner": 1 - share})
    both_busy = log[: max(i for i, name in enumerate(log) if name == "sampler")]
    time = {name: both_busy.count(name) * seconds for name, seconds in (("sampler", 0.1), ("learner", 0.5))}
    assert time["sampler"] / sum(time.values()) == pytest.approx(share, abs=0.05)


def test_a_stage_alone_has_the_whole_device_and_earns_no_credit_by_idling():
    clock, log = TickingClock(), []
    sampler, learner = Work("sampler", clock, 0.1, 0, log), Work("learner", clock, 0.1, 100, log)
    original = learner.step

    def step():
        original()
        if learner.left == 50:
            sampler.left = 40  # wakes up after a long idle time
        return True

    learner.step = step
    run(sampler, learner, shares={"sampler": 0.5, "learner": 0.5})
    assert log[:50] == ["learner"] * 50
    assert 18 <= log[50:90].count("sampler") <= 22, "level from then on, not ahead"


def test_calls_run_between_steps_and_hand_back_results_and_errors():
    clock, log = TickingClock(), []
    stage = Work("sampler", clock, 0.1, 3, log)
    device, _ = SharedDevice({"sampler": stage}, {"sampler": 1.0}, clock, 10.0), None
    before = device.call(lambda: list(log))
    broken = device.call(lambda: 1 // 0)
    device.start(lambda name, error: None)
    assert before.result(5) == []
    with pytest.raises(ZeroDivisionError):
        broken.result(5)
    assert device.call(threading.get_ident).result(5) != threading.get_ident()
    assert not before.cancel()
    assert device.stop(5)
    with pytest.raises(StageStoppedError):
        device.call(lambda: None)


def test_a_stage_that_raises_fails_alone_with_its_cause():
    clock, log = TickingClock(), []
    sampler, learner = Work("sampler", clock, 0.1, 10, log, fails_at=7), Work("learner", clock, 0.1, 10, log)
    _, failures = run(sampler, learner, shares={"sampler": 0.5, "learner": 0.5})
    assert [name for name, _ in failures] == ["sampler"]
    assert str(sampler.failure) == "broken"
    assert log.count("learner") == 10
    assert log.count("sampler") == 3


def test_steps_over_the_promised_stall_are_counted():
    clock, log = TickingClock(), []
    short, long = Work("sampler", clock, 0.1, 5, log), Work("learner", clock, 0.5, 3, log)
    device, _ = run(short, long, shares={"sampler": 0.5, "learner": 0.5}, max_stall_s=0.3)
    assert device.long_steps == {"sampler": 0, "learner": 3}
