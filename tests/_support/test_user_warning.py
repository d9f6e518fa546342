"""Where warnings point, and how often each is given."""

import warnings

from torchdata.nodes import IterableWrapper

from odb_nodes import LengthObserver, Loader, WindowBucketer
from odb_nodes.core.nodes.read_ahead import ReadAhead
from odb_nodes.testing import assert_resumes_exactly


def said_by(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        run()
    return [warning for warning in caught if warning.category is UserWarning]


def narrow_loader():
    lengths = [1 + n * 7919 % 200 for n in range(300)]
    return Loader(WindowBucketer(LengthObserver(IterableWrapper(lengths), int), 600, 8))


def test_a_warning_points_to_the_line_of_the_user_or_of_a_thread():
    (warning,) = said_by(lambda: list(narrow_loader()))
    assert "are padding" in str(warning.message) and warning.filename == __file__
    samples = LengthObserver(IterableWrapper([1, 9, 1]), int)
    (warning,) = said_by(lambda: list(Loader(ReadAhead(WindowBucketer(samples, 5), 2))))
    assert warning.filename.endswith("exclusions.py")


def test_each_cause_is_warned_of_once():
    assert len(said_by(lambda: assert_resumes_exactly(narrow_loader, every=9))) == 1
    assert len(said_by(narrow_loader().__iter__().__next__)) == 0
    assert len(said_by(lambda: list(narrow_loader()))) == 1  # other filters: said anew
