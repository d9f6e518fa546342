import random
import re
import threading
from collections import UserDict
from dataclasses import replace
from functools import partial, wraps
from itertools import count

import numpy as np
import pytest
import torch
from refusals import refuses
from torchdata.nodes import IterableWrapper

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    Loader,
    ODBDataLoader,
    PackedCollate,
    PaddingCollate,
    RankAligner,
    Sample,
    SampleError,
    StateError,
    TokenBudget,
    WindowBucketer,
    pop_step_info,
)
from odb_nodes._support.seeds import declares_draws, seed_rngs
from odb_nodes.core.collate.protocol import new_tensor
from odb_nodes.core.nodes import ReadAhead, group_collator
from odb_nodes.core.nodes.seeded_collate import SeededCollate
from odb_nodes.core.processing.columns import DataColumns
from odb_nodes.core.sample_block import SampleBlock
from odb_nodes.training.vision import MultiImageCollate, VisionLanguageCollate
from odb_nodes.training.vision.collate import StepImages

ROWS = [[1, 2, 3], [4], [5, 6]]


def groups(*groups):
    return IterableWrapper([[Sample(data, 1, 1) for data in group] for group in groups])


def test_a_group_is_padded_to_one_of_the_shapes():
    samples = [{"input_ids": row, "labels": row, "id": i} for i, row in enumerate(ROWS)]
    batch = PaddingCollate(pad_token_id=9, shapes=((6, 2), (4, 4)))(samples)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9], [4, 9, 9, 9], [5, 6, 9, 9], [9] * 4]
    assert batch["labels"][3].tolist() == [-100] * 4
    assert batch["attention_mask"].sum(1).tolist() == [3, 1, 2, 0]
    assert batch["id"].tolist() == [0, 1, 2]
    wide = PaddingCollate(pad_to_multiple_of=4, shapes=((6, 2),))(samples[:1])
    assert wide["input_ids"].shape == (1, 4)  # wider than all of them: as it is
    left = PaddingCollate(side="left", shapes=((4, 4),))(samples)
    assert left["attention_mask"].tolist() == [[0, 1, 1, 1], [0, 0, 0, 1], [0, 0, 1, 1], [0] * 4]


def test_other_keys_become_what_they_can():
    batch = PaddingCollate()(
        [
            {"input_ids": row, "token_type_ids": np.ones(len(row)), "n": i, "box": [1] * len(row)}
            | {"name": "x", "weight": np.float32(i), "zero_d": torch.tensor(i)}
            for i, row in enumerate(ROWS)
        ]
    )
    assert batch["token_type_ids"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert batch["n"].tolist() == batch["weight"].tolist() == batch["zero_d"].tolist() == [0, 1, 2]
    assert batch["name"] == ["x", "x", "x"]
    assert batch["box"] == [[1, 1, 1], [1], [1, 1]]  # not told to have a value per token
    padded = PaddingCollate(token_keys=("input_ids", "box"))
    assert padded([{"input_ids": row, "box": row} for row in ROWS])["box"].shape == (3, 3)


def test_rows_of_different_dtypes_lose_nothing():
    rows = [np.array([1, 1]), np.array([0.5, 0.25])]
    batch = PaddingCollate()([{"input_ids": [1, 2], "position_ids": row} for row in rows])
    assert batch["position_ids"].tolist() == [[1, 1], [0.5, 0.25]]


IDS = {"input_ids": [1]}
REFUSALS = [
    ({"shapes": ((2, 4),)}, [IDS] * 3, ValueError, "has 1 tokens must have at most 2 .* has 3"),
    ({"shapes": ((4, 4), (6, 2))}, [], ValueError, r"`shapes` must go .* widths \[4, 2\]"),
    ({"side": "top"}, [], ValueError, "`side` must be one of"),
    ({}, [IDS, {**IDS, "labels": [1]}], ValueError, "the same keys"),
    ({}, [{**IDS, "labels": [1]}, IDS], ValueError, "the same keys"),
    ({}, [{**IDS, "labels": [1, 2]}], ValueError, "sample 0 .* `labels` must have the length"),
    ({}, [IDS] * 2 + [{**IDS, "n": 1}] * 3, SampleError, r"0 lacks \['n'\]: 3 of 5 have"),
    ({}, [IDS] * 5 + [{**IDS, "zz": 1}, IDS], SampleError, r"5 also has \['zz'\]: 6 of 7"),
    ({}, [{**IDS, "a": 1}] + [{**IDS, "b": 1}] * 2, SampleError, r"\['a'\] and lacks \['b'\]"),
    ({}, [IDS, {"input_ids": ["x"]}], SampleError, "sample 1 .*: `input_ids` must hold int"),
    ({}, ["text"], TypeError, "sample 0 .* is a `str`. Pass a `collate_fn`"),
    ({}, [{"text": "x"}], TypeError, "mappings with `input_ids`"),
]


test_samples_that_do_not_go_together_are_an_error = refuses(
    REFUSALS, lambda options, samples: PaddingCollate(**options)(samples)
)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"input_ids": ["a", "b"]}, r"`input_ids` must hold integers.* is \['a', 'b'\]"),
        ({"input_ids": "text"}, "`input_ids` must be a list, .* is 'text'"),
        ({"input_ids": [1, None]}, r"`input_ids` must hold integers.* is \[1, N"),
        ({"input_ids": [1, [2]]}, "`input_ids` must hold integers"),
        ({"input_ids": [0.5, 1.0]}, r"`input_ids` must hold integers.*\[0.5, 1.0\]"),
        ({"input_ids": np.ones(2)}, "`input_ids` must hold integers"),
        ({"input_ids": torch.ones(1, 2)}, "`input_ids` must hold integers"),
        ({"input_ids": [True]}, "`input_ids` must hold integers"),
        ({"input_ids": [1], "labels": ["x"]}, "`labels` must hold numbers.* is .'x'."),
        ({"input_ids": [1], "labels": torch.ones(1, dtype=torch.bfloat16)}, "`labels` must hold n"),
    ],
)
def test_ids_that_are_no_integers_are_named_with_their_key(sample, message):
    for use in (PaddingCollate().prepare, lambda sample: PaddingCollate()([sample])):
        with pytest.raises(SampleError, match=message):
            use(sample)


