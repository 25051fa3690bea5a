"""Files that appear whole or not at all."""

import os

import pytest

from bert_unpad._files import replacing, write_text


class PowerFailure(Exception):
    pass


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_file_is_the_old_one_or_the_new_one(tmp_path, monkeypatch, name):
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def stop(*arguments):
        assert path.read_text() == "old"
        raise PowerFailure

    with monkeypatch.context() as patch:
        patch.setattr(os, name, stop)
        with pytest.raises(PowerFailure):
            write_text(path, "new")
    assert path.read_text() == "old"
    write_text(path, "new \u00e9")
    assert path.read_bytes() == "new \u00e9".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    events, replace, fsync = [], os.replace, os.fsync

    def sync(handle):
        events.append(os.fstat(handle))
        fsync(handle)

    def rename(*paths):
        events.append("rename")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    with replacing(tmp_path / "a.txt") as temporary:
        temporary.write_text("12345")
    synced, renamed = events
    assert renamed == "rename"
    status = (tmp_path / "a.txt").stat()
    assert (synced.st_ino, synced.st_size) == (status.st_ino, 5)


def test_nothing_is_left_of_a_failed_write(tmp_path):
    def write_half():
        with replacing(tmp_path / "a.txt") as temporary:
            temporary.write_text("half")
            raise PowerFailure

    with pytest.raises(PowerFailure):
        write_half()
    assert list(tmp_path.iterdir()) == []
