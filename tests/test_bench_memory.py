"""The meter of real bytes: what counts, and that a walk which kept its branches would be seen."""

import jax
import jax.numpy as jnp
import pytest

from noria.bench import executors
from noria.bench.bases import base_of
from noria.bench.memory import Meter
from noria.bench.replay import peaks
from noria.bench.trees import group
from noria.learner.replay import Programs
from noria.learner.step import loss_cotangents
from noria.rl.chunks import plan_replay

KIB = 1024


def floats(kib):
    return jax.block_until_ready(jnp.zeros(kib * KIB // 4) + 1.0)


def test_what_counts_is_what_was_named_and_what_came_after_it_once_each():
    own, other = floats(64), floats(1000)
    meter = Meter({"own": own})
    assert meter.alive_bytes() == 64 * KIB
    new = floats(32)
    assert meter.alive_bytes() == 96 * KIB
    double = meter.watched(jax.jit(lambda x: 2 * x))
    assert double(new).nbytes == 32 * KIB
    assert meter.peak_bytes == (64 + 32 + 32) * KIB
    del new
    assert meter.alive_bytes() == 64 * KIB
    del other  # the meter holds it, so that nothing new gets its memory
    assert meter.alive_bytes() == 64 * KIB


@pytest.fixture(scope="module")
def subject():
    return executors.make_subject(base_of("tiny"))


def tree_of(members):
    return group(257, prompt=300, answer=40, members=members)


def test_the_peak_of_a_real_walk_keeps_to_the_formula_whatever_the_number_of_branches(subject):
    (few, formula), (many, same) = (peaks(subject, tree_of(members), "replay", "exact", 128) for members in (2, 16))
    assert formula == same
    assert many == few
    assert 0.9 * formula < few < 1.25 * formula, "adapters, and the room behind a path, which are much of so small a walk"


def test_a_walk_that_kept_what_it_scored_would_be_seen_to_grow(subject):
    def peak(members):
        meter, kept = Meter(subject.model), []
        score, *others = map(meter.watched, Programs())

        def hoarding(*arguments):
            kept.append(score(*arguments))
            return kept[-1]

        executors._walk(subject, plan_replay(tree_of(members), 128), 128, Programs(hoarding, *others), loss_cotangents)
        return meter.peak_bytes

    assert peak(16) > 1.2 * peak(2)
