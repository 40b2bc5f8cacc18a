"""Write docs/run-file.md and docs/errors.md from the code; a test compares them with it.

usage: python scripts/make_reference.py
"""

from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from noria import errors
from noria.config import RunConfig, ServerConfig

DOCS = Path(__file__).parents[1] / "docs"

RUN_FILE_HEAD = """# Run and server files

Every field, its default and its meaning. Unknown keys are errors that name the nearest key. `python scripts/make_reference.py` writes this page.
"""

ERRORS_HEAD = """# Errors

Every failure that noria raises on purpose is a class of `noria/errors.py` with a stable code; the command line prints `error[code]: message`.
`python scripts/make_reference.py` writes this page.

| code | class | when |
|---|---|---|
"""


def run_file_page() -> str:
    """The reference of run and server files."""
    run = _tables(RunConfig, "A run file (`noria train RUN.toml`)", "")
    server = _tables(ServerConfig, "A server file (`--server-config SERVER.toml`)", "")
    return RUN_FILE_HEAD + run + server


def errors_page() -> str:
    """The reference of error codes."""
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.NoriaError)]
    rows = [f"| `{c.code}` | `{c.__name__}` | {_one_line(c.__doc__)} |" for c in sorted(classes, key=lambda c: c.code)]
    return ERRORS_HEAD + "\n".join(rows) + "\n"


def _tables(model: type[BaseModel], title: str, section: str) -> str:
    level = "##" if not section else "###"
    heading = title if not section else f"`[{section}]`"
    rows, below = [], []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            below.append(_tables(field.annotation, title, f"{section}.{name}".lstrip(".")))
        else:
            rows.append(f"| `{name}` | {_default(field)} | {field.description} |")
    intro = "" if not section else f"\n{_one_line(model.__doc__)}\n"
    table = f"\n{level} {heading}\n{intro}\n| field | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    return table + "".join(below)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return f"`{value!r}`" if not isinstance(value, bool) else f"`{str(value).lower()}`"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    (DOCS / "run-file.md").write_text(run_file_page(), encoding="utf-8")
    (DOCS / "errors.md").write_text(errors_page(), encoding="utf-8")
