"""Generation in parts gives what generation at once gives, and batches begin with the longest."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from odb_nodes import SampleError, Skipped, TokenBudget
from odb_nodes.memory import LongestFirst, generate_in_parts

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


def batch_of(count=9):
    width = max(map(len, prompts(count)))
    rows = [[PAD] * (width - len(one)) + one for one in prompts(count)]
    mask = [[0] * (width - len(one)) + [1] * len(one) for one in prompts(count)]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


@pytest.fixture
def most_rows(model):
    """`most_rows(n)`: batches of more than n rows run out of memory from now on."""
    handles = []

    def fails_above(most):
        def fails(_, args, given):
            if len(given["input_ids"]) > most:
                raise torch.OutOfMemoryError("out of memory, as the test wants it")

        handles.append(model.register_forward_pre_hook(fails, with_kwargs=True))

    yield fails_above
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8])
def test_parts_keep_the_order_and_are_padded_on_the_right(model, most_rows, most):
    whole, parts = generate_in_parts(model, batch_of(), **OPTIONS)
    assert parts == 1
    assert whole.equal(model.generate(**batch_of(), **OPTIONS))
    most_rows(most)
    found, parts = generate_in_parts(model, batch_of(), **OPTIONS)
    assert parts >= -(-9 // most)
    assert found.equal(whole)


def test_several_sequences_of_each_row_stay_together(model, most_rows):
    options = {**OPTIONS, "num_beams": 2, "num_return_sequences": 2}
    whole, _ = generate_in_parts(model, batch_of(), **options)
    most_rows(6)
    found, parts = generate_in_parts(model, batch_of(), pad_token_id=END, **options)  # as beams do
    assert parts > 1
    assert found.equal(whole)


def test_what_cannot_be_halved_is_an_error(model, most_rows):
    with pytest.raises(TypeError, match="must have `input_ids`"):
        generate_in_parts(model, {"inputs": torch.ones(2, 3)})
    with pytest.raises(ValueError, match="`prompt_ids` has a row for each of `input_ids`"):
        generate_in_parts(model, batch_of(), prompt_ids=torch.ones(9, 3))
    with pytest.raises(ValueError, match=r"`pixel_values` of shape \(7, 3\) is not of the 9 rows"):
        generate_in_parts(model, {**batch_of(), "pixel_values": torch.ones(7, 3)})
    with pytest.raises(TypeError, match="Leave out `return_dict_in_generate`"):
        generate_in_parts(model, batch_of(), return_dict_in_generate=True, **OPTIONS)
    with pytest.raises(TypeError, match="`batch` must be a `Mapping`, but is a `Tensor` instead"):
        generate_in_parts(model, batch_of()["input_ids"])
    with pytest.raises(TypeError, match="`model` must have a `generate`, but is a `Linear`"):
        generate_in_parts(torch.nn.Linear(2, 2), batch_of())
    with pytest.raises(ValueError, match="`input_ids` must have one row or more, but is empty"):
        generate_in_parts(model, {"input_ids": torch.ones(0, 3, dtype=torch.int64)})
    most_rows(0)
    with pytest.raises(torch.OutOfMemoryError):
        generate_in_parts(model, batch_of(), **OPTIONS)


def process(prompt):
    return {"input_ids": prompt}


@pytest.mark.parametrize("ranks", [1, 3])
def test_results_are_in_the_order_of_the_data(model, ranks):
    data = prompts(40)
    results = [None] * len(data)
    for rank in range(ranks):
        batches = LongestFirst(
            data, 96, new_tokens=12, process_fn=process, rank=rank, world_size=ranks
        )
        longest = []
        for batch, indices in batches:
            assert indices == sorted(indices, key=lambda index: (-len(data[index]), index))
            rows, cols = batch["input_ids"].shape
            assert rows * (cols + 12) <= 96
            longest.append(cols)
            found, _ = generate_in_parts(model, batch, **OPTIONS)
            for index, row in zip(indices, found, strict=True):
                results[index] = row.tolist()
        assert len(batches) == len(longest)
        assert longest == sorted(longest, reverse=True)
    for prompt, found in zip(data, results, strict=True):
        alone = model.generate(torch.tensor([prompt]), **OPTIONS)[0].tolist()
        assert [token for token in found if token != PAD] == [one for one in alone if one != PAD]


def test_a_budget_bounds_samples_and_patches_of_a_batch():
    data = [{"input_ids": [1] * 4, "image_grid_thw": [[1, 1, 5]]} for _ in range(10)]
    budget = TokenBudget(400, max_samples=4, max_patches=15)
    sizes = [len(indices) for _, indices in LongestFirst(data, budget, collate_fn=list)]
    assert sorted(sizes) == [1, 3, 3, 3]
    even = LongestFirst(data[:9], TokenBudget(28, row_sizes="even"), collate_fn=list)
    assert sorted(len(indices) for _, indices in even) == [1, 2, 6]


@pytest.mark.parametrize("dataset", [{1, 2}, (n for n in range(3)), {"train": [1]}, 5])
def test_what_has_no_indices_is_an_error(dataset):
    with pytest.raises(TypeError, match="`dataset` must be a sequence, .* Pass a list"):
        LongestFirst(dataset, 96)


def test_nothing_to_generate_for_is_an_error():
    with pytest.raises(ValueError, match="`dataset` must have one item or more, but is empty"):
        LongestFirst([], 96)


def test_samples_that_cannot_be_used_are_errors():
    with pytest.raises(SampleError, match=r"item 1 is skipped \(empty\)\.$"):
        LongestFirst(
            [1, 2], 96, process_fn=lambda n: {"input_ids": [1]} if n < 2 else Skipped("empty")
        )
    with pytest.raises(ValueError, match="`new_tokens` must be"):
        LongestFirst([[1]], 96, new_tokens=-1)
    with pytest.raises(ValueError, match="padded"):
        LongestFirst([], TokenBudget(96, layout="packed"))
