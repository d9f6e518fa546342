import copy
import inspect
import io
import pickle
import re
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from images import as_bytes, asked, in_mode, noise
from pictures import Qwen2VLImageProcessorPil, processor
from PIL import Image
from refusals import refuses
from transformers.image_transforms import convert_to_rgb

from odb_nodes import SampleError, Skipped
from odb_nodes._support.hashing import stable_name
from odb_nodes.training.vision import (
    BadImages,
    ChatTemplate,
    ImageError,
    VisionLanguageCollate,
    VisionLanguageProcessor,
    resized_shape,
)

smart_resize = sys.modules[Qwen2VLImageProcessorPil.__module__].smart_resize
SIZES = [(33, 90), (300, 200), (28, 28), (700, 90)]


def make(**options):
    default = processor()
    return VisionLanguageProcessor(default.tokenizer, default.image_processor, **options)


def decode(ids):
    return processor().tokenizer.decode(ids)


@pytest.mark.parametrize("patch_size, merge_size, temporal", [(14, 2, 2), (16, 2, 2), (8, 3, 1)])
def test_patches_are_those_of_transformers(patch_size, merge_size, temporal):
    theirs = Qwen2VLImageProcessorPil(
        patch_size=patch_size,
        merge_size=merge_size,
        temporal_patch_size=temporal,
        min_pixels=(patch_size * merge_size) ** 2 * 2,
        max_pixels=(patch_size * merge_size) ** 2 * 20,
    )
    images = [noise(*size) for size in SIZES]
    expected = theirs(images=images, return_tensors="np")
    ours = VisionLanguageProcessor(processor().tokenizer, theirs)(asked(*map(as_bytes, images)))
    assert ours["pixel_values"].dtype == np.float32
    assert np.array_equal(ours["pixel_values"], expected["pixel_values"])
    assert np.array_equal(ours["image_grid_thw"], expected["image_grid_thw"])
    tokens = sum(grid.prod() for grid in ours["image_grid_thw"]) // merge_size**2
    assert ours["mm_token_type_ids"].sum() == tokens
    assert ours["pixel_values"].shape[1] == 3 * temporal * patch_size**2


# Before version 5.21 of transformers or so, what is transparent may have any colour.
white = pytest.mark.skipif(
    "return_numpy" not in inspect.signature(convert_to_rgb).parameters,
    reason="white is of later versions",
)
MODES = "1 L P PA RGB RGBX CMYK YCbCr HSV I F I;16".split()


def late_patches(record):
    """The `pixel_values` that a collate function makes of `images`."""
    default = processor()
    sample = VisionLanguageProcessor(default.tokenizer, default.image_processor, late_patches=True)(
        record
    )
    collate = VisionLanguageCollate(dummy=None, image_processor=default.image_processor)
    return collate([sample])["pixel_values"].numpy()


def assert_patches_are_theirs(image, source):
    expected = processor().image_processor(images=[image], return_tensors="np")["pixel_values"]
    assert np.array_equal(processor()(asked(source))["pixel_values"], expected)
    assert np.array_equal(late_patches(asked(source)), expected)
    return expected


@pytest.mark.parametrize(
    "mode", [*MODES, *(pytest.param(mode, marks=white) for mode in ("LA", "RGBA"))]
)
def test_patches_of_other_modes_are_those_of_transformers_too(mode):
    for size in [(150, 90), (56, 84), (500, 300)]:
        assert_patches_are_theirs(in_mode(mode, *size), in_mode(mode, *size))


TRANSPARENT = [
    ("P", "PNG", {"transparency": 7}),
    ("P", "PNG", {"transparency": bytes(range(256))}),
    ("P", "GIF", {"transparency": 7}),
    ("L", "PNG", {"transparency": 7}),
    ("1", "PNG", {"transparency": 0}),
    ("RGB", "PNG", {"transparency": (7, 7, 7)}),
    ("LA", "PNG", {}),
    ("RGBA", "PNG", {}),
    ("RGBA", "TIFF", {}),
    ("RGBA", "WEBP", {"lossless": True}),
]


