"""Files that appear complete, durably, or not at all."""

import os
import stat

import pytest

from fodp.support.files import atomically

fcntl = pytest.importorskip("fcntl")


def test_a_file_is_made_durable_through_a_handle_that_may_write(tmp_path, monkeypatch):
    """Elsewhere than on Linux a handle for reading makes nothing durable, or is refused."""
    synced = []

    def fsync(handle):
        if stat.S_ISREG(os.fstat(handle).st_mode):
            synced.append(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE)

    monkeypatch.setattr(os, "fsync", fsync)
    with atomically(tmp_path / "file") as part:
        part.write_text("all of it")
    assert synced == [os.O_RDWR]
    assert (tmp_path / "file").read_text() == "all of it"


def test_what_breaks_off_leaves_what_was_there(tmp_path):
    (tmp_path / "file").write_text("before")

    def break_off():
        with atomically(tmp_path / "file") as part:
            part.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    with atomically(tmp_path / "file", keep=True) as part:
        part.write_text("too late")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("file", "before")]
