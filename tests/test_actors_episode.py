"""One episode: ids that only grow, seeds that repeat, and tenant code that raises, hangs, or answers nonsense."""

import asyncio
import math
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from noria.actors.episode import action_of, run_episode
from noria.actors.rules import EpisodeRules, Seams, rules_of, stop_ids
from noria.actors.threads import AbandonableThreads
from noria.clock import VirtualClock
from noria.config import DeadlinesConfig, RunConfig
from noria.errors import (
    ConfigError,
    DeadlineExceededError,
    EnvironmentFailedError,
    EnvironmentOutputError,
    PromptTooLongError,
    RewardNotFiniteError,
    StageStoppedError,
)
from noria.observe import SpanRecorder
from noria.protocols import Step
from noria.types import Completion, SampleRequest, Task

EOS, NEWLINE = 0, 10


class Letters:
    """One token per character, except that the pair "th" is one token of its own when encoded: decode then encode is not one-to-one."""

    vocab_size = 300
    eos_id = EOS

    def encode(self, text):
        return tuple(ord(c) for c in text.replace("th", chr(299)))

    def decode(self, ids):
        return "".join(chr(i) for i in ids if i != EOS).replace(chr(299), "th")

    def token_id(self, text):
        ids = self.encode(text)
        if len(ids) != 1:
            raise ConfigError(f"{text!r} is {len(ids)} tokens")
        return ids[0]


class ScriptedSampler:
    """Answers each request with the next of its replies, an id sequence or an error, after `seconds`; records what it was asked."""

    def __init__(self, clock, replies=("t", "h", "\n"), *, seconds=1.0, max_context=10_000):
        self.clock, self.replies, self.seconds, self.max_context = clock, list(replies), seconds, max_context
        self.requests: list[SampleRequest] = []
        self.num_cancelled = 0

    async def sample(self, request):
        self.requests.append(request)
        if len(request.prompt_ids) >= self.max_context:
            raise PromptTooLongError("no room")
        try:
            await self.clock.sleep(self.seconds)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        reply = self.replies[(len(self.requests) - 1) % len(self.replies)]
        if isinstance(reply, Exception):
            raise reply
        ids = tuple(ord(c) for c in reply)[: request.params.max_tokens]
        reason = "stop" if ids[-1] in request.params.stop_ids else "length"
        return Completion(ids, (-0.5,) * len(ids), (3,) * len(ids), reason)


class Echo:
    """Plain environment: num_turns turns, a reward of 1 each, and an observation that repeats the action."""

    num_tasks = 8

    def __init__(self, num_turns=1):
        self.num_turns, self.actions = num_turns, []

    def reset(self, task):
        return f"task {task.index}: "

    def step(self, action):
        self.actions.append(action)
        return Step(1.0, len(self.actions) == self.num_turns, f"<{action}>", {"length": float(len(action))})


class Factory:
    num_tasks = 8
    num_held_out = 4

    def __init__(self, make):
        self.make = make

    def __call__(self):
        return self.make()


def rules_for(make, **changes) -> EpisodeRules:
    deadlines = DeadlinesConfig(reset_s=60, step_s=120, episode_s=1800, sample_s=600)
    rules = EpisodeRules("tenant", "run", Factory(make), 7, 8, 1.0, (EOS, NEWLINE), 1, deadlines)
    return replace(rules, **changes)


def seams_for(sampler, clock, *, max_threads=8, max_hung=64) -> Seams:
    return Seams(sampler, Letters(), clock, SpanRecorder(clock), AbandonableThreads(max_threads, max_hung=max_hung))


def play(make, *, sampler=None, clock=None, task=None, member=0, **changes):
    clock = clock or VirtualClock()
    sampler = sampler or ScriptedSampler(clock, ["answer\n"])
    seams = seams_for(sampler, clock)
    try:
        return clock.run(run_episode(seams, rules_for(make, **changes), task or Task(2, 5), episode_id="e", member=member))
    finally:
        seams.threads.shutdown()


