"""What the virtual ranks of a process agree on."""

import pytest

from odb_nodes import StateError
from odb_nodes.core.alignment.peers import Peers


def test_configurations_of_virtual_ranks_may_lack_a_name():
    peers = Peers(None, 1.0, 8)
    with pytest.raises(StateError, match=r"they differ in \['removed', 'added'\]"):
        peers._agree([{"same": 1, "removed": 2}, {"same": 1, "added": 3}], {})
