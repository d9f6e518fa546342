from dataclasses import replace

import numpy as np
import pytest
import torch
from images import step
from pictures import (
    Qwen2VLImageProcessorPil,
    augmented,
    content_of,
    make_loader,
    processor,
    record,
    samples,
)
from refusals import refuses

from odb_nodes import PaddingCollate, SampleError, TokenBudget, load_state, save_state
from odb_nodes.core.processing.observation import observe_sample
from odb_nodes.testing import assert_resumes_exactly
from odb_nodes.training.vision import VisionLanguageCollate

collate = VisionLanguageCollate(dummy=processor().dummy_image(), pad_token_id=0)


def test_text_is_padded_and_images_are_joined():
    group = samples([0, 1, 2, 5])  # with 0, 1, 2 and 2 images
    batch = collate(group)
    width = max(len(sample["input_ids"]) for sample in group)
    keys = ("input_ids", "labels", "attention_mask", "mm_token_type_ids")
    assert all(batch[key].shape == (4, width) for key in keys)
    with_images = group[1:]
    for key in ("pixel_values", "image_grid_thw"):
        expected = np.concatenate([sample[key] for sample in with_images])
        assert np.array_equal(batch[key], expected)
    assert batch["pixel_values"].dtype == torch.float32
    assert batch["id"].tolist() == [0, 1, 2, 5]
    assert "position_ids" not in batch
    assert batch["mm_token_type_ids"].sum() == batch["image_grid_thw"].prod(-1).sum() // 4


def test_text_alone_is_what_padding_collate_makes():
    group = samples([0, 3, 6])
    batch = collate(group)
    token_keys = (*PaddingCollate.token_keys, "mm_token_type_ids")
    expected = PaddingCollate(token_keys=token_keys)(group)
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[key], expected[key]) for key in batch)


def test_a_text_that_came_another_way_needs_no_token_types():
    plain = {"id": 9, "input_ids": [1, 2, 3], "labels": [1, 2, 3]}
    batch = collate([*samples([1]), plain])
    assert not batch["mm_token_type_ids"][1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patches_may_be_tensors(dtype):
    (sample,) = samples([1])
    tensors = {key: torch.as_tensor(value) for key, value in sample.items()}
    batch = collate([{**tensors, "pixel_values": tensors["pixel_values"].to(dtype)}])
    assert batch["pixel_values"].dtype == torch.float32
    assert torch.equal(batch["pixel_values"], tensors["pixel_values"].to(dtype).float())


FIRST, SECOND = samples([1, 4])
TOKENS = ("input_ids", "labels", "mm_token_type_ids")
END = int(np.flatnonzero(SECOND["mm_token_type_ids"])[0]) + 3
CUT = {**SECOND, **{key: SECOND[key][:END] for key in TOKENS}}  # 3 image tokens are left
PLACE = np.flatnonzero(SECOND["mm_token_type_ids"])[:1]
MORE = {**SECOND, **{key: np.append(SECOND[key], SECOND[key][PLACE]) for key in TOKENS}}
LACKS = "`input_ids` must have an image token for each 4 of the .* has 3 of them. Do not cut"


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (CUT, LACKS),
        (MORE, "must have an image token for each 4"),
        ({**SECOND, "pixel_values": SECOND["pixel_values"][:3]}, "row per patch .*, but has 3 ins"),
        ({**SECOND, "pixel_values": SECOND["pixel_values"][:, :100]}, r"of \(1176,\) val.*\(100,"),
    ],
)
def test_images_that_do_not_fit_the_text_or_the_batch_are_an_error(second, message):
    for function in (collate, VisionLanguageCollate(dummy=None)):
        with pytest.raises(SampleError, match="sample 1 of the group: .*" + message):
            function([FIRST, second])


def test_a_dummy_or_an_image_processor_tells_how_many_patches_make_a_token():
    sample = {**SECOND, **{key: SECOND[key][: END - 2] for key in TOKENS}}  # a token for all
    for options in (
        {"dummy": DUMMY},
        {"dummy": None, "image_processor": PROCESSOR.image_processor},
    ):
        with pytest.raises(SampleError, match="for each 4 of the .* has 1 of them"):
            VisionLanguageCollate(**options)([sample])