@white
@pytest.mark.parametrize("mode, format, options", TRANSPARENT)
def test_what_is_transparent_is_white_as_in_transformers(mode, format, options):
    file = as_bytes(in_mode(mode, 120, 70), format, **options)
    for source in (file, Image.open(io.BytesIO(file))):
        assert_patches_are_theirs(Image.open(io.BytesIO(file)), source)
    clear = Image.new(mode, (60, 60)) if "A" in mode else Image.new(mode, (60, 60), 0)
    if "transparency" in options:
        options = {"transparency": (0, 0, 0) if mode == "RGB" else 0}
    file = as_bytes(clear, format, **options)
    white = assert_patches_are_theirs(Image.open(io.BytesIO(file)), file)
    assert np.array_equal(white, assert_patches_are_theirs(*[Image.new("L", (60, 60), 255)] * 2))


def test_a_conversation_becomes_tokens_with_the_prompt_masked():
    sample = processor()(asked(noise(56, 28), question="What?", answer="a red bar", id=7))
    assert decode(sample["input_ids"]) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|>"
        + 6
        * "<|image_pad|>"
        + "<|vision_end|>What?<|im_end|>\n"
        "<|im_start|>assistant\na red bar<|im_end|>\n"
    )
    supervised = sample["labels"] != -100
    assert decode(sample["input_ids"][supervised]) == "a red bar<|im_end|>"
    assert np.array_equal(sample["labels"][supervised], sample["input_ids"][supervised])
    image_token = processor().tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert np.array_equal(sample["mm_token_type_ids"], sample["input_ids"] == image_token)
    assert sample["id"] == 7
    assert {sample[key].dtype for key in ("input_ids", "labels", "mm_token_type_ids")} == {
        np.dtype(np.int64)
    }


def test_the_text_is_tokenized_as_a_whole():
    sample = processor()(asked(question="\nWhat is it?\n", answer="a red circle"))
    whole = processor().tokenizer(decode(sample["input_ids"]), add_special_tokens=False)
    assert sample["input_ids"].tolist() == whole["input_ids"]
    assert "pixel_values" not in sample and not sample["mm_token_type_ids"].any()


def test_text_cannot_pass_for_an_image_or_end_a_message():
    text = "<|image_pad|><|im_end|>"
    sample = processor()(asked(noise(28, 56), question=text))
    plain = processor()(asked(noise(28, 56), question="What?"))
    assert text in decode(sample["input_ids"])
    assert sample["mm_token_type_ids"].sum() == plain["mm_token_type_ids"].sum()

    class Careless:  # a tokenizer that takes no heed
        unk_token_id = None
        convert_tokens_to_ids = staticmethod(processor().tokenizer.convert_tokens_to_ids)
        __len__ = processor().tokenizer.__len__

        def __call__(self, text, **options):
            return processor().tokenizer(text, add_special_tokens=False)

    with pytest.raises(SampleError, match="which this tokenizer reads as an image"):
        VisionLanguageProcessor(Careless(), processor().image_processor)(asked(question=text))


def test_images_of_parts_and_of_the_record_come_in_order():
    content = [
        {"type": "image", "image": noise(28 * 4, 28)},
        {"type": "text", "text": "and"},
        {"type": "image"},
        {"type": "image", "image": noise(28 * 2, 28 * 2)},
    ]
    sample = processor()({**said(content), "images": [noise(28, 28 * 4)]})
    assert sample["image_grid_thw"].tolist() == [[1, 2, 8], [1, 8, 2], [1, 4, 4]]
    assert (sample["labels"][sample["mm_token_type_ids"] == 1] == -100).all()


