"""Case 2: the ids that the sampler saw and produced are those of the buffer's row and of the learner's microbatch, hash for hash."""

import asyncio
import hashlib

import numpy as np
from sampler_builders import NoSpans, adapter, drive, engine
from sqlalchemy import select

from noria.actors.pool import ActorPool
from noria.actors.rules import EpisodeRules
from noria.buffer.codec import decode_group
from noria.buffer.database import open_database
from noria.buffer.sqlite import SqliteBuffer
from noria.buffer.tables import GROUPS
from noria.clock import RealClock
from noria.config import AlgorithmConfig, DeadlinesConfig
from noria.model.weights import load_base
from noria.protocols import Step
from noria.rl.packing import ReadyRun, cut, pack, plan_microbatch, shapes_up_to
from noria.rl.tree import build_tree

TURNS = 3
ALGORITHM = AlgorithmConfig(steps=1, group_size=4, groups_per_batch=2, truncated="keep")


class Tool:
    """Answers every action with text, some of it special, and pays by what was said, so that no two episodes of a group are paid alike."""

    num_tasks, num_held_out = 10, 1

    def __call__(self):
        return Tool()

    def reset(self, task):
        self.num_turns = 0
        return f"task {task.index}: call the tool<|sep|>"

    def step(self, action):
        self.num_turns += 1
        reward = int(hashlib.sha256(action.encode()).hexdigest()[:4], 16) / 2**16
        return Step(reward, done=self.num_turns == TURNS, observation=f"<|sep|>tool says {len(action)} é\n")


class Recorder:
    """The sampler, and the newest ids of every episode that went through it."""

    def __init__(self, inner):
        self.inner, self.ids, self.sampled = inner, {}, []

    async def sample(self, request):
        completion = await self.inner.sample(request)
        self.ids[request.episode_id] = request.prompt_ids + completion.sampled_ids
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
    """The ids of each episode of a microbatch, by the mask rule alone: all that its last entry's position may see, and that entry's target."""
    entries = microbatch.entries
    for episode in np.unique(entries.episode_M[: microbatch.num_entries]):
        last = np.flatnonzero(entries.episode_M[: microbatch.num_entries] == episode)[-1]
        i = entries.predict_from_M[last]
        yield [int(microbatch.ids_T[j]) for j in range(i + 1) if i < microbatch.end_T[j]] + [int(entries.target_M[last])]


def test_ids_are_the_same_at_the_sampler_in_the_buffer_and_in_the_microbatch(tmp_path):
    tokenizer, clock = load_base("tiny").tokenizer, RealClock()
    sampler = engine(eos_id=tokenizer.eos_id)
    sampler.publish("run", 0, adapter(0), 1.0)
    recorder, database = Recorder(sampler), open_database(tmp_path / "noria.db")
    buffer, pool = SqliteBuffer(database, clock), ActorPool(recorder, tokenizer, clock, NoSpans())
    rules = EpisodeRules(
        tenant="t",
        run_id="run",
        environment=Tool(),
        seed=0,
        max_tokens=9,
        temperature=1.0,
        stop_ids=(tokenizer.eos_id,),
        max_turns=TURNS,
        deadlines=DeadlinesConfig(),
    )

    async def play():
        await buffer.register_run("run", num_tasks=10, seed=0, num_places=2)
        for _ in range(2):
            lease = await buffer.admit("run", version=0, deadline_s=clock.wall() + 600)
            outcome = await pool.play_group(rules, lease, group_size=4, episode_tries=1)
            assert await buffer.put(outcome.group)
        await pool.close()
        return await buffer.lease("run", [item.group_id for item in await buffer.outstanding("run")])

    async def everything():
        return (await drive(sampler, play()))[0]

    groups = asyncio.run(everything())
    with database.connect() as connection:
        stored = [decode_group(row.payload) for row in connection.execute(select(GROUPS.c.payload).order_by(GROUPS.c.admission))]
    buffer.close()
    database.dispose()

    at_sampler = {episode_id: digest(ids) for episode_id, ids in recorder.ids.items()}
    assert len(at_sampler) == 8
    assert {e.episode_id: digest(e.ids) for g in stored for e in g.episodes} == at_sampler
    pieces = cut(build_tree(groups, ALGORITHM)[0], shapes_up_to(256)[-1])
    assert len(pieces) > 1, "an episode's ids must survive the cut too"
    assert sorted(digest(ids) for m in microbatches(pieces, shapes_up_to(256)) for ids in trained_ids(m)) == sorted(at_sampler.values())
    retold = [tokenizer.encode(tokenizer.decode(ids)) != ids for ids in recorder.sampled]
    assert any(retold), "the case must hold ids that no text gives back"
