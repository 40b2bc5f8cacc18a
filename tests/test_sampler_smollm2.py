"""The sampler on the real base: its log-probabilities are the model's, and what it says makes sense."""

import jax
import numpy as np
import pytest
from sampler_builders import NoSpans, config, request, run

from noria.model.placement import place
from noria.model.transformer import forward_logits
from noria.model.weights import load_base
from noria.sampler.engine import SamplerEngine
from noria.sampler.runner import Shapes


@pytest.mark.slow
def test_smollm2_answers_and_its_logprobs_are_those_of_a_full_forward_pass():
    base = load_base("smollm2-135m")
    placed = place(base.params)
    tokenizer = base.tokenizer
    shapes = Shapes(lanes=(16,), rows=(4,))
    sampler = SamplerEngine(placed, base.config, config(), rank_classes=(8,), eos_id=tokenizer.eos_id, spans=NoSpans(), shapes=shapes)
    question = tokenizer.encode("The capital of France is")
    greedy, *others = run(
        sampler,
        request(question, temperature=0.0, max_tokens=8),
        *(request(question, temperature=0.8, max_tokens=24, sample_index=n) for n in range(8)),
    )
    assert "Paris" in tokenizer.decode(greedy.sampled_ids)
    for completion, temperature in ((greedy, 1.0), (others[0], 0.8), (others[5], 0.8)):
        logits_TV = forward_logits(placed.stacked, base.config, np.asarray(question + completion.sampled_ids, np.int32))
        logprobs_TV = np.asarray(jax.nn.log_softmax(logits_TV / temperature))
        rows = range(len(question) - 1, len(question) - 1 + len(completion.sampled_ids))
        np.testing.assert_allclose(completion.behavior_logprobs, logprobs_TV[rows, completion.sampled_ids], atol=1e-4)
