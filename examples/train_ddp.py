"""Train a tiny language model on several ranks with DDP, in dynamic batches; kill it, resume it.

    torchrun --nproc-per-node 4 examples/train_ddp.py             # a few minutes on 2 cores
    torchrun --nproc-per-node 2 examples/train_ddp.py --steps 12  # a quick look

Each rank forms batches of its share of the text under `--token-budget`; all take the same steps,
and the gradient is that of the mean loss over all supervised tokens, whichever rank has them. With
`--accumulate 4` an optimizer step is made of 4 batches of each rank.

Then the run is repeated, killed on all ranks with SIGKILL in mid-epoch, and goes on from its last
checkpoint. On every rank the groups must be those of the uninterrupted run, and on CPUs the losses
too, to the last bit. The loop is in data_parallel.py; this is what DDP is asked to do.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

from data_parallel import Trainer, main
from odb_nodes import load_state, save_state

FILE = "model.pt"


class DdpTrainer(Trainer):
    """Every rank has the whole model and the whole optimizer."""

    model: DistributedDataParallel

    def parallel(self, model: LlamaForCausalLM) -> DistributedDataParallel:
        """Return the model in DDP."""
        parallel = DistributedDataParallel(model)
        # DDP arranges its buckets anew after its first backward, and with more than two ranks that
        # changes the order of additions. Done before any step, a resumed run adds as the whole one.
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
        parallel(input_ids=tokens, labels=tokens).loss.backward()
        parallel.zero_grad()
        return parallel

    def micro_step(self, *, last: bool) -> AbstractContextManager[None]:
        """Return a context for forward and backward; the ranks share gradients in the last one."""
        return nullcontext() if last else self.model.no_sync()

    def save(self, folder: Path) -> None:
        """Write model and optimizer, which all ranks have, once."""
        if dist.get_rank() == 0:
            state = {
                "model": self.model.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            save_state(state, folder / FILE)

    def load(self, folder: Path) -> None:
        """Read model and optimizer on every rank."""
        state = load_state(folder / FILE)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


if __name__ == "__main__":
    main(DdpTrainer, "train_ddp", __doc__)
