"""Reproducible measurements, one file each: what a stage does, over what the machine can do, in one run."""
