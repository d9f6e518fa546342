"""Random crops and templates: a sample is the same whoever processes it, and however often."""

import pytest
from pictures import augmented, content_of, make_loader, processor

from odb_nodes import StateError, load_state, save_state
from odb_nodes.vision import VisionLanguageProcessor

pytestmark = pytest.mark.filterwarnings(
    "ignore:sample .* is skipped", "ignore:of the .* samples of the epoch"
)


def make(**options):
    given = {"damaged_every": 0, "process_fn": augmented, "token_budget": 600, **options}
    return make_loader(40, **given)


@pytest.mark.slow
def test_crops_depend_neither_on_workers_nor_on_a_resume_but_on_the_epoch(tmp_path):
    with make() as loader:
        expected = [content_of(loader), content_of(loader)]
    first, second = ({i: b for b in epoch for i in b["id"]} for epoch in expected)
    assert any(first[index] != second[index] for index in first)  # New crops each epoch.
    for before, after in ((0, 4), (2, 0)):
        with make(num_workers=before) as loader:
            batches = iter(loader)
            for _ in range(5):
                next(batches)
            save_state(loader.state_dict(), tmp_path / "state")
        with make(num_workers=after) as loader:
            loader.load_state_dict(load_state(tmp_path / "state"))
            assert [content_of(loader), content_of(loader)] == [expected[0][5:], expected[1]]


@pytest.mark.slow
def test_damaged_pictures_are_skipped_alike_by_workers():
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