def test_prepare_returns_a_ready_sample_itself():
    ready = {"input_ids": np.arange(3), "labels": 1, "token_type_ids": None, "name": "x"}
    for sample in (ready, "text", 5, {"text": [1]}, {"input_ids": None}):
        assert PaddingCollate().prepare(sample) is sample
    assert PaddingCollate().prepare({"input_ids": []})["input_ids"].dtype == np.int64


# GroupCollator


def node_of(source, *options):
    node = GroupCollator(source, *options)
    node.reset(None)
    return node


def test_each_batch_carries_its_step_info_which_can_be_taken_once():
    group = [Sample({"input_ids": [1, 2, 3]}, 3, 2), Sample({"input_ids": [1]}, 1, 0)]
    batches = list(node_of(IterableWrapper([group, group])))
    infos = [pop_step_info(batch) for batch in batches]
    assert set(batches[0]) == {"input_ids", "attention_mask"}
    with pytest.raises(KeyError, match="popped before"):
        pop_step_info(batches[0])
    assert [info.step for info in infos] == [0, 1]
    for info in infos:
        assert (info.local_samples, info.all_samples_this_step) == (2, 2)
        assert (info.local_targets, info.all_targets) == (2, 2)
        assert (info.loss_scale, info.is_filler) == (1.0, False)


def test_any_mutable_mapping_serves_as_a_batch():
    (batch,) = node_of(groups([1, 2]), lambda data: UserDict(data=data))
    assert batch["data"] == [1, 2]
    assert pop_step_info(batch).local_samples == 2


def failing(*errors):
    """A collate function that raises these, one by one, at the second group."""
    errors = list(errors)

    def collate(data):
        if data == [2] and errors:
            raise errors.pop()
        return {"data": data}

    return collate


@pytest.mark.parametrize("error", [ValueError, KeyError, StopIteration, SampleError])
def test_an_error_of_a_collate_function_names_it_the_step_and_the_samples(error):
    rows = [{"input_ids": [1] * (n % 5 + 1)} for n in range(40)]
    calls = count()

    def collate(samples):
        if next(calls) == 3:
            raise error("bad")
        return PaddingCollate()(samples)

    loader = ODBDataLoader(rows, token_budget=16, window=8, collate_fn=collate)
    with pytest.raises(SampleError, match="bad") as caught:
        list(loader)
    message = str(caught.value)
    assert error is SampleError or message.startswith(f"`collate_fn` raised {error.__name__}: ")
    assert re.search(r"\b\d+ samples?( \(key \d+\))+ at step 3 of epoch 0", message)
    assert type(caught.value.__cause__) is error


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, KeyboardInterrupt])
def test_an_error_of_a_collate_function_passes_where_its_type_decides(error):
    with pytest.raises(error, match="^boom$"):
        next(node_of(groups([2]), failing(error("boom"))))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failing_collate_function_loses_no_group(error):
    node = node_of(groups([1], [2], [3]), failing(error("boom")))
    next(node)
    good = node.state_dict()
    with pytest.raises(error, match="boom"):
        next(node)
    with pytest.raises(StateError, match="failed at step 1"):
        node.state_dict()
    assert [batch["data"] for batch in node] == [[2], [3]]
    node.reset(good)
    assert [batch["data"] for batch in node] == [[2], [3]]


