"""Case 2: the ids that the sampler saw and produced are those of the buffer's row and of the learner's microbatch, hash for hash."""

import asyncio
import hashlib

import numpy as np
import pytest
from actor_builders import EOS, Factory, Letters
from chat_builders import MERGING, STRIPPING, Talk
from sampler_builders import NoSpans, adapter, drive, engine
from sqlalchemy import select

from noria.actors.pool import ActorPool
from noria.actors.rules import EpisodeRules
from noria.buffer.codec import decode_group
from noria.buffer.database import open_database
from noria.buffer.sqlite import SqliteBuffer
from noria.buffer.tables import GROUPS
from noria.clock import RealClock, VirtualClock
from noria.config import AlgorithmConfig, DeadlinesConfig
from noria.model.weights import load_base
from noria.protocols import Step
from noria.rl.packing import ReadyRun, cut, pack, plan_microbatch, shapes_up_to
from noria.rl.tree import build_tree
from noria.text.chat import TINY_TEMPLATE, ChatFormat
from noria.types import Completion, Message, Prompt

TURNS = 3
ALGORITHM = AlgorithmConfig(steps=1, group_size=4, groups_per_batch=2, truncated="keep")

FORGETFUL = """{% for m in messages %}
{{- '<|sep|>' + m.role + '\\n' + ('...' if m.role == 'assistant' and not loop.last else m.content) + '<|eos|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|sep|>assistant\\n' }}{% endif %}"""
"""Shows what the assistant said in the last message only: every turn forks."""


class Tool:
    """Answers every action with text, some of it special, and pays by what was said, so that no two episodes of a group are paid alike."""

    num_tasks, num_held_out = 10, 1

    def __call__(self):
        return type(self)()

    def reset(self, task):
        self.num_turns = 0
        return f"task {task.index}: call the tool<|sep|>"

    def step(self, action):
        self.num_turns += 1
        reward = int(hashlib.sha256(str(action).encode()).hexdigest()[:4], 16) / 2**16
        return Step(reward, done=self.num_turns == TURNS, observation=self.observe(str(action)))

    def observe(self, text):
        return f"<|sep|>tool says {len(text)} é\n"


class Chat(Tool):
    """The same in messages, two at a time."""

    def reset(self, task):
        return Prompt((Message("user", super().reset(task)),))

    def observe(self, text):
        return Message("tool", super().observe(text)), Message("user", "and now?")


class Recorder:
    """The sampler, and what every episode saw and produced: one sequence of ids for every path."""

    def __init__(self, inner):
        self.inner, self.paths, self.sampled = inner, {}, []

    async def sample(self, request):
        completion = await self.inner.sample(request)
        paths = self.paths.setdefault(request.episode_id, [])
        if paths and request.prompt_ids[: len(paths[-1])] == paths[-1]:
            paths.pop()
        paths.append(request.prompt_ids + completion.sampled_ids)
        self.sampled.append(completion.sampled_ids)
        return completion


def digest(ids):
    return hashlib.sha256(np.asarray(ids, "<i8").tobytes()).hexdigest()


def microbatches(pieces, shapes):
    done = 0
    while done < len(pieces):
        plan = plan_microbatch([ReadyRun("run", 1, pieces, done)], shapes, 0)
        done += len(plan.pieces)
        yield pack(plan)


def trained_ids(microbatch):
    """The ids of each sequence of a microbatch, by the mask rule alone: all that its last entry's position may see, and that entry's target."""
    entries = microbatch.entries
    for sequence in np.unique(entries.sequence_M[: microbatch.num_entries]):
        last = np.flatnonzero(entries.sequence_M[: microbatch.num_entries] == sequence)[-1]
        i = entries.predict_from_M[last]
        yield [int(microbatch.ids_T[j]) for j in range(i + 1) if i < microbatch.end_T[j]] + [int(entries.target_M[last])]


def rules_for(environment, **changes):
    settings = {"seed": 0, "max_tokens": 9, "temperature": 1.0, "stop_ids": (EOS,), "max_turns": TURNS, "deadlines": DeadlinesConfig()} | changes
    return EpisodeRules(tenant="t", run_id="run", environment=environment, **settings)


async def play_and_lease(pool, buffer, clock, rules, *, num_groups=2):
    """Play groups into the buffer, and lease them as the learner would."""
    await buffer.register_run("run", num_tasks=10, seed=0, num_places=num_groups)
    for _ in range(num_groups):
        lease = await buffer.admit("run", version=0, deadline_s=clock.wall() + 600)
        outcome = await pool.play_group(rules, lease, group_size=4, episode_tries=1)
        assert await buffer.put(outcome.group)
    await pool.close()
    return await buffer.lease("run", [item.group_id for item in await buffer.outstanding("run")])


def stored_groups(database):
    with database.connect() as connection:
        return [decode_group(row.payload) for row in connection.execute(select(GROUPS.c.payload).order_by(GROUPS.c.admission))]


