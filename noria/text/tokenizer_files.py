"""Tokenizers and chat templates as models carry them: a Hugging Face folder, or the metadata of a GGUF file.

Never a guess: what a file does not say, or says in a way that noria does not implement, is a named error that says what would do.
Deliberately not here: weights and configurations (`model/`), and what the tokenizers do (`text/tokenizer.py`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer as Engine

from noria.errors import ChatTemplateError, ModelFileCorruptError, ModelFileMissingError, ModelUnsupportedError
from noria.plain_json import parse_json
from noria.protocols import Tokenizer
from noria.text.chat import ChatFormat
from noria.text.tokenizer import WORD_SPLITS, FastTokenizer, SpecialTokens, byte_level_bpe, missing_bytes, sentencepiece_bpe, spelling
from noria.types import Ids

_PROBE: Final = "a"
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # GGUF's token types
_SPLIT_NAMES: Final = {"llama-v3": "llama-bpe", "llama3": "llama-bpe"} | {name: name for name in WORD_SPLITS}


def read_folder(folder: Path) -> tuple[Tokenizer, ChatFormat | None]:
    """The tokenizer of a Hugging Face folder, and its chat template if it has one.

    Reads tokenizer.json and, where they are there, tokenizer_config.json, generation_config.json, config.json and chat_template.jinja. The ids that
    end a turn are the eos of tokenizer_config.json, then those of generation_config.json, else those of config.json. Text begins with a BOS if
    tokenizer.json puts one there, or, where it puts nothing around a text, if tokenizer_config.json says so (`add_bos_token`).

    Raises ModelFileMissingError, ModelFileCorruptError, ModelUnsupportedError (no tokenizer.json but another kind of tokenizer file).
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        other = next((name for name in ("tokenizer.model", "tekken.json", "vocab.json") if (folder / name).is_file()), None)
        if other is not None:
            raise ModelUnsupportedError(f"{folder} has {other} and no tokenizer.json; save it once with transformers' fast tokenizer")
        raise ModelFileMissingError(f"{path} is missing")
    spec = _read_json(path)
    engine = _load_engine(path, spec)
    config = _read_optional(folder / "tokenizer_config.json")
    bos, eos = _token_text(config, "bos_token"), _token_text(config, "eos_token")
    end_ids = _end_ids_of(folder, engine, eos)
    tokenizer = _wrap(engine, spec, end_ids, _bos_id_of(engine, config, bos))
    template = _template_of(folder, config)
    eos = eos or engine.id_to_token(end_ids[0]) or ""
    return tokenizer, _chat(template, tokenizer, bos=bos, eos=eos, name=folder.name)


def from_gguf(metadata: Mapping[str, Any], *, source: str) -> tuple[Tokenizer, ChatFormat | None]:
    """The tokenizer of a GGUF file's metadata, and its chat template if it has one. source: names the file in messages.

    Raises ModelFileCorruptError (fields are missing or do not fit together), ModelUnsupportedError.
    """
    fields = _Metadata(metadata, source)
    tokens, kinds = fields.listed("tokens", str), fields.listed("token_type", int)
    if len(kinds) != len(tokens):
        raise ModelFileCorruptError(f"{source}: {len(tokens)} tokens do not fit {len(kinds)} token types")
    eos_id, bos_id = fields.required("eos_token_id", int), fields.optional("bos_token_id", int)
    other_ends = (fields.optional(key, int) for key in ("eot_token_id", "eom_token_id"))
    end_ids = tuple(dict.fromkeys((eos_id, *(i for i in other_ends if i is not None))))
    read = {"gpt2": _read_gpt2, "llama": _read_sentencepiece}.get(model := fields.required("model", str))
    if read is None:
        raise ModelUnsupportedError(f"{source} has a tokenizer of kind {model!r}; noria reads 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)")
    try:
        tokenizer = read(fields, tokens, kinds, end_ids)
    except ValueError as error:
        raise ModelFileCorruptError(f"{source}: {error}") from error
    template = metadata.get("tokenizer.chat_template")
    bos = tokens[bos_id] if bos_id is not None and 0 <= bos_id < len(tokens) else ""
    return tokenizer, _chat(template if isinstance(template, str) else None, tokenizer, bos=bos, eos=tokens[eos_id], name=source)


