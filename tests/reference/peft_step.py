"""A GRPO update by torch and PEFT, as its users would make it fast: run by the reference interpreter, which keeps its models and answers requests.

usage: python peft_step.py FOLDER

    FOLDER/model              Hugging Face folder
    FOLDER/adapters/NAME      PEFT folders, one per tenant
    FOLDER/batch.npz          ids [G, P + R], behavior_logprobs [G, R], advantages [G]

One request a line on standard input, one JSON object a line on standard output:

    DTYPE NAME [NAME ...]     one update of each of these adapters, one after another -> {"seconds", "grad_norms"}

Efficient, not a straw man: rows of equal length need no padding and so no mask (the fused causal attention of SDPA), all rows are one batch, the
hidden states are cut to the answers before the head, no checkpointing, AdamW over the adapter alone. In bfloat16 the adapters are bfloat16 too:
faster, and coarser than anyone should train.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

TIS_CAP = 2.0


class Side:
    """One dtype's model with every tenant's adapter, and their optimizers."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        names = sorted(path.name for path in (folder / "adapters").iterdir())
        base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype, attn_implementation="sdpa")
        base.config.use_cache = False
        for name in names:
            path = folder / "adapters" / name
            if name == names[0]:
                options = {"is_trainable": True, "autocast_adapter_dtype": dtype == torch.float32}
                self.model = PeftModel.from_pretrained(base, path, adapter_name=name, **options)
            else:
                self.model.load_adapter(path, adapter_name=name, is_trainable=True, autocast_adapter_dtype=dtype == torch.float32)
        self.model.eval()  # no dropout anywhere; gradients are taken all the same
        self.optimizers = {}
        for name in names:
            self.model.set_adapter(name)
            self.optimizers[name] = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4, betas=(0.9, 0.95))
        batch = np.load(folder / "batch.npz")
        self.ids, self.behavior, self.advantages = (torch.from_numpy(batch[key]) for key in ("ids", "behavior_logprobs", "advantages"))

    def update(self, name: str) -> float:
        """One update of one adapter; the norm of its gradient."""
        self.model.set_adapter(name)
        causal = self.model.base_model.model
        num_answer = self.behavior.shape[1]
        hidden = causal.model(input_ids=self.ids[:, :-1], use_cache=False).last_hidden_state[:, -num_answer:]
        log_p = torch.log_softmax(causal.lm_head(hidden).float(), -1)
        learner = log_p.gather(-1, self.ids[:, -num_answer:, None])[..., 0]
        weight = torch.exp(learner.detach() - self.behavior).clamp(max=TIS_CAP)
        loss = -(weight * self.advantages[:, None] * learner).sum() / learner.numel()
        loss.backward()
        optimizer = self.optimizers[name]
        norm = torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(norm)


def answer(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main(folder: Path) -> None:
    sides: dict[str, Side] = {}
    answer({"torch": torch.__version__, "threads": torch.get_num_threads()})
    for line in sys.stdin:
        dtype, *names = line.split()
        if dtype not in sides:
            sides[dtype] = Side(folder, getattr(torch, dtype))
        start = time.perf_counter()
        norms = [sides[dtype].update(name) for name in names]
        answer({"seconds": time.perf_counter() - start, "grad_norms": norms})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
