"""What a sample request may ask for: refused at the edge, with the value seen and what to do about it."""

import math

from noria.errors import InvalidRequestError, PromptTooLongError
from noria.types import MAX_STOP_CHARS, MAX_STOP_TEXTS, MAX_TEMPERATURE, MAX_TOP, MIN_TEMPERATURE, Ids, SampleRequest

MAX_SEED = 2**63
"""Seeds are below this: a key is made of two 32-bit words."""


def check_request(request: SampleRequest, *, vocab_size: int, max_context: int) -> None:
    """Whatever can be said without a tokenizer, which is then not given stop texts without limit (`stops.stops_of`).

    Raises InvalidRequestError; PromptTooLongError for more positions than max_context.
    """
    prompt, params = request.prompt_ids, request.params
    problems = {
        "the prompt is empty; give at least one id": not prompt,
        f"prompt ids must be in [0, {vocab_size}), got {min(prompt, default=0)} .. {max(prompt, default=0)}": not _are_ids(prompt, vocab_size),
        f"stop ids must be in [0, {vocab_size}), got {params.stop_ids}": not _are_ids(params.stop_ids, vocab_size),
        f"at most {MAX_STOP_TEXTS} stop texts, got {len(params.stop)}": len(params.stop) > MAX_STOP_TEXTS,
        "an empty stop text is in every text; leave it out": "" in params.stop,
        f"a stop text has at most {MAX_STOP_CHARS} characters, got {max(map(len, params.stop), default=0)}": any(
            len(text) > MAX_STOP_CHARS for text in params.stop
        ),
        f"max_tokens must be at least 1, got {params.max_tokens}": params.max_tokens < 1,
        f"temperature must be 0 or in [{MIN_TEMPERATURE:g}, {MAX_TEMPERATURE:g}], got {params.temperature}": (
            params.temperature != 0 and not MIN_TEMPERATURE <= params.temperature <= MAX_TEMPERATURE
        ),
        f"top_k must be in [0, 2^31) (0 for all), got {params.top_k}": not 0 <= params.top_k < 2**31,
        f"top_p must be in (0, 1], got {params.top_p}": not 0 < params.top_p <= 1,
        f"num_top must be in [0, {MAX_TOP}], got {request.num_top}": not 0 <= request.num_top <= MAX_TOP,
        f"timeout_s must be above 0 and finite, got {request.timeout_s}": not 0 < request.timeout_s < math.inf,
        f"seed must be in [0, 2^63), got {params.seed}": not 0 <= params.seed < MAX_SEED,
        f"sample_index must be in [0, 2^31), got {params.sample_index}": not 0 <= params.sample_index < 2**31,
    }
    for problem, is_so in problems.items():
        if is_so:
            raise InvalidRequestError(f"request {request.request_id!r}: {problem}")
    if len(prompt) + params.max_tokens > max_context:
        raise PromptTooLongError(
            f"request {request.request_id!r}: a prompt of {len(prompt)} ids and max_tokens = {params.max_tokens} exceed max_context = "
            f"{max_context}; shorten the prompt, lower max_tokens, or raise max_context"
        )


def _are_ids(ids: Ids, vocab_size: int) -> bool:
    return not ids or (min(ids) >= 0 and max(ids) < vocab_size)
