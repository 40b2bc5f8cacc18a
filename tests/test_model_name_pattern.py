"""Expressions for module names: matched as `re` matches them, in bounded time, or refused."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.model.name_pattern import PatternError, name_matcher

NAMES = ("model.layers.3.self_attn.q_proj", "model.layers.12.mlp.down_proj", "lm_head", "visual.blocks.0.mlp.up_proj", "a", "ab", "aab_9")

WRITTEN_BY_PEOPLE = (
    r".*\.(q|k|v|o)_proj",
    r"^model\.layers\.\d+\.self_attn\.(?:q|k)_proj$",
    r"^(?!.*visual).*(?:q_proj|down_proj|up_proj).*",
    r"(?:.*?(?:language|model).*?(?:self_attn|mlp).*?(?:q_proj|down_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:mlp)\.(?:(?:down_proj)))",
    r"model\.layers\.(?P<layer>1[0-9]|[0-3])\..*",
    r"(?=.*mlp)[^v].*",
    r"\Alm_head\Z",
    r"[]a-z_.\d\]]+",
    r"a{,2}b?|a{2}b_\d|lm{1}_head",
    r"",
)


@pytest.mark.parametrize("pattern", WRITTEN_BY_PEOPLE)
def test_what_people_write_matches_as_re_does(pattern):
    matches = name_matcher(pattern)
    assert [matches(name) for name in NAMES] == [re.fullmatch(pattern, name) is not None for name in NAMES]


ATOMS = st.sampled_from(["a", "b", "_", r"\.", ".", r"\d", r"\w", "[ab]", "[^a]", r"\b", "^", "$"])
REPEATS = st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,3}", "{,2}", "{2,}"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: f"({'|'.join(options)})"),
        st.tuples(inner, REPEATS).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        st.tuples(st.sampled_from(["(?=", "(?!"]), inner).map(lambda pair: f"{pair[0]}{pair[1]})"),
    ),
    max_leaves=8,
)


@given(PATTERNS, st.text("ab_.1", min_size=1, max_size=7))
def test_any_pattern_matches_as_re_does(pattern, name):
    assert name_matcher(pattern)(name) == (re.fullmatch(pattern, name) is not None)


@pytest.mark.parametrize("pattern", ["([a-z._0-9]+)+!", "(.*)*x!", "(.*.*.*.*.*.*)!", "((a|a|b)+)+!", "(" * 9 + ".*" + ")*" * 9 + "!"])
def test_what_backtracking_would_never_finish_is_answered(pattern):
    begin = time.perf_counter()
    matches = name_matcher(pattern)
    assert not any(matches(name) for name in NAMES)
    assert time.perf_counter() - begin < 5


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"(a)\1", r"\\1, which"),
        (r"(?<=a)b", "which noria does not match"),
        (r"(?i)Q_PROJ", "which noria does not match"),
        (r"a++b", "possessive"),
        ("a" * 2001, "2001 characters"),
        ("(" * 21 + "a" + ")" * 21, "nested"),
        ("a{99999999999}", "too large"),
        ("((a?){999}){9999}", "too long to match"),
    ],
)
def test_what_is_not_matched_is_refused(pattern, message):
    with pytest.raises(PatternError, match=message):
        name_matcher(pattern)("a_" * 500)


def test_what_is_no_expression_is_one_of_res_errors():
    with pytest.raises(re.error):
        name_matcher("(")
