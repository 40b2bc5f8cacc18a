"""What the sampler answers, once more and naively: a full forward pass of merged weights per request, in float64 from the logits on, a sort for
top-k and top-p, and the draw by its definition. Nothing is cached, paged, shared or batched.

    T position   V vocabulary, as Y rows of Z columns
"""

import jax
import numpy as np
from sampler_builders import adapter, merged, tiny

from noria.model.lora import HEAD
from noria.model.transformer import forward_logits
from noria.sampler.runner import Shapes
from noria.types import Completion, SampleRequest, SamplingParams

TIE = 1e-4
"""What a change of the logits by so much could turn into another token, or another kept part, is a near tie."""

COLUMNS = 256

SIZES = {"shapes": Shapes(lanes=(16,), rows=(4,), tops=(HEAD,)), "rank_classes": (4, 16), "num_slots": 3, "num_pages": 64}
"""Of all tests of the whole sampler, so that its programs are compiled once: two slots, two classes of ranks, few pages."""

_forward = jax.jit(forward_logits, static_argnums=1)


@jax.jit
def _uniform_pair(seed_2, sample_index, position):
    key = jax.random.fold_in(jax.random.wrap_key_data(seed_2, impl="threefry2x32"), sample_index)
    return jax.random.uniform(jax.random.fold_in(key, position), (2,))


def weights_of(seed, scale=1.0, **shape):
    """The base with the adapter of a seed folded in."""
    return jax.tree.map(np.asarray, merged(tiny()[1], adapter(seed, **shape), scale))


def logits_of(weights, ids, context=256):
    """Logits [T, V] of all positions, float64. context: positions that are computed, the rest of them padding, so that one program serves all."""
    padded_T = np.zeros(context, np.int32)
    padded_T[: len(ids)] = ids
    return np.asarray(_forward(weights, tiny()[0], padded_T)[: len(ids)], np.float64)


def log_softmax(logits_TV):
    shifted_TV = logits_TV - logits_TV.max(-1, keepdims=True)
    return shifted_TV - np.log(np.exp(shifted_TV).sum(-1, keepdims=True))


def possible(logits_V, params: SamplingParams, position, slack=TIE):
    """The ids that the draw of the token at a position may come to, if the logits are off by up to `slack`: one, unless it is a near tie."""
    if not params.temperature:
        return set(np.flatnonzero(logits_V >= logits_V.max() - slack).tolist())
    scaled_V = logits_V / params.temperature
    columns, row = np.asarray(_uniform_pair(np.array(divmod(params.seed, 2**32), np.uint32), params.sample_index, position)).tolist()
    return set().union(*(_drawn(scaled_V, kept_V, columns, row, slack=slack) for kept_V in _kept(scaled_V, params, slack)))


def _kept(scaled_V, params, slack):
    """Masks [V] of what top-k, then top-p leave; of equals the smaller ids. Several if what is left is a near tie."""
    order = np.lexsort((np.arange(len(scaled_V)), -scaled_V))
    ranked = scaled_V[order]
    limit = min(params.top_k or len(order), len(order))
    weight = np.exp(ranked - ranked[0])
    found = {}
    for most in {_shifted(ranked, limit, -slack), limit, _shifted(ranked, limit, slack)}:
        cumulative = np.cumsum(weight[:most]) / weight[:most].sum()
        for p in (params.top_p - slack, params.top_p, params.top_p + slack):
            count = most if params.top_p == 1.0 else min(most, int(np.searchsorted(cumulative, p)) + 1)
            found[max(1, count)] = order[: max(1, count)]
    for ids in found.values():
        kept_V = np.zeros(len(order), bool)
        kept_V[ids] = True
        yield kept_V


def _shifted(ranked, limit, slack):
    """How many ids would be kept if all that lies within `slack` of the last one that is kept were kept too, or (below 0) went with it."""
    last = ranked[limit - 1]
    near = int((ranked > last + slack).sum()) if slack > 0 else int((ranked >= last + slack).sum())
    is_tie = limit < len(ranked) and 0 < last - ranked[limit] <= abs(slack)
    return max(1, near) if is_tie else limit


