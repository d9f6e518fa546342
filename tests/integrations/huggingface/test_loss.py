"""The unit that the loss of a batch is a mean over, under a `Trainer`, and how it is determined."""

import itertools

import language_models as lm
import pytest
import torch
import trainers
from pictures import model, samples
from transformers import (
    MambaConfig,
    MambaForCausalLM,
    Trainer,
    TrainerCallback,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

from odb_nodes import TokenBudget
from odb_nodes.core.sample import Observation
from odb_nodes.integrations.huggingface import (
    ODBTrainer,
    ODBTrainerMixin,
    configure_trainer,
)
from odb_nodes.integrations.huggingface.loss import count_targets
from odb_nodes.training.tasks import TaskWeights
from odb_nodes.training.vision import VisionLanguageCollate

SIZE = 40
SAID = {"loss_is": "sample_mean"}


def rows(**labels):
    """Samples of many lengths, with these labels each."""
    return [{"input_ids": [1 + n] * (n % 13 + 2), **labels} for n in range(SIZE)]


def collate(samples):
    """Padded rows, and all else as a tensor of one row per sample."""
    width = max(len(sample["input_ids"]) for sample in samples)
    ids = [sample["input_ids"] + [0] * (width - len(sample["input_ids"])) for sample in samples]
    keys = {*samples[0]} - {"input_ids"}
    columns = {key: torch.tensor([sample[key] for sample in samples]) for key in keys}
    return {"input_ids": torch.tensor(ids), **columns}


class Gradients(TrainerCallback):
    """Notes how far the gradient of each optimizer step is off the mean over its samples."""

    def __init__(self, trainer):
        self.trainer, self.errors = trainer, []

    def on_step_begin(self, args, state, control, **kwargs):
        self.fillers = [step.factor == 0 for step in self.trainer.odb_run.losses.waiting if step]

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        model = self.trainer.model
        seen = zip(model.seen, self.fillers, strict=True)
        values = [value for batch, is_filler in seen if not is_filler for value in batch]
        values = self.values(values)
        model.seen.clear()
        self.errors.append(abs(model.weight.grad.item() - sum(values) / len(values)))

    def values(self, values):
        return values


def error_of(folder, data, odb=(), check=Gradients, **options):
    """Train an epoch on samples whose loss is a mean over rows; the largest error of a gradient."""
    options = {"num_train_epochs": 1, "learning_rate": 0.0, **options}
    trainer = ODBTrainer(
        lm.Rows(),
        trainers.arguments(folder, **options),
        train_dataset=data,
        data_collator=collate,
        odb=trainers.config(**{"token_budget": 32, **dict(odb)}),
    )
    trainer.add_callback(check := check(trainer))
    trainer.train()
    assert len(check.errors) == trainer.state.global_step > 2
    return max(check.errors)


# --- what it is a mean over -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "labels, odb",
    [
        ({"labels": 2}, {}),
        ({"labels": [0.5]}, {}),
        ({"start_positions": 2}, {}),
        ({"goal": [0.5, 1.0, 0.0]}, {}),
        ({}, {}),
        ({}, SAID),
        ({"labels": [1, 2, 3]}, SAID),
    ],
)
def test_one_label_per_sample_or_none_counts_samples(tmp_path, labels, odb, recwarn):
    options = {"label_names": [*labels] or None, "gradient_accumulation_steps": 3, "odb": odb}
    assert error_of(tmp_path, rows(**labels), **options) < 1e-12
    warned = ['give `loss_is="sample_mean"`' in str(warning.message) for warning in recwarn]
    assert any(warned) is (not labels and not odb)


def test_a_mean_over_tokens_without_labels_may_be_said_to_be_one(tmp_path):
    data = [{"input_ids": sample["input_ids"]} for sample in map(lm.sample_of, range(SIZE))]
    model, seen = lm.Unlabelled(), []
    options = {"gradient_accumulation_steps": 3, "logging_steps": 1, "num_train_epochs": 1}
    trainer = ODBTrainer(
        model,
        trainers.arguments(tmp_path, learning_rate=0.0, **options),
        train_dataset=data,
        odb=trainers.config(
            loss_is="token_mean",
            observe=lambda sample: Observation(
                len(sample["input_ids"]), len(sample["input_ids"]) - 1
            ),
        ),
    )
    model.register_forward_hook(lambda _, __, out: seen.append((out["loss"].item(), out["items"])))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    for number, loss in enumerate(losses):
        step = seen[number * 3 : (number + 1) * 3]
        if loss != losses[-1]:  # which repeats batches
            mean = sum(loss * items for loss, items in step) / sum(items for _, items in step)
            assert loss == pytest.approx(mean, abs=1e-4)  # logs before version 5 are rounded