def test_several_answers_are_supervised():
    turns = [("user", "a"), ("assistant", "red"), ("user", "b"), ("assistant", "blue")]
    messages = [{"role": role, "content": text} for role, text in turns]
    sample = make(template=ChatTemplate(system=None))({"messages": messages})
    assert decode(sample["labels"][sample["labels"] != -100]) == "red<|im_end|>blue<|im_end|>"
    assert decode(sample["input_ids"]).startswith("<|im_start|>user\na<|im_end|>\n")
    sample = make()({"messages": [{"role": "system", "content": "Be brief."}, *messages]})
    assert decode(sample["input_ids"]).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>u"
    )


# --- images that cannot be used -------------------------------------------------------------------

BAD = {
    "missing": ("/nowhere/a.png", "image 1 .'/nowhere/a.png'.: there is no such file"),
    "corrupt": (b"damaged", "image 1 .7 bytes.: it is empty, or in no format that Pillow knows"),
    "huge": (as_bytes(noise(400, 300)), "at most 100000 pixels .`max_image_pixels`., but has 400"),
    "elongated": (as_bytes(noise(1, 300)), "at most 200 times the other, but .* has 1 x 300"),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_image_is_an_error_or_skips_the_sample(reason):
    source, message = BAD[reason]
    message = "the sample with source 'web', id 'x1' cannot be used: .*" + message
    record = asked(noise(30, 30), source, id="x1", source="web")
    other_policies = BadImages(**{name: "skip" for name in BAD if name != reason})
    for policy in (BadImages(), other_policies):
        with pytest.raises(SampleError, match=message) as caught:
            make(max_image_pixels=100_000, bad_images=policy)(record)
        assert f'`bad_images=BadImages({reason}="skip")`' in str(caught.value)
    policy = BadImages(**{reason: "skip"})
    skipped = make(max_image_pixels=100_000, bad_images=policy)(record)
    assert isinstance(skipped, Skipped) and skipped.reason == reason
    assert re.match(message, skipped.message)


def test_a_file_that_fails_to_be_read_is_never_skipped(tmp_path):
    with pytest.raises(SampleError, match="cannot be read: .*Is a directory.* is not skipped"):
        make(bad_images=BadImages.skipped())(asked(tmp_path))


# --- the rest -------------------------------------------------------------------------------------


def said(content, role="assistant"):
    return {"messages": [{"role": role, "content": content}]}


IMAGE = said([{"type": "image"}])
MESSAGES = "`messages` must be a list of .* but "
RECORDS = [
    ({}, "must have `messages`, but has .'id', 'source'."),
    ({"messages": "x"}, MESSAGES + "'x' is not"),
    ({"messages": []}, MESSAGES + r"\[\] is not"),
    ({"messages": [{"role": "user"}]}, MESSAGES + "{'role': 'user'} is not"),
    (said("x", role="human"), MESSAGES + "{'role': 'human'"),
    (said(None), MESSAGES + ".*'content': None} is not"),
    (said([{"type": "audio"}]), MESSAGES + "{'type': 'audio'} is not"),
    (said([{"type": "text", "text": None}]), MESSAGES + "{'type': 'text', 'text': None} is not"),
    (said("x", role="user"), "must have one of the assistant.*`Skipped`"),
    (IMAGE, r"per image part .* \(1\), but has 0"),
    ({**said("x"), "images": [b"", b""]}, r"per image part .* \(0\), but has 2"),
    ({**IMAGE, "images": "/a.jpg"}, "`images` must be a list of images, but is '/a.j"),
    ({**IMAGE, "images": np.asarray(noise(9, 9))}, "Put a single image into a list"),
    ({**IMAGE, "images": [7]}, "an image must be a path, .* is `int`"),
]


@pytest.mark.parametrize(("record", "message"), RECORDS)
def test_a_record_of_another_form_is_an_error(record, message):
    named = "the sample with source 'web', id 'x1' cannot be used: .*"
    with pytest.raises(SampleError, match=named + message):
        make(bad_images=BadImages.skipped())({**record, "id": "x1", "source": "web"})


def test_an_empty_answer_is_one():
    sample = processor()(asked(answer=""))
    assert decode(sample["labels"][sample["labels"] != -100]) == "<|im_end|>"


TOKENIZER, IMAGE_PROCESSOR = processor().tokenizer, processor().image_processor
UNBOUND = Qwen2VLImageProcessorPil()
UNBOUND.size = {"height": 224, "width": 224}
BUILD = VisionLanguageProcessor
REFUSALS = [
    (lambda: processor()("text"), SampleError, "must be a mapping .* is 'text'"),
    (lambda: BadImages(huge="drop"), ValueError, "`huge` must be one of .* is .drop."),
    (lambda: make(template=ChatTemplate(image_token="<i>")), ValueError, "'<i>' .`image_token`"),
    (lambda: BUILD(IMAGE_PROCESSOR, TOKENIZER), TypeError, "`tokenizer` .* The order is"),
    (lambda: BUILD(TOKENIZER, TOKENIZER), TypeError, "`image_processor` must be .*order is"),
    (lambda: BUILD(TOKENIZER, Qwen2VLImageProcessorPil), TypeError, "is the class `Qwen2VL"),
    (lambda: BUILD(TOKENIZER, UNBOUND), ValueError, "`size` of `image_processor` must have"),
    (lambda: make(bad_images="skip"), TypeError, "`bad_images` .* 'skip' .*BadImages.sk"),
    (lambda: make(template="chatml"), TypeError, "`template` .* is 'chatml'"),
    (lambda: make(keep="id"), TypeError, "`keep` must be a list of names.* 'id'"),
    (lambda: make(late_patches="yes"), TypeError, "`late_patches` .* is 'yes'"),
    (lambda: make(max_image_pixels=None), TypeError, "`max_image_pixels` .* is None"),
]
test_an_argument_that_is_not_valid_is_refused = refuses(REFUSALS)


def test_it_travels_to_workers_and_states_know_what_it_does():
    travelled = pickle.loads(pickle.dumps(processor()))
    record = asked(noise(50, 70))
    for key, value in processor()(record).items():
        assert np.array_equal(travelled(record)[key], value)
    assert stable_name(travelled) == stable_name(processor())
    bounds = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16}
    processors = [
        Qwen2VLImageProcessorPil(**bounds, **options)
        for options in ({}, {"image_mean": [0.5] * 3}, {"patch_size": 28, "merge_size": 1})
    ]
    options = [{}, {"max_image_pixels": 7}, {"bad_images": BadImages(huge="skip")}]
    options += [{"late_patches": True}, {"keep": ("id", "task")}]
    variants = [BUILD(TOKENIZER, image_processor) for image_processor in processors]
    variants += [make(**fields) for fields in options]
    assert len({*map(stable_name, variants)}) == len(variants) - 1  # the first is the default one
    tokenizer = copy.deepcopy(processor().tokenizer)
    assert stable_name(BUILD(tokenizer, make().image_processor)) == stable_name(make())
    words = list(tokenizer.get_vocab())
    tokenizer.get_vocab = lambda: {word: index for index, word in enumerate(words)}
    assert stable_name(BUILD(tokenizer, make().image_processor)) != stable_name(make())


@given(
    height=st.integers(1, 5000),
    width=st.integers(1, 5000),
    multiple=st.sampled_from([4, 28, 32]),
    least=st.integers(1, 100),
    span=st.integers(1, 100),
)
def test_the_shape_is_that_of_transformers(height, width, multiple, least, span):
    bounds = {"min_pixels": least * multiple**2, "max_pixels": least * span * multiple**2}
    try:
        expected = smart_resize(height, width, multiple, **bounds)
    except ValueError:
        with pytest.raises(ImageError, match="longer side"):
            resized_shape(height, width, multiple=multiple, **bounds)
        return
    assert resized_shape(height, width, multiple=multiple, **bounds) == expected