def test_a_single_turn_is_prompt_then_sampled_ids():
    episode = play(Echo)
    (turn,) = episode.turns
    assert (turn.observation_ids, turn.completion.sampled_ids) == (Letters().encode("task 2: "), tuple(map(ord, "answer\n")))
    assert (episode.reward, episode.truncated, episode.reward_parts, episode.oldest_version) == (1.0, False, (("length", 6.0),), 3)


def test_history_is_never_encoded_again():
    clock = VirtualClock()
    sampler = ScriptedSampler(clock, ["th\n", "hth\n", "h\n"])
    episode = play(lambda: Echo(3), sampler=sampler, clock=clock, max_turns=5)
    sampled = [tuple(map(ord, text)) for text in ("th\n", "hth\n", "h\n")]
    observed = [Letters().encode(text) for text in ("task 2: ", "<th>", "<hth>")]
    assert episode.ids == sum((o + s for o, s in zip(observed, sampled, strict=True)), ())
    assert episode.ids != Letters().encode(Letters().decode(episode.ids)), "the texts must be ones that a second encoding would change"
    assert [r.prompt_ids for r in sampler.requests] == [episode.ids[: len(r.prompt_ids)] for r in sampler.requests]
    assert episode.reward == 3.0
    assert dict(episode.reward_parts) == {"length": 2 + 3 + 1.0}


@pytest.mark.parametrize(("reply", "action"), [("ab\n", "ab"), (f"ab{chr(EOS)}", "ab"), ("abcdefghij", "abcdefgh"), ("\n", ""), ("a\n\n", "a\n")])
def test_the_environment_sees_the_action_without_its_stop(reply, action):
    environment = Echo()
    clock = VirtualClock()
    play(lambda: environment, sampler=ScriptedSampler(clock, [reply]), clock=clock)
    assert environment.actions == [action]


def test_only_the_last_stop_id_is_taken_off():
    assert action_of(Completion((1, NEWLINE, 2), (0.0,) * 3, (0,) * 3, "length"), (NEWLINE,)) == (1, NEWLINE, 2)
    assert action_of(Completion((), (), (), "length"), (NEWLINE,)) == ()


def test_cut_completions_and_missing_turns_make_an_episode_truncated():
    clock = VirtualClock()
    assert play(Echo, sampler=ScriptedSampler(clock, ["no stop at all"]), clock=clock).truncated
    short = play(lambda: Echo(3), max_turns=2)
    assert (short.truncated, len(short.turns), short.reward) == (True, 2, 2.0)


def test_a_first_prompt_without_room_is_an_error_and_a_later_one_truncates():
    clock = VirtualClock()
    with pytest.raises(PromptTooLongError):
        play(Echo, sampler=ScriptedSampler(clock, max_context=3), clock=clock)
    episode = play(lambda: Echo(9), sampler=ScriptedSampler(clock, ["abcdef\n"], max_context=20), clock=clock, max_turns=9)
    assert (episode.truncated, len(episode.turns), episode.reward) == (True, 1, 1.0)


def test_seeds_repeat_for_the_same_task_member_and_turn_and_for_nothing_else():
    def seeds(**changes):
        clock = VirtualClock()
        sampler = ScriptedSampler(clock, ["a\n"])
        play(lambda: Echo(2), sampler=sampler, clock=clock, max_turns=2, **changes)
        return tuple(r.params.seed for r in sampler.requests)

    base = seeds()
    others = [seeds(member=1), seeds(task=Task(3, 5)), seeds(task=Task(2, 6)), seeds(seed=8)]
    assert seeds() == base
    assert len({*base, *(s for other in others for s in other)}) == 10
    assert all(0 <= s < 2**31 for s in base)
    assert base == (500539325, 2073082273), "seeds are part of what a run file means"


def test_async_environments_work_like_plain_ones():
    class AsyncEcho(Echo):
        async def reset(self, task):
            await asyncio.sleep(30)
            return super().reset(task)

        async def step(self, action):
            await asyncio.sleep(60)
            return super().step(action)

    clock = VirtualClock()
    assert play(AsyncEcho, clock=clock) == play(Echo)
    assert clock.now() == pytest.approx(91)


