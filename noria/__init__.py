"""noria: reinforcement learning post-training of language models, for many users at once on shared accelerators.

`noria.train(...)` and what it returns are found by `__getattr__`, so that importing noria loads nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from noria.notebook import TrainingResult as TrainingResult
    from noria.notebook import train as train

__all__ = ["TrainingResult", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'noria' has no attribute {name!r}")
    from noria import notebook

    return getattr(notebook, name)
