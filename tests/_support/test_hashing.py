"""Names of callables that are the same in every run."""

from functools import partial

import numpy as np

from odb_nodes._support.hashing import stable_name


def crop(sample, tokens=40, side="left", **_):
    return sample


class Tokenizer:
    def __init__(self, *words):
        self._vocabulary = {word: index for index, word in enumerate(words)}

    def get_vocab(self):
        return dict(reversed(self._vocabulary.items()))


def test_a_partial_is_named_with_its_plain_arguments_and_a_tokenizer_by_its_vocabulary():
    assert (
        stable_name(partial(crop, 5, side="left", other=[1]))
        == "crop(5, other=<list>, side='left')"
    )
    assert stable_name(partial(partial(crop, 5), None)) == "crop(5, None)"
    assert stable_name(partial(crop, np.int64(5))) == "crop(5)"
    first, same, other = (
        stable_name(partial(crop, Tokenizer(*words))) for words in ("ab", "ab", "ba")
    )
    assert first == same != other
    assert first.startswith("crop(<Tokenizer of 2 tokens, ")