def raising(where: str, error: BaseException, is_async: bool):
    """An environment whose method `where` raises."""

    class Raising(Echo):
        def __init__(self):
            super().__init__()
            if where == "init":
                raise error

    def fail(self, *_):
        raise error

    async def fail_later(self, *_):
        await asyncio.sleep(1)
        raise error

    if where != "init":
        setattr(Raising, where, fail_later if is_async else fail)
    return Raising


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("where", ["init", "reset", "step"])
@pytest.mark.parametrize(
    "error", [KeyError("secret"), SystemExit(3), StopIteration(), RecursionError("deep"), asyncio.CancelledError(), TimeoutError()]
)
def test_whatever_an_environment_raises_is_a_named_failure_with_its_cause(where, error, is_async):
    with pytest.raises(EnvironmentFailedError) as caught:
        play(raising(where, error, is_async))
    if not (is_async and isinstance(error, asyncio.CancelledError) and where != "init"):
        assert type(error).__name__ in str(caught.value)
        assert isinstance(caught.value.__cause__, (type(error), RuntimeError))
    assert ("step" if where == "step" else "reset of task (2, 5)") in str(caught.value)


@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_async_environment_that_hangs_and_ignores_cancellation_meets_its_deadline(where):
    async def stubborn(self, *_):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    clock = VirtualClock()
    limit_s = {"reset": 60, "step": 120}[where]
    with pytest.raises(DeadlineExceededError, match=f"waited {limit_s} s for the environment's {where}"):
        play(type("Hanging", (Echo,), {where: stubborn}), clock=clock)
    assert clock.now() <= limit_s + 1.001


@pytest.mark.parametrize("where", ["reset", "step"])
def test_a_plain_environment_that_hangs_meets_its_deadline(where):
    gate = threading.Event()
    clock = VirtualClock(patience_s=0.3)
    with pytest.raises(DeadlineExceededError, match=f"for the environment's {where}"):
        play(type("Hanging", (Echo,), {where: lambda *_: gate.wait()}), clock=clock)
    gate.set()


def returning(**answers):
    """An environment whose methods return what is given."""
    return type("Returning", (Echo,), {name: lambda *_, answer=answer: answer for name, answer in answers.items()})


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_a_reward_that_is_not_finite_fails_the_episode_by_name(reward):
    with pytest.raises(RewardNotFiniteError):
        play(returning(step=Step(reward)))
    with pytest.raises(RewardNotFiniteError, match="reward part 'x'"):
        play(returning(step=Step(0.0, reward_parts={"x": reward})))


def test_rewards_that_overflow_together_fail_the_episode():
    with pytest.raises(RewardNotFiniteError, match="sum"):
        play(returning(step=Step(1.7e308, False, "x")), max_turns=2)


@pytest.mark.parametrize(
    "answers",
    [
        {"reset": None},
        {"reset": ""},
        {"reset": b"bytes"},
        {"reset": ("prompt", {})},
        {"step": 1.0},
        {"step": None},
        {"step": (1.0, True)},
        {"step": Step("1")},
        {"step": Step(None)},
        {"step": Step(1.0, None)},
        {"step": Step(1.0, False)},
        {"step": Step(1.0, False, 5)},
        {"step": Step(1.0, True, None, [("a", 1)])},
        {"step": Step(1.0, True, None, {"a": "1"})},
    ],
)
def test_nonsense_from_an_environment_is_named(answers):
    with pytest.raises(EnvironmentOutputError):
        play(returning(**answers))


@pytest.mark.parametrize("reward", [1, True, np.float32(1), np.int64(1)])
def test_any_finite_number_is_a_reward_and_becomes_a_float(reward):
    episode = play(returning(step=Step(reward, np.bool_(True))))
    assert (episode.reward, type(episode.reward)) == (1.0, float)


def test_a_slow_sampler_and_a_slow_episode_meet_their_deadlines():
    clock = VirtualClock()
    sampler = ScriptedSampler(clock, seconds=601)
    with pytest.raises(DeadlineExceededError, match="waited 600 s for sample request e/0"):
        play(Echo, sampler=sampler, clock=clock)
    assert sampler.num_cancelled == 1
    with pytest.raises(DeadlineExceededError, match="waited 1800 s for episode e"):
        play(lambda: Echo(9), sampler=ScriptedSampler(clock, ["a\n"], seconds=500), clock=clock, max_turns=9)


