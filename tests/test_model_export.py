"""PEFT folders in and out without PEFT: bytes round trip, every refusal has its reason, nothing is half-written."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from export_builders import FAMILIES, a_base, a_config, lora_of, random_adapter, rewrite_config, rewrite_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_builders import drain, make_learner, same_bytes, spec, state_of, tiny
from safetensors.numpy import load_file, save_file

from noria.adapters.versions import VersionFiles
from noria.errors import AdapterFileCorruptError, AdapterFormatError, ConfigError, NoriaError, StateConflictError, StorageError
from noria.model.export import read_peft, start_from, write_merged, write_peft
from noria.model.lora import HEAD, MODULES, VALUE, fresh_state, initial_adapter, misfit, resize_rank, trained_modules
from noria.types import LoraSpec

CONFIG = a_config()
TENSORS = "adapter_model.safetensors"


def exported(folder, kind="all", *, config=CONFIG, rank=4, **changes):
    """A folder written by `write_peft`, with fields of its adapter_config.json changed; returns what was written."""
    lora = lora_of(kind, rank)
    adapter = random_adapter(config, lora, head=kind == HEAD)
    write_peft(folder, adapter, lora, config, base_name="base")
    rewrite_config(folder, **changes)
    return adapter, lora


def tensor_bytes(folder):
    return {name: tensor.tobytes() for name, tensor in load_file(folder / TENSORS).items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["all", "attn", "mlp", "head"])
def test_what_is_written_is_read_bit_for_bit(tmp_path, family, kind):
    config = FAMILIES[family]
    adapter, lora = exported(tmp_path / "x", kind, config=config)
    read = read_peft(tmp_path / "x", config)
    assert same_bytes(read.params, adapter)
    assert read.lora == lora
    assert read.modules == trained_modules(lora)
    assert (HEAD in read.modules) == (kind == HEAD)


def test_names_shapes_and_settings_are_pefts(tmp_path):
    adapter, _ = exported(tmp_path / "x", "attn", rank=3)
    tensors = load_file(tmp_path / "x" / TENSORS)
    assert len(tensors) == 2 * 4 * CONFIG.num_layers
    np.testing.assert_array_equal(tensors["base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"], adapter["a"]["k"][1].T)
    np.testing.assert_array_equal(tensors["base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight"], adapter["b"]["o"][0].T)
    fields = json.loads((tmp_path / "x" / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "r": 3, "lora_alpha": 8, "use_rslora": False, "bias": "none", "base_model_name_or_path": "base"}
    assert fields.items() >= expected.items()
    assert fields["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_the_padding_of_a_rank_class_is_never_written(tmp_path):
    lora = lora_of("all", 3)
    adapter = random_adapter(CONFIG, lora, max_rank=16)
    write_peft(tmp_path / "x", adapter, lora, CONFIG, base_name="base")
    assert {min(tensor.shape) for tensor in load_file(tmp_path / "x" / TENSORS).values()} == {3}
    assert same_bytes(resize_rank(read_peft(tmp_path / "x", CONFIG).params, 16), adapter)


def test_loaded_trained_for_no_step_committed_and_exported_it_has_the_same_bytes(tmp_path):
    config, _ = tiny()
    _, lora = exported(tmp_path / "theirs", config=config)
    params = start_from(tmp_path / "theirs", config, lora, width=8, seed=5)
    learner = make_learner(max_rank=8)
    learner.load_run(spec("run", rank=lora.rank, alpha=lora.alpha), fresh_state(params))
    files = VersionFiles(tmp_path / "versions")
    record = files.write("run", 0, state_of(learner, "run"), lora.rank)
    write_peft(tmp_path / "ours", files.load(record, width=16).params, lora, config, base_name="base")
    assert tensor_bytes(tmp_path / "ours") == tensor_bytes(tmp_path / "theirs")


SPELLINGS = {
    "an adapter name": lambda name: name.replace(".weight", ".default.weight"),
    "no wrapper": lambda name: name.removeprefix("base_model.model."),
    "no model": lambda name: name.removeprefix("base_model.model.model."),
    "data parallel": lambda name: f"module.{name}",
    "compiled": lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_usual_spellings_of_names_are_read(tmp_path, spelling):
    adapter, _ = exported(tmp_path / "x", HEAD)
    rewrite_tensors(tmp_path / "x", lambda tensors: {SPELLINGS[spelling](name): tensor for name, tensor in tensors.items()})
    assert same_bytes(read_peft(tmp_path / "x", CONFIG).params, adapter)


@pytest.mark.parametrize("dtype", [np.float16, jax.numpy.bfloat16])
def test_half_precision_becomes_float32_exactly(tmp_path, dtype):
    adapter, _ = exported(tmp_path / "x")
    rewrite_tensors(tmp_path / "x", lambda tensors: {name: tensor.astype(dtype) for name, tensor in tensors.items()})
    assert same_bytes(read_peft(tmp_path / "x", CONFIG).params, jax.tree.map(lambda leaf: leaf.astype(dtype).astype(np.float32), adapter))


TARGETS = {
    "all-linear": "all-linear",
    "an expression": r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj",
    "whole names": [f"model.layers.{n}.{part}_proj" for n in (0, 1) for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o")]
    + ["gate_proj", "up_proj", "mlp.down_proj"],
}


@pytest.mark.parametrize("target", TARGETS)
def test_targets_are_matched_as_peft_matches_them(tmp_path, target):
    adapter, _ = exported(tmp_path / "x", target_modules=TARGETS[target])
    assert same_bytes(read_peft(tmp_path / "x", CONFIG).params, adapter)


def test_an_adapter_of_some_modules_is_zero_in_the_others(tmp_path):
    adapter, lora = exported(tmp_path / "x", "attn", target_modules=["v_proj", "q_proj"])
    rewrite_tensors(tmp_path / "x", lambda tensors: {name: t for name, t in tensors.items() if "q_proj" in name or "v_proj" in name})
    read = read_peft(tmp_path / "x", CONFIG)
    assert read.modules == ("q", "v")
    assert read.lora == lora
    for side, module in ((side, module) for side in "ab" for module in MODULES):
        expected = adapter[side][module] if module in ("q", "v") else np.zeros_like(read.params[side][module])
        np.testing.assert_array_equal(read.params[side][module], expected)


def test_settings_that_are_off_or_say_nothing_are_read_over(tmp_path):
    noise = {"lora_dropout": 0.1, "peft_version": "9", "layers_to_transform": [0, 1], "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 8}}
    adapter, _ = exported(tmp_path / "x", use_something_new=False, something_new_config=None, init_lora_weights="gaussian", **noise)
    assert same_bytes(read_peft(tmp_path / "x", CONFIG).params, adapter)


UNSAYABLE = {
    "another method": ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    "no method": ({"peft_type": ...}, "peft_type is None"),
    "ranks that differ": ({"rank_pattern": {"q_proj": 8}}, "one rank and one scale"),
    "scales that differ": ({"alpha_pattern": {"q_proj": 32}}, "one rank and one scale"),
    "biases": ({"bias": "lora_only"}, "trains biases"),
    "biases of deltas": ({"lora_bias": True}, "have biases"),
    "magnitudes": ({"use_dora": True}, "DoRA"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "whole modules"),
    "transposed": ({"fan_in_fan_out": True}, "transposed"),
    "some layers": ({"layers_to_transform": [1]}, "1 of 2 layers"),
    "excluded layers": ({"exclude_modules": r".*layers\.0\..*"}, "1 of 2 layers"),
    "the embedding": ({"target_modules": ["embed_tokens", "q_proj"]}, "embed_tokens"),
    "tied embeddings": ({"ensure_weight_tying": True}, "together with"),
    "repeated layers": ({"layer_replication": [[0, 2], [1, 2]]}, "repeats layers"),
    "a base of its own": ({"init_lora_weights": "pissa_niter_16"}, "changed the base"),
    "a new setting": ({"use_something_new": 3}, "use_something_new is 3"),
    "no module of the base": ({"target_modules": r".*c_attn"}, "names no module"),
}


@pytest.mark.parametrize("case", UNSAYABLE)
def test_what_noria_cannot_have_is_refused_with_a_reason(tmp_path, case):
    changes, reason = UNSAYABLE[case]
    exported(tmp_path / "x", **changes)
    with pytest.raises(AdapterFormatError, match=reason):
        read_peft(tmp_path / "x", CONFIG)


Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
WRONG_TENSORS = {
    "one is missing": (lambda t: t.pop(Q_A), AdapterFileCorruptError, "lacks .*lora_A of model.layers.0.self_attn.q_proj"),
    "no target names it": (
        lambda t: t.update({"base_model.model.lm_head.lora_A.weight": np.ones((4, 32), "f4")}),
        AdapterFileCorruptError,
        "lm_head",
    ),
    "twice": (lambda t: t.update({Q_A.replace(".weight", ".b.weight"): t[Q_A]}), AdapterFileCorruptError, "more than one lora_A"),
    "not a number": (lambda t: t[Q_A].__setitem__((0, 0), np.nan), AdapterFileCorruptError, "NaN or infinite"),
    "another rank": (lambda t: t.update({Q_A: t[Q_A][:2].copy()}), AdapterFormatError, "another base or rank"),
    "another base": (lambda t: t.update({Q_A: t[Q_A][:, :16].copy()}), AdapterFormatError, "another base or rank"),
    "transposed": (lambda t: t.update({Q_A: t[Q_A].T.copy()}), AdapterFormatError, "another base or rank"),
    "one layer too many": (lambda t: t.update({Q_A.replace("layers.0", "layers.2"): t[Q_A]}), AdapterFormatError, "each of 2 layers"),
    "another dtype": (lambda t: t.update({Q_A: t[Q_A].astype(np.float64)}), AdapterFormatError, "F64"),
    "an embedding": (
        lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": t[Q_A]}),
        AdapterFormatError,
        "adapts the embedding",
    ),
    "a magnitude": (lambda t: t.update({Q_A.replace("lora_A", "lora_magnitude_vector"): t[Q_A]}), AdapterFormatError, "DoRA"),
    "a saved module": (lambda t: t.update({"base_model.model.score.modules_to_save.weight": t[Q_A]}), AdapterFormatError, "replaces a module"),
    "an unknown one": (lambda t: t.update({"base_model.model.model.layers.0.mlp.experts.lora_A.weight": t[Q_A]}), AdapterFormatError, "experts"),
    "a stranger before it": (lambda t: t.update({"vision." + Q_A: t.pop(Q_A)}), AdapterFormatError, "vision"),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_tensors_that_do_not_belong_are_refused(tmp_path, case):
    change, error, reason = WRONG_TENSORS[case]
    exported(tmp_path / "x")
    rewrite_tensors(tmp_path / "x", lambda tensors: (change(tensors), tensors)[1])
    with pytest.raises(error, match=reason):
        read_peft(tmp_path / "x", CONFIG)


def test_missing_and_damaged_files_are_refused_by_name(tmp_path):
    exported(tmp_path / "x")
    path, settings_path = tmp_path / "x" / TENSORS, tmp_path / "x" / "adapter_config.json"
    whole, fields = path.read_bytes(), settings_path.read_text()
    for damaged in (whole[:-8], whole[:40], b""):
        path.write_bytes(damaged)
        with pytest.raises(AdapterFileCorruptError, match=TENSORS):
            read_peft(tmp_path / "x", CONFIG)
    path.unlink()
    with pytest.raises(AdapterFileCorruptError, match=TENSORS):
        read_peft(tmp_path / "x", CONFIG)
    path.with_suffix(".bin").write_bytes(b"pickled")
    with pytest.raises(AdapterFormatError, match="pickle"):
        read_peft(tmp_path / "x", CONFIG)
    for damaged in (fields[:-5], "[1]", "", '{"peft_type": "LORA", "r": "4", "target_modules": ["q_proj"]}'):
        settings_path.write_text(damaged)
        with pytest.raises(AdapterFileCorruptError, match=r"adapter_config\.json"):
            read_peft(tmp_path / "x", CONFIG)
    with pytest.raises(AdapterFileCorruptError, match=r"adapter_config\.json"):
        read_peft(tmp_path / "nowhere", CONFIG)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["q_proj", "all-linear", ".*", "(", "LORA"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.just("q_proj"), inner, max_size=2),
    max_leaves=4,
)
FIELDS = ("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform", "rank_pattern", "alpha_pattern")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written") / "x"
    adapter, _ = exported(folder)
    return folder, adapter, json.loads((folder / "adapter_config.json").read_text())


def read_or_refused(folder):
    try:
        return read_peft(folder, CONFIG)
    except NoriaError as error:
        return error


@settings(max_examples=200, deadline=None)
@given(st.sampled_from((*FIELDS, "bias", "init_lora_weights", "modules_to_save")), ANY_JSON)
def test_any_value_of_any_setting_is_read_the_same_or_refused_by_name(written, name, value):
    folder, adapter, fields = written
    (folder / "adapter_config.json").write_text(json.dumps(fields | {name: value}))
    read = read_or_refused(folder)
    assert str(folder) in str(read) if isinstance(read, NoriaError) else same_bytes(read.params, adapter)


def test_a_copy_of_the_bases_embedding_must_be_the_bases(tmp_path):
    """PEFT saves both embeddings beside an adapter of the unembedding; another base's would make another model."""
    base = a_base(CONFIG)
    adapter, _ = exported(tmp_path / "x", HEAD)
    names = ("base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.base_layer.weight")
    rewrite_tensors(tmp_path / "x", lambda tensors: tensors | dict.fromkeys(names, base.params["embed"]))
    assert same_bytes(read_peft(tmp_path / "x", CONFIG, base.params).params, adapter)
    rounded = base.params["embed"].astype(jax.numpy.bfloat16)
    rewrite_tensors(tmp_path / "x", lambda tensors: tensors | dict.fromkeys(names, rounded))
    assert same_bytes(read_peft(tmp_path / "x", CONFIG, base.params).params, adapter)
    with pytest.raises(AdapterFormatError, match="save_embedding_layers=False"):
        read_peft(tmp_path / "x", CONFIG)
    with pytest.raises(AdapterFormatError, match="for a base with another"):
        read_peft(tmp_path / "x", CONFIG, a_base(CONFIG, seed=1).params)


