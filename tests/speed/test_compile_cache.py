"""The folder for compiled code: which one a run gets, what is deleted when, what is refused."""

import json
import os
import stat
import threading
import time

import pytest
import torch
from speed_tier.speed import compile_cache
from speed_tier.speed.compile_cache import Cleared, choose, clear, prune
from speed_tier.speed.flags import FLAGS, default_inductor_cache
from speed_tier.tests.speed import tiny
from speed_tier.tests.speed.process import full_state

CUDA = torch.device("cuda", 1)
posix = pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs POSIX owners and modes")


@pytest.fixture(autouse=True)
def nobody_named_a_folder(monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr(compile_cache, "_MADE_HERE", set())


def inductor(cache):
    return cache.flags.get("env.TORCHINDUCTOR_CACHE_DIR")


def ours(state, device=tiny.CPU):
    cache = choose(state, device)
    assert cache.folder is not None, cache.where
    return cache


def fill(key, name, size, age_s=0.0):
    """An entry of a key: a folder with two files, last written `age_s` ago."""
    entry = key / name
    entry.mkdir(parents=True)
    for half in ("first", "second"):
        (entry / half).write_bytes(b"x" * (size // 2))
        os.utime(entry / half, times=(time.time() - age_s,) * 2)
    return entry


def key(state, name, last_used_s=0.0):
    folder = state / "compiled" / name
    folder.mkdir(parents=True)
    (folder / "about.json").write_text("{}")
    os.utime(folder / "about.json", times=(time.time() - last_used_s,) * 2)
    return folder


# -- which folder ---------------------------------------------------------------------------------
def test_a_run_gets_a_folder_of_its_key_in_the_hosts_user_folder(tmp_path, monkeypatch):
    cache = ours(tmp_path)
    assert cache.folder.parent == tmp_path / "compiled"
    assert cache.flags == {"env.TORCHINDUCTOR_CACHE_DIR": str(cache.folder)}
    assert cache.where == str(cache.folder)
    about = json.loads((cache.folder / "about.json").read_text())
    assert torch.__version__ in about["key"]
    assert ours(tmp_path).folder == cache.folder
    monkeypatch.setattr(compile_cache, "pack_version", lambda: "another")
    assert ours(tmp_path).folder != cache.folder


@pytest.mark.parametrize("what", ["torch", "triton", "python"])
def test_another_version_is_another_key(tmp_path, monkeypatch, what):
    first = ours(tmp_path).folder
    found = compile_cache.versions()
    monkeypatch.setattr(compile_cache, "versions", lambda: {**found, what: "another"})
    assert ours(tmp_path).folder != first


def test_another_card_is_another_key_and_triton_is_named_a_folder_there(tmp_path, monkeypatch):
    named = {}
    for name in ("first card", "second card"):
        found = tiny.capabilities(tiny.CPU)
        card = type(found)(**{**vars(found), "device_type": "cuda", "device_name": name})
        monkeypatch.setattr(compile_cache, "capabilities", lambda device, card=card: card)
        cache = ours(tmp_path, CUDA)
        assert cache.flags["env.TRITON_CACHE_DIR"] == str(cache.folder / "triton")
        named[name] = cache.folder
    assert named["first card"] != named["second card"]


def test_a_folder_that_the_user_named_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    cache = choose(tmp_path / "state", tiny.CPU)
    assert (cache.flags, cache.folder) == ({}, None)
    assert cache.where == f"{tmp_path / 'mine'} (TORCHINDUCTOR_CACHE_DIR)"
    assert not (tmp_path / "state").exists()
    on_card = choose(None, CUDA)
    # Inductor would set it to that, and leave it set.
    assert on_card.flags == {"env.TRITON_CACHE_DIR": str(tmp_path / "mine" / "triton" / "1")}


def test_a_triton_folder_that_the_user_named_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    assert list(choose(tmp_path, CUDA).flags) == ["env.TORCHINDUCTOR_CACHE_DIR"]


def test_what_inductor_left_set_is_nobodys_wish(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_inductor_cache())
    monkeypatch.setenv("TRITON_CACHE_DIR", os.path.join(default_inductor_cache(), "triton", "0"))
    assert len(ours(tmp_path, CUDA).flags) == 2


def test_without_a_user_folder_torchs_own_is_used():
    cache = choose(None, tiny.CPU)
    assert inductor(cache) == default_inductor_cache() == cache.where
    assert cache.folder is None


@pytest.mark.parametrize(
    "name", ["with blank", "o'brien", 'a "quote"', "x" * 200 + "/" + "y" * 200]
)
def test_a_path_that_builds_cannot_take_falls_back_with_the_reason(tmp_path, name):
    cache = choose(tmp_path / name, tiny.CPU)
    assert cache.folder is None
    assert inductor(cache) == default_inductor_cache()
    assert "because" in cache.where
    assert ("is too long" if len(name) > 100 else "blank or a quote") in cache.where
    assert not (tmp_path / name).exists()


def test_a_name_outside_ascii_is_no_obstacle(tmp_path):
    assert ours(tmp_path / "äöü 文".replace(" ", "")).folder.is_dir()


def test_a_folder_that_cannot_be_written_falls_back_with_the_reason(tmp_path):
    (tmp_path / "state").write_text("a file where a folder would have to be")
    cache = choose(tmp_path / "state", tiny.CPU)
    assert (cache.folder, inductor(cache)) == (None, default_inductor_cache())
    assert "cannot be written" in cache.where


def test_a_read_only_folder_falls_back_with_the_reason(tmp_path, monkeypatch):
    ours(tmp_path)

    def read_only(path, data):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(compile_cache.Path, "write_bytes", read_only)
    cache = choose(tmp_path, tiny.CPU)
    assert cache.folder is None
    assert "cannot be written (Read-only file system)" in cache.where


def test_a_network_drive_falls_back_with_the_reason(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path}/net nfs4 rw 0 0\n")
    real_open = open
    monkeypatch.setattr(
        "builtins.open",
        lambda path, *a, **k: real_open(mounts if path == "/proc/self/mounts" else path, *a, **k),
    )
    (tmp_path / "net").mkdir()
    assert "is on a network drive (nfs4)" in choose(tmp_path / "net", tiny.CPU).where
    assert ours(tmp_path / "network").folder is not None


# -- whose code is run ----------------------------------------------------------------------------
@posix
def test_it_is_made_for_its_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        folder = ours(tmp_path).folder
    finally:
        os.umask(before)
    for made in (folder, folder.parent):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


@posix
@pytest.mark.parametrize("which", ["root", "key"])
def test_code_that_another_user_may_have_put_there_is_not_run(tmp_path, monkeypatch, which):
    folder = ours(tmp_path).folder
    place = folder if which == "key" else folder.parent
    place.chmod(0o770)
    assert "can be written by other users (mode 770)" in choose(tmp_path, tiny.CPU).where
    place.chmod(0o755)
    assert choose(tmp_path, tiny.CPU).folder == folder
    monkeypatch.setattr(os, "getuid", lambda: place.stat().st_uid + 1)
    assert "belongs to another user" in choose(tmp_path, tiny.CPU).where


@posix
@pytest.mark.parametrize("which", ["root", "key"])
def test_a_link_is_not_followed(tmp_path, which):
    folder = ours(tmp_path).folder
    place = folder if which == "key" else folder.parent
    elsewhere = tmp_path / "elsewhere"
    place.rename(elsewhere)
    place.symlink_to(elsewhere, target_is_directory=True)
    assert "is a link" in choose(tmp_path, tiny.CPU).where
    if which == "root":
        assert clear(tmp_path) == Cleared()
        assert elsewhere.is_dir()


# -- deleting -------------------------------------------------------------------------------------
def test_keys_that_were_used_longest_ago_go_first_then_the_oldest_entries(tmp_path):
    oldest, older = key(tmp_path, "oldest", 3000), key(tmp_path, "older", 2000)
    current = key(tmp_path, "current")
    for one in (oldest, older):
        fill(one, "fxgraph/ab/e", 1000)
    old = fill(current, "triton/h1", 1000, age_s=500)
    new = fill(current, "triton/h2", 1000, age_s=100)
    assert prune(current, limit_bytes=4100) == 0
    assert prune(current, limit_bytes=3500) == 1002
    assert (oldest.exists(), older.exists(), old.exists()) == (False, True, True)
    assert prune(current, limit_bytes=1500) == 2002
    assert (older.exists(), old.exists(), new.exists()) == (False, False, True)
    assert sorted(p.name for p in new.iterdir()) == ["first", "second"]
    assert [p.name for p in current.parent.iterdir()] == ["current"]


def test_nothing_is_deleted_under_a_run(tmp_path):
    cache = ours(tmp_path)
    entry = fill(cache.folder, "triton/h1", 1000)
    cache.open()
    other = key(tmp_path, "other")
    assert prune(other, limit_bytes=0) == 0
    assert prune(cache.folder, limit_bytes=0) == 2  # the other key
    cleared = clear(tmp_path)
    assert cleared.freed_bytes == 0
    assert cleared.kept_bytes > 1000
    assert entry.is_dir()
    cache.close(grown=False)
    cache.close(grown=False)
    assert clear(tmp_path).freed_bytes > 1000
    assert not cache.folder.exists()
    assert ours(tmp_path).folder == cache.folder


def test_the_mark_of_a_process_that_was_killed_wears_off(tmp_path):
    cache = ours(tmp_path)
    cache.open()
    (mark,) = (tmp_path / "compiled" / "in_use").iterdir()
    long_ago = time.time() - compile_cache._MARK_LASTS_S - 1
    os.utime(mark, times=(long_ago, long_ago))
    assert clear(tmp_path).kept_bytes == 0
    assert not mark.exists()


def test_a_run_that_compiled_something_looks_after_the_bound(tmp_path, monkeypatch):
    pruned = threading.Event()
    monkeypatch.setattr(compile_cache, "prune", lambda folder: pruned.set())
    for grown in (False, True):
        cache = ours(tmp_path)
        cache.open()
        cache.close(grown)
        assert pruned.wait(5 if grown else 0.1) is grown


def test_what_a_killed_process_left_half_deleted_goes_too(tmp_path):
    folder = ours(tmp_path).folder
    left = folder.parent / "trash-0123"
    left.mkdir()
    clear(tmp_path)
    assert not left.exists()


def test_a_folder_is_made_anew_once_for_a_reason(tmp_path, monkeypatch):
    cache = ours(tmp_path)
    entry = fill(cache.folder, "ab", 100)
    assert not cache.make_anew("cut off")  # this process made it: nothing old is in there
    assert entry.exists()
    monkeypatch.setattr(compile_cache, "_MADE_HERE", set())  # as in the next process
    assert cache.make_anew("cut off")
    assert not entry.exists()
    assert cache.folder.is_dir()
    assert not cache.make_anew("another")  # once a process
    monkeypatch.setattr(compile_cache, "_MADE_HERE", set())
    assert not ours(tmp_path).make_anew("cut off")
    assert ours(tmp_path).make_anew("another")
    assert not choose(None, tiny.CPU).make_anew("cut off")


def test_a_folder_that_another_process_uses_is_not_made_anew(tmp_path, monkeypatch):
    cache = ours(tmp_path)
    entry = fill(cache.folder, "ab", 100)
    monkeypatch.setattr(compile_cache, "_MADE_HERE", set())
    cache.open()
    theirs = cache.folder.parent / "in_use" / f"{cache.folder.name}.{os.getppid()}.0a0a0a0a"
    theirs.touch()
    assert not cache.make_anew("cut off")
    assert entry.exists()
    theirs.unlink()
    assert cache.make_anew("cut off")  # a run of this process is the one that asks
    assert not entry.exists()


def test_torch_is_told_while_the_run_lasts_and_not_after(tmp_path):
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

    before = full_state()
    cache = ours(tmp_path, CUDA)
    token = FLAGS.acquire(cache.flags)
    assert cache_dir() == str(cache.folder)
    assert triton_cache_dir(1) == str(cache.folder / "triton")
    FLAGS.release(token)
    assert full_state() == before


def test_a_scan_of_many_entries_is_quick(tmp_path):
    current = key(tmp_path, "current")
    for number in range(300):
        fill(current, f"fxgraph/ab/{number}", 10)
    began = time.thread_time()
    assert prune(current) == 0
    assert time.thread_time() - began < 0.5
