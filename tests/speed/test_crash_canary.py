"""A note on disk that outlives a process, and does no harm when it cannot be kept."""

import json
import os
import subprocess
import sys

import pytest
from speed_tier.speed.crash_canary import CrashCanary

NOTE = f"graph_being_captured.{os.getpid()}.json"


def ended_process():
    done = subprocess.Popen([sys.executable, "-c", "pass"])
    done.wait()
    return done.pid


def test_a_capture_that_ended_the_process_is_not_tried_again(tmp_path):
    folder = tmp_path / "state"
    with CrashCanary(folder).watching("a"):
        assert not CrashCanary(None).crashed("a")
        left = json.loads((folder / NOTE).read_text())
    assert left == ["a"]
    assert not (folder / NOTE).exists()

    (folder / NOTE).write_text(json.dumps(["a"]))  # as a crash leaves it in a container
    canary = CrashCanary(folder)
    assert canary.crashed("a")
    assert not canary.crashed("b")
    assert CrashCanary(folder).crashed("a"), "remembered by the next process as well"


def test_two_servers_share_a_folder(tmp_path):
    ended, running = (
        tmp_path / f"graph_being_captured.{pid}.json" for pid in (ended_process(), os.getppid())
    )
    ended.write_text(json.dumps(["a"]))
    running.write_text(json.dumps(["b"]))
    with CrashCanary(tmp_path).watching("c"):
        canary = CrashCanary(tmp_path)
        assert [canary.crashed(key) for key in "abc"] == [True, False, False]
        assert not ended.exists()
        assert running.exists() and (tmp_path / NOTE).exists()


def test_a_note_of_an_older_version_is_a_crash(tmp_path):
    (tmp_path / "graph_being_captured.json").write_text(json.dumps(["a"]))
    assert CrashCanary(tmp_path).crashed("a")
    assert not (tmp_path / "graph_being_captured.json").exists()


def test_an_exception_is_no_crash(tmp_path):
    with pytest.raises(ValueError), CrashCanary(tmp_path).watching("a"):
        raise ValueError
    assert not CrashCanary(tmp_path).crashed("a")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{}", b"[1, null]", b'"a"'])
def test_a_damaged_note_changes_nothing(tmp_path, content):
    (tmp_path / NOTE).write_bytes(content)
    (tmp_path / "graphs_that_crashed.json").write_bytes(content)
    assert not CrashCanary(tmp_path).crashed("a")


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    canary = CrashCanary(blocked / "below")
    assert not canary.crashed("a")
    with canary.watching("a"):
        pass
