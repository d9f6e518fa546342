"""Generation in parts gives what generation at once gives, and batches begin with the longest."""

import pytest
import torch
from refusals import refuses
from transformers import LlamaConfig, LlamaForCausalLM

from odb_nodes import SampleError, Skipped, TokenBudget
from odb_nodes.training.memory import LongestFirst, generate_in_parts

END, PAD = 1, 0
OPTIONS = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(2)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    tokens = {"vocab_size": 24, "eos_token_id": END, "pad_token_id": PAD, "bos_token_id": None}
    network = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens)).double().eval()
    network.lm_head.weight.data[END] *= 4  # so that rows end at different places
    return network


def prompts(count=9):
    generator = torch.Generator().manual_seed(0)
    lengths = [2 + 5 * n % 11 for n in range(count)]
    return [torch.randint(2, 24, (length,), generator=generator).tolist() for length in lengths]


def batch_of():
    width = max(map(len, prompts()))
    rows = [[PAD] * (width - len(prompt)) + prompt for prompt in prompts()]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts()]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


@pytest.fixture
def most_rows(model):
    """`most_rows(n)`: batches of more than n rows run out of memory from now on."""
    handles = []

    def fails_above(most):
        def fails(_, args, options):
            if len(options["input_ids"]) > most:
                raise torch.OutOfMemoryError("out of memory, as the test wants it")

        handles.append(model.register_forward_pre_hook(fails, with_kwargs=True))

    yield fails_above
    for handle in handles:
        handle.remove()


BEAMS = {"num_beams": 2, "num_return_sequences": 2}


