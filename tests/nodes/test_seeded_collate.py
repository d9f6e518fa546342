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
    ODBDataLoader,
    PackedCollate,
    PaddingCollate,
    Sample,
    StateError,
    TokenBudget,
)
from odb_nodes._core.seeds import declares_draws, is_global, seed_rngs
from odb_nodes.nodes import ReadAhead
from odb_nodes.nodes.seeded_collate import SeededCollate
from odb_nodes.testing import assert_resumes_exactly
from odb_nodes.vision import MultiImageCollate, VisionLanguageCollate
from odb_nodes.vision.step_images import StepImages

DATA = [{"input_ids": [n] * (n % 23 + 1)} for n in range(90)]
GLOBAL = {
    "random": random.random,
    "numpy": np.random.random,
    "torch": lambda: float(torch.rand(())),
}
OWN = {
    "torch": lambda: torch.Generator().manual_seed(5),
    "numpy": lambda: np.random.default_rng(5),
    "numpy legacy": lambda: np.random.RandomState(5),
    "random": lambda: random.Random(5),
}


def draw_all(samples):
    """A batch with a number from each of the global generators."""
    batch = PaddingCollate()(samples)
    return {**batch, "drawn": torch.tensor([draw() for draw in GLOBAL.values()])}


def draw_from(generator):
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.random() if hasattr(generator, "random") else generator.random_sample())


class Keeper:
    """A collate function with a generator of its own, which it may make in its first call only."""

    def __init__(self, make, *, lazily=False):
        self.make, self.generator = make, None if lazily else make()

    def __call__(self, samples):
        if self.generator is None:
            self.generator = self.make()
        return {**PaddingCollate()(samples), "drawn": draw_from(self.generator)}


def make_loader(collate, **options):
    options = {"token_budget": 128, "window": 16, "seed": 4, **options}
    return ODBDataLoader(DATA, collate_fn=collate, **options)


def drawn(loader, epochs=1, *, trainer_draws=False):
    """What the batches of some epochs hold, drawing from the global generators in between."""
    found = []
    with loader:
        for _ in range(epochs):
            for batch in loader:
                found.append(np.asarray(batch["drawn"]).tolist())
                if trainer_draws:
                    _ = [draw() for draw in GLOBAL.values() for _ in range(random.randrange(9))]
    return found


def groups(collate, seed=0, rank=0, steps=6):
    source = IterableWrapper([[Sample({"input_ids": [n]}, 1, 1)] for n in range(steps)])
    return GroupCollator(source, collate, seed, rank)


@pytest.mark.parametrize("name", GLOBAL)
def test_the_generators_of_the_trainer_are_left_alone(name):
    draw = GLOBAL[name]

    def numbers(collate):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        return [draw() for _ in make_loader(collate)]

    assert numbers(draw_all) == numbers(None)


def test_each_step_epoch_rank_and_seed_has_numbers_of_its_own():
    epochs = Loader(groups(draw_all))
    numbers = [tuple(batch["drawn"].tolist()) for _ in range(2) for batch in epochs]
    for other in (groups(draw_all, rank=1), groups(draw_all, seed=1)):
        numbers += [tuple(batch["drawn"].tolist()) for batch in other]
    assert len({*numbers}) == 24
    assert numbers[:6] == [tuple(batch["drawn"].tolist()) for batch in groups(draw_all)]


def test_the_rank_is_that_of_the_environment(monkeypatch):
    def numbers():
        source = groups(draw_all).source
        return [batch["drawn"].tolist() for batch in GroupCollator(source, draw_all)]

    expected = [
        [batch["drawn"].tolist() for batch in groups(draw_all, rank=rank)] for rank in range(2)
    ]
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert numbers() == expected[rank]


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("own", OWN)
def test_a_generator_of_the_function_is_seeded_for_each_batch(own, lazily):
    collate = Keeper(OWN[own], lazily=lazily)
    first = drawn(make_loader(collate))
    assert drawn(make_loader(collate)) == first  # though the generator has advanced
    assert drawn(make_loader(Keeper(OWN[own], lazily=True))) == first
    assert len({*first}) == len(first) > 9
    assert_resumes_exactly(lambda: make_loader(Keeper(OWN[own], lazily=lazily)), every=9, chain=0)


@pytest.mark.parametrize("how", ["partial", "closure", "method", "inner", "list"])
def test_generators_are_found_wherever_a_function_keeps_them(how):
    def make():
        generator, keeper = random.Random(), Keeper(random.Random)
        return {
            "partial": partial(
                lambda samples, generator: {"drawn": generator.random()}, generator=generator
            ),
            "closure": lambda samples: {"drawn": generator.random()},
            "method": keeper.__call__,
            "inner": partial(lambda inner, samples: inner(samples), keeper),
            "list": partial(lambda all, samples: {"drawn": all[0].random()}, [generator]),
        }[how]

    first, again = ([batch["drawn"] for batch in groups(make())] for _ in range(2))
    assert first == again


@pytest.mark.parametrize("name", GLOBAL)
def test_the_global_generators_are_known(name):
    kept = {
        "random": random.random.__self__,
        "numpy": np.random.random_sample.__self__,
        "torch": torch.default_generator,
    }[name]
    seed_rngs(5)
    expected = GLOBAL[name]()
    seed_rngs(5)
    assert is_global(kept) and draw_from(kept) == expected


