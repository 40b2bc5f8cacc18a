"""One episode: ids that only grow, seeds that repeat, and tenant code that raises, hangs, or answers nonsense."""

import asyncio
import math
import threading
from fractions import Fraction

import numpy as np
import pytest
from actor_builders import EOS, NEWLINE, Echo, Factory, Letters, ScriptedSampler, play, rules_for, seams_for

from noria.actors.dialogue import action_of
from noria.actors.episode import run_episode
from noria.actors.rules import rules_of, stops
from noria.clock import VirtualClock
from noria.config import RunConfig
from noria.errors import (
    DeadlineExceededError,
    EnvironmentFailedError,
    EnvironmentOutputError,
    PromptTooLongError,
    RewardNotFiniteError,
)
from noria.protocols import Step
from noria.sampler.stops import StopSearch
from noria.text.tokenizer import ByteTokenizer
from noria.types import Task


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
    assert action_of((1, NEWLINE, 2), (NEWLINE,)) == (1, NEWLINE, 2)
    assert action_of((), (NEWLINE,)) == ()


def test_cut_completions_and_missing_turns_make_an_episode_truncated():
    clock = VirtualClock()
    assert play(Echo, sampler=ScriptedSampler(clock, ["no stop at all"]), clock=clock).truncated
    short = play(lambda: Echo(3), max_turns=2)
    assert (short.truncated, len(short.turns), short.reward) == (True, 2, 2.0)


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_an_episode_of_which_any_turn_was_cut_is_truncated(cut):
    """Whichever turn it was, and however the environment went on: what does not end is not trained as if it did."""
    clock = VirtualClock()
    replies = ["a\n", "b\n", "c\n"]
    replies[cut] = "no stop at all"
    episode = play(lambda: Echo(3), sampler=ScriptedSampler(clock, replies), clock=clock, max_turns=5)
    assert [turn.completion.finish_reason == "length" for turn in episode.turns] == [turn == cut for turn in range(3)]
    assert (episode.truncated, episode.reward) == (True, 3.0)


def scoring(*steps):
    """An environment whose steps are given: each a reward, or its components by name."""

    class Scoring(Echo):
        def step(self, action):
            self.actions.append(action)
            given, is_last = steps[len(self.actions) - 1], len(self.actions) == len(steps)
            return Step(0.0, is_last, "x", given) if isinstance(given, dict) else Step(given, is_last, "x")

    return Scoring


@pytest.mark.parametrize("parts", [(0.7, 0.2, 0.1), (0.1, 0.2, 0.7), (0.1, 0.7, 0.2)])
def test_rewards_that_add_up_to_one_are_one_whatever_their_order(parts):
    """So that they solve a task: `sum` gives 0.9999999999999999 for the first, and on Python 3.12 something else."""
    names = ("right", "form", "short")
    weights = dict(zip(names, parts, strict=True))
    assert play(scoring(dict.fromkeys(names, 1.0)), reward_weights=weights).reward == 1.0
    assert play(scoring(*parts), max_turns=3).reward == 1.0
    tenth = play(scoring(*[0.1] * 10), max_turns=10)
    assert tenth.reward == 1.0
    assert dict(play(scoring(*[{"x": 0.1}] * 10), max_turns=10).reward_parts) == {"x": 1.0}


def test_components_that_overflow_together_fail_the_episode():
    with pytest.raises(RewardNotFiniteError, match="reward part 'x'"):
        play(scoring({"x": 1.7e308}, {"x": 1.7e308}), max_turns=2)
    with pytest.raises(RewardNotFiniteError, match="weighted sum"):
        play(scoring({"x": 1.0, "y": 1.0}), reward_weights={"x": 1.7e308, "y": 1.7e308})


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
            await asyncio.sleep(0)
            return super().reset(task)

        async def step(self, action):
            await asyncio.to_thread(lambda: None)
            return super().step(action)

    clock = VirtualClock()
    assert play(AsyncEcho, clock=clock) == play(Echo)
    assert clock.now() == pytest.approx(1), "time stands still while tenant code is under way; sampling takes a second"


def test_plain_and_async_methods_and_methods_that_return_an_awaitable_may_be_mixed():
    class Mixed(Echo):
        def reset(self, task):
            return self._later(super().reset(task))

        async def _later(self, text):
            await asyncio.sleep(0)
            return text

    assert play(Mixed) == play(Echo)


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
        await asyncio.sleep(0)
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

    clock = VirtualClock(patience_s=0.3)
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


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, np.float32("nan"), 10**400, Fraction(-(10**400), 3)])
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
        {"step": Step(1.0, reward_parts={1: 0.5})},
        {"step": Step(1.0, reward_parts={None: 0.5})},
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
    sampler = ScriptedSampler(clock, seconds=606)
    with pytest.raises(DeadlineExceededError, match="waited 605 s for sample request e/0"):
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
    seams.loops.shutdown()