def broken(adapter, change):
    change(adapter)
    return adapter


UNWRITABLE = {
    "not a number": (lambda x: x["a"]["q"].__setitem__((0, 0, 0), np.nan), "not finite"),
    "beyond its rank": (lambda x: x["b"]["up"].__setitem__((1, 5, 0), 1.0), "beyond rank 4"),
    "a module is missing": (lambda x: x["a"].pop("up"), "'up' is nothing"),
    "half an unembedding": (lambda x: x["a"].update(head=np.zeros((1, 32, 8), np.float32)), "'head' is nothing"),
    "another base": (lambda x: x["a"].update(up=np.zeros((2, 31, 8), np.float32)), "up"),
}


@pytest.mark.parametrize("case", UNWRITABLE)
def test_an_adapter_that_is_not_the_bases_is_not_written(tmp_path, case):
    change, reason = UNWRITABLE[case]
    lora = lora_of("all")
    with pytest.raises(AdapterFormatError, match=reason):
        write_peft(tmp_path / "x", broken(random_adapter(CONFIG, lora, max_rank=8), change), lora, CONFIG, base_name="base")
    assert list(tmp_path.iterdir()) == []


def test_values_of_modules_that_would_not_be_written_are_not_lost_in_silence(tmp_path):
    adapter, lora = random_adapter(CONFIG, lora_of("all")), lora_of("attn")
    with pytest.raises(AdapterFormatError, match=r"values in \['gate', 'up', 'down'\]"):
        write_peft(tmp_path / "x", adapter, lora, CONFIG, base_name="base")
    with pytest.raises(AdapterFormatError, match=r"values in \['q', "):
        write_peft(tmp_path / "x", adapter, lora_of("all"), CONFIG, base_name="base", modules=("up",))
    for modules in ((), ("up", HEAD)):
        with pytest.raises(AdapterFormatError, match="cannot be written"):
            write_peft(tmp_path / "x", adapter, lora_of("all"), CONFIG, base_name="base", modules=modules)


