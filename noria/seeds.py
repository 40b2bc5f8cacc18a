"""Seeds from names: every random choice that must be repeatable is keyed by what it is for, never by a shared generator's state."""

import hashlib
import json


def derive_seed(*parts: int | str, bits: int = 63) -> int:
    """A stable, well mixed integer in [0, 2**bits) of the given parts: equal on every machine, in every process, in every version of Python.

    parts: integers and texts; their order and their borders matter. bits: 1 to 64. Source: BLAKE2b, RFC 7693.
    """
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - bits)
