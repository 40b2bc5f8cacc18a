"""A committed version out of a state folder, in a format that others read. Its checksums are verified on the way."""

from pathlib import Path
from typing import Literal, TypeAlias, get_args

import numpy as np

from noria.errors import ConfigError, UnknownVersionError
from noria.model.export import write_merged, write_peft
from noria.model.hf_writer import Dtype
from noria.model.weights import load_base, public_name
from noria.service.archive import open_archive
from noria.service.first_version import own_modules
from noria.service.folder import ADAPTERS

Kind: TypeAlias = Literal["peft", "merged"]


def export_version(state_dir: Path, name: str, *, version: str, kind: Kind, out: Path, dtype: Dtype = "float32") -> int:
    """Write a version of a run into the new folder `out`; the version's number. version: a number, "best" or "newest".

    kind: "peft", an adapter folder that names the base as others find it, with the modules of `first_version.own_modules`; "merged", the base with
    the adapter in its weights. dtype: of the merged weights; an adapter is always float32.

    Raises ConfigError (an unknown kind or dtype, an adapter in bfloat16), StateConflictError (no such run, or `out` holds something),
    UnknownVersionError (no such version, or not kept on disk), AdapterFileCorruptError, AdapterFormatError, StorageError, and what loading the base
    raises.
    """
    for what, given, known in (("kind", kind, get_args(Kind)), ("dtype", dtype, get_args(Dtype))):
        if given not in known:
            raise ConfigError(f"{what} must be {' or '.join(map(repr, known))} (got {given!r:.80})")
    if kind == "peft" and dtype != "float32":
        raise ConfigError(f"an adapter is always written in float32 (got dtype {dtype}): leave dtype out, or export the merged model")
    with open_archive(state_dir) as archive:
        config = archive.run(name).config
        record = archive.version(name, version).record
        try:
            state = archive.files.load(record, config.adapter.rank)
        except UnknownVersionError as error:
            raise UnknownVersionError(
                f"{error}: a server keeps its keep_versions newest, and the best one where evaluation.keep_best is set; raise keep_versions"
            ) from error
    base = load_base(config.base)
    if kind == "peft":
        modules = own_modules(config, base.config, state.params)
        own = {side: {m: leaf if m in modules else np.zeros_like(leaf) for m, leaf in leaves.items()} for side, leaves in state.params.items()}
        write_peft(out, own, config.adapter.lora, base.config, base_name=public_name(config.base), modules=modules)
    else:
        write_merged(out, base, state.params, config.adapter.lora, dtype=dtype)
    return record.version


def version_folder(state_dir: Path, name: str, version: int) -> Path:
    """Where the files of a version lie, while they are kept."""
    return state_dir / ADAPTERS / name / str(version)
