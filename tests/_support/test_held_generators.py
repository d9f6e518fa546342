"""Generators are found wherever a function or a dataset holds them."""

import random
import sys
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from odb_nodes._support.held_generators import generators_in

GLOBAL = np.random.default_rng(3)
IN_DICT, BITS = np.random.default_rng(4), np.random.PCG64(5)
REGISTRY = {"augment": [IN_DICT]}


class Holder:
    def __init__(self, generator):
        self.generator = generator

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.generator


@dataclass(slots=True)
class Slotted:
    generator: object


class PrivatelySlotted:
    __slots__ = ("__generator",)

    def __init__(self, generator):
        self.__generator = generator


class Module(torch.nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.generator = generator


class Rows(list):
    """A long list, with an attribute."""


def rows(generator):
    long_list = Rows(range(1000))
    long_list.generator = generator
    return long_list


def in_class(generator):
    return type("Classy", (), {"generator": generator})()


HELD_IN = {
    "attribute": Holder,
    "slot of a dataclass": Slotted,
    "private slot": PrivatelySlotted,
    "class": in_class,
    "list with attributes": rows,
    "method": lambda generator: Holder(generator).__getitem__,
    "method of the generator": lambda generator: generator.random,
    "partial": lambda generator: partial(lambda item, rng: item, rng=generator),
    "closure": lambda generator: lambda item: generator,
    "cached function": lambda generator: lru_cache(lambda item: generator),
    "default": lambda generator: lambda item, rng=generator: item,
    "subset of a subset": lambda generator: Subset(Subset(Holder([{"rng": generator}]), [0]), [0]),
    "one of many datasets": lambda generator: ConcatDataset([*([[1]] * 100), Holder(generator)]),
    "modules": lambda generator: torch.nn.Sequential(torch.nn.Identity(), Module(generator)),
}


class Transform(Holder):
    def __call__(self, item):
        return self.generator.random(), item


TRANSFORM = Transform(np.random.default_rng(6))


def found(holder):
    return [*generators_in([holder])]


@pytest.mark.parametrize("where", HELD_IN)
def test_a_generator_is_found_in_each_holder(where):
    generator = np.random.default_rng(0)
    assert found(HELD_IN[where](generator)) == [generator]


def draw_globally(_item=None):
    return [GLOBAL.random() for _ in range(2)]


class DrawsGlobally:
    def __getitem__(self, index):
        return self.draw(index)

    @staticmethod
    def draw(index):
        return draw_globally(index)


@pytest.mark.parametrize("holder", [draw_globally, lambda item: draw_globally(), DrawsGlobally()])
def test_a_generator_in_a_global_variable_is_found_by_functions_that_name_it(holder):
    assert found(holder) == [GLOBAL]


@pytest.mark.parametrize(
    ("holder", "generator"),
    [
        (lambda item: REGISTRY["augment"][0].random(), IN_DICT),
        (lambda item: TRANSFORM(item), TRANSFORM.generator),
        (lambda item: np.random.Generator(BITS).random(), BITS),
        (in_class({"augment": IN_DICT}), IN_DICT),
        (in_class(TRANSFORM), TRANSFORM.generator),
    ],
)
def test_a_generator_within_a_global_or_class_variable_is_found(holder, generator):
    assert found(holder) == [generator]


def test_a_generator_in_a_module_is_found(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "these", sys.modules[__name__], raising=False)
    assert found(lambda item: these.GLOBAL.random()) == [GLOBAL]  # noqa: F821


def test_generators_are_found_once_in_a_fixed_order():
    generators = [random.Random(1), torch.Generator(), np.random.RandomState(2)]
    holder = partial(
        lambda *_: None, generators[0], Holder(generators[1]), [generators[0], {"a": generators[2]}]
    )
    assert found(holder) == generators
    many = [random.Random() for _ in range(100)]
    assert found(many) == found(dict(enumerate(many))) == many


@pytest.mark.parametrize(
    "holder",
    [
        random.random,
        np.random.rand,
        partial(torch.rand, generator=torch.default_generator),
        Holder(random.SystemRandom()),
        [[np.random.default_rng()]] * 33,  # data
    ],
)
def test_global_and_stateless_generators_and_data_are_ignored(holder):
    assert found(holder) == []
