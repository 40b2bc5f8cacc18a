"""Write docs/run-file.md, docs/errors.md and docs/cli.md from the code; a test compares them with it.

usage: python scripts/make_reference.py
"""

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from noria import errors
from noria.cli import app
from noria.cli.frame import EXIT_CODES
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


CLI_HEAD = f"""# Commands

Every command with its arguments and options; `noria COMMAND --help` says the same. `python scripts/make_reference.py` writes this page.

{EXIT_CODES}
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


def cli_page() -> str:
    """The reference of the command line."""
    return CLI_HEAD + "".join(_command(name, command) for name, command in _commands("noria", typer.main.get_command(app)))


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Every command below a group, in the order of its help. command: of click, or of typer's own copy of it."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for child, below in command.commands.items():
        yield from _commands(f"{name} {child}", below)


def _command(name: str, command: Any) -> str:
    rows = [f"| {_spelling(param)} | {_meaning(param)} |" for param in command.params if param.name != "help"]
    table = "\n| argument, option | meaning |\n|---|---|\n" + "\n".join(rows) + "\n" if rows else ""
    examples = (command.epilog or "").removesuffix(EXIT_CODES).split("\n\n")[1:]
    block = "\n```bash\n" + "".join(f"{example}\n" for example in examples if example) + "```\n"
    paragraphs = "\n\n".join(" ".join(paragraph.split()) for paragraph in (command.help or "None |").split("\n\n"))
    return f"\n## `{name}`\n\n{paragraphs}\n{table}{block}"


def _spelling(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{param.metavar or param.name.upper()}`"
    names = "/".join((*param.opts, *param.secondary_opts))
    return f"`{names}`" if param.is_flag else f"`{names} {param.metavar}`".replace("|", "\\|")


def _meaning(param: Any) -> str:
    if param.required:
        note = " Required."
    elif isinstance(param.show_default, str):
        note = f" Default: {param.show_default}."
    elif param.default in (None, False, ()) or getattr(param, "is_flag", False):
        note = ""
    else:
        note = f" Default: {getattr(param.default, 'value', param.default)}."
    return _one_line(getattr(param, "help", None)) + note


def _tables(model: type[BaseModel], title: str, section: str) -> str:
    level = "##" if not section else "###"
    heading = title if not section else f"`[{section}]`"
    rows, below = [], []
    for name, field in model.model_fields.items():
        inner = _section(field)
        if inner is not None:
            below.append(_tables(inner, title, f"{section}.{name}".lstrip(".")))
        else:
            rows.append(f"| `{name}` | {_default(field)} | {field.description} |")
    intro = "" if not section else f"\n{_one_line(model.__doc__)}\n"
    table = f"\n{level} {heading}\n{intro}\n| field | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    return table + "".join(below)


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a section of its own, optional or not."""
    kinds = get_args(field.annotation) if isinstance(field.annotation, types.UnionType) else (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


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
    (DOCS / "cli.md").write_text(cli_page(), encoding="utf-8")
