"""Sampling by vLLM's CPU build, as its users would make it fast: run by an interpreter of its own, which keeps its engine and takes its turn.

usage: python sampler_vllm.py FOLDER MODE DTYPE

    FOLDER/model          Hugging Face folder
    FOLDER/adapters/NAME  PEFT folders, named by their numbers from 0 on; read in mode `adapters` alone
    FOLDER/sizes.json     {"lanes", "context", "rank"}: most sequences at once, positions of the longest, rank of the adapters
    MODE                  compiled, eager, or adapters (with which vLLM's CPU build turns compilation off by itself)
    DTYPE                 float32 or bfloat16: of weights, adapters and cache

One JSON object a line on standard input, one on standard output; the first object, unasked, says what this is.

    {"prompts": [[id, ...], ...], "members": samples of each prompt, "answer": new tokens of each sample}
    -> {"seconds", "ids": [[id, ...], ...] of every sample, a prompt's samples one after another}

In mode `adapters` prompt i is sampled under adapter i modulo their number. Every sample has `answer` tokens, whatever they are.

Efficient, not a straw man: greedy (no softmax, no sort), no log-probabilities, no text, no statistics; Intel's OpenMP with a thread per core. The
engine runs in this process, since vLLM would take one core from the threads that compute for a process of its own.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

CACHE_BYTES = 512 * 2**20
"""K/V of every lane at full length, more than twice over."""


def prepare() -> None:
    """Set what is read when libraries load, and start again if Intel's OpenMP is not loaded first, as vLLM's guide for CPUs asks."""
    cores, cache = len(os.sched_getaffinity(0)), Path(sys.prefix) / "cache"
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(cores),
        "KMP_BLOCKTIME": "5",  # milliseconds, and no pause instructions: what vLLM sets for its own workers
        "KMP_TPAUSE": "0",
    }
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    preloaded = os.environ.get("LD_PRELOAD", "")
    os.environ.update(settings)
    if library.exists() and str(library) not in preloaded:
        os.environ["LD_PRELOAD"] = f"{library}:{preloaded}".rstrip(":")
        os.execv(sys.executable, [sys.executable, *sys.argv])


class Side:
    """One engine, and the adapters that its prompts are sampled under, if any."""

    def __init__(self, folder: Path, mode: str, dtype: str) -> None:
        from vllm import LLM, SamplingParams  # noqa: PLC0415 - reads what `prepare` sets
        from vllm.lora.request import LoRARequest  # noqa: PLC0415

        sizes = json.loads((folder / "sizes.json").read_text())
        self.params = SamplingParams
        self.adapters: list[Any] = []
        options: dict[str, Any] = {}
        if mode == "adapters":
            names = sorted((path.name for path in (folder / "adapters").iterdir()), key=int)
            self.adapters = [LoRARequest(name, int(name) + 1, str(folder / "adapters" / name)) for name in names]
            options = {"enable_lora": True, "max_loras": len(names), "max_cpu_loras": len(names), "max_lora_rank": sizes["rank"]}
        self.engine = LLM(
            str(folder / "model"),
            dtype=dtype,
            enforce_eager=mode == "eager",
            skip_tokenizer_init=True,
            max_model_len=sizes["context"],
            max_num_seqs=sizes["lanes"],
            kv_cache_memory_bytes=CACHE_BYTES,
            disable_log_stats=True,
            seed=0,
            **options,
        )

    def round(self, request: dict[str, Any]) -> dict[str, Any]:
        """All samples of one request, and the seconds that they took."""
        answer, prompts = request["answer"], [{"prompt_token_ids": ids} for ids in request["prompts"]]
        params = self.params(n=request["members"], temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
        under = [self.adapters[index % len(self.adapters)] for index in range(len(prompts))] if self.adapters else None
        start = time.perf_counter()
        outputs = self.engine.generate(prompts, params, lora_request=under, use_tqdm=False)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "ids": [list(sample.token_ids) for output in outputs for sample in output.outputs]}


def main(folder: Path, mode: str, dtype: str, answers: TextIO) -> None:
    import torch  # noqa: PLC0415 - reads what `prepare` sets
    import vllm  # noqa: PLC0415

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    side = Side(folder, mode, dtype)
    answer({"vllm": vllm.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()})
    for line in sys.stdin:
        answer(side.round(json.loads(line)))


if __name__ == "__main__":
    prepare()
    with os.fdopen(os.dup(1), "w") as protocol:
        os.dup2(2, 1)  # what libraries print is no answer
        main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], protocol)