def test_every_wait_leaves_a_span():
    clock = VirtualClock()
    seams = seams_for(ScriptedSampler(clock, ["a\n"], seconds=5), clock)
    clock.run(run_episode(seams, rules_for(Echo), Task(0, 0), episode_id="e", member=0))
    spans = {total.name: (total.is_wait, total.total_s) for total in seams.spans.snapshot()}
    assert spans == {"episode": (True, pytest.approx(5)), "reset": (False, 0), "sample": (True, pytest.approx(5)), "step": (False, 0)}
    seams.threads.shutdown()


def test_the_rules_come_from_the_run_file():
    config = RunConfig.model_validate(
        {"name": "r", "seed": 4, "environment": {"name": "x"}, "algorithm": {"steps": 1}, "sampling": {"stop": ["\n", "th"], "max_tokens": 5}}
    )
    rules = rules_of(config, "run-1", Factory(Echo), Letters())
    assert (rules.stop_ids, rules.max_tokens, rules.seed, rules.run_id, rules.version) == ((EOS, NEWLINE, 299), 5, 4, "run-1", None)


@pytest.mark.parametrize("text", ["", "ab"])
def test_a_stop_text_must_be_one_token(text):
    with pytest.raises(ConfigError, match=r"sampling\.stop"):
        stop_ids((text,), Letters())


def test_hung_threads_are_given_up_replaced_bounded_and_end_when_they_return():
    clock = VirtualClock(patience_s=0.3)
    threads = AbandonableThreads(1, max_hung=2)
    gate = threading.Event()

    async def hang() -> None:
        with pytest.raises(DeadlineExceededError):
            await clock.wait_for(threads.call("x", gate.wait), 1, "the hung call")

    async def main() -> None:
        await hang()
        assert await threads.call("x", lambda: 5) == 5, "the only thread was replaced"
        await hang()
        assert threads.num_hung == 2
        with pytest.raises(EnvironmentFailedError, match="2 environment calls hang"):
            await threads.call("x", lambda: 5)

    before = set(threading.enumerate())
    clock.run(main())
    gate.set()
    threads.shutdown()
    started = set(threading.enumerate()) - before
    for thread in started:
        thread.join(5)
    assert threads.num_hung == 0
    assert not any(thread.is_alive() for thread in started)


def test_threads_queue_beyond_their_number_and_a_cancelled_waiting_call_never_runs():
    clock = VirtualClock()
    threads = AbandonableThreads(2)
    gate, ran = threading.Event(), []

    async def main() -> list[int]:
        calls = [asyncio.ensure_future(threads.call("x", lambda i=i: (gate.wait(), ran.append(i)))) for i in range(6)]
        await asyncio.sleep(0)
        calls[5].cancel()
        await asyncio.gather(calls[5], return_exceptions=True)
        gate.set()
        await asyncio.gather(*calls, return_exceptions=True)
        threads.shutdown()
        with pytest.raises(StageStoppedError):
            await threads.call("x", lambda: 1)
        return sorted(ran)

    assert clock.run(main()) == [0, 1, 2, 3, 4]
    assert threads.num_hung == 0


def test_the_process_can_exit_while_a_call_hangs(tmp_path):
    script = tmp_path / "hang.py"
    script.write_text(
        "import asyncio, threading\n"
        "from noria.actors.threads import AbandonableThreads\n"
        "from noria.clock import RealClock\n"
        "from noria.errors import DeadlineExceededError\n"
        "threads = AbandonableThreads(1)\n"
        "try:\n"
        "    asyncio.run(RealClock().wait_for(threads.call('x', threading.Event().wait), 0.05, 'x'))\n"
        "except DeadlineExceededError:\n"
        "    print('bye')\n"
    )

    async def run() -> bytes:
        process = await asyncio.create_subprocess_exec(sys.executable, str(script), stdout=asyncio.subprocess.PIPE, env={"PYTHONPATH": "."})
        out, _ = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 0
        return out

    assert asyncio.run(run()) == b"bye\n"
