"""Toy data, and toy parts of a job, of tests in several rooms."""


class Stream:
    """An iterable that is no sequence."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


class Once:
    """An iterable that can be read once, which its type does not say."""

    def __init__(self):
        self.items = iter([1, 2])

    def __iter__(self):
        return self.items


class Epochs:
    """An iterable that records the epochs of `set_epoch`."""

    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        return iter([1, 2, 3])


class Holder:
    """A part of a job that holds the state which it is given."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state