def test_the_rules_come_from_the_run_file():
    config = RunConfig.model_validate(
        {"name": "r", "seed": 4, "environment": {"name": "x"}, "algorithm": {"steps": 1}, "sampling": {"stop": ["\n", "ab", "th"], "max_tokens": 5}}
    )
    rules = rules_of(config, "run-1", Factory(Echo), Letters())
    assert (rules.stop_ids, rules.max_tokens, rules.seed, rules.run_id, rules.version) == ((EOS, NEWLINE, 299), 5, 4, "run-1", None)
    assert (rules.stop, rules.top_k, rules.top_p) == (("\n", "ab", "th"), 0, 1.0)


def test_a_stop_text_is_looked_for_and_one_of_one_token_is_a_stop_id_too():
    assert stops(("ab", "\n", "th", "héé", "\n"), Letters()) == ((EOS, NEWLINE, 299), ("ab", "\n", "th", "héé"))


def test_a_special_token_as_a_stop_text_is_its_id_only():
    tokenizer = ByteTokenizer()
    assert stops(("<|sep|>", "a"), tokenizer) == ((tokenizer.eos_id, tokenizer.SPECIAL["<|sep|>"], ord("a")), ("a",))


@pytest.mark.parametrize("ids", [(ord("t"), ord("h")), (299,)], ids=["by two tokens", "by its own"])
def test_a_stop_text_of_one_token_ends_a_turn_however_it_is_spelled(ids):
    stop_ids, texts = stops(("th",), Letters())
    assert StopSearch(Letters(), texts).find((ord("a"), *ids, ord("!"))) == 1 + len(ids)
    environment, clock = Echo(), VirtualClock()
    play(lambda: environment, sampler=ScriptedSampler(clock, ["a" + "".join(map(chr, ids))]), clock=clock, stop=texts, stop_ids=stop_ids)
    assert environment.actions == ["a"]


@pytest.mark.parametrize(
    ("replies", "action"), [(["so </answer>!"], "so "), (["END </answer"], ""), (["no such text"], "no such text"), (["a</answer>END\n"], "a")]
)
def test_the_environment_sees_the_action_up_to_its_stop_text_and_the_episode_keeps_every_id(replies, action):
    environment, clock = Echo(), VirtualClock()
    sampler = ScriptedSampler(clock, replies)
    episode = play(lambda: environment, sampler=sampler, clock=clock, stop=("</answer>", "END"), max_tokens=99)
    assert environment.actions == [action]
    assert episode.turns[0].completion.sampled_ids == tuple(map(ord, replies[0]))
    params = sampler.requests[0].params
    assert (params.stop, params.stop_ids, params.is_constrained) == (("</answer>", "END"), (EOS, NEWLINE), False)


def test_the_samplers_own_deadline_comes_before_the_actors():
    clock = VirtualClock()
    sampler = ScriptedSampler(clock, seconds=603)
    assert play(Echo, sampler=sampler, clock=clock).turns, "it may still answer"
    assert sampler.requests[0].timeout_s == 600


class Elsewhere:
    """Values whose conversions are tenant code: each notes the thread it ran in."""

    def __init__(self):
        self.threads = set()

    def note(self, answer):
        self.threads.add(threading.get_ident())
        return answer


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", ["reward", "parts", "repr", "error", "text"])
def test_no_code_of_a_tenant_runs_in_the_actors_thread(kind, is_async):
    seen = Elsewhere()

    class Number(np.float64):
        def __float__(self):
            return seen.note(1.0)

    class Parts(dict):
        def items(self):
            return seen.note({"x": 1.0}.items())

    class Speaking(str):
        def __str__(self):
            return seen.note("nonsense")

    class SpeakingError(Exception):
        def __str__(self):
            return seen.note("out of order")

    def answer():
        if kind == "error":
            raise SpeakingError
        return {"reward": Step(Number(1)), "parts": Step(1.0, True, None, Parts()), "repr": Speaking(), "text": Step(1.0, False, Speaking("x"))}[kind]

    class Plain(Echo):
        def step(self, action):
            return answer()

    class Async(Echo):
        async def step(self, action):
            return answer()

    try:
        episode = play(Async if is_async else Plain, max_turns=2)
        assert all(type(i) is int for i in episode.ids)
    except (EnvironmentFailedError, EnvironmentOutputError):
        assert kind in ("error", "repr")
    assert threading.get_ident() not in seen.threads
    assert seen.threads or kind == "text"


def test_an_error_whose_text_raises_is_told_by_its_name():
    class Mute(Exception):
        def __str__(self):
            raise SystemExit

    with pytest.raises(EnvironmentFailedError, match=r"step raised Mute: .*SystemExit"):
        play(raising("step", Mute(), is_async=True))
