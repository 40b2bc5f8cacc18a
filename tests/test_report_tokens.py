"""Ids are spelled so that nothing is missing, and what is marked can be seen without colour."""

from noria.model.weights import load_base
from noria.report.tokens import marked, spell, spell_one
from noria.text.tokenizer import ByteTokenizer


def test_special_tokens_are_written_out_where_decoding_leaves_them_out():
    tokenizer = ByteTokenizer()
    text = "<|bos|>hé<|eos|><|eos|>llo"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == "héllo"
    assert spell(tokenizer, ids) == text
    assert tokenizer.encode(spell(tokenizer, ids)) == ids


def test_a_chat_is_spelled_as_its_template_rendered_it():
    base = load_base("smollm2-135m")
    text = "<|im_start|>user\nHi<|im_end|>\n"
    assert spell(base.tokenizer, base.tokenizer.encode(text)) == text
    assert base.tokenizer.name_of(10**9) == str(10**9)


def test_one_token_shows_its_white_space():
    tokenizer = ByteTokenizer()
    assert [spell_one(tokenizer, token) for token in tokenizer.encode("\n\ta")] == ["\\n", "\\t", "a"]
    assert spell_one(tokenizer, 10_000) == "10000"


def test_marks_are_characters():
    tokenizer = ByteTokenizer()
    shown = marked(tokenizer, tokenizer.encode("2+2= 4!"), [False] * 4 + [True] * 2 + [False])
    assert shown.plain == "2+2=⟦ 4⟧!"
    other = marked(tokenizer, tokenizer.encode("ab"), [True, False], [False, True])
    assert other.plain == "⟦a⟧⟨b⟩"