class _Metadata:
    """The fields of a GGUF file that begin with `tokenizer.ggml.`, checked on reading."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self._metadata, self.source = metadata, source

    def required(self, key: str, kind: type[Any]) -> Any:
        value = self.optional(key, kind)
        if value is None:
            raise ModelFileCorruptError(f"{self.source} lacks metadata tokenizer.ggml.{key}")
        return value

    def optional(self, key: str, kind: type[Any]) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise ModelFileCorruptError(f"{self.source}: metadata tokenizer.ggml.{key} is {str(value)[:80]!r}, expected {kind.__name__}")
        return value

    def listed(self, key: str, kind: type[Any]) -> list[Any]:
        values: list[Any] = self.required(key, list)
        bad = next((value for value in values if not isinstance(value, kind)), None)
        if bad is not None:
            raise ModelFileCorruptError(f"{self.source}: metadata tokenizer.ggml.{key} has {str(bad)[:80]!r}, expected {kind.__name__}")
        return values

    def special(self, kinds: list[int], end_ids: Ids, *, adds_bos: bool) -> SpecialTokens:
        """adds_bos: whether text begins with a BOS where the file does not say; as llama.cpp has it."""
        said = self.optional("add_bos_token", bool)
        bos_id = self.required("bos_token_id", int) if (adds_bos if said is None else said) else None
        return SpecialTokens(_of_kind(kinds, _CONTROL), end_ids, bos_id, _of_kind(kinds, _USER_DEFINED))


def _read_gpt2(fields: _Metadata, tokens: list[str], kinds: list[int], end_ids: Ids) -> FastTokenizer:
    pre = fields.optional("pre", str) or "default"
    split = _SPLIT_NAMES.get(pre)
    if split is None:
        raise ModelUnsupportedError(f"{fields.source} cuts text into words as {pre!r}; noria knows {', '.join(_SPLIT_NAMES)}")
    special = fields.special(kinds, end_ids, adds_bos=split in ("llama-bpe", "tekken"))
    return byte_level_bpe(tokens, fields.listed("merges", str), special, split=split)


def _read_sentencepiece(fields: _Metadata, tokens: list[str], kinds: list[int], end_ids: Ids) -> FastTokenizer:
    unknown = fields.optional("unknown_token_id", int)
    adds_space = fields.optional("add_space_prefix", bool)
    byte_ids = _of_kind(kinds, _BYTE)
    if len(byte_ids) not in (0, 256):
        raise ValueError(f"{len(byte_ids)} tokens stand for bytes, expected 256")
    return sentencepiece_bpe(
        tokens,
        fields.listed("scores", float),
        fields.special(kinds, end_ids, adds_bos=True),
        byte_ids=byte_ids,
        unknown_id=(_of_kind(kinds, _UNKNOWN) or (0,))[0] if unknown is None else unknown,
        adds_space=adds_space is not False,
    )


def _of_kind(kinds: list[int], kind: int) -> tuple[int, ...]:
    return tuple(i for i, other in enumerate(kinds) if other == kind)


def _load_engine(path: Path, spec: dict[str, Any]) -> Engine:
    kind = spec["model"].get("type", "BPE") if isinstance(spec.get("model"), dict) else None
    if kind != "BPE":
        raise ModelUnsupportedError(f"{path} has a model of type {kind!r}; noria reads 'BPE'")
    try:
        engine = Engine.from_file(str(path))
    except Exception as error:  # the package raises nothing more precise
        raise ModelFileCorruptError(f"cannot read {path}: {error}; download it again, or update `tokenizers` if the file is newer") from error
    engine.no_truncation()
    engine.no_padding()
    return engine


def _wrap(engine: Engine, spec: dict[str, Any], end_ids: Ids, bos_id: int | None) -> FastTokenizer:
    vocabulary = engine.get_vocab(with_added_tokens=True)
    if not spec["model"].get("byte_fallback"):
        missing = missing_bytes(vocabulary) if "ByteLevel" in _types_in(spec.get("decoder")) else b""
        return FastTokenizer(engine, end_ids=end_ids, bos_id=bos_id, missing_bytes=missing)
    tokens = [""] * (max(vocabulary.values()) + 1)
    for text, token_id in vocabulary.items():
        tokens[token_id] = text
    special_ids = [token_id for token_id, token in engine.get_added_tokens_decoder().items() if token.special]
    strips_space = bool(_types_in(spec.get("decoder")) & {"Strip", "Metaspace"})
    return FastTokenizer(engine, end_ids=end_ids, bos_id=bos_id, spelling=spelling(tokens, special_ids), strips_space=strips_space)


def _types_in(part: Any) -> set[str]:
    """Types of a decoder and of those that it is a sequence of."""
    if not isinstance(part, dict):
        return set()
    if part.get("prepend_scheme") == "never":
        return set()
    return {str(part.get("type")), *(name for inner in part.get("decoders") or () for name in _types_in(inner))}


def _bos_id_of(engine: Engine, config: dict[str, Any], bos: str) -> int | None:
    if engine.post_processor is None:
        return engine.token_to_id(bos) if config.get("add_bos_token") is True and bos else None
    with_special = engine.encode(_PROBE, add_special_tokens=True).ids
    without = engine.encode(_PROBE, add_special_tokens=False).ids
    return with_special[0] if with_special[:1] != without[:1] else None


def _end_ids_of(folder: Path, engine: Engine, eos: str) -> Ids:
    eos_id = engine.token_to_id(eos) if eos else None
    if eos and eos_id is None:
        raise ModelFileCorruptError(f"{folder / 'tokenizer_config.json'}: eos_token {eos!r} is not in tokenizer.json")
    ids = [] if eos_id is None else [eos_id]
    for name in ("generation_config.json", "config.json"):
        if name == "generation_config.json" or not ids:
            ids += _eos_ids(folder / name)
    size = engine.get_vocab_size(with_added_tokens=True)
    bad = [i for i in ids if engine.id_to_token(i) is None]
    if bad or not ids:
        told = f"names eos ids {bad}, and tokenizer.json has {size} tokens" if bad else "names no eos token in any of its files"
        raise ModelFileCorruptError(f"{folder} {told}; noria needs to know which token ends a turn")
    return tuple(dict.fromkeys(ids))


def _eos_ids(path: Path) -> list[int]:
    value = _read_optional(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelFileCorruptError(f"{path}: eos_token_id is {value!r}, expected an id or a list of ids")
    return ids


def _token_text(config: dict[str, Any], key: str) -> str:
    value = config.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _template_of(folder: Path, config: dict[str, Any]) -> str | None:
    """The folder's template; of several named ones "default", with "tool_use" for chats with tools, as transformers chooses."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    value = config.get("chat_template")
    if isinstance(value, str) or value is None:
        return value
    try:
        named = {entry["name"]: str(entry["template"]) for entry in value}
        default = named["default"]
    except (KeyError, TypeError) as error:
        raise ModelFileCorruptError(f"{folder / 'tokenizer_config.json'}: chat_template is neither a text nor a list with a default one") from error
    with_tools = named.get("tool_use")
    return default if with_tools is None else "".join(("{% if tools %}", with_tools, "{% else %}", default, "{% endif %}"))


def _chat(template: str | None, tokenizer: Tokenizer, *, bos: str, eos: str, name: str) -> ChatFormat | None:
    if not template:
        return None
    try:
        return ChatFormat(template, tokenizer, bos=bos, eos=eos, name=name)
    except ChatTemplateError as error:
        raise ModelFileCorruptError(str(error)) from error


def _read_optional(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.is_file() else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(_read_text(path))
    except ValueError as error:
        raise ModelFileCorruptError(f"cannot read {path}: {error}; download it again") from error
    if not isinstance(value, dict):
        raise ModelFileCorruptError(f"{path} is {type(value).__name__}, expected an object")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileCorruptError(f"cannot read {path}: {error}; download it again") from error