test_what_does_not_fit_is_refused = refuses(
    [
        (lambda: GroupCollator([1]), "`source` must be a `BaseNode`.* is .1."),
        (lambda: GroupCollator(groups(), 5), "`collate_fn`"),
        (lambda: GroupCollator(IterableWrapper([{}])), "must yield groups, .* yielded `dict`"),
        (
            lambda: GroupCollator(groups([1]), tuple),
            "`collate_fn` must return a dict .* `tuple` at step 0 of epoch 0 instead, for .*sample",
        ),
    ],
    lambda make: list(Loader(make())),
    TypeError,
)


class Stepwise(PaddingCollate):
    """A collate function that looks at the step."""

    def collate_step(self, samples, info):
        return {**self(samples), "seen": info}


def test_a_collate_function_may_look_at_the_step():
    data = [{"input_ids": [1] * (n % 5 + 1), "pixel_values": [0] * (n % 5 == 4)} for n in range(20)]
    bucketer = WindowBucketer(LengthObserver(IterableWrapper(data)), 16, 4)
    batches = list(Loader(GroupCollator(RankAligner(bucketer), Stepwise())))
    for batch in batches:
        info = pop_step_info(batch)  # which knows the tokens of the batch beside
        assert replace(info, local_tokens=0, local_padded_tokens=0) == batch["seen"]
        has_image = any(map(len, batch["pixel_values"]))
        assert batch["seen"].modalities == (("image",) if has_image else ())
    assert {batch["seen"].modalities for batch in batches} == {("image",), ()}


def test_a_collate_function_may_change_the_dicts_it_gets():
    row = {"input_ids": [1], "images": ["a"]}
    node = GroupCollator(groups([row], [row]), lambda rows: {"images": rows[0].pop("images")})
    assert [batch["images"] for batch in Loader(node)] == [["a"], ["a"]]


class Pinned:
    """Stands for pinned memory, which only a machine with CUDA has: notes what is asked of it."""

    def __init__(self):
        self.made, self.pinned = [], []

    def new(self, *of):
        self.made.append(new_tensor(*of))
        return self.made[-1]

    def pin(self, batch):
        self.pinned.append({**batch})
        return batch


def own_collate(samples):
    return {"input_ids": torch.from_numpy(np.stack([sample["input_ids"] for sample in samples]))}


