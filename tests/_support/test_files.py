import os

import pytest

from odb_nodes._support.files import replacing


def test_a_new_file_has_the_permissions_of_the_old_one(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o640)
    with replacing(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_share_that_refuses_permissions_keeps_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def refuse(*_):
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "chmod", refuse)
    with pytest.raises(OSError) as raised, replacing(path):
        pass
    assert raised.value.filename == str(path)
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_bytes() == b"old"
