"""Packed rows of images and text: the gradient of the samples padded, which stay apart."""

import copy
import functools
import itertools
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from aligned_ranks import on_ranks
from images import step
from pictures import IMAGE_TOKEN, network_of, processor, record, samples
from refusals import refuses
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface

from odb_nodes import ODBDataLoader, PackedCollate, SampleError, TokenBudget, pop_step_info
from odb_nodes.core.collate import check_packing
from odb_nodes.testing import assert_resumes_exactly
from odb_nodes.training.vision import VisionLanguageCollate

QWEN = ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe"]
PLAIN = ["Llava", "InternVL"]
PACKED = TokenBudget(2048, layout="packed")
DUMMY = processor().dummy_image()
INDICES = [2, 0, 1, 5, 3, 4]


@functools.cache
def network(kind):
    """A tiny model in fp64."""
    network = copy.deepcopy(network_of(kind)).double()
    if kind.endswith("Moe"):
        network.set_experts_implementation("eager")  # the one for fp64
    return network


def group_of(kind, indices=INDICES):
    """Samples with 0 to 2 images: patches with a grid, or whole images."""
    if kind in QWEN:
        return samples(indices)
    rows = []
    for index in indices:
        rng = np.random.default_rng(index)
        ids = [*rng.integers(1, 50, 3), *[IMAGE_TOKEN] * (4 * (index % 3)), *rng.integers(1, 50, 5)]
        labels = np.where(np.array(ids) == IMAGE_TOKEN, -100, ids)
        rows.append({"id": index, "input_ids": np.array(ids), "labels": labels})
        if index % 3:
            rows[-1]["pixel_values"] = rng.standard_normal((index % 3, 3, 8, 8), np.float32)
    return rows


def gradient(kind, batch):
    """The gradient of the summed loss, all in fp64: the loss of transformers is in fp32."""
    model, labels = network(kind), batch["labels"]
    model.zero_grad()
    options = {key: value for key, value in batch.items() if key not in ("labels", "id")}
    logits = model(**options).logits[:, :-1]
    cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum").backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def assert_same_gradient(kind, batch, group):
    actual = gradient(kind, batch)
    expected = gradient(kind, VisionLanguageCollate(dummy=None)(group))
    assert any("vis" in name for name in expected)
    for name in actual.keys() | expected.keys():
        zero = torch.zeros((), dtype=torch.float64)
        off = (actual.get(name, zero) - expected.get(name, zero)).abs().max()
        assert off <= 1e-12 * max(1, expected.get(name, zero).abs().max()), (name, off)


def packing(kind, **options):
    return VisionLanguageCollate.of(PACKED, model=network(kind), **{"dummy": None, **options})


@pytest.mark.parametrize(
    "kind", [pytest.param("Qwen2VL", marks=pytest.mark.fast), *QWEN[1:], *PLAIN]
)
def test_a_row_has_the_gradient_of_its_samples_padded(kind):
    group = group_of(kind)
    batch = packing(kind)(group)
    assert batch["position_ids"].shape[:-2] == ((4,) if kind in QWEN else ())
    assert_same_gradient(kind, batch, group)
    check_packing(network(kind), batch)


@pytest.mark.parametrize("kind", QWEN[:3])
@pytest.mark.parametrize("indices", [INDICES, [0, 3, 6]])
def test_padding_and_a_dummy_change_nothing(kind, indices):
    group = group_of(kind, indices)
    budget = TokenBudget(2048, layout="packed", pad_to_multiple_of=16)
    collate = VisionLanguageCollate.of(budget, model=network(kind), dummy=DUMMY)
    batch = collate.collate_step(group, step("image"))
    assert "pixel_values" in batch and batch["input_ids"].shape[1] % 16 == 0
    reference = [*group, *samples([1])]  # so that the towers take part
    reference[-1]["labels"] = np.full_like(reference[-1]["labels"], -100)
    assert_same_gradient(kind, batch, reference if indices == [0, 3, 6] else group)


# --- apart ------------------------------------------------------------------------------------


def given_to(kind, **more):
    """The arguments of a model for a row of two samples with images."""
    batch = packing("Llava" if kind == "PaliGemma" else kind)(group_of(kind, [1, 2]))
    return {key: value for key, value in {**batch, **more}.items() if key not in ("labels", "id")}


def prefix_of(kind):
    """The arguments of a model whose prompts look ahead, over the bounds of samples, too."""
    batch = given_to(kind)
    starts = batch["cu_seq_lens_q"].tolist()
    types = torch.ones_like(batch["input_ids"])
    for start, stop in itertools.pairwise(starts):
        types[0, start : stop - 3] = 0
    return {**batch, "token_type_ids": types}


def without_text_positions(kind):
    """Positions as padded batches have them, by which no one can tell the samples apart."""
    batch = given_to(kind)
    return {**batch, "position_ids": batch["position_ids"][1:]}


