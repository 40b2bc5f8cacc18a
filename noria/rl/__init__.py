"""The algorithm, as pure functions: advantages, token tree, packing, staleness, losses."""
