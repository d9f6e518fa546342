"""Trainers of other libraries, each in a module of its own that is imported only by its users."""
