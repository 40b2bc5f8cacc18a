"""Groups, evaluation and the pool: retries, survivors, cancellation, hundreds of episodes at once, an orderly end."""

import asyncio
import math
import threading
from collections import Counter
from itertools import count

import pytest

from noria.actors.evaluation import held_out_tasks
from noria.actors.pool import ActorPool
from noria.actors.rules import EpisodeRules
from noria.buffer.database import open_database
from noria.buffer.sqlite import SqliteBuffer
from noria.clock import VirtualClock
from noria.config import DeadlinesConfig
from noria.envs.arithmetic import Addition
from noria.errors import DeadlineExceededError, EnvironmentFailedError, PromptTooLongError, StageStoppedError
from noria.observe import SpanRecorder
from noria.protocols import Lease, Step
from noria.seeds import derive_seed
from noria.types import Completion, Task

NEWLINE = 10


class Characters:
    """One token per character."""

    vocab_size = 200_000
    bos_id = None
    eos_id = 0
    end_ids = (0,)

    def encode(self, text):
        return tuple(map(ord, text))

    def decode(self, ids):
        return "".join(map(chr, ids))


class SlowSampler:
    """Answers every request with `answer(request)` after a virtual time that differs from request to request; counts what goes on."""

    def __init__(self, clock, answer=lambda request: "x\n", *, seconds=10.0):
        self.clock, self.answer, self.seconds = clock, answer, seconds
        self.num_waiting = self.most_waiting = self.num_cancelled = 0
        self.requests = []

    async def sample(self, request):
        self.requests.append(request)
        self.num_waiting += 1
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        try:
            await self.clock.sleep(self.seconds * (1 + derive_seed(request.request_id, bits=8) / 256))
            ids = tuple(map(ord, self.answer(request)))
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_waiting -= 1
        return Completion(ids, (-0.5,) * len(ids), (1,) * len(ids), "stop" if ids[-1] == NEWLINE else "length")


class Coin:
    """Rewards 1 or 0 by the task; `fail` is told the try's number in the whole test and may raise, hang or return a step."""

    num_tasks, num_held_out = 100, 10

    def __init__(self, fail=lambda number: None):
        self.fail, self.numbers = fail, count(1)

    def __call__(self):
        return _CoinEpisode(self.fail, next(self.numbers))


class _CoinEpisode:
    def __init__(self, fail, number):
        self.fail, self.number, self.index = fail, number, -1

    def reset(self, task):
        self.index = task.index
        return f"{task.index}?"

    def step(self, action):
        return self.fail(self.number) or Step(float(self.index % 2))


def rules_for(environment=None, **changes) -> EpisodeRules:
    values = {"tenant": "t", "run_id": "r", "environment": environment or Coin(), "seed": 0, "max_tokens": 8, "temperature": 1.0}
    return EpisodeRules(**{**values, "stop_ids": (0, NEWLINE), "max_turns": 1, "deadlines": DeadlinesConfig(), **changes})


def lease_for(clock, index=0, timeout_s=5000.0) -> Lease:
    return Lease(f"r-{index:06d}", "r", Task(index, 1), index, 0, clock.wall() + timeout_s)


def pool_for(sampler, clock, **options) -> ActorPool:
    return ActorPool(sampler, Characters(), clock, SpanRecorder(clock), **options)


def play(environment, *, answer=lambda request: "x\n", group_size=4, episode_tries=3, index=1):
    """The outcome of one group, the sampler that served it, and the pool's counters."""
    clock = VirtualClock(patience_s=0.5)
    sampler = SlowSampler(clock, answer)
    pool = pool_for(sampler, clock)

    async def main():
        outcome = await pool.play_group(rules_for(environment), lease_for(clock, index), group_size=group_size, episode_tries=episode_tries)
        await pool.close()
        return outcome

    return clock.run(main()), sampler, pool.counts()


def test_a_group_has_all_its_episodes_in_order_of_member():
    outcome, sampler, counts = play(Coin())
    assert [(e.member, e.reward) for e in outcome.group.episodes] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0)]
    assert (outcome.group.group_id, outcome.group.task, outcome.group.num_failed, outcome.failures) == ("r-000001", Task(1, 1), 0, ())
    assert len({e.episode_id for e in outcome.group.episodes}) == len({r.request_id for r in sampler.requests}) == 4
    assert (counts.num_finished, counts.num_playing, counts.failures) == (4, 0, {})


def failing(*numbers, how=None):
    """An environment whose tries with these numbers (from 1) fail."""

    def fail(number):
        if number in numbers:
            if how is not None:
                return how()
            raise ValueError("flaky")
        return None

    return Coin(fail)


