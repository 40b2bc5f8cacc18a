"""Builders for tests of actors: a tokenizer, a sampler that follows a script, environments, rules, and one episode played."""

import asyncio
from dataclasses import replace

from noria.actors.episode import run_episode
from noria.actors.loops import EnvironmentLoops
from noria.actors.rules import EpisodeRules, Seams
from noria.actors.threads import AbandonableThreads, HungThreads
from noria.clock import VirtualClock
from noria.config import DeadlinesConfig
from noria.errors import ConfigError, PromptTooLongError
from noria.observe import SpanRecorder
from noria.protocols import Step
from noria.types import Completion, SampleRequest, Task

EOS, NEWLINE = 0, 10


class Letters:
    """One token per character, except that the pair "th" is one token of its own when encoded: decode then encode is not one-to-one."""

    vocab_size = 300
    bos_id = None
    eos_id = EOS
    end_ids = (EOS,)

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


def seams_for(sampler, clock, *, max_threads=8, tokenizer=None, chat=None) -> Seams:
    hung = HungThreads()
    threads, loops = AbandonableThreads(max_threads, hung), EnvironmentLoops(hung)
    return Seams(sampler, tokenizer or Letters(), clock, SpanRecorder(clock), threads, loops, chat)


def play(make, *, sampler=None, clock=None, task=None, member=0, tokenizer=None, chat=None, **changes):
    clock = clock or VirtualClock()
    sampler = sampler or ScriptedSampler(clock, ["answer\n"])
    seams = seams_for(sampler, clock, tokenizer=tokenizer, chat=chat)
    try:
        return clock.run(run_episode(seams, rules_for(make, **changes), task or Task(2, 5), episode_id="e", member=member))
    finally:
        seams.threads.shutdown()
        seams.loops.shutdown()
