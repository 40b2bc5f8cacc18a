"""A committed version out of a state folder, in a format that others read. Its checksums are verified on the way."""

from pathlib import Path
from typing import Literal, TypeAlias

from noria.errors import UnknownVersionError
from noria.model.export import write_merged, write_peft
from noria.model.weights import load_base
from noria.service.archive import open_archive
from noria.service.folder import ADAPTERS

Kind: TypeAlias = Literal["peft", "merged"]


def export_version(state_dir: Path, name: str, *, version: str, kind: Kind, out: Path) -> int:
    """Write a version of a run into the new folder `out`; the version's number. version: a number, "best" or "newest".

    kind: "peft", an adapter folder; "merged", the base with the adapter in its weights, in float32.
    Raises StateConflictError (no such run, or `out` holds something), UnknownVersionError (no such version, or not kept on disk),
    AdapterFileCorruptError, AdapterFormatError, and what loading the base raises.
    """
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
        base_name = str(base.folder) if base.folder else config.base
        write_peft(out, state.params, config.adapter.lora, base.config, base_name=base_name)
    else:
        write_merged(out, base, state.params, config.adapter.lora)
    return record.version


def version_folder(state_dir: Path, name: str, version: int) -> Path:
    """Where the files of a version lie, while they are kept."""
    return state_dir / ADAPTERS / name / str(version)