def test_a_failed_episode_is_tried_again_under_new_request_ids_and_the_same_seed():
    outcome, sampler, counts = play(failing(1))
    assert len(outcome.group.episodes) == 4
    assert (outcome.num_retries, counts.num_retries, outcome.failures) == (1, 1, ())
    assert len({r.request_id for r in sampler.requests}) == 5
    assert sorted(Counter(r.params.seed for r in sampler.requests).values()) == [1, 1, 1, 2]


def test_what_fails_for_good_is_left_out_counted_and_told_but_never_a_reward():
    outcome, _, counts = play(failing(1, 2, 3), episode_tries=1)
    assert outcome.group is None
    assert [(f.code, f.num_tries) for f in outcome.failures] == [("environment_failed", 1)] * 3
    assert "ValueError: flaky" in outcome.failures[0].message
    assert (counts.num_finished, counts.failures) == (1, {"environment_failed": 3})


def test_two_episodes_are_enough_for_a_group():
    outcome, _, _ = play(failing(1, 2), episode_tries=1)
    assert [e.reward for e in outcome.group.episodes] == [1.0, 1.0]
    assert (outcome.group.num_failed, len(outcome.failures)) == (2, 2)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        (lambda: Step(math.nan), "reward_not_finite"),
        (lambda: "nonsense", "environment_output_invalid"),
        (lambda: threading.Event().wait(), "deadline_exceeded"),
    ],
)
def test_every_kind_of_bad_episode_is_left_out_under_its_code(how, code):
    outcome, _, counts = play(failing(1, how=how), episode_tries=1)
    assert (len(outcome.group.episodes), counts.failures) == (3, {code: 1})
    assert counts.num_hung == (code == "deadline_exceeded")


@pytest.mark.parametrize(("num_failing", "num_left"), [(1, 7), (6, 2), (7, 0), (8, 0)])
def test_a_group_of_eight_goes_on_with_those_that_are_left_or_not_at_all(num_failing, num_left):
    """One of eight fails: seven train. Seven fail: one has nothing to be compared with. All fail: the failures say why."""
    outcome, _, counts = play(failing(*range(1, num_failing + 1)), group_size=8, episode_tries=1)
    assert (0 if outcome.group is None else len(outcome.group.episodes)) == num_left
    assert len(outcome.failures) == num_failing
    assert counts.failures == {"environment_failed": num_failing}
    assert all("ValueError: flaky" in failure.message for failure in outcome.failures)


def test_an_episode_that_waits_for_ever_is_played_again_and_its_group_is_full():
    async def never():
        await asyncio.Event().wait()

    outcome, _, counts = play(failing(1, 2, how=never), group_size=8)
    assert len(outcome.group.episodes) == 8
    assert (counts.num_retries, counts.failures) == (2, {})


def test_a_reward_function_that_loops_is_an_error_and_its_thread_is_replaced():
    is_over = []

    def loop():
        while not is_over:
            pass

    clock = VirtualClock(patience_s=0.1)
    pool = pool_for(SlowSampler(clock), clock, max_episodes=2)

    async def main():
        looping = await pool.play_group(rules_for(failing(1, 2, how=loop)), lease_for(clock), group_size=2, episode_tries=1)
        assert looping.group is None
        assert [f.code for f in looping.failures] == ["deadline_exceeded"] * 2
        assert (pool.counts().num_hung, pool.counts().num_finished) == (2, 0)
        fine = await pool.play_group(rules_for(), lease_for(clock, 1), group_size=8, episode_tries=1)
        assert len(fine.group.episodes) == 8, "all the threads there were are stuck, and others have taken their places"
        is_over.append(True)
        await pool.close()

    clock.run(main())


def test_a_run_whose_calls_all_hang_is_refused_and_another_run_plays_on():
    gate, tried = threading.Event(), []

    def hang(number):
        tried.append(number)
        return gate.wait()

    clock = VirtualClock(patience_s=0.1)
    pool = pool_for(SlowSampler(clock, seconds=0), clock)

    async def main():
        bad = rules_for(Coin(hang), run_id="bad")
        hanging = await pool.play_group(bad, lease_for(clock, 0), group_size=128, episode_tries=1)
        assert {f.code for f in hanging.failures} == {"deadline_exceeded"}
        refused = await pool.play_group(bad, lease_for(clock, 1), group_size=128, episode_tries=2)
        assert "run bad hang in 128 threads" in refused.failures[0].message
        assert len(tried) == pool.counts().num_hung == 128, "no more calls, no more threads"
        good = await pool.play_group(rules_for(), lease_for(clock, 2), group_size=128, episode_tries=1)
        assert len(good.group.episodes) == 128
        await pool.close()

    clock.run(main())
    gate.set()


