"""Collate functions that draw random numbers."""

import random
import threading
from functools import partial, wraps

import numpy as np
import pytest
import torch
from torchdata.nodes import IterableWrapper

from odb_nodes import (
    GroupCollator,
    Loader,
    PackedCollate,
    PaddingCollate,
    Sample,
    StateError,
    TokenBudget,
)
from odb_nodes._core.seeds import declares_draws, seed_rngs
from odb_nodes.nodes import ReadAhead
from odb_nodes.nodes.seeded_collate import SeededCollate
from odb_nodes.vision import MultiImageCollate, VisionLanguageCollate
from odb_nodes.vision.collate import StepImages

GLOBAL = {
    "random": (random.random, random.random.__self__),
    "numpy": (np.random.random, np.random.random_sample.__self__),
    "torch": (lambda: float(torch.rand(())), torch.default_generator),
}
OWN = {
    "torch": lambda: torch.Generator().manual_seed(5),
    "numpy": lambda: np.random.default_rng(5),
    "numpy legacy": lambda: np.random.RandomState(5),
    "random": lambda: random.Random(5),
}


def draw_all(_):
    """A batch with a number from each of the global generators."""
    return {"drawn": [draw() for draw, _ in GLOBAL.values()]}


def draw_from(generator):
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.random() if hasattr(generator, "random") else generator.random_sample())


class Keeper:
    """Draws from a generator of its own, which it may make in its first call, and a global one."""

    def __init__(self, make, *, lazily=False):
        self.make, self.generator = make, None if lazily else make()

    def __call__(self, samples):
        if self.generator is None:
            self.generator = self.make()
        return {"drawn": (draw_from(self.generator), random.random())}


def groups(collate, seed=0, rank=0):
    source = IterableWrapper([[Sample({"input_ids": [n]}, 1, 1)] for n in range(6)])
    return GroupCollator(source, collate, seed, rank)


def drawn(batches):
    return [batch["drawn"] for batch in batches]


@pytest.mark.parametrize("name", GLOBAL)
def test_the_generators_of_the_trainer_are_left_alone_also_if_the_function_keeps_them(name):
    draw, kept = GLOBAL[name]
    for collate in (draw_all, Keeper(lambda: kept)):
        seed_rngs(3)
        expected = [draw() for _ in range(6)]
        seed_rngs(3)
        assert [draw() for _ in groups(collate)] == expected
        assert drawn(groups(collate)) == drawn(groups(collate))


def test_each_step_epoch_rank_and_seed_has_numbers_of_its_own():
    epochs = Loader(groups(draw_all))
    runs = [epochs, epochs, groups(draw_all, rank=1), groups(draw_all, seed=1)]
    numbers = [number for run in runs for one in drawn(run) for number in one]
    assert len({*numbers}) == 4 * 6 * 3
    assert numbers[: 6 * 3] == sum(drawn(groups(draw_all)), [])


def test_the_rank_is_that_of_the_environment(monkeypatch):
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        expected = groups(draw_all, rank=rank)
        assert drawn(GroupCollator(expected.source, draw_all)) == drawn(expected)


@pytest.mark.parametrize("own", OWN)
def test_a_generator_of_the_function_is_seeded_for_each_batch_also_if_made_in_the_first(own):
    collate = Keeper(OWN[own])
    first = drawn(groups(collate))
    assert drawn(groups(collate)) == first  # though the generator has advanced
    assert drawn(groups(Keeper(OWN[own], lazily=True))) == first
    assert len({*first}) == 6


FOUND_IN = {
    "partial": lambda own: partial(lambda _, own: {"drawn": own.random()}, own=own),
    "closure": lambda own: lambda _: {"drawn": own.random()},
    "method": lambda own: Keeper(lambda: own).__call__,
    "inner": lambda own: partial(lambda inner, samples: inner(samples), Keeper(lambda: own)),
    "list": lambda own: partial(lambda all, _: {"drawn": all[0].random()}, [own]),
}


@pytest.mark.parametrize("how", FOUND_IN)
def test_generators_are_found_wherever_a_function_keeps_them(how):
    first, again = (drawn(groups(FOUND_IN[how](random.Random()))) for _ in range(2))
    assert first == again


