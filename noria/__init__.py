"""noria: reinforcement learning post-training of language models, for many users at once on shared accelerators."""