def test_a_prompt_that_is_too_long_is_not_tried_again():
    def refuse(request):
        raise PromptTooLongError("no room")

    outcome, sampler, _ = play(Coin(), answer=refuse)
    assert outcome.group is None
    assert [(f.code, f.num_tries) for f in outcome.failures] == [("prompt_too_long", 1)] * 4
    assert len(sampler.requests) == 4


def test_a_stopped_sampler_is_no_episodes_failure_and_ends_the_group_at_once():
    def stop(request):
        raise StageStoppedError("sampler stopped")

    clock = VirtualClock()
    sampler = SlowSampler(clock, stop)
    pool = pool_for(sampler, clock)
    with pytest.raises(StageStoppedError, match="sampler stopped"):
        clock.run(pool.play_group(rules_for(), lease_for(clock), group_size=4, episode_tries=3))
    assert (len(sampler.requests), sampler.num_cancelled, sampler.num_waiting) == (4, 3, 0)


def test_cancelling_a_group_cancels_its_sample_requests():
    clock = VirtualClock()
    sampler = SlowSampler(clock)
    pool = pool_for(sampler, clock)

    async def main() -> bool:
        task = asyncio.ensure_future(pool.play_group(rules_for(), lease_for(clock), group_size=8, episode_tries=3))
        await clock.sleep(1)
        assert (sampler.num_waiting, pool.counts().num_playing) == (8, 8)
        task.cancel()
        await asyncio.wait({task})
        return task.cancelled()

    assert clock.run(main())
    assert (sampler.num_waiting, sampler.num_cancelled, pool.counts().num_playing) == (0, 8, 0)


def test_a_group_ends_at_its_leases_deadline():
    clock = VirtualClock()
    sampler = SlowSampler(clock, seconds=100)
    pool = pool_for(sampler, clock)
    with pytest.raises(DeadlineExceededError, match="group r-000000"):
        clock.run(pool.play_group(rules_for(), lease_for(clock, timeout_s=50), group_size=8, episode_tries=3))
    assert (clock.now(), sampler.num_cancelled) == (pytest.approx(50), 8)


def test_hundreds_of_episodes_are_in_flight_and_never_more_than_there_is_room_for():
    clock = VirtualClock()
    sampler = SlowSampler(clock, seconds=60)
    pool = pool_for(sampler, clock, max_episodes=300)

    async def main():
        rules = rules_for()
        groups = [pool.play_group(rules, lease_for(clock, i), group_size=8, episode_tries=3) for i in range(100)]
        outcomes = await asyncio.gather(*groups)
        await pool.close()
        return outcomes

    outcomes = clock.run(main())
    assert sampler.most_waiting == 300
    assert sum(len(outcome.group.episodes) for outcome in outcomes) == pool.counts().num_finished == 800
    assert clock.now() < 60 * 2 * math.ceil(800 / 300)
    assert len({e.episode_id for o in outcomes for e in o.group.episodes}) == 800


def test_closing_the_pool_cancels_what_plays_and_refuses_more():
    clock = VirtualClock()
    sampler = SlowSampler(clock)
    pool = pool_for(sampler, clock)

    async def main():
        playing = asyncio.ensure_future(pool.play_group(rules_for(), lease_for(clock), group_size=4, episode_tries=3))
        await clock.sleep(1)
        await pool.close()
        await pool.close()
        with pytest.raises(StageStoppedError, match="while this was played"):
            await playing
        with pytest.raises(StageStoppedError, match="no more"):
            await pool.play_group(rules_for(), lease_for(clock), group_size=4, episode_tries=3)

    clock.run(main())
    assert sampler.num_cancelled == 4


def test_a_caller_cancelled_while_the_pool_closes_sees_its_own_cancellation():
    clock = VirtualClock()
    pool = pool_for(SlowSampler(clock), clock)

    async def main() -> bool:
        playing = asyncio.ensure_future(pool.play_group(rules_for(), lease_for(clock), group_size=4, episode_tries=3))
        await clock.sleep(1)
        playing.cancel()
        await pool.close()
        await asyncio.wait({playing})
        return playing.cancelled()

    assert clock.run(main())


