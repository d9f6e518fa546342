"""Which keys of the samples reach the collator and the loss of a `Trainer`."""

import copy
import warnings
from collections import UserDict

import language_models as lm
import pytest
import torch
import trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DefaultDataCollator,
    LlamaConfig,
    LlamaForSequenceClassification,
    Trainer,
    default_data_collator,
)

from odb_nodes import PackedCollate, PaddingCollate, SampleError, TokenBudget
from odb_nodes.core.collate.protocol import collate_group
from odb_nodes.integrations.huggingface import ODBTrainer, ODBTrainerMixin, configure_trainer
from odb_nodes.integrations.huggingface.run import TrainBatches
from odb_nodes.integrations.huggingface.samples import TrainerCollate, rename_labels

DATA = [
    {"input_ids": [1 + n] * (n % 7 + 2), "labels": [1 + n] * (n % 7 + 2), "weight": n, "extra": n}
    for n in range(20)
]


class Own(Trainer):
    """Says itself which columns its collator needs, and uses what it makes."""

    def __init__(self, *args, **kwargs):
        self.seen = set()
        super().__init__(*args, **kwargs)

    def _set_signature_columns_if_needed(self):
        if self._signature_columns is None:
            self._signature_columns = ["input_ids", "labels", "weight"]

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.seen.add(tuple(sorted(inputs)))
        kept = {key: inputs[key] for key in ("input_ids", "attention_mask", "labels")}
        kept["id"] = kept["input_ids"]  # which the model notes
        return super().compute_loss(model, kept, *args, **kwargs)


class Collate:
    """Turns a column that the model does not take into one that it does not take, either."""

    def __init__(self):
        self.seen = set()

    def __call__(self, samples):
        self.seen.add(tuple(sorted(samples[0])))
        weights = torch.tensor([sample.pop("weight") for sample in samples])
        return {**PaddingCollate()(samples), "weights": weights}


def make(kind, folder, collate=None, data=DATA, model=None, args=(), **options):
    """A trainer of one step."""
    return kind(
        model or lm.Averaging(),
        trainers.arguments(folder, max_steps=1, **dict(args)),
        train_dataset=data,
        data_collator=collate,
        **options,
    )


class Mine(ODBTrainerMixin, Own):
    pass


GIVEN, LABELLED = ("input_ids", "labels", "weight"), ("attention_mask", "input_ids", "labels")


@pytest.mark.parametrize("how", ["mixin", "configure", "for training alone", "all columns"])
def test_collator_and_loss_get_the_columns_of_the_trainer(tmp_path, how):
    collate, data = Collate(), list(map(UserDict if how == "mixin" else dict, DATA))
    args = {"remove_unused_columns": how != "all columns"}
    if how == "mixin":
        trainer = make(Mine, tmp_path, collate, data, odb=trainers.config())
    elif how == "for training alone":
        trainer = make(Own, tmp_path, None, data)
        configure_trainer(trainer, token_budget=64, collate_fn=collate)
    else:
        trainer = make(Own, tmp_path, collate, data, args=args)
        configure_trainer(trainer, token_budget=64)
    trainer.train()
    extra = ("extra",) if how in ("for training alone", "all columns") else ()
    assert collate.seen == {(*extra, *GIVEN)}
    more = ("extra",) if how == "all columns" else ()
    assert trainer.seen == {("attention_mask", *more, *LABELLED[1:], "weights")}


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_what_our_collate_functions_make_stays_if_the_model_takes_it(tmp_path, layout):
    class Positions(lm.Averaging):
        def forward(self, input_ids, attention_mask=None, position_ids=None, labels=None, id=None):
            return super().forward(input_ids, labels=labels, id=input_ids)

    class Seeing(Own):
        def compute_loss(self, model, inputs, *args, **kwargs):
            self.seen.add(tuple(sorted(inputs)))
            inputs = {"input_ids": inputs["input_ids"], "labels": inputs["labels"]}
            return Trainer.compute_loss(self, model, inputs, *args, **kwargs)

    trainer = make(Seeing, tmp_path, model=Positions())
    collate = PackedCollate() if layout == "packed" else None
    budget = TokenBudget(64, layout=layout)
    configure_trainer(trainer, token_budget=budget, collate_fn=collate).train()
    (keys,) = trainer.seen
    assert ("position_ids" if layout == "packed" else "attention_mask") in keys
    assert {"input_ids", "labels", "weight"} <= {*keys}
    assert "extra" not in keys


def test_a_collate_function_for_another_layout_is_still_refused(tmp_path):
    class Mine(PaddingCollate):
        pass

    budget = TokenBudget(64, layout="packed")
    trainer = configure_trainer(make(Own, tmp_path), token_budget=budget, collate_fn=Mine())
    with pytest.raises(ValueError, match="must be for groups of layout"):
        trainer.train()


