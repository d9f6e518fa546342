"""Train a tiny language model with `ODBTrainer`, the Trainer of transformers in dynamic batches.

    python examples/train_hf_trainer.py             # one epoch, a few minutes on 2 cores
    python examples/train_hf_trainer.py --resume    # go on from the last checkpoint

The texts are tokenized in the workers, so no length is known beforehand. The metrics of the
batches, `odb/*`, go to TensorBoard.
"""

from __future__ import annotations

import argparse

from transformers import TrainingArguments

from odb_nodes.integrations.huggingface import ODBConfig, ODBTrainer
from tiny_lm import build_model, load_corpus


def main() -> None:
    """Train, and save a checkpoint every few steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accumulate", type=int, default=1, help="batches a step (%(default)s)")
    parser.add_argument("--steps", type=int, default=-1, help="most steps (default: one epoch)")
    parser.add_argument("--save-every", type=int, default=20, help="steps (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--output", default="runs/train_hf_trainer", help="folder (%(default)s)")
    options = parser.parse_args()

    corpus = load_corpus()
    args = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        num_train_epochs=1,
        learning_rate=1e-3,
        warmup_steps=4,
        gradient_accumulation_steps=options.accumulate,
        dataloader_num_workers=1,
        remove_unused_columns=False,
        logging_steps=1,
        disable_tqdm=True,  # print the logs instead
        save_steps=options.save_every,
        report_to=["tensorboard"],
        seed=0,
    )
    trainer = ODBTrainer(
        build_model(),
        args,
        train_dataset=corpus.train,
        odb=ODBConfig(token_budget=2048, window=256, process_fn=corpus.encode),
    )
    trainer.train(resume_from_checkpoint=options.resume)


if __name__ == "__main__":
    main()
