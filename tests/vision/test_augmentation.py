"""Random crops and templates: a sample is the same whoever processes it, and however often."""

import pytest
import torch
from pictures import augmented, content_of, make_loader, processor

from odb_nodes import StateError, load_state, pop_step_info, save_state
from odb_nodes.testing import assert_resumes_exactly
from odb_nodes.vision import VisionLanguageProcessor

pytestmark = pytest.mark.filterwarnings("ignore:sample .* is skipped")


def make(size=40, **options):
    given = {"damaged_every": 0, "process_fn": augmented, "token_budget": 600, **options}
    return make_loader(size, **given)


def equal(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one
    )


def epoch(loader):
    found = []
    for batch in loader:
        pop_step_info(batch)
        found.append(batch)
    return found


def test_batches_do_not_depend_on_the_number_of_workers():
    with make() as loader:
        expected = [epoch(loader), epoch(loader)]
    for num_workers in (1, 4):
        with make(num_workers=num_workers) as loader:
            for whole in expected:
                found = epoch(loader)
                assert len(found) == len(whole)
                assert all(map(equal, found, whole))
    first, second = ({i: b for b in e for i in b["id"].tolist()} for e in expected)
    assert any(not equal(first[index], second[index]) for index in first)  # New crops each epoch.


@pytest.mark.parametrize("workers", [(0, 4), (4, 0), (1, 1)])
def test_a_resumed_run_has_the_same_crops(workers, tmp_path):
    with make() as loader:
        expected = [epoch(loader), epoch(loader)]
    before, after = workers
    for step in range(1, len(expected[0]), 3):
        with make(num_workers=before) as loader:
            batches = iter(loader)
            for _ in range(step):
                next(batches)
            save_state(loader.state_dict(), tmp_path / "state")
        with make(num_workers=after) as loader:
            loader.load_state_dict(load_state(tmp_path / "state"))
            found = [*epoch(loader), *epoch(loader)]
        rest = [*expected[0][step:], *expected[1]]
        assert len(found) == len(rest)
        assert all(map(equal, found, rest))


def test_a_resumed_run_has_the_same_crops_at_every_step(sampled):
    less = sampled(horizon=3, chain=1)
    assert assert_resumes_exactly(lambda: make(16), epochs=2, **less).resumes > 10


def test_a_graph_with_skipped_pictures_resumes_exactly(sampled):
    less = sampled(horizon=3, chain=1)
    report = assert_resumes_exactly(lambda: make_loader(30), epochs=1, **less)
    assert report.resumes > 5
    with make_loader(60, num_workers=2) as parallel, make_loader(60) as alone:
        assert content_of(parallel) == content_of(alone)
        assert parallel.skipped_samples == alone.skipped_samples
        assert alone.skipped_samples["corrupt"] >= 3


def test_a_state_knows_the_processor():
    with make_loader(20, damaged_every=0) as loader:
        next(iter(loader))
        state = loader.state_dict()
    made = processor()
    other = VisionLanguageProcessor(made.tokenizer, made.image_processor, max_image_pixels=10**8)
    with make_loader(20, damaged_every=0, process_fn=other) as loader:
        loader.load_state_dict(state)
        with pytest.raises(StateError, match="max_image_pixels=100000000"):
            next(iter(loader))
