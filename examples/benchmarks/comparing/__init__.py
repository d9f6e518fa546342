"""The tables of `compare.py`, one module for each kind."""
