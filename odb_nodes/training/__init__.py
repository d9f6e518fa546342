"""What surrounds training: memory, monitoring, tasks, images, the ledger and checkpoints."""