def spoken():
    """Utterances of many lengths, with transcripts of many lengths; the long ones are silent."""
    rng = torch.Generator().manual_seed(0)
    for n in range(SIZE):
        frames, letters = 40 + 8 * (n % 11), 0 if n % 11 > 5 else n % 7
        labels = torch.randint(0, 8, (letters,), generator=rng) if letters else torch.tensor([-100])
        yield {"input_values": torch.randn(frames, generator=rng).double(), "labels": labels}


def collate_spoken(samples):
    pad, options = torch.nn.utils.rnn.pad_sequence, {"batch_first": True}
    values = [sample["input_values"] for sample in samples]
    return {
        "input_values": pad(values, **options),
        "attention_mask": pad(
            [torch.ones(len(sample), dtype=torch.long) for sample in values], **options
        ),
        "labels": pad([sample["labels"] for sample in samples], padding_value=-100, **options),
    }


def ctc_trainer(folder, reduction, odb=(), **options):
    """A trainer of a small model whose blank token is its last."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 9}
    convolutions = {"conv_dim": (8,), "conv_kernel": (4,), "conv_stride": (2,)}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    zero = ("hidden", "activation", "attention", "feat_proj", "feat_extract", "final")
    sizes |= convolutions | positions | {f"{name}_dropout": 0.0 for name in zero}
    config = Wav2Vec2Config(
        **sizes,
        num_attention_heads=2,
        layerdrop=0.0,
        mask_time_prob=0.0,
        feat_extract_norm="layer",
        pad_token_id=8,
        ctc_loss_reduction=reduction,
    )
    return ODBTrainer(
        Wav2Vec2ForCTC(config).double(),
        trainers.arguments(folder, max_steps=5, **options),
        train_dataset=[*spoken()],
        data_collator=collate_spoken,
        odb=trainers.config(
            token_budget=256,
            window=8,
            observe=lambda sample: len(sample["input_values"]) // 2,
            **dict(odb),
        ),
    )


def test_the_mean_of_ctc_is_over_samples(tmp_path):
    trainer = ctc_trainer(tmp_path, "mean", gradient_accumulation_steps=3)
    silent = []

    def expect(reference, batches):
        rows = sum(len(batch["labels"]) for batch in batches)
        for batch in batches:
            silent.append(bool((batch["labels"] == -100).all()))
            for row in range(len(batch["labels"])):
                sample = {key: value[row : row + 1] for key, value in batch.items()}
                (reference(**sample).loss / rows).backward()

    check = trainers.GradientCheck(trainer, expect, "input_values", "attention_mask", "labels")
    trainer.train()
    assert len(check.errors) == 5
    assert max(check.errors) < 1e-6  # the loss is computed in fp32
    assert any(silent)  # which the model got as they are


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_sum_of_ctc_is_refused_unless_it_is_said_to_be_a_mean(tmp_path, reduction):
    with pytest.raises(ValueError, match=f"is '{reduction}'.*`model.config.ctc_loss_reduction = "):
        ctc_trainer(tmp_path, reduction).train()
    if reduction == "sum":
        ctc_trainer(tmp_path, reduction, odb={"loss_is": "sample_mean"}).train()


def test_batches_of_which_only_some_have_labels_are_refused(tmp_path):
    def collate_some(samples):
        batch = collate(samples)
        if batch["input_ids"].shape[1] < 8:
            del batch["labels"]
        return batch

    args = trainers.arguments(tmp_path, gradient_accumulation_steps=8, max_steps=2)
    options = {
        "train_dataset": rows(labels=1),
        "data_collator": collate_some,
        "odb": trainers.config(),
    }
    with pytest.raises(ValueError, match="must have labels, or none, but only some have"):
        ODBTrainer(lm.Rows(), args, **options).train()


def test_labels_per_token_are_those_as_long_as_the_ids():
    def count(labels, shift=True, **columns):
        return count_targets(
            {"input_ids": torch.ones(2, 3), **columns, "labels": labels}, shift=shift
        )

    per_token = torch.tensor([[1, 1, -100], [1, 1, 1]])
    assert (count(per_token), count(per_token, shift=False)) == (3, 5)
    assert count(torch.tensor([1, -100])) == 1
    assert count(torch.tensor([[4], [5]])) == 2  # one label of each sample
    assert count(torch.tensor([[0.5], [1.5]])) == 2
    assert count(per_token, shift_labels=per_token) == 5
    assert count_targets({"goal": per_token[0]}, shift=True) is None
    assert count_targets({"goal": per_token[0]}, shift=True, names=("goal",)) == 2


def errors_of_rank(folder):
    """The steps of this rank, and the largest error, of samples without labels and with one."""
    import rank_jobs

    class Gathering(Gradients):
        def values(self, values):
            return [value for rank_values in rank_jobs.gathered(values) for value in rank_values]

    return [
        error_of(
            f"{folder}/{len(labels)}",
            rows(**labels)[:37],
            {"token_budget": 20},
            check=Gathering,
            label_names=[*labels] or None,
            gradient_accumulation_steps=3,
        )
        for labels in ({}, {"start_positions": 1})
    ]


class Logging(Trainer):
    """Gathers a figure of each row in `compute_loss`, as the trainers of TRL do."""

    gathered = ()

    def compute_loss(self, model, inputs, *args, **kwargs):
        ids, accelerator = inputs["input_ids"][:, :1], self.accelerator
        gathered = (accelerator.gather(ids), accelerator.gather_for_metrics(ids.flatten()))
        self.gathered += ([len(ids), *map(torch.Tensor.tolist, gathered)],)
        return super().compute_loss(model, inputs, *args, **kwargs)


def gathered_of_rank(folder):
    data = [{"input_ids": [n % 9 + 1] * (n * 7 % 30 + 2)} for n in range(60)]
    data = [{**sample, "labels": sample["input_ids"], "id": n} for n, sample in enumerate(data)]
    trainer = Logging(lm.Normalizing(), trainers.arguments(folder, max_steps=5), train_dataset=data)
    configure_trainer(trainer, token_budget=128, window=32, loss_is="divided").train()
    return trainer.gathered


@pytest.mark.slow
def test_ranks_gather_as_many_rows_as_each_has(tmp_path):
    body = "import test_loss as l\nr.finish(l.gathered_of_rank(sys.argv[1]))"
    ours, theirs = trainers.results_of(tmp_path, body, str(tmp_path))
    assert any(first[0] != second[0] for first, second in zip(ours, theirs, strict=True))
    for (count, rows, flat), (other_count, *same) in zip(ours, theirs, strict=True):
        assert [rows, flat] == same
        assert len(rows) == count + other_count
        assert [row[0] for row in rows] == flat


@pytest.mark.slow
def test_two_ranks_weigh_samples_alike(tmp_path):
    body = "import test_loss as l\nr.finish(l.errors_of_rank(sys.argv[1]))"
    errors = trainers.results_of(tmp_path, body, str(tmp_path))
    assert max(map(max, errors)) < 1e-12


# --- how it is found out --------------------------------------------------------------------------


class Metrics(Trainer):
    """Counts where it computes a loss, as trainers of other libraries do."""

    calls = ()

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.calls += (model.training,)
        return super().compute_loss(model, inputs, *args, **kwargs)


class Dynamic(ODBTrainerMixin, Metrics):
    pass


@pytest.mark.parametrize(
    "model, loss_is",
    [("Normalizing", None), ("Normalizing", "divided"), ("Ignoring", "token_mean")],
)
def test_a_loss_is_checked_once_by_two_of_them_without_training(tmp_path, model, loss_is):
    options = {"model": model, "kind": Dynamic, "num_train_epochs": 1, "odb": {"loss_is": loss_is}}
    trainer = trainers.make_trainer(tmp_path, **options)
    trainer.train()
    entries = trainers.entries_of(tmp_path)
    assert lm.check_steps([entries], SIZE) < 1e-12
    assert trainer.calls == (False,) * (2 if loss_is is None else 0) + (True,) * len(entries)


def test_a_loss_that_cannot_be_divided_is_not_said_to_be(tmp_path):
    with pytest.raises(ValueError, match="for `num_items_in_batch`"):
        trainers.make_trainer(tmp_path, model="Averaging", odb={"loss_is": "divided"})
    args, odb = trainers.arguments(tmp_path), trainers.config(loss_is="divided")
    data = [{"input_ids": sample["input_ids"]} for sample in map(lm.sample_of, range(SIZE))]
    trainer = ODBTrainer(lm.Normalizing(), args, train_dataset=data, odb=odb)
    with pytest.raises(ValueError, match='"divided" if the batches have no `labels`'):
        trainer.train()


def test_a_trainer_whose_model_is_gone_trains_again(tmp_path):
    """The trainer has no model, as between the trials of a hyperparameter search."""
    model_init = lm.Normalizing
    trainer = ODBTrainer(
        args=trainers.arguments(tmp_path, max_steps=3),
        model_init=model_init,
        train_dataset=trainers.Texts(SIZE),
        odb=trainers.config(),
    )
    trainer.train()
    first = lm.weights_of(trainer.model)
    trainer.model = trainer.model_wrapped = None
    trainer.train()
    assert torch.equal(lm.weights_of(trainer.model), first)


# --- packed rows: images in them, and models that would mix their samples ------------------------


def test_the_gradient_of_packed_images_is_that_of_the_padded_samples(tmp_path):
    network, data = model().double(), samples(range(24))
    samples_by_ids = {tuple(sample["input_ids"].tolist()): sample for sample in data}

    def expect(reference, batches):
        group = []
        for batch in batches:
            assert batch["position_ids"].shape[:2] == (4, 1)
            row, bounds = batch["input_ids"][0].tolist(), batch["cu_seq_lens_q"].tolist()
            group += [samples_by_ids[tuple(row[a:b])] for a, b in itertools.pairwise(bounds)]
        batch = VisionLanguageCollate(dummy=None)(group)
        reference(**{key: batch[key] for key in batch if key != "id"}).loss.backward()

    budget = TokenBudget(300, layout="packed", max_patches=300)
    trainer = ODBTrainer(
        network,
        trainers.arguments(tmp_path, max_steps=4, gradient_accumulation_steps=2),
        train_dataset=data,
        odb=trainers.config(
            token_budget=budget,
            collate_fn=VisionLanguageCollate.of(budget, dummy=None, model=network),
        ),
    )
    check = trainers.GradientCheck(trainer, expect, "input_ids", "position_ids", "cu_seq_lens_q")
    trainer.train()
    assert len(check.of_parameters) == 4
    assert max(check.of_parameters) < 1e-5  # the loss is computed in fp32


TEXTS = [{"input_ids": [*range(2, 6 + n % 9)], "labels": [*range(2, 6 + n % 9)]} for n in range(30)]
TASKS = {
    "task_weights": TaskWeights({"a": 1.0}),
    "observe": lambda sample: Observation(len(sample["input_ids"]), task="a"),
}


def mamba():
    return MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1))


@pytest.mark.parametrize(
    ("make", "mixing"), [(trainers.decoder, ""), (mamba, "MambaForC"), (model, "Qwen2VLForC")]
)
@pytest.mark.parametrize("odb", [{}, {"loss_is": "token_mean"}, TASKS])
def test_a_model_that_would_mix_the_samples_of_a_row_does_not_train(make, mixing, odb, tmp_path):
    network = make()
    before = lm.weights_of(network)
    trainer = ODBTrainer(
        network,
        trainers.arguments(tmp_path, max_steps=1),
        train_dataset=TEXTS,
        odb=trainers.config(token_budget=TokenBudget(64, layout="packed"), **odb),
    )
    if not mixing:
        trainer.train()
        return
    with pytest.raises(ValueError, match=f"must not see each other, but in a `{mixing}.* they do"):
        trainer.train()
    assert torch.equal(lm.weights_of(network), before)