def _drawn(scaled_V, kept_V, columns, row, *, slack):
    """Ids whose column's, then whose row's share of the cumulative weight has the uniform number in it, give or take `slack` in the logits."""
    weight_V = np.where(kept_V, np.exp(scaled_V - scaled_V.max()), 0.0)
    weight_YZ = np.pad(weight_V, (0, -len(weight_V) % COLUMNS)).reshape(-1, COLUMNS)
    for z in _around(weight_YZ.sum(0), columns, slack):
        for y in _around(weight_YZ[:, z], row, slack):
            yield y * COLUMNS + z


def _around(weight_X, uniform, slack):
    """A border at the share F moves by 2 slack F (1 - F) at most: all weights below it up, all above it down, or the other way round."""
    end_X = np.cumsum(weight_X) / weight_X.sum()
    start_X = np.concatenate(([0.0], end_X[:-1]))
    first_X, last_X = (end + sign * 2 * slack * end * (1 - end) for end, sign in ((start_X, -1), (end_X, 1)))
    return np.flatnonzero((weight_X > 0) & (first_X <= uniform) & (uniform < last_X)).tolist()


def check(asked: SampleRequest, completion: Completion, weights, *, context=256):
    """A completion is the naive one: ids, log-probabilities, most likely ids, those of the prompt, and why it ended. How many draws were near ties.

    weights: of all its tokens; or, per sampled token, those of its version, all K/V before it being of that version too.
    """
    prompt, params = asked.prompt_ids, asked.params
    ids, first = prompt + completion.sampled_ids, len(prompt) - 1
    by_token = weights if isinstance(weights, list) else [weights] * len(completion.sampled_ids)
    kinds = {name: logits_of(each, ids, context) for name, each in {id(each): each for each in by_token}.items()}
    num_ties = 0
    for number, (token, each) in enumerate(zip(completion.sampled_ids, by_token, strict=True)):
        logits_V = kinds[id(each)][first + number]
        may_be = possible(logits_V, params, first + number + 1)
        assert token in may_be, f"token {number} is {token}, naively one of {may_be}"
        num_ties += len(may_be) > 1
        logprobs_V = log_softmax(logits_V / (params.temperature or 1.0))
        assert abs(completion.behavior_logprobs[number] - logprobs_V[token]) < TIE
        if asked.num_top:
            check_top(completion.top[number], logprobs_V, asked.num_top)
    assert len(completion.top) == (len(completion.sampled_ids) if asked.num_top else 0)
    check_end(asked, completion)
    check_prompt(asked, completion, kinds[id(by_token[0])][: len(prompt)])
    return num_ties


def check_end(asked, completion):
    """For requests whose only stop ids are their own and end of text, 2."""
    stops = {*asked.params.stop_ids, 2}
    assert not stops & set(completion.sampled_ids[:-1])
    if not asked.params.stop:
        is_stopped = completion.sampled_ids[-1] in stops
        assert completion.finish_reason == ("stop" if is_stopped else "length")
        assert is_stopped or len(completion.sampled_ids) == asked.params.max_tokens


def check_prompt(asked, completion, logits_TV):
    """Log-probabilities of the prompt's ids but the first, at temperature 1."""
    if not asked.wants_prompt:
        assert (completion.prompt_logprobs, completion.prompt_top) == ((), ())
        return
    logprobs_TV, targets = log_softmax(logits_TV[:-1]), list(asked.prompt_ids[1:])
    np.testing.assert_allclose(completion.prompt_logprobs, logprobs_TV[np.arange(len(targets)), targets], atol=TIE)
    assert len(completion.prompt_top) == (len(targets) if asked.num_top else 0)
    for top, logprobs_V in zip(completion.prompt_top, logprobs_TV, strict=False):
        check_top(top, logprobs_V, asked.num_top)


def check_top(top, logprobs_V, num_top):
    """The most likely ids are the largest, each with its own log-probability, most likely first."""
    found = [logprob for _, logprob in top]
    assert len({id_ for id_, _ in top}) == len(top) == num_top
    assert found == sorted(found, reverse=True)
    np.testing.assert_allclose(found, np.sort(logprobs_V)[::-1][:num_top], atol=TIE)
    np.testing.assert_allclose(found, logprobs_V[[id_ for id_, _ in top]], atol=TIE)