def test_tokens_that_only_the_model_knows_are_not_counted():
    plain = {key: value for key, value in CUT.items() if key != "mm_token_type_ids"}
    VisionLanguageCollate(dummy=None)([plain])
    patches = late(record(4)) | {key: CUT[key] for key in TOKENS}
    with pytest.raises(SampleError, match=LACKS):
        VisionLanguageCollate(dummy=None, image_processor=processor().image_processor)([patches])


@pytest.mark.parametrize(
    ("group", "seen"),
    [
        (["text"], "is a `str`. Pass"),
        ([{"labels": [1]}], r"is a `dict` with the keys \['labels'\]"),
    ],
)
def test_what_is_no_sample_is_refused(group, seen):
    message = f"`VisionLanguageCollate` takes mappings with `input_ids`, but sample 0 .* {seen}"
    for use in (collate, lambda samples: collate.collate_step(samples, step("image"))):
        with pytest.raises(TypeError, match=message):
            use(group)


def test_images_that_the_step_does_not_know_of_are_an_error():
    info = step("audio")
    with pytest.raises(ValueError, match="'image' must be among its `modalities`, but they are"):
        collate.collate_step(samples([1]), replace(info, all_samples_this_step=2))
    collate.collate_step(samples([1]), info)  # No other rank waits.


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_dummy_goes_behind_the_shortest_sample_where_others_have_images(side):
    group = samples([3, 0, 6])
    collate = VisionLanguageCollate(dummy=processor().dummy_image(), side=side)
    plain, batch = collate(group), collate.collate_step(group, step("image"))
    assert batch["input_ids"].shape == plain["input_ids"].shape  # There was room.
    changed = (batch["input_ids"] != plain["input_ids"]).any(dim=1).nonzero().flatten()
    lengths = [len(sample["input_ids"]) for sample in group]
    assert changed.tolist() == [lengths.index(min(lengths))]
    (row,) = changed.tolist()
    seen = batch["attention_mask"][row].bool()
    added = batch["input_ids"][row][seen][lengths[row] :]
    dummy = "<|vision_start|><|image_pad|><|vision_end|>"
    assert processor().tokenizer.decode(added) == dummy
    assert (
        batch["input_ids"][row][seen][: lengths[row]].tolist() == group[row]["input_ids"].tolist()
    )
    assert (batch["labels"] != -100).sum() == (plain["labels"] != -100).sum()
    assert batch["mm_token_type_ids"].sum() == 1
    assert batch["pixel_values"].shape == (4, 1176) and not batch["pixel_values"].any()
    assert batch["image_grid_thw"].tolist() == [[1, 2, 2]]


def test_no_dummy_is_needed_where_a_rank_has_images_or_no_rank_has():
    for group, info in [(samples([1, 0]), step("image")), (samples([0]), step())]:
        batch, expected = collate.collate_step(group, info), collate(group)
        assert all(torch.equal(batch[key], expected[key]) for key in expected)
    assert "pixel_values" not in VisionLanguageCollate(dummy=None).collate_step(
        samples([0]), step("image")
    )


def test_a_filler_has_no_images_where_no_rank_has():
    (sample,) = samples([5])
    batch = collate.collate_step([sample], step(is_filler=True))
    assert not {"pixel_values", "image_grid_thw"} & batch.keys()
    assert batch["mm_token_type_ids"].sum() == 0
    images = sample["mm_token_type_ids"].sum()
    assert batch["input_ids"].shape == (1, len(sample["input_ids"]) - images)
    assert (batch["labels"] != -100).sum() == (sample["labels"] != -100).sum()
    # Where they are agreed on, they stay.
    assert "pixel_values" in collate.collate_step([sample], step("image", is_filler=True))


PACKED, SHAPES = TokenBudget(512, layout="packed"), TokenBudget(512, shapes=4)
DUMMY = processor().dummy_image()
NO_LABELS = [{"input_ids": [1, 2]}]
OTHER = "must be a `DummyImage`, but is .*, with the paren"
REFUSALS = [
    (lambda: make_loader(token_budget=PACKED), ValueError, "`VisionLanguageCollate` .*layout=.pad"),
    (lambda: VisionLanguageCollate.of(SHAPES, dummy=DUMMY), ValueError, "`shapes` .*`dummy`"),
    (lambda: collate.collate_step(NO_LABELS, step("image")), SampleError, "must have `labels`"),
    (lambda: VisionLanguageCollate(dummy=processor().dummy_image), TypeError, OTHER),
    (
        lambda: VisionLanguageCollate(dummy=None, image_processor=processor()),
        TypeError,
        "`image_processor` must be .* Pass `processor.im",
    ),
]
test_what_does_not_go_with_images_is_refused = refuses(REFUSALS)


