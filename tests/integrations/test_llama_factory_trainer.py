"""Arguments in the manner of LLaMA-Factory, and a trainer made in its manner."""

from types import SimpleNamespace

import pytest
from test_huggingface import decoder
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from odb_nodes import PaddingCollate
from odb_nodes.integrations.llama_factory import DynamicBatches

SIZE, CUTOFF = 50, 32


class Texts:
    """Samples as a preprocessed dataset has them, none longer than the cutoff."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        tokens = [1 + (index + place) % 28 for place in range(2 + 7 * index % (CUTOFF - 1))]
        labels = [-100, *tokens[1:]]
        sample = {"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": labels}
        return {**sample, "images": None, "videos": None, "audios": None}


class Collator(PaddingCollate):
    """Takes the media out of the rows, as its own does."""

    def __call__(self, samples):
        for row in samples:
            for key in ("images", "videos", "audios"):
                row.pop(key)
        return super().__call__(samples)


class CustomSeq2SeqTrainer(Seq2SeqTrainer):
    """Takes an argument of its own, and passes the loss on."""

    def __init__(self, finetuning_args, **kwargs):
        super().__init__(**kwargs)
        self.finetuning_args = finetuning_args
        self.seen = {}  # batches by their labels: what fills the last optimizer step repeats one

    def compute_loss(self, model, inputs, *args, **kwargs):
        if model.training:
            labels = tuple(inputs["labels"].flatten().tolist())
            self.seen[labels] = tuple(inputs["input_ids"].shape)
        return super().compute_loss(model, inputs, *args, **kwargs)


def make_trainer(folder, neat_packing):
    data_args = SimpleNamespace(cutoff_len=CUTOFF, packing=None, neat_packing=neat_packing)
    finetuning_args = SimpleNamespace(stage="sft", disable_shuffling=False)
    training_args = Seq2SeqTrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        num_train_epochs=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        eval_strategy="epoch",
        per_device_eval_batch_size=2,
        remove_unused_columns=False,  # so that the collator gets the media
    )
    batches = DynamicBatches.of(data_args, training_args, finetuning_args)
    trainer = CustomSeq2SeqTrainer(
        finetuning_args,
        model=decoder(),
        args=training_args,
        train_dataset=Texts(),
        eval_dataset=Texts(),
        data_collator=Collator(pad_to_multiple_of=8),
    )
    assert batches.configure(trainer, window=16) is trainer
    return trainer


@pytest.mark.parametrize("neat_packing", [False, True])
def test_a_trainer_made_in_its_manner_trains_on_dynamic_batches(neat_packing, tmp_path):
    trainer = make_trainer(tmp_path, neat_packing)
    trainer.train()
    assert all(rows * width <= 4 * CUTOFF for rows, width in trainer.seen.values())
    assert all(rows == 1 for rows, _ in trainer.seen.values()) == neat_packing
    targets = sum(label != -100 for labels in trainer.seen for label in labels)
    assert targets == sum(len(Texts()[index]["input_ids"]) - 1 for index in range(SIZE))

    # Evaluation is the stock trainer's.
    (loss,) = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    given = {"eval_dataset": Texts(), "data_collator": Collator(pad_to_multiple_of=8)}
    stock = Seq2SeqTrainer(model=trainer.model, args=trainer.args, **given)
    assert stock.evaluate()["eval_loss"] == loss