def test_a_folder_with_something_in_it_is_never_overwritten(tmp_path):
    exported(tmp_path / "x")
    before = tensor_bytes(tmp_path / "x")
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "x", tmp_path / "file"):
        with pytest.raises(StateConflictError, match="nothing was written"):
            exported(target, "attn")
    assert tensor_bytes(tmp_path / "x") == before
    (tmp_path / "empty").mkdir()
    exported(tmp_path / "empty")
    exported(tmp_path / "new" / "deep")


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def no_space(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("noria.model.export.save_file", no_space)
    with pytest.raises(StorageError, match="no space"):
        exported(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_warm_start_takes_what_the_folder_has_and_starts_the_rest_fresh(tmp_path):
    adapter, lora = exported(tmp_path / "x", "attn")
    wanted = lora_of("all")
    started, fresh = start_from(tmp_path / "x", CONFIG, wanted, 16, 7), initial_adapter(CONFIG, wanted, 16, 7)
    padded = resize_rank(adapter, 16)
    for side, module in ((side, module) for side in "ab" for module in MODULES):
        source = padded if module in trained_modules(lora) else fresh
        np.testing.assert_array_equal(started[side][module], source[side][module])
    assert fresh["a"]["up"].any()


@pytest.mark.parametrize(
    ("spec", "advice"),
    [
        (LoraSpec(8, 16.0), r"rank = 4, adapter\.alpha = 8 and adapter\.use_rslora = false"),
        (LoraSpec(4, 16.0), r"rank = 4, adapter\.alpha = 8 and adapter\.use_rslora = false"),
        (LoraSpec(4, 8.0, use_rslora=True), r"rank = 4, adapter\.alpha = 8 and adapter\.use_rslora = false"),
        (LoraSpec(4, 8.0, train_mlp=False), r"gate, up, down.*adapter\.train_mlp = true"),
        (LoraSpec(4, 8.0, train_attn=False), r"q, k, v, o.*adapter\.train_attn = true"),
    ],
)
def test_a_run_of_another_shape_than_its_warm_start_is_told_what_to_set(tmp_path, spec, advice):
    exported(tmp_path / "x")
    with pytest.raises(ConfigError, match=advice):
        start_from(tmp_path / "x", CONFIG, spec, 16, 0)


def test_the_same_scale_by_another_formula_is_the_same_adapter(tmp_path):
    adapter, _ = exported(tmp_path / "x")
    assert same_bytes(start_from(tmp_path / "x", CONFIG, LoraSpec(4, 4.0, use_rslora=True), 4, 0), adapter)


def test_a_warm_start_that_adapts_the_unembedding_is_for_runs_that_train_it(tmp_path):
    adapter, lora = exported(tmp_path / "x", HEAD)
    with pytest.raises(ConfigError, match=r"adapts head, which the run does not train: set adapter\.train_unembed = true"):
        start_from(tmp_path / "x", CONFIG, lora_of("all"), 8, 0)
    assert same_bytes(start_from(tmp_path / "x", CONFIG, lora, 8, 0), resize_rank(adapter, 8))
    critic = start_from(tmp_path / "x", CONFIG, replace(lora, train_value=True), 8, 7)
    fresh = initial_adapter(CONFIG, replace(lora, train_value=True), 8, 7)
    assert same_bytes({side: critic[side].pop(VALUE) for side in "ab"}, {side: fresh[side][VALUE] for side in "ab"})
    assert same_bytes(critic, resize_rank(adapter, 8))


def test_a_warm_start_may_bring_pefts_copy_of_the_unembedding(tmp_path):
    base = a_base(CONFIG)
    adapter, lora = exported(tmp_path / "x", HEAD)
    rewrite_tensors(tmp_path / "x", lambda t: t | {"base_model.model.model.embed_tokens.weight": base.params["embed"]})
    with pytest.raises(AdapterFormatError, match="copy of the base's own"):
        start_from(tmp_path / "x", CONFIG, lora, 4, 0)
    assert same_bytes(start_from(tmp_path / "x", CONFIG, lora, 4, 0, base=base.params), adapter)


@pytest.mark.parametrize("kind", ["all", "head"])
def test_a_trained_adapter_is_exported_without_its_value_head(tmp_path, kind):
    lora = replace(lora_of(kind), train_value=True)
    adapter = random_adapter(CONFIG, lora)
    assert VALUE in adapter["a"]
    write_peft(tmp_path / "x", adapter, lora, CONFIG, base_name="base")
    read = read_peft(tmp_path / "x", CONFIG)
    assert read.lora == lora_of(kind)
    assert same_bytes(read.params, {side: {m: leaf for m, leaf in leaves.items() if m != VALUE} for side, leaves in adapter.items()})
    for folder, params in (("with", adapter), ("without", read.params)):
        write_merged(tmp_path / folder, a_base(CONFIG), params, lora)
    assert (tmp_path / "with" / "model.safetensors").read_bytes() == (tmp_path / "without" / "model.safetensors").read_bytes()


def test_only_who_has_room_for_it_takes_an_adapted_unembedding():
    adapter = random_adapter(CONFIG, lora_of("all"), head=True)
    assert misfit(adapter, CONFIG, 4, (HEAD,)) is None
    for tops in ((), (VALUE,)):
        assert "an adapted unembedding (module 'head'), for which there is no room here: set learner.has_unembed" in misfit(adapter, CONFIG, 4, tops)
    plain = random_adapter(CONFIG, lora_of("all"))
    assert misfit(plain, CONFIG, 4) is misfit(plain, CONFIG, 4, (HEAD, VALUE)) is None
    del adapter["b"][HEAD]
    assert "b of module 'head' is nothing" in misfit(adapter, CONFIG, 4, (HEAD,))


def test_learner_refuses_an_adapter_of_the_unembedding():
    config, _ = tiny()
    adapter = random_adapter(config, lora_of("all"), head=True, max_rank=8)
    learner = make_learner(max_rank=8)
    loaded = learner.load_run(spec("run", rank=4), fresh_state(adapter))
    drain(learner)
    with pytest.raises(StateConflictError, match="unembedding"):
        loaded.result(0)


def test_a_file_of_another_library_without_metadata_is_read(tmp_path):
    adapter, _ = exported(tmp_path / "x")
    save_file(load_file(tmp_path / "x" / TENSORS), tmp_path / "x" / TENSORS)
    assert same_bytes(read_peft(tmp_path / "x", CONFIG).params, adapter)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["all", "attn", "mlp"])
def test_an_adapter_that_starts_a_run_of_any_family_and_is_exported_untrained_has_the_same_bytes(tmp_path, family, kind):
    config = FAMILIES[family]
    _, lora = exported(tmp_path / "theirs", kind, config=config, rank=6)
    state = fresh_state(start_from(tmp_path / "theirs", config, lora, width=16, seed=5))
    files = VersionFiles(tmp_path / "versions")
    record = files.write("run", 0, state, lora.rank)
    write_peft(tmp_path / "ours", files.load(record, width=8).params, lora, config, base_name="base")
    assert tensor_bytes(tmp_path / "ours") == tensor_bytes(tmp_path / "theirs")