def test_a_global_generator_that_a_function_keeps_is_put_back():
    collate = Keeper(lambda: torch.default_generator)
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    first = torch.rand(()).item()
    numbers = [batch["drawn"] for batch in groups(collate)]
    assert [first, torch.rand(()).item()] == expected
    assert numbers == [batch["drawn"] for batch in groups(collate)]


def test_it_resumes_exactly_at_every_step():
    assert_resumes_exactly(lambda: make_loader(draw_all), epochs=2)


@pytest.mark.parametrize("collate", [draw_all, Keeper(OWN["torch"], lazily=True)])
def test_batches_do_not_depend_on_workers_nor_on_what_the_trainer_draws(collate):
    expected = drawn(make_loader(collate), epochs=2)
    for _ in range(2):
        loader = make_loader(collate, num_workers=1, prefetch=3)
        assert drawn(loader, epochs=2, trainer_draws=True) == expected


def test_it_resumes_exactly_at_steps_that_were_read_ahead():
    assert_resumes_exactly(lambda: make_loader(draw_all, num_workers=1), every=5, chain=1)


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
    expected = [batch["drawn"] for batch in groups(now_and_then)]
    assert [batch["drawn"] for batch in Loader(ReadAhead(groups(now_and_then), 2))] == expected
    assert len({*expected}) == 3


def test_a_group_that_cannot_be_collated_on_the_trainers_thread_is_not_lost():
    fails = [False]

    def collate(samples):
        if fails[0] and samples[0]["input_ids"] == [3]:
            raise OSError("no route to host")
        return {"drawn": random.random(), "id": samples[0]["input_ids"][0]}

    def make():
        return ReadAhead(groups(collate), 2)

    expected = [(batch["id"], batch["drawn"]) for batch in Loader(make())]
    fails[0], loader, found = True, Loader(make()), []
    with pytest.raises(OSError, match="no route"):
        for batch in loader:
            found.append((batch["id"], batch["drawn"]))
    fails[0] = False
    assert found + [(batch["id"], batch["drawn"]) for batch in loader] == expected
    fails[0], node = True, make()
    with pytest.raises(OSError, match="no route"):
        list(node)
    with pytest.raises(StateError, match="no state after `collate_fn` failed"):
        node.state_dict()
    fails[0] = False
    assert [batch["id"] for batch in node] == [3, 4, 5]


def test_a_function_that_makes_a_generator_in_each_call_is_not_called_twice_for_each_batch():
    calls = []

    class Maker:
        def __call__(self, samples):
            calls.append(len(samples))
            self.generator = np.random.default_rng(samples[0]["input_ids"][0])
            return {"drawn": self.generator.random()}

    batches = list(groups(Maker()))
    assert len(calls) == len(batches) + 1  # It might have made one for all calls.


def test_a_state_knows_the_seed_only_of_a_function_that_may_draw():
    state = groups(draw_all, seed=1).state_dict()
    with pytest.raises(
        StateError,
        match="'may draw, seed 1' when saved, but is 'may draw, seed 2'",
    ):
        groups(draw_all, seed=2).reset(state)
    groups(None, seed=2).reset(groups(None, seed=1).state_dict())
    assert SeededCollate(PaddingCollate()).draws_nothing
    assert not SeededCollate(type("Own", (PaddingCollate,), {})()).draws_nothing


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("own", OWN)
def test_a_generator_that_others_use_as_well_goes_on_for_them(own, lazily):
    shared, alone = OWN[own](), OWN[own]()
    numbers = []
    for _ in groups(Keeper(lambda: shared, lazily=lazily)):
        numbers.append(draw_from(shared))
    with pytest.raises(OSError, match="unreadable"):
        list(groups(partial(fail, generator=shared)))
    assert [*numbers, draw_from(shared)] == [draw_from(alone) for _ in range(7)]


def test_a_generator_of_the_system_has_no_state_and_is_left_alone():
    assert len([*groups(Keeper(random.SystemRandom))]) == 6


def fail(samples, generator):
    draw_from(generator)
    raise OSError(f"{len(samples)} unreadable")


def test_what_draws_nothing_says_so_and_not_for_its_subclasses():
    budget = TokenBudget(8, layout="packed")
    for ours in (
        PaddingCollate(),
        PackedCollate.of(budget),
        MultiImageCollate(),
        VisionLanguageCollate(dummy=None),
    ):
        assert declares_draws(ours) is False

    class Masking(PaddingCollate):
        pass

    class Quiet(PaddingCollate):
        draws_random_numbers = False

    class Drawing(PaddingCollate):
        draws_random_numbers = True

    class Further(Drawing):
        pass

    found = [declares_draws(kind()) for kind in (Masking, Quiet, Drawing, Further)]
    assert found == [None, False, True, True]
    assert declares_draws(draw_all) is None
    assert declares_draws(StepImages()) is None  # of this library, where nobody has said


def test_a_wrapper_of_what_draws_nothing_may_draw():
    def quiet(samples):
        return samples

    quiet.draws_random_numbers = False

    @wraps(quiet)  # which copies the attribute
    def wrapper(samples):
        return random.sample(quiet(samples), 1)

    @wraps(draw_all)
    def other(samples):
        return samples

    other.draws_random_numbers = False
    assert [declares_draws(one) for one in (quiet, wrapper, other)] == [False, None, False]