def solve(request):
    """What a perfect policy answers to an addition prompt."""
    question = Characters().decode(request.prompt_ids).rsplit("\n", 1)[1]
    a, b = (int(part) for part in question.removesuffix("=").split("+"))
    return f" {a + b}\n"


class AdditionFactory:
    num_tasks, num_held_out = Addition.num_tasks, Addition.num_held_out

    def __call__(self):
        return Addition()


def evaluate(environment, *, answer=solve, num_tasks=16, **how):
    clock = VirtualClock()
    sampler = SlowSampler(clock, answer)
    pool = pool_for(sampler, clock)
    tasks = held_out_tasks(environment, num_tasks)

    async def main():
        result = await pool.evaluate(rules_for(environment), tasks, version=3, **how)
        await pool.close()
        return result

    return clock.run(main()), sampler


def test_evaluation_is_greedy_pinned_and_on_held_out_tasks():
    result, sampler = evaluate(AdditionFactory())
    assert (result.accuracy, result.mean_reward, len(result.rewards), result.num_failed) == (1.0, 1.0, 16, 0)
    assert {(r.params.temperature, r.version) for r in sampler.requests} == {(0.0, 3)}
    assert [task.index for task in held_out_tasks(AdditionFactory(), 2)] == [4096, 4097]


def test_evaluation_has_a_temperature_and_a_mark_of_its_own():
    result, sampler = evaluate(Coin(lambda number: Step(0.5)), answer=lambda request: "x\n", num_tasks=4, samples=2, temperature=0.6, solved_at=0.5)
    assert {(r.params.temperature, r.version) for r in sampler.requests} == {(0.6, 3)}
    assert (result.accuracy, dict(result.pass_at), len(sampler.requests)) == (1.0, {1: 1.0, 2: 1.0}, 8)


def test_evaluation_counts_wrong_answers_and_leaves_failures_out_of_the_mean():
    wrong, _ = evaluate(AdditionFactory(), answer=lambda request: " 1\n")
    assert wrong.accuracy == 0.0

    def fail(number):
        if number <= 5:
            raise ValueError
        return Step(1.0)

    result, _ = evaluate(Coin(fail), answer=lambda request: "x\n", num_tasks=4)
    assert (result.mean_reward, result.num_failed) == (1.0, 0), "five failures, and three tries for each of four tasks"


def test_an_evaluation_without_any_result_is_an_error_and_not_a_zero():
    def fail(number):
        raise ValueError("always")

    with pytest.raises(EnvironmentFailedError, match=r"all 4 tasks failed; the first: .*always"):
        evaluate(Coin(fail), answer=lambda request: "x\n", num_tasks=4)


def test_there_are_no_more_held_out_tasks_than_the_environment_has():
    assert len(held_out_tasks(Coin(), 50)) == 10


def test_every_group_is_settled_once_whatever_its_environment_does(tmp_path):
    """Actors and buffer together: good, raising, NaN and hanging episodes, and a deadline; the places are all free in the end."""

    def fail(number):
        match number % 5:
            case 0:
                raise ValueError("flaky")
            case 1:
                return Step(math.nan)
            case 2 if number % 3 == 0:
                return threading.Event().wait()
        return None

    clock = VirtualClock(patience_s=0.5)
    engine = open_database(tmp_path / "noria.db")
    buffer = SqliteBuffer(engine, clock)
    pool = pool_for(SlowSampler(clock), clock)

    async def play_one(rules, lease):
        try:
            outcome = await pool.play_group(rules, lease, group_size=4, episode_tries=2)
        except DeadlineExceededError:
            return await buffer.drop(lease.group_id, "deadline")
        if outcome.group is None:
            return await buffer.drop(lease.group_id, "failed")
        assert await buffer.put(outcome.group)
        await buffer.lease("r", [lease.group_id])
        return await buffer.transaction(lambda connection: buffer.settle_trained(connection, [lease.group_id], 1))

    async def main():
        rules = rules_for(Coin(fail))
        await buffer.register_run("r", num_tasks=100, seed=0, num_places=6)
        for _ in range(3):
            leases = [await buffer.admit("r", version=0, deadline_s=clock.wall() + 200) for _ in range(6)]
            assert await buffer.admit("r", version=0, deadline_s=clock.wall() + 200) is None
            await asyncio.gather(*(play_one(rules, lease) for lease in leases))
        counts = await buffer.counts("r")
        await pool.close()
        return counts

    counts = clock.run(main())
    buffer.close()
    engine.dispose()
    assert counts.places_in_use == 0
    assert sum(counts.by_status.values()) == 18
    assert counts.by_status["trained"] >= 1