def test_collate_functions_that_take_the_step_still_do():
    class Step:
        def __call__(self, samples):
            raise AssertionError

        def collate_step(self, samples, info):
            return {**samples[0], "info": info}

    for before in (True, False):
        collate = TrainerCollate(Step(), {"a"}, selects_before=before)
        assert {*collate_group(collate, [{"a": 1, "b": 2}], "step")} == {"a", "info"}


# --- labels and lengths ---------------------------------------------------------------------------


def classifier():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=60, intermediate_size=8, **sizes)
    config.num_labels = 3
    return BertForSequenceClassification(config)


@pytest.mark.parametrize("name", ["label", "label_ids"])
def test_a_label_has_the_name_that_the_default_collator_gives_it(tmp_path, name):
    def train(name):
        data = [{"input_ids": sample["input_ids"], name: sample["weight"] % 3} for sample in DATA]
        trainer = make(ODBTrainer, tmp_path, None, data, classifier(), odb=trainers.config())
        trainer.train()
        return lm.weights_of(trainer.model), trainer.evaluate(data)["eval_loss"]

    weights, loss = train(name)
    expected, expected_loss = train("labels")
    assert torch.equal(weights, expected)
    assert loss == expected_loss


def test_labels_are_renamed_only_where_they_can_be():
    batch = {"label": torch.tensor([0.5, 1.0], dtype=torch.float64), "input_ids": [1]}
    assert rename_labels(batch, {"labels"})["labels"].dtype == torch.float32
    assert rename_labels(batch, {"label"}) is batch
    assert rename_labels({**batch, "labels": [1]}, {"labels"})["labels"] == [1]
    assert rename_labels({"label_ids": [[1, 2], [3, 4]]}, set())["labels"].shape == (2, 2)
    with pytest.raises(ValueError, match="`label_ids` of each sample must be a number, or lists"):
        rename_labels({"label_ids": [[1, 2], [3]]}, set())


def test_samples_without_a_length_are_told_what_to_do(tmp_path):
    class Other(Trainer):
        def _set_signature_columns_if_needed(self):
            self._signature_columns = ["labels", "video"]

    data = [dict.fromkeys(("labels", "video"), [1] * (n + 2)) for n in range(8)]
    trainer = configure_trainer(make(Other, tmp_path, list, data), token_budget=64)
    message = "of `ODBOther` has no `input_ids`.*'labels', 'video'.*for frames.*`observe=lambda s:"
    with pytest.raises(SampleError, match=message):
        trainer.train()


class Looks(torch.nn.Module):
    """Takes images."""

    main_input_name = "pixel_values"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = torch.nn.Linear(4, 3)

    def forward(self, pixel_values, labels=None):
        logits = self.head(pixel_values.flatten(1))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels)}


IMAGES = [{"pixel_values": torch.full((1, 2, 2), n / 9), "label": n % 3} for n in range(20)]


@pytest.mark.parametrize("keeps_all", [True, False])
def test_images_of_one_size_are_stacked_by_the_default_collator(tmp_path, keeps_all):
    def weights(collate, data=IMAGES):
        args = {"remove_unused_columns": not keeps_all}
        odb = trainers.config(observe=lambda _: 4)
        trainer = make(ODBTrainer, tmp_path, collate, data, Looks(), args, odb=odb)
        trainer.train()
        assert trainer.evaluate(data)["eval_loss"] > 0
        return lm.weights_of(trainer.model)

    expected = weights(lambda samples: default_data_collator(samples))
    for collate in (None, default_data_collator, DefaultDataCollator()):
        assert torch.equal(weights(collate), expected)
    unequal = [{"pixel_values": torch.zeros(1, 2, n + 1), "label": 0} for n in range(20)]
    with pytest.raises(
        ValueError, match="must have the same size.*Give the trainer a `data_collator`"
    ):
        weights(None, unequal)


def test_samples_with_a_length_need_nothing_though_the_collator_does_not_see_it(tmp_path):
    class Other(Own):
        def _set_signature_columns_if_needed(self):
            self._signature_columns = ["tokens"]

    def collate(samples):
        rows = [{"input_ids": sample["tokens"], "labels": sample["tokens"]} for sample in samples]
        return PaddingCollate()(rows)

    data = [{"input_ids": s["input_ids"], "tokens": s["input_ids"]} for s in DATA]
    trainer = configure_trainer(make(Other, tmp_path, collate, data), token_budget=64)
    trainer.train()
    assert trainer.state.global_step == 1