def assert_same_everywhere(recorder, database, groups, shapes):
    """Sampler = buffer = microbatches, path by path. Returns the pieces."""
    at_sampler = sorted(digest(path) for paths in recorder.paths.values() for path in paths)
    stored = stored_groups(database)
    assert {e.episode_id: e.paths for g in stored for e in g.episodes} == {name: tuple(paths) for name, paths in recorder.paths.items()}
    assert sorted(digest(path) for g in stored for e in g.episodes for path in e.paths) == at_sampler
    pieces = cut(build_tree(groups, ALGORITHM)[0], shapes[-1])
    assert sorted(digest(ids) for m in microbatches(pieces, shapes) for ids in trained_ids(m)) == at_sampler
    return pieces


@pytest.mark.parametrize(
    ("environment", "template", "num_paths"),
    [(Tool(), None, 1), (Chat(), TINY_TEMPLATE, 1), (Chat(), FORGETFUL, TURNS)],
    ids=["text", "chat", "forks"],
)
def test_ids_are_the_same_at_the_sampler_in_the_buffer_and_in_the_microbatch(tmp_path, environment, template, num_paths):
    tokenizer, clock = load_base("tiny").tokenizer, RealClock()
    sampler = engine(eos_id=tokenizer.eos_id)
    sampler.publish("run", 0, adapter(0), 1.0)
    recorder, database = Recorder(sampler), open_database(tmp_path / "noria.db")
    chat = ChatFormat(template, tokenizer) if template else None
    buffer, pool = SqliteBuffer(database, clock), ActorPool(recorder, tokenizer, clock, NoSpans(), chat=chat)
    rules = rules_for(environment, stop_ids=(tokenizer.eos_id,))

    async def everything():
        return (await drive(sampler, play_and_lease(pool, buffer, clock, rules)))[0]

    groups = asyncio.run(everything())
    assert len(recorder.paths) == 8
    assert {len(paths) for paths in recorder.paths.values()} == {num_paths}
    pieces = assert_same_everywhere(recorder, database, groups, shapes_up_to(256))
    assert len(pieces) > 1, "an episode's ids must survive the cut too"
    buffer.close()
    database.dispose()
    retold = [tokenizer.encode(tokenizer.decode(ids)) != ids for ids in recorder.sampled]
    assert any(retold), "the case must hold ids that no text gives back"


class Thinker:
    """A sampler that thinks, says a word in two pieces and the number of the request, and stops."""

    def __init__(self, clock):
        self.clock, self.num_requests = clock, 0

    async def sample(self, request):
        number = self.num_requests
        self.num_requests += 1
        await self.clock.sleep(1.0)
        ids = (*map(ord, f"<think>th{number}</think>the moth {number}"), EOS)
        return Completion(ids, (-0.5,) * len(ids), (0,) * len(ids), "stop")


@pytest.mark.parametrize("template", [MERGING, STRIPPING], ids=["merging", "stripping"])
def test_reasoning_two_piece_words_adjacent_tool_messages_and_eos_as_padding_survive_all_the_way(tmp_path, template):
    """The end-of-text id is 0, which is also the padding of ids and targets: whether a token trains is a matter of its place only."""
    clock, tokenizer = VirtualClock(), Letters()
    recorder, database = Recorder(Thinker(clock)), open_database(tmp_path / "noria.db")
    results = (Message("tool", "this"), Message("tool", "that"))

    class Paid(Talk):
        def step(self, action):
            step = super().step(action)
            return Step(float(action.content.split()[-1]), step.done, step.observation)

    buffer = SqliteBuffer(database, clock)
    pool = ActorPool(recorder, tokenizer, clock, NoSpans(), chat=ChatFormat(template, tokenizer))
    rules = rules_for(Factory(lambda: Paid(results, results)), max_tokens=99)
    groups = clock.run(play_and_lease(pool, buffer, clock, rules))
    pieces = assert_same_everywhere(recorder, database, groups, shapes_up_to(1024))
    buffer.close()
    database.dispose()

    assert all(len(e.paths) == (TURNS if template is STRIPPING else 1) for g in groups for e in g.episodes)
    assert all(tokenizer.encode(tokenizer.decode(ids)) != ids[:-1] for ids in recorder.sampled), "a second encoding would change every turn"
    sampled = sorted(i for ids in recorder.sampled for i in ids)
    batches = list(microbatches(pieces, shapes_up_to(1024)))
    assert sorted(int(i) for m in batches for i in m.entries.target_M[: m.num_entries]) == sampled, "every sampled token once, and nothing else"
    assert all((m.entries.weight_M[: m.num_entries] > 0).all() and not m.entries.weight_M[m.num_entries :].any() for m in batches)
    num_ends = sum(int((m.entries.target_M[: m.num_entries] == EOS).sum()) for m in batches)
    assert num_ends >= len(recorder.sampled), "every turn's end trains, also in mid-sequence"
