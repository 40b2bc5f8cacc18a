"""Settings of an environment class: its public class attributes are its settings, their defaults and their types."""

from difflib import get_close_matches

from noria.errors import ConfigError


class Settings:
    """Base of environments with settings: a run file may give any public class attribute that is a value another one of the same type."""

    def __init__(self, **settings: object) -> None:
        """Raises ConfigError for a key that is no setting, or a value of another type than its default."""
        known = settings_of(type(self))
        for key, value in settings.items():
            if key not in known:
                close = get_close_matches(key, known, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
                raise ConfigError(f"environment.settings: {type(self).__name__} has no setting {key!r}; {hint}")
            setattr(self, key, _as_setting(key, value, known[key]))


def settings_of(kind: type[Settings]) -> dict[str, object]:
    """The public class attributes that are values, with their defaults."""
    attributes = {key: value for ancestor in reversed(kind.__mro__) for key, value in vars(ancestor).items()}
    return {key: value for key, value in attributes.items() if not key.startswith("_") and isinstance(value, str | int | float | tuple)}


def _as_setting(key: str, value: object, default: object) -> object:
    """`value` in the type of the setting's default; TOML writes floats as integers and tuples as lists."""
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    if type(value) is not type(default):
        raise ConfigError(f"environment.settings.{key}: must be {type(default).__name__}, like its default {default!r} (got {value!r})")
    return value
