"""What transformers makes of configuration files: run by the reference interpreter.

usage: python config_meanings.py FOLDER

Reads FOLDER/NAME/config.json; writes beside it meaning.json: the numbers that shape the model, or null if transformers refuses the file.
"""

import json
import sys
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig


def main(folder: Path) -> None:
    for path in sorted(folder.glob("*/config.json")):
        try:
            meaning = meaning_of(AutoConfig.from_pretrained(path.parent))
        except (StrictDataclassError, TypeError, ValueError):
            meaning = None
        (path.parent / "meaning.json").write_text(json.dumps(meaning))


def meaning_of(config: PretrainedConfig) -> dict[str, object]:
    """As the models of these families read their configuration."""
    window = getattr(config, "sliding_window", None)
    return {
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "o_bias": getattr(config, "attention_bias", None) or False,
        "tie": config.tie_word_embeddings,
        "rope_type": config.rope_parameters["rope_type"],
        "rope_theta": config.rope_parameters["rope_theta"],
        "has_window": window is not None and window < config.max_position_embeddings,
        "act": config.hidden_act,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
