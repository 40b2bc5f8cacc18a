"""Sampling by torch and transformers, as its users would make it fast: run by the reference interpreter, which keeps its models and answers requests.

usage: python sampler_transformers.py FOLDER

    FOLDER/model             Hugging Face folder
    FOLDER/NAME.npz          ids [prompts, P]: a round of a workload, written before it is asked for

One request a line on standard input, one JSON object a line on standard output:

    DTYPE WAY MEMBERS ANSWER NAME             `members` samples of each prompt of NAME, exactly ANSWER new tokens each -> {"seconds", "ids"}

Efficient, not a straw man: greedy (no softmax, no sort), no log-probabilities, all samples as one batch, prompts of equal length, so no padding;
SDPA; one thread per core. The ways:

    dynamic    generate on every sample's own row
    static     the same with preallocated keys and values
    shared     the prompts run once, their cache repeated for their samples, generate from there: no option of generate, but what its parts can do
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM


class Side:
    """One dtype's model."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype, attn_implementation="sdpa").eval()
        self.model.generation_config.eos_token_id = None  # nothing ends early
        self.model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def sample(self, way: str, ids: torch.Tensor, members: int, answer: int) -> torch.Tensor:
        """New ids [prompts * members, answer], the samples of one prompt next to each other."""
        rows = ids.repeat_interleave(members, 0)
        options: dict[str, Any] = {"max_new_tokens": answer, "min_new_tokens": answer, "do_sample": False}
        if way == "static":
            options["cache_implementation"] = "static"
        if way == "shared":
            cache = self.model(ids[:, :-1], use_cache=True, logits_to_keep=1).cache
            cache.batch_repeat_interleave(members)
            options["cache"] = cache
        return self.model.generate(rows, attention_mask=torch.ones_like(rows), **options)[:, ids.shape[1] :]


def answer(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main(folder: Path) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    sides: dict[str, Side] = {}
    answer({"torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads()})
    for line in sys.stdin:
        dtype, way, members, new, name = line.split()
        if dtype not in sides:
            sides[dtype] = Side(folder, getattr(torch, dtype))
        ids = torch.from_numpy(np.load(folder / f"{name}.npz")["ids"])
        start = time.perf_counter()
        sampled = sides[dtype].sample(way, ids, int(members), int(new))
        seconds = time.perf_counter() - start
        assert sampled.shape == (len(ids) * int(members), int(new))
        answer({"seconds": seconds, "ids": sampled.tolist()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
