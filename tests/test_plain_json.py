"""Others' JSON: whatever is wrong with it is a ValueError, and what the files of models and adapters make of that has a name."""

import json

import pytest
from export_builders import a_config

from noria.errors import AdapterFileCorruptError, AdapterFormatError, ModelFileCorruptError
from noria.model.hf_folder import read_config
from noria.model.peft_config import read_peft_config
from noria.plain_json import MAX_DEPTH, parse_json
from noria.text.tokenizer_files import read_folder

HUGE = "1" + "0" * 400


def deep(depth):
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("text", ['{"a": [1, -2.5, null, true, "x"]}', deep(MAX_DEPTH), f"-{'9' * 308}", "\ufeff{}", "1e400"])
def test_what_is_json_is_what_json_reads(text):
    assert parse_json(text) == json.loads(text.removeprefix("\ufeff"))
    assert parse_json(text.encode()) == json.loads(text.encode())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON: .* line 1, column 2"),
        (b'"\xff"', "utf-8"),
        (deep(MAX_DEPTH + 1), "nested more than 100 deep"),
        (deep(100_000), "nested more than 100 deep"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "nested more than 100 deep"),
        (HUGE, "401 digits"),
        (f"[-{'9' * 309}]", "309 digits"),
        ("9" * 5000, "5000 digits"),
    ],
)
def test_what_is_wrong_is_a_value_error(text, message):
    with pytest.raises(ValueError, match=message):
        parse_json(text)


@pytest.mark.parametrize("damage", [f'"lora_alpha": {HUGE}', f'"r": {HUGE}', f'"rank_pattern": {deep(5000)}', f'"lora_alpha": {deep(100_000)}'])
def test_an_adapters_file_with_absurd_values_is_refused_by_name(tmp_path, damage):
    path = tmp_path / "adapter_config.json"
    path.write_text('{"peft_type": "LORA", "target_modules": ["q_proj"], ' + damage + "}")
    with pytest.raises(AdapterFileCorruptError, match=r"adapter_config\.json"):
        read_peft_config(path, a_config())


@pytest.mark.parametrize("pattern", ["([a-z._0-9]+)+!", r"(.)\1.*", r"((a?){999}){9999}", "(" * 5000 + ")" * 5000])
def test_an_adapters_expression_never_hangs_and_is_refused_by_name(tmp_path, pattern):
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA", "target_modules": pattern}))
    with pytest.raises(AdapterFormatError, match="modules"):
        read_peft_config(path, a_config())


@pytest.mark.parametrize("damage", [f'"rope_theta": {HUGE}', f'"hidden_size": {HUGE}', f'"rope_scaling": {deep(5000)}'])
def test_a_models_file_with_absurd_values_is_refused_by_name(tmp_path, damage):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], ' + damage + "}")
    with pytest.raises(ModelFileCorruptError, match=r"config\.json"):
        read_config(tmp_path, "base")
    (tmp_path / "tokenizer.json").write_text("{" + damage + "}")
    with pytest.raises(ModelFileCorruptError, match=r"tokenizer\.json"):
        read_folder(tmp_path)
