"""From a run file's words to an environment: the one place where code is named by a string.

    name = "addition"               a built-in
    name = "my_env.py:Countdown"    a class in a file, found beside the run file; the file may import what is installed, not its neighbours

What a class has to offer is `protocols.Environment`, and `num_tasks`; which keys its settings may have is its constructor's signature. If it
says `num_held_out`, the indices from `num_tasks` on are its held-out tasks; if not, the last eighth of its tasks is held out of training here.
"""

import difflib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, final

from noria.actors.threads import failure_of
from noria.config import EnvironmentConfig
from noria.errors import ConfigError, EnvironmentFailedError
from noria.protocols import Environment
from noria.seeds import derive_seed

HELD_OUT_SHARE = 8
"""One task in this many is held out where the environment does not say: enough to evaluate on, little to train without."""


@final
class LoadedEnvironment:
    """Satisfies `protocols.EnvironmentFactory`. num_held_out: tasks from index num_tasks on, which are never leased for training."""

    def __init__(self, make: Callable[..., Environment], settings: Mapping[str, Any], num_tasks: int, num_held_out: int) -> None:
        self._make = make
        self._settings = dict(settings)
        self.num_tasks = num_tasks
        self.num_held_out = num_held_out

    def __call__(self) -> Environment:
        """A fresh environment for one episode."""
        return self._make(**self._settings)


def load_environment(config: EnvironmentConfig, *, builtin: Mapping[str, Callable[..., Environment]], folder: Path) -> LoadedEnvironment:
    """The environment that `config` names, built once to see that it works.

    Runs tenant code in the calling thread, which may never come back: a server calls it by `ActorPool.load`.

    builtin: by name. folder: where relative files are looked for, usually the run file's. Raises EnvironmentFailedError (not found, cannot be
    imported, or does not build), ConfigError (settings that its constructor does not take, with the right keys).
    """
    file, separator, name = config.name.rpartition(":")
    make = _class_in_file(folder / file, name) if separator else _builtin(config.name, builtin)
    return environment_factory(make, config.settings, name=config.name)


def environment_factory(make: Callable[..., Environment], settings: Mapping[str, Any], *, name: str) -> LoadedEnvironment:
    """The factory of a class (or function) that makes environments. name: for errors. Raises as `load_environment`."""
    _check_settings(make, settings, name)
    try:
        return _built(make, settings, name)
    except (ConfigError, EnvironmentFailedError):
        raise
    except BaseException as error:
        raise failure_of(f"environment {name!r}: building it", error) from error


def _built(make: Callable[..., Environment], settings: Mapping[str, Any], name: str) -> LoadedEnvironment:
    sample = make(**settings)
    missing = [method for method in ("reset", "step") if not callable(getattr(sample, method, None))]
    if missing:
        raise EnvironmentFailedError(f"environment {name!r} has no method {' and no method '.join(missing)}; see noria.protocols.Environment")
    num_tasks = _count(sample, "num_tasks", None, name)
    if num_tasks < 1:
        raise EnvironmentFailedError(f"environment {name!r} has num_tasks = {num_tasks}; it needs at least 1")
    withheld = num_tasks // HELD_OUT_SHARE
    if hasattr(sample, "num_held_out"):
        return LoadedEnvironment(make, settings, num_tasks, _count(sample, "num_held_out", 0, name))
    return LoadedEnvironment(make, settings, num_tasks - withheld, withheld)


def _builtin(name: str, builtin: Mapping[str, Callable[..., Environment]]) -> Callable[..., Environment]:
    if name in builtin:
        return builtin[name]
    raise EnvironmentFailedError(
        f'there is no built-in environment {name!r}; {_nearest(name, builtin)}. An environment of your own is named "file.py:Class"'
    )


def _class_in_file(path: Path, name: str) -> Callable[..., Environment]:
    try:
        is_there = path.is_file()
    except (OSError, ValueError):  # too long, or a NUL
        is_there = False
    if not is_there:
        raise EnvironmentFailedError(f"there is no file {path} to load the environment {name!r} from")
    module_name = f"noria_environment_{derive_seed(str(path.resolve())):x}_{threading.get_ident():x}"  # no other thread may be importing it
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise EnvironmentFailedError(f'{path} is not a Python file; an environment is named "file.py:Class"')
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(module_name, None)
        raise failure_of(f"environment file {path}: importing it", error) from error
    found = getattr(module, name, None)
    if not callable(found):
        classes = [key for key, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module_name]
        raise EnvironmentFailedError(f"{path} defines no class {name!r}; {_nearest(name, classes)}")
    return found  # type: ignore[no-any-return]


def _check_settings(make: Callable[..., Environment], settings: Mapping[str, Any], name: str) -> None:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError) as error:
        raise EnvironmentFailedError(f"environment {name!r} cannot be called: {error}") from error
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = [p.name for p in named]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key in settings:
        if key not in known and not takes_any:
            raise ConfigError(f"environment.settings: {name!r} has no setting {key!r}; {_nearest(key, known)}")
    missing = [p.name for p in named if p.default is p.empty and p.name not in settings]
    if missing:
        raise ConfigError(f"environment.settings: {name!r} needs {', '.join(missing)}")


def _count(sample: object, attribute: str, default: int | None, name: str) -> int:
    value = getattr(sample, attribute, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise EnvironmentFailedError(f"environment {name!r} has {attribute} = {value!r}; it must say how many tasks there are")
    return value


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names) or 'none'}"