# --- a trainer of another library -----------------------------------------------------------------


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[EOS]": 1, **{f"w{n}": n for n in range(2, lm.VOCABULARY)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="[EOS]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", eos_token="[EOS]", unk_token="[EOS]"
    )


def of_trl(kind, folder, rows, model, **options):
    """A trainer of TRL of this kind."""
    import datasets
    import trl

    defaults = {"bf16": False, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    defaults |= {"save_strategy": "no", "max_grad_norm": 0.0, "optim": "sgd", "learning_rate": 0.1}
    args = getattr(trl, f"{kind}Config")(str(folder), num_train_epochs=1, **defaults | options)
    data = {"train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer()}
    if kind == "DPO":
        data["ref_model"] = copy.deepcopy(model)
    return getattr(trl, f"{kind}Trainer")(model, args=args, **data)


@pytest.mark.filterwarnings(trainers.OF_TRANSFORMERS)
def test_packed_documents_of_trl_keep_their_boundaries(tmp_path):
    rows = [{"text": f"w{n + 2} w3 w4"} for n in range(24)]
    options = {"max_length": 16, "packing": True, "padding_free": True}
    trainer = of_trl("SFT", tmp_path, rows, trainers.decoder(), **options)
    configure_trainer(trainer, token_budget=64)
    starts = []

    def count(_, __, kwargs):
        if trainer.model.training:
            starts.append(int((kwargs["position_ids"] == 0).sum()))

    trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    trainer.train()
    assert sum(starts) == 24


def scoring():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "pad_token_id": 0}
    sizes |= {"vocab_size": lm.VOCABULARY, "num_attention_heads": 2, "num_labels": 1}
    return LlamaForSequenceClassification(LlamaConfig(**sizes))


@pytest.mark.filterwarnings(trainers.OF_TRANSFORMERS, "ignore:.gradient_checkpointing_(dis|en)able")
@pytest.mark.parametrize("kind, make", [("DPO", trainers.decoder), ("Reward", scoring)])
def test_pairs_of_trl_are_weighed_by_pairs(tmp_path, kind, make):
    """An epoch is one optimizer step, of many batches, or of one that has all pairs."""

    def words(count, first):
        return " ".join(f"w{(first + n) % 20 + 2}" for n in range(count))

    rows = [
        {
            "prompt": words(n % 5 + 1, 0) + " ",
            "chosen": words(n % 7 + 1, n),
            "rejected": words(3, n + 1),
        }
        for n in range(20)
    ]
    if kind == "Reward":  # whose answers contain the prompt
        for row in rows:
            prompt = row.pop("prompt")
            row |= {key: prompt + row[key] for key in ("chosen", "rejected")}
    results = []
    for budget, accumulate in ((10_000, 1), (64, 30)):
        options = {"gradient_accumulation_steps": accumulate, "max_length": 32, "logging_steps": 1}
        trainer = of_trl(kind, tmp_path, rows, make().double(), **options)
        configure_trainer(trainer, token_budget=budget)
        widest, steps = [], []

        def look(_, args, kwargs, widest=widest):
            widest.append(kwargs["input_ids"].numel())

        trainer.model.register_forward_pre_hook(look, with_kwargs=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="the batches have no labels")
            trainer.train()
        steps = trainer.state.global_step
        assert (steps, max(widest) <= budget) == (1, True)
        results.append(
            (lm.weights_of(trainer.model), trainers.logs_of(trainer, "odb/samples_per_step"))
        )
    assert results[0][1] == results[1][1] == [20]
    assert not torch.equal(results[0][0], lm.weights_of(make().double()))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-7)


class Masking:
    """Draws which tokens are masked, as for masked language modelling."""

    def __call__(self, samples):
        batch = PaddingCollate()(samples)
        drawn = torch.rand(batch["input_ids"].shape) < 0.5
        return {**batch, "labels": batch["input_ids"].masked_fill(drawn, -100)}


@pytest.mark.parametrize("for_training", [True, False])
@pytest.mark.parametrize("keeps_all", [True, False])
def test_the_random_numbers_of_a_collator_are_seeded(tmp_path, for_training, keeps_all):
    collate = Masking()
    args = {"remove_unused_columns": not keeps_all}
    trainer = make(Own, tmp_path, None if for_training else collate, args=args)
    odb = {"token_budget": 64, "collate_fn": collate if for_training else None}
    configure_trainer(trainer, **odb)
    labels = []
    for seed in (1, 2):  # as of a run, and of one that resumes it
        torch.manual_seed(seed)
        labels.append([batch["labels"].tolist() for batch in TrainBatches(trainer).loader])
    assert labels[0] == labels[1]
