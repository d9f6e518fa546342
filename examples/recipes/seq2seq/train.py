"""Train an encoder-decoder (T5) with `ODBTrainer`.

    python examples/recipes/seq2seq/train.py

Run it again after a stop: it goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.trainer_utils import get_last_checkpoint

from odb_nodes.integrations.huggingface import ODBConfig, ODBSeq2SeqTrainer

# 1. Options. `--token-budget` is what to raise first on a real card.
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--token-budget", type=int, default=2048, help="padded tokens of a batch")
parser.add_argument("--steps", type=int, default=-1, help="most steps (default: two epochs)")
parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
parser.add_argument("--output", type=Path, default=Path("runs/seq2seq"))

NUMBERS = "zero one two three four five six seven eight nine".split()
MAX_TOKENS = 512


def make_data(path: Path) -> None:
    """Write 1,000 numbers in digits and in words, which are longer. Yours replaces the file."""
    rng = random.Random(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = f"{path}.{os.getpid()}"  # a kill leaves no file that looks complete, nor do other ranks
    with open(part, "w") as file:
        for _ in range(1000):
            digits = rng.choices(range(10), k=1 + min(250, int(rng.lognormvariate(3.5, 0.8))))
            source, target = " ".join(map(str, digits)), " ".join(NUMBERS[n] for n in digits)
            file.write(json.dumps({"source": source, "target": target}) + "\n")
    os.replace(part, path)


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer trained on the data. Yours: `AutoTokenizer.from_pretrained(...)`."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive a fork
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, 300, special_tokens=["<pad>", "</s>"], show_progress=False)
    bpe._tokenizer.post_processor = TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, pad_token="<pad>", eos_token="</s>"
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> T5ForConditionalGeneration:
    """Return a tiny model. Yours: `AutoModelForSeq2SeqLM.from_pretrained(...)`."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "d_model": 64,
        "d_ff": 128,
        "d_kv": 32,
        "num_layers": 2,
        "num_heads": 2,
    }
    tokens: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), **sizes, **tokens))


class Encoder:
    """Turns a record into a sample; runs in the workers, so that no length is known before."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer

    def __call__(self, record: dict[str, Any]) -> dict[str, list[int]]:
        """Return `input_ids` of the encoder, and `labels` of the decoder."""
        options = {"truncation": True, "max_length": MAX_TOKENS}
        source, target = (self.tokenizer(record[k], **options) for k in ("source", "target"))
        return {"input_ids": source.input_ids, "labels": target.input_ids}


def longer_side(sample: dict[str, list[int]]) -> int:
    """Return what a sample costs: the decoder's tokens count where they are more."""
    return max(len(sample["input_ids"]), len(sample["labels"]))


def main() -> None:
    """Train, from the last checkpoint where there is one."""
    options = parser.parse_args()

    # 2. Data, tokenizer, model.
    path = options.output / "data/pairs.jsonl"
    if not path.exists():
        make_data(path)
    records = [json.loads(line) for line in path.open()]
    tokenizer = make_tokenizer([text for record in records for text in record.values()])
    model = make_model(tokenizer)

    # 3. The trainer. `per_device_train_batch_size` has no effect: the token budget decides.
    args = Seq2SeqTrainingArguments(
        str(options.output),
        max_steps=options.steps,
        num_train_epochs=2,
        learning_rate=3e-3,  # of a tiny model; 1e-4 for a real one
        dataloader_num_workers=1,
        remove_unused_columns=False,  # records become samples in the workers
        save_steps=options.save_every,
        save_total_limit=2,
        logging_steps=1,
        disable_tqdm=True,  # print the logs in place of a bar
        report_to=[],
        bf16=torch.cuda.is_available(),
        seed=0,
    )
    trainer = ODBSeq2SeqTrainer(
        model,
        args,
        train_dataset=records,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        odb=ODBConfig(
            token_budget=options.token_budget,
            process_fn=Encoder(tokenizer),
            observe=longer_side,
        ),
    )
    # True takes the newest complete checkpoint.
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(options.output)) is not None)


if __name__ == "__main__":
    main()
