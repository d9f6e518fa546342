"""Checkpoints of training loops and states of all ranks: saved, loaded, and resharded."""
