"""Versions that change while requests decode: each token by the version it names, over keys and values as their own versions left them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampler_builders import adapter, config, engine, merged, prompt, request, run, tiny

from noria.errors import RequestCancelledError, StateConflictError, UnknownVersionError
from noria.model.placement import place
from noria.model.transformer import block, embed, rotary_angles, unembed

CONTEXT = config().max_context
SCALE = 0.5


@partial(jax.jit, static_argnames=("model",))
def one_position(params, layers, cache, token, position, *, model):
    """Feed one id by one version's weights: writes its K/V into the cache (per layer [S, K, H] each) and returns logits [V]."""
    x_RCD = embed(params, token)[None, None]
    angles = rotary_angles(model, position[None, None])
    written = []
    for weights, (k_SKH, v_SKH) in zip(layers, cache, strict=True):

        def attention(q, k, v, k_SKH=k_SKH, v_SKH=v_SKH):
            k_SKH, v_SKH = k_SKH.at[position].set(k[0, 0]), v_SKH.at[position].set(v[0, 0])
            written.append((k_SKH, v_SKH))
            repeat = q.shape[2] // k.shape[2]
            scores_NS = jnp.einsum("nh,snh->ns", q[0, 0], jnp.repeat(k_SKH, repeat, 1)) * q.shape[-1] ** -0.5
            weights_NS = jax.nn.softmax(jnp.where(jnp.arange(CONTEXT) <= position, scores_NS, -jnp.inf), -1)
            return jnp.einsum("ns,snh->nh", weights_NS, jnp.repeat(v_SKH, repeat, 1))[None, None]

        x_RCD = block(weights, None, x_RCD, angles=angles, attention=attention, config=model)
    return unembed(params, x_RCD[0], model)[0], written


def mixed_logprobs(weights_of, prompt_ids, completion, versions):
    """Log-probabilities of a completion fed position by position, each by `versions[position]`: a reference that mixes K/V alike."""
    model = tiny()[0]
    cache = [(jnp.zeros((CONTEXT, model.num_kv_heads, model.head_dim)),) * 2 for _ in range(model.num_layers)]
    ids, found = prompt_ids + completion.sampled_ids, []
    for position, version in enumerate(versions):
        base = weights_of(version)
        logits, cache = one_position(base.stacked, base.layers, cache, jnp.int32(ids[position]), jnp.int32(position), model=model)
        found.append(float(jax.nn.log_softmax(logits)[ids[position + 1]]))
    return found[len(prompt_ids) - 1 :]


def test_a_hundred_version_swaps_during_sampling_mix_nothing_but_what_each_token_names():
    """Case 47: a publish between any two dispatches; no half-written weights, no position by another version than its own."""
    sampler = engine(steps_per_dispatch=2)
    placed, published = {}, []

    def weights_of(version):
        if version not in placed:
            placed[version] = place(merged(tiny()[1], adapter(version), SCALE))
        return placed[version]

    def publish(_step):
        sampler.publish("a", len(published), adapter(len(published)), SCALE)
        published.append(len(published))

    publish(0)
    asked = [request(prompt(length, seed=length), run="a", max_tokens=200, seed=length) for length in (3, 20, 41)]
    completions = run(sampler, *asked, between=lambda step: publish(step) if step else None)
    used = {version for completion in completions for version in completion.versions}
    assert len(published) > 100
    assert len(used) >= 100
    for one, completion in zip(asked, completions, strict=True):
        first = len(one.prompt_ids) - 1
        fed_by = (0,) * first + completion.versions
        reference = mixed_logprobs(weights_of, one.prompt_ids, completion, fed_by)
        np.testing.assert_allclose(completion.behavior_logprobs, reference, atol=1e-4)
        late = (0,) * first + (0, *completion.versions[:-1])
        one_late = mixed_logprobs(weights_of, one.prompt_ids, completion, late)
        assert np.abs(np.array(one_late) - reference).max() > 0.1, "the reference tells versions apart"


def test_a_retired_runs_pages_are_gone_and_a_later_run_of_its_name_starts_cold():
    """The same name, version and ids as before, with other weights: what an empty cache gives, and not what the old run left."""
    sampler, asked = engine(), partial(request, prompt(70), run="a", episode="e", max_tokens=12, seed=3)
    for weights in (adapter(0), adapter(1)):
        sampler.publish("a", 0, weights, 1.0)
        sampler.publish("b", 0, weights, 1.0)
        before = sampler.counts.num_prefilled
        (warm,) = run(sampler, asked())
        assert sampler.counts.num_prefilled - before == 69
        fresh = engine()
        fresh.publish("a", 0, weights, 1.0)
        assert [warm] == run(fresh, asked())
        sampler.retire("a")
        (kept,) = run(sampler, request(prompt(70), run="b", max_tokens=12, seed=3))
        assert kept.sampled_ids == warm.sampled_ids
        sampler.retire("b")
    assert sampler.num_held_pages == 0


def test_retiring_a_run_in_the_middle_of_its_prefill_and_decoding_leaves_other_runs_pages():
    sampler = engine()
    for name in "ab":
        sampler.publish(name, 0, adapter(0), 1.0)
    (first,) = run(sampler, request(prompt(100), run="b", max_tokens=6, seed=1))

    def retire(step):
        if step == 3:
            sampler.retire("a")

    asked = [request(prompt(length, seed=length), run="a", episode=f"e{length}", max_tokens=30) for length in (5, 200, 220)]
    for one in asked:
        with pytest.raises(RequestCancelledError):
            run(sampler, one, between=retire)
        sampler.publish("a", 0, adapter(1), 1.0)
    before = sampler.counts.num_prefilled
    (again,) = run(sampler, request(prompt(100), run="b", max_tokens=6, seed=1))
    assert (again, sampler.counts.num_prefilled) == (first, before)
    assert sampler.num_held_pages == 0


def test_a_retired_run_takes_no_request_and_its_name_is_free_when_its_last_pin_is_gone():
    sampler = engine()
    sampler.publish("a", 0, adapter(0), 1.0)
    sampler.pin("a", 0)
    sampler.retire("a")
    with pytest.raises(UnknownVersionError, match="no published version"):
        run(sampler, request(run="a", version=0))
    with pytest.raises(UnknownVersionError):
        sampler.pin("a", 0)
    with pytest.raises(StateConflictError, match=r"pinned versions \[0\]"):
        sampler.publish("a", 0, adapter(1), 1.0)
    sampler.unpin("a", 0)
    assert sampler.num_free_slots == 7
    sampler.publish("a", 0, adapter(1), 1.0)
    assert len(run(sampler, request(run="a", version=0))[0].sampled_ids) == 8