# --- patches made with the batch ------------------------------------------------------------------

PROCESSOR = processor()
late = replace(PROCESSOR, late_patches=True)


def test_late_patches_are_the_same_in_an_eighth_of_the_memory():
    collate = VisionLanguageCollate(
        dummy=PROCESSOR.dummy_image(), image_processor=PROCESSOR.image_processor
    )
    indices = [0, 1, 2, 5]
    carried = [late(record(index)) for index in indices]
    batch, expected = collate(carried), collate(samples(indices))
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[key], expected[key]) for key in expected)
    assert [observe_sample(sample)[1:] for sample in carried] == [
        observe_sample(sample)[1:] for sample in samples(indices)
    ]
    (early,) = samples([5])
    assert 8 * sum(image.nbytes for image in carried[-1]["images"]) == early["pixel_values"].nbytes
    without = collate.collate_step([carried[-1]], step(is_filler=True))
    assert not {"pixel_values", "images", "image_settings"} & without.keys()
    with pytest.raises(SampleError, match="pass `image_processor=processor.image_processor`"):
        VisionLanguageCollate(dummy=None)(carried)


@pytest.mark.parametrize(
    "name, value, shown",
    [
        ("patch_size", 16, "16 instead of 14"),
        ("image_mean", [0.5, 0.5, 0.5], ".0.5, 0.5, 0.5. instead of .0.48"),
        ("rescale_factor", 1 / 127.5, "0.0078.* instead of 0.0039"),
    ],
)
def test_late_patches_are_made_as_the_processor_would_make_them(name, value, shown):
    image_processor = Qwen2VLImageProcessorPil(**{name: value})
    with pytest.raises(SampleError, match=f"but differs in `{name}` .{shown}.*Pass the same"):
        VisionLanguageCollate(dummy=None, image_processor=image_processor)([late(record(1))])
    bounded = Qwen2VLImageProcessorPil(max_pixels=28 * 28 * 5)  # of no account
    batch = VisionLanguageCollate(dummy=None, image_processor=bounded)([late(record(1))])
    assert torch.equal(batch["pixel_values"], collate(samples([1]))["pixel_values"])


@pytest.mark.slow
@pytest.mark.parametrize("state", ["replay", "payload"])
@pytest.mark.filterwarnings("ignore:sample .* is skipped", "ignore:of the .* samples read for")
def test_late_patches_come_out_of_workers_and_states(state, sampled):
    with make_loader(30, process_fn=late, num_workers=2, state=state) as loader:
        assert content_of(loader) == content_of(make_loader(30))
    less = sampled(horizon=2, chain=1, every=2)
    assert_resumes_exactly(lambda: make_loader(20, process_fn=late, state=state), epochs=1, **less)


# --- random crops and templates: a sample is the same whoever processes it, and however often ----

CROPPED = {"damaged_every": 0, "process_fn": augmented, "token_budget": 600}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:of the .* samples read for")
def test_crops_depend_neither_on_workers_nor_on_a_resume_but_on_the_epoch(tmp_path):
    with make_loader(40, **CROPPED) as loader:
        expected = [content_of(loader), content_of(loader)]
    first, second = ({i: b for b in epoch for i in b["id"]} for epoch in expected)
    assert any(first[index] != second[index] for index in first)  # New crops each epoch.
    for before, after in ((0, 4), (2, 0)):
        with make_loader(40, **CROPPED, num_workers=before) as loader:
            batches = iter(loader)
            for _ in range(5):
                next(batches)
            save_state(loader.state_dict(), tmp_path / "state")
        with make_loader(40, **CROPPED, num_workers=after) as loader:
            loader.load_state_dict(load_state(tmp_path / "state"))
            assert [content_of(loader), content_of(loader)] == [expected[0][5:], expected[1]]