@pytest.mark.parametrize(("most", "options"), [(1, {}), (5, {}), (6, BEAMS)])
def test_parts_keep_the_order_and_are_padded_on_the_right(model, most_rows, most, options):
    whole, parts = generate_in_parts(model, batch_of(), **OPTIONS, **options)
    assert parts == 1
    assert whole.equal(model.generate(**batch_of(), **OPTIONS, **options))
    most_rows(most)
    pads = {"pad_token_id": END} if options else {}  # as beams do
    rows, parts = generate_in_parts(model, batch_of(), **pads, **OPTIONS, **options)
    assert parts >= -(-9 // most)
    assert rows.equal(whole)


@pytest.mark.parametrize("ranks", [1, 3])
def test_results_are_in_the_order_of_the_data(model, ranks):
    data = prompts(40)
    results = [None] * len(data)
    for rank in range(ranks):
        shard = {"rank": rank, "world_size": ranks}
        options = {"new_tokens": 12, "process_fn": lambda prompt: {"input_ids": prompt}}
        batches, longest = LongestFirst(data, 96, **options, **shard), []
        for batch, indices in batches:
            assert indices == sorted(indices, key=lambda index: (-len(data[index]), index))
            count, width = batch["input_ids"].shape
            assert count * (width + 12) <= 96
            longest.append(width)
            rows, _ = generate_in_parts(model, batch, **OPTIONS)
            for index, row in zip(indices, rows, strict=True):
                results[index] = row.tolist()
        assert len(batches) == len(longest)
        assert longest == sorted(longest, reverse=True)
    for prompt, row in zip(data, results, strict=True):
        alone = model.generate(torch.tensor([prompt]), **OPTIONS)[0].tolist()
        assert [token for token in row if token != PAD] == [
            token for token in alone if token != PAD
        ]


@pytest.mark.parametrize("how", [{"pad_to_multiple_of": 16}, {"shapes": 3}])
def test_the_budget_bounds_what_padded_prompts_grow_to(how):
    data = [{"input_ids": [1] * (n % 20 + 1)} for n in range(60)]
    batches = LongestFirst(data, TokenBudget(256, **how), new_tokens=10)
    shapes = [batch["input_ids"].shape for batch, _ in batches]
    assert max(rows * (width + 10) for rows, width in shapes) in range(200, 257)
    if "shapes" in how:
        assert len({*shapes}) <= 3


def test_a_budget_bounds_samples_and_patches_of_a_batch():
    data = [{"input_ids": [1] * 4, "image_grid_thw": [[1, 1, 5]]} for _ in range(10)]
    budget = TokenBudget(400, max_samples=4, max_patches=15)
    sizes = [len(indices) for _, indices in LongestFirst(data, budget, collate_fn=list)]
    assert sorted(sizes) == [1, 3, 3, 3]
    even = LongestFirst(data[:9], TokenBudget(28, row_sizes="even"), collate_fn=list)
    assert sorted(len(indices) for _, indices in even) == [1, 2, 6]


IDS = torch.ones(9, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ({"inputs": IDS}, {}, "must have `input_ids`"),
        ({"input_ids": IDS}, {"prompt_ids": IDS}, "`prompt_ids` has a row for each"),
        ({"input_ids": IDS, "pixel_values": torch.ones(7, 3)}, {}, r"`pixel_values` .* \(7, 3\)"),
        ({"input_ids": IDS}, {"return_dict_in_generate": True, **OPTIONS}, "Leave out `return_di"),
        (IDS, {}, "`batch` must be a `Mapping`"),
        ({"input_ids": IDS[:0]}, {}, "`input_ids` must have one row or more"),
    ],
)
def test_a_batch_that_cannot_be_halved_is_an_error(model, batch, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        generate_in_parts(model, batch, **options)


def test_a_row_that_does_not_fit_alone_and_a_model_that_cannot_generate_are_errors(
    model, most_rows
):
    with pytest.raises(TypeError, match="`model` must have a `generate`, but is a `Linear`"):
        generate_in_parts(torch.nn.Linear(2, 2), batch_of())
    model.generate = lambda **_: torch.ones(3)
    with pytest.raises(TypeError, match=r"`generate` must return a tensor \(B, T\).* \(3,\)"):
        generate_in_parts(model, batch_of(), **OPTIONS)
    del model.generate
    most_rows(0)
    with pytest.raises(torch.OutOfMemoryError):
        generate_in_parts(model, batch_of(), **OPTIONS)


def skipping(number):
    return {"input_ids": [1]} if number < 2 else Skipped("empty")


test_bad_arguments_of_longest_first_are_an_error = refuses(
    [
        ({1, 2}, 96, {}, TypeError, "`dataset` must be a sequence"),
        (iter([1]), 96, {}, TypeError, "`dataset` .* Pass a list"),
        ({"train": [1]}, 96, {}, TypeError, "`dataset` must be a sequence"),
        ([], 96, {}, TypeError, "`dataset` must be a sequence of one item or more"),
        ([1, 2], 96, {"process_fn": skipping}, SampleError, r"item 1 is skipped \(empty\)"),
        ([[1]], 96, {"new_tokens": -1}, ValueError, "`new_tokens` must be"),
        ([], TokenBudget(96, layout="packed"), {}, ValueError, "padded"),
    ],
    lambda dataset, budget, options: LongestFirst(dataset, budget, **options),
)


def broken(prompt):
    return {"input_ids": {"a": [1]}[prompt]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"process_fn": broken}, "item 30 cannot be processed: KeyError: 'b'"),
        (
            {"observe": lambda prompt: {"a": 1}[prompt]},
            "item 30 cannot be processed: KeyError: 'b'",
        ),
        ({"process_fn": lambda _: {}}, "item 0 cannot be processed: a sample has no length"),
        (
            {"observe": len, "collate_fn": lambda _: {}["x"]},
            "`collate_fn` raised KeyError: 'x'. It was given .* samples for items \\[28, 29,",
        ),
    ],
)
def test_an_error_of_a_function_of_the_user_names_the_item_or_the_items(options, message):
    with pytest.raises(SampleError, match=message) as caught:
        list(LongestFirst(["a"] * 30 + ["b"] + ["a"] * 9, 64, new_tokens=4, **options))
    assert isinstance(caught.value.__cause__, (KeyError, SampleError))