MIXED = [
    ("Llava", lambda kind: given_to(kind, use_cache=True)),
    ("Qwen3VL", lambda kind: given_to(kind, use_cache=True)),
    ("Qwen2VL", without_text_positions),
    ("Qwen2_5_VL", without_text_positions),
    pytest.param("PaliGemma", prefix_of, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "make"), MIXED)
def test_samples_that_see_each_other_are_found(kind, make):
    model = network(kind).train()
    with pytest.raises(ValueError, match=f"must not see each other, but in a `{kind}ForCond"):
        check_packing(model, make(kind))
    assert all(module.training for module in model.modules()) and not model._forward_hooks


def test_text_in_one_row_of_a_model_with_positions_of_its_own_is_found_mixed():
    """`PackedCollate` numbers tokens in one dimension, which Qwen2-VL takes for no packed row."""
    batch = PackedCollate()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    with pytest.raises(ValueError, match="in a `Qwen2VLForConditionalGeneration` they do"):
        check_packing(network("Qwen2VL"), batch)
    batch = packing("Qwen2VL")([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    check_packing(network("Qwen2VL"), batch)


test_what_cannot_be_checked_is_named = refuses(
    [
        (lambda: check_packing(torch.nn.Linear(1, 1), {}), TypeError, "of transformers.*`Linear`"),
        (
            lambda: check_packing(network("Llava"), packing("Llava")(group_of("Llava", [0]))),
            ValueError,
            "two samples or more",
        ),
    ]
)


def varlen(module, query, key, value, attention_mask, *, scaling, is_causal=None, **options):
    """Attention within the parts that `cu_seq_lens_q` has, as kernels for variable lengths."""
    causal, parts = module.is_causal if is_causal is None else is_causal, []
    bounds = options.get("cu_seq_lens_q")
    if bounds is None:  # the tower of whole images
        assert attention_mask is None and not causal
        bounds = torch.tensor([0, query.shape[2]])
    else:
        assert options["max_length_q"] == int(bounds.diff().max())
    for start, stop in itertools.pairwise(bounds.tolist()):
        rows = (tensor[:, :, start:stop] for tensor in (query, key, value))
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                *rows, is_causal=causal, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2), None


@pytest.mark.parametrize("kind", [*QWEN[:3], "Llava"])
def test_kernels_for_variable_lengths_find_the_samples(kind, monkeypatch):
    """Text layers use `cu_seq_lens_q`; vision towers use other bounds, which the row has, too."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", varlen)
    group, model = group_of(kind), network(kind)
    batch = packing(kind)(group)
    expected = gradient(kind, batch)
    configs = [model.config, *(getattr(model.config, name) for name in model.config.sub_configs)]
    for config in configs:
        monkeypatch.setattr(config, "_attn_implementation_internal", "flash_attention_2")
    actual = gradient(kind, batch)
    for name, value in expected.items():
        assert (actual[name] - value).abs().max() <= 1e-12 * max(1, value.abs().max()), name


# --- in a loader ------------------------------------------------------------------------------

DATA = samples(range(40))
BUDGET = TokenBudget(400, layout="packed", max_patches=360)


def loader(**options):
    collate = VisionLanguageCollate.of(BUDGET, model=network_of("Qwen2VL"), dummy=DUMMY)
    options = {"token_budget": BUDGET, "window": 12, "collate_fn": collate, **options}
    return ODBDataLoader(options.pop("dataset", DATA), **options)


def test_rows_keep_both_limits_and_the_order_of_their_images():
    seen, most = [], 0
    for batch in loader():
        info, ids = pop_step_info(batch), batch["id"].tolist()
        row = [DATA[index] for index in ids]
        assert batch["input_ids"].shape == (1, sum(len(sample["input_ids"]) for sample in row))
        assert batch["input_ids"].numel() <= 400
        assert info.local_samples == len(ids)
        assert info.local_targets == int((batch["labels"][:, 1:] != -100).sum())
        assert info.local_targets == sum(
            int((sample["labels"][1:] != -100).sum()) for sample in row
        )
        assert (batch["mm_token_type_ids"] == 1).sum() * 4 == len(batch.get("pixel_values", ()))
        for key in ("pixel_values", "image_grid_thw"):
            expected = [sample[key] for sample in row if key in sample]
            assert (key in batch) == bool(expected)
            if expected:
                assert np.array_equal(batch[key], np.concatenate(expected))
        most = max(most, len(batch.get("pixel_values", ())))
        seen += ids
    assert 180 < most <= 360
    assert sorted(seen) == [*range(40)]


def test_a_run_resumes_at_every_step():
    assert_resumes_exactly(lambda: loader(dataset=DATA[:16]), epochs=1)


@pytest.mark.filterwarnings("error")
def test_ranks_without_images_take_part():
    """A dummy is no excess that a batch would be warned of, and counts for nothing."""
    texts, images = range(0, 60, 3), [n for n in range(30) if n % 3]
    turns = samples([n for pair in zip(texts, images, strict=True) for n in pair])

    budget = TokenBudget(150, layout="packed")

    def batches(exchange):
        return [*loader(dataset=turns, process_group=exchange, shuffle=False, token_budget=budget)]

    steps = [*zip(*on_ranks(2, batches), strict=True)]
    assert (
        max(batch["input_ids"].numel() for step_batches in steps for batch in step_batches) > 150
    )  # with a dummy
    for step_batches in steps:
        infos = [pop_step_info(batch) for batch in step_batches]
        assert len({"pixel_values" in batch for batch in step_batches}) == 1
        assert len({info.all_targets for info in infos}) == 1
        targets = [int((batch["labels"][:, 1:] != -100).sum()) for batch in step_batches]
        counts = [
            0 if info.is_filler else count for info, count in zip(infos, targets, strict=True)
        ]
        assert infos[0].all_targets == sum(counts)


# --- what is refused ----------------------------------------------------------------------------

FIRST = samples([1])[0]
NO_TYPES = {key: value for key, value in FIRST.items() if key != "mm_token_type_ids"}
NO_GRID = {key: value for key, value in FIRST.items() if key != "image_grid_thw"}
TWO = samples([2])[0]


def packed_for(dummy=None, shapes=None, **model):
    budget = TokenBudget(99, layout="packed", shapes=shapes)
    return VisionLanguageCollate.of(budget, dummy=dummy, **model)


REFUSED = [
    (packed_for, "`model` must be the model of"),
    (lambda: packed_for(model=network_of("PaliGemma")), '"paligemma", no test shows'),
    (lambda: packed_for(model=torch.nn.Linear(1, 1)), "must be a model of transformers.*`Linear`"),
    (lambda: VisionLanguageCollate(dummy=None, model=network_of("Llava"), side="left"), "`side`"),
    (lambda: packed_for(dummy=DUMMY, model=network_of("Qwen2VL"), shapes=1), "`shapes` must be"),
    (lambda: loader(token_budget=TokenBudget(400)), '"padded".*of layout "packed"'),
    (lambda: packing("Qwen2VL")([NO_TYPES]), "sample 0 .* cannot place .* `mm_token_type_ids`"),
    (lambda: packing("Qwen2VL")([NO_TYPES, TWO]), "sample 0 lacks .'mm_token_type_ids'"),
    (lambda: packing("Qwen2VL")([NO_GRID]), "sample 0 .* cannot place .* `image_grid_thw`"),
    (lambda: packing("Qwen2VL")([FIRST, NO_GRID]), "sample 1 .* `image_grid_thw`, or none"),
    (lambda: packing("Qwen2VL")([one_run(TWO)]), "sample 0 .* other tokens between"),
    (lambda: packing("Qwen2VL")([{**FIRST, "attention_mask": [0]}]), "sample 0 .*`attention_mask`"),
]


def one_run(sample):
    """A sample whose two images have no token between them."""
    order = np.argsort(sample["mm_token_type_ids"] == 1, kind="stable")
    keys = ("input_ids", "labels", "mm_token_type_ids")
    return {**sample, **{key: sample[key][order] for key in keys}}


test_what_cannot_be_packed_is_refused = refuses(REFUSED, error=(TypeError, ValueError, SampleError))


def test_a_family_that_one_has_tried_may_be_added():
    class Tried(VisionLanguageCollate):
        packable = ("paligemma",)

    collate = Tried.of(PACKED, dummy=None, model=network_of("PaliGemma"))
    assert collate.layout == "packed"


def test_a_collate_function_goes_to_workers_without_the_weights():
    collate = packing("Qwen2VL")
    sent = pickle.dumps(collate)
    assert len(sent) < 20_000
    group = group_of("Qwen2VL")
    for function in (pickle.loads(sent), replace(collate, pad_token_id=0)):
        actual, expected = function(group), collate(group)
        assert torch.equal(actual["position_ids"], expected["position_ids"])


def test_patches_that_are_made_with_the_batch_are_placed_alike():
    collate = packing("Qwen2VL", image_processor=processor().image_processor)
    late = replace(processor(), late_patches=True)
    actual, expected = collate([late(record(n)) for n in INDICES]), collate(samples(INDICES))
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(torch.as_tensor(actual[key]), torch.as_tensor(value)), key


def test_a_padded_budget_leaves_the_model_out():
    collate = VisionLanguageCollate.of(TokenBudget(99), dummy=None, model=network_of("PaliGemma"))
    assert collate.model is None and collate.layout == "padded"


def test_rows_of_one_shape():
    budget = TokenBudget(512, layout="packed", shapes=1, max_samples=5)
    collate = VisionLanguageCollate.of(budget, dummy=None, model=network_of("Qwen2VL"))
    for indices in ([0, 1], [3, 4, 6]):
        batch = collate(samples(indices))
        assert batch["position_ids"].shape == (4, 1, 512) and len(batch["cu_seq_lens_q"]) == 7