@pytest.mark.parametrize(("own", "lazily"), [*((own, False) for own in OWN), ("random", True)])
def test_a_generator_that_others_use_as_well_goes_on_for_them(own, lazily):
    def fail(samples, generator):
        draw_from(generator)
        raise OSError(f"{len(samples)} unreadable")

    shared, alone = OWN[own](), OWN[own]()
    numbers = [draw_from(shared) for _ in groups(Keeper(lambda: shared, lazily=lazily))]
    with pytest.raises(OSError, match="unreadable"):
        list(groups(partial(fail, generator=shared)))
    assert [*numbers, draw_from(shared)] == [draw_from(alone) for _ in range(7)]


def test_a_generator_of_the_system_has_no_state_and_is_left_alone():
    assert len({*drawn(groups(Keeper(random.SystemRandom)))}) == 6


def test_a_function_that_makes_a_generator_in_each_call_is_not_called_twice_for_each_batch():
    calls = []

    class Maker:
        def __call__(self, samples):
            calls.append(len(samples))
            self.generator = np.random.default_rng(samples[0]["input_ids"][0])
            return {"drawn": self.generator.random()}

    batches = list(groups(Maker()))
    assert len(calls) == len(batches) + 1  # It might have made one for all calls.


# reading ahead


def test_what_does_not_draw_is_collated_ahead_and_what_draws_is_not():
    threads = []

    def collate(samples, draws):
        threads.append(threading.get_ident())
        return {"drawn": random.random() if draws else 0}

    here = threading.get_ident()
    for draws in (True, False):
        threads.clear()
        assert len(list(Loader(ReadAhead(groups(partial(collate, draws=draws)), 2)))) == 6
        assert here not in threads[:1]  # The first batch shows it, while the trainer waits.
        assert {one == here for one in threads[1:]} == {draws}


def test_a_function_may_say_that_it_draws_for_some_batches_alone():
    def now_and_then(samples):
        return {"drawn": random.random() if samples[0]["input_ids"][0] % 3 == 2 else 0}

    now_and_then.draws_random_numbers = True
    expected = drawn(groups(now_and_then))
    assert drawn(Loader(ReadAhead(groups(now_and_then), 2))) == expected
    assert len({*expected}) == 3


def test_a_group_that_cannot_be_collated_on_the_trainers_thread_is_not_lost():
    fails = [False]

    def collate(samples):
        if fails[0] and samples[0]["input_ids"] == [3]:
            raise OSError("no route to host")
        return {"drawn": random.random()}

    expected = drawn(groups(collate))
    fails[0], found = True, []
    node = ReadAhead(groups(collate), 2)
    with pytest.raises(OSError, match="no route"):
        for batch in node:
            found.append(batch["drawn"])
    with pytest.raises(StateError, match="no state after `collate_fn` failed"):
        node.state_dict()
    fails[0] = False
    assert found + drawn(node) == expected


# what a function says


def test_a_state_knows_the_seed_only_of_a_function_that_may_draw():
    state = groups(draw_all, seed=1).state_dict()
    with pytest.raises(StateError, match="seed 1' when saved, but is 'may draw, seed 2'"):
        groups(draw_all, seed=2).reset(state)
    groups(None, seed=2).reset(groups(None, seed=1).state_dict())


class Masking(PaddingCollate):
    pass


class Drawing(PaddingCollate):
    draws_random_numbers = True


def quiet(samples):
    return samples


quiet.draws_random_numbers = False


@wraps(quiet)  # which copies the attribute
def wrapper(samples):
    return random.sample(quiet(samples), 1)


@pytest.mark.parametrize(
    ("collate", "draws"),
    [
        (PaddingCollate(), False),
        (PackedCollate.of(TokenBudget(8, layout="packed")), False),
        (MultiImageCollate(), False),
        (VisionLanguageCollate(dummy=None), False),
        (Masking(), None),  # what its base says is not said of it
        (type("Quiet", (Masking,), {"draws_random_numbers": False})(), False),
        (type("Further", (Drawing,), {})(), True),
        (draw_all, None),
        (quiet, False),
        (wrapper, None),
        (StepImages(), None),  # of this library, where nobody has said
    ],
)
def test_what_draws_nothing_says_so_and_not_for_its_subclasses_nor_wrappers(collate, draws):
    assert declares_draws(collate) is draws
    assert SeededCollate(collate).draws_nothing is (draws is False)