@pytest.mark.parametrize("collate_fn", [None, own_collate])
def test_a_batch_is_pinned_once_and_text_is_collated_into_pinned_memory(collate_fn, monkeypatch):
    memory = Pinned()
    monkeypatch.setattr(group_collator, "PinnedMemory", lambda: memory)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    data = [{"input_ids": np.array(row)} for row in ([1, 2], [3, 4])]
    block = SampleBlock.of([Sample(row, 2, 1) for row in data], DataColumns.of(data))
    node = GroupCollator(IterableWrapper([block, block]), collate_fn, pin_memory=True)
    batches = [*node]
    assert [batch["input_ids"].tolist() for batch in batches] == [[[1, 2], [3, 4]]] * 2
    assert [id(batch["input_ids"]) for batch in memory.pinned] == [
        id(batch["input_ids"]) for batch in batches
    ]
    made = {id(tensor) for tensor in memory.made}
    assert (id(batches[0]["input_ids"]) in made) == (collate_fn is None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_of_text_are_in_pinned_memory():
    node = GroupCollator(groups([{"input_ids": [1, 2]}, {"input_ids": [3]}]), pin_memory=True)
    assert all(
        value.is_pinned() for value in next(node).values() if isinstance(value, torch.Tensor)
    )


# --- collate functions that draw random numbers --------------------------------------------------


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


def collated(collate, seed=0, rank=0):
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
        assert [draw() for _ in collated(collate)] == expected
        assert drawn(collated(collate)) == drawn(collated(collate))


def test_each_step_epoch_rank_and_seed_has_numbers_of_its_own():
    epochs = Loader(collated(draw_all))
    runs = [epochs, epochs, collated(draw_all, rank=1), collated(draw_all, seed=1)]
    numbers = [number for run in runs for batch in drawn(run) for number in batch]
    assert len({*numbers}) == 4 * 6 * 3
    assert numbers[: 6 * 3] == sum(drawn(collated(draw_all)), [])


def test_the_rank_is_that_of_the_environment(monkeypatch):
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        expected = collated(draw_all, rank=rank)
        assert drawn(GroupCollator(expected.source, draw_all)) == drawn(expected)


@pytest.mark.parametrize("own", OWN)
def test_a_generator_of_the_function_is_seeded_for_each_batch_also_if_made_in_the_first(own):
    collate = Keeper(OWN[own])
    first = drawn(collated(collate))
    assert drawn(collated(collate)) == first  # though the generator has advanced
    assert drawn(collated(Keeper(OWN[own], lazily=True))) == first
    assert len({*first}) == 6


FOUND_IN = {
    "partial": lambda own: partial(lambda _, own: {"drawn": own.random()}, own=own),
    "closure": lambda own: lambda _: {"drawn": own.random()},
    "method": lambda own: Keeper(lambda: own).__call__,
    "inner": lambda own: partial(lambda inner, samples: inner(samples), Keeper(lambda: own)),
    "list": lambda own: partial(lambda all, _: {"drawn": all[0].random()}, [own]),
}


@pytest.mark.parametrize("how", FOUND_IN)
def test_generators_in_closures_partials_and_containers_are_seeded(how):
    first, again = (drawn(collated(FOUND_IN[how](random.Random()))) for _ in range(2))
    assert first == again


@pytest.mark.parametrize(("own", "lazily"), [*((own, False) for own in OWN), ("random", True)])
def test_a_shared_generator_continues_for_its_other_users(own, lazily):
    def fail(samples, generator):
        draw_from(generator)
        raise OSError(f"{len(samples)} unreadable")

    shared, alone = OWN[own](), OWN[own]()
    numbers = [draw_from(shared) for _ in collated(Keeper(lambda: shared, lazily=lazily))]
    with pytest.raises(SampleError, match="raised OSError: 1 unreadable"):
        list(collated(partial(fail, generator=shared)))
    assert [*numbers, draw_from(shared)] == [draw_from(alone) for _ in range(7)]


def test_a_generator_of_the_system_has_no_state_and_is_left_alone():
    assert len({*drawn(collated(Keeper(random.SystemRandom)))}) == 6


def test_a_function_that_makes_a_generator_in_each_call_is_not_called_twice_for_each_batch():
    calls = []

    class Maker:
        def __call__(self, samples):
            calls.append(len(samples))
            self.generator = np.random.default_rng(samples[0]["input_ids"][0])
            return {"drawn": self.generator.random()}

    batches = list(collated(Maker()))
    assert len(calls) == len(batches) + 1  # It might have made one for all calls.


# reading ahead


def test_only_collate_functions_that_draw_nothing_run_ahead():
    threads = []

    def collate(samples, draws):
        threads.append(threading.get_ident())
        return {"drawn": random.random() if draws else 0}

    here = threading.get_ident()
    for draws in (True, False):
        threads.clear()
        assert len(list(Loader(ReadAhead(collated(partial(collate, draws=draws)), 2)))) == 6
        assert here not in threads[:1]  # The first batch shows it, while the trainer waits.
        assert {thread == here for thread in threads[1:]} == {draws}


def test_a_function_may_say_that_it_draws_for_some_batches_alone():
    def now_and_then(samples):
        return {"drawn": random.random() if samples[0]["input_ids"][0] % 3 == 2 else 0}

    now_and_then.draws_random_numbers = True
    expected = drawn(collated(now_and_then))
    assert drawn(Loader(ReadAhead(collated(now_and_then), 2))) == expected
    assert len({*expected}) == 3


def test_a_group_that_cannot_be_collated_on_the_trainers_thread_is_not_lost():
    fails = [False]

    def collate(samples):
        if fails[0] and samples[0]["input_ids"] == [3]:
            raise OSError("no route to host")
        return {"drawn": random.random()}

    expected = drawn(collated(collate))
    fails[0], numbers = True, []
    node = ReadAhead(collated(collate), 2)
    with pytest.raises(SampleError, match="raised OSError: no route") as caught:
        for batch in node:
            numbers.append(batch["drawn"])
    assert type(caught.value.__cause__) is OSError
    with pytest.raises(StateError, match="no state after `collate_fn` failed"):
        node.state_dict()
    fails[0] = False
    assert numbers + drawn(node) == expected


# what a function says


def test_a_state_knows_the_seed_only_of_a_function_that_may_draw():
    state = collated(draw_all, seed=1).state_dict()
    with pytest.raises(StateError, match="seed 1' when saved, but is 'may draw, seed 2'"):
        collated(draw_all, seed=2).reset(state)
    collated(None, seed=2).reset(collated(None, seed=1).state_dict())


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
def test_draws_random_numbers_is_not_inherited_by_overrides(collate, draws):
    assert declares_draws(collate) is draws
    assert SeededCollate(collate).draws_nothing is (draws is False)
