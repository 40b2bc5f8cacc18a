"""Ids as text that a person can tell apart: what decoding leaves out is spelled as the vocabulary writes it."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.text import Text

from noria.protocols import Tokenizer


def spell(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of ids, special tokens written out, so that nothing is missing."""
    return "".join(_pieces(tokenizer, ids))


def spell_one(tokenizer: Tokenizer, token: int) -> str:
    """One token, with line breaks and spaces that can be seen."""
    return repr(spell(tokenizer, (token,)))[1:-1]


def marked(tokenizer: Tokenizer, ids: Sequence[int], mask: Sequence[bool], other_mask: Sequence[bool] = ()) -> Text:
    """The text of ids, stretches of the mask in colour and between ⟦ and ⟧, which pipes keep; those of the other mask between ⟨ and ⟩."""
    shown = Text()
    kinds = zip(mask, other_mask or [False] * len(mask), strict=True)
    for (is_marked, is_other), group in groupby(zip(ids, kinds, strict=True), key=lambda pair: pair[1]):
        text = spell(tokenizer, [token for token, _ in group])
        before, after, style = ("⟦", "⟧", "bold green") if is_marked else ("⟨", "⟩", "yellow") if is_other else ("", "", "")
        shown.append(f"{before}{text}{after}", style=style)
    return shown


def _pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[str]:
    """Stretches of text, and special tokens one by one."""
    for is_special, group in groupby(ids, key=lambda token: tokenizer.decode((token,)) == ""):
        if is_special:
            yield from (tokenizer.name_of(token) for token in group)
        else:
            yield tokenizer.decode(tuple(group))
