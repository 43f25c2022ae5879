"""A process that starts again compiles nothing anew, and a damaged cache costs only time."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from speed_tier.tests.speed.optimizations.warm_start import start

pytestmark = pytest.mark.slow  # blocks are compiled, in processes of their own


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A first process, one after it, and one that finds half of every file."""
    folder, damaged = tmp_path_factory.mktemp("user"), tmp_path_factory.mktemp("damaged")
    first = start(folder)
    shutil.copytree(folder, damaged, dirs_exist_ok=True)
    for path in damaged.rglob("*"):
        if path.is_file() and path.name != "about.json":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with ThreadPoolExecutor() as pool:
        again, cut_off = pool.map(start, [folder, damaged])
    return {"first": first, "again": again, "cut off": cut_off, "folder": folder}


@pytest.mark.parametrize("name", ["first", "again", "cut off"])
def test_every_process_is_right_and_leaves_its_settings_as_they_were(runs, name):
    run = runs[name]
    assert (run["same"], run["leaks"], run["fell_back"]) == (True, [], "")


def test_a_restart_compiles_nothing_anew(runs):
    first, again = runs["first"], runs["again"]
    assert first["compiles"] == [1, 0, 0]
    assert first["inductor"]["fxgraph_cache_miss"] == 1
    assert again["compiles"] == [1, 1, 0]
    assert again["cache"].startswith(str(runs["folder"]))
    assert list(runs["folder"].rglob("fxgraph")), "compiled code went elsewhere"
    assert again["inductor"]["fxgraph_cache_hit"] == 1
    assert "fxgraph_cache_miss" not in again["inductor"]
    # A graph with sdpa_kernel in it went past this one.
    assert again["aot_autograd"]["autograd_cache_hit"] == 1
    assert not {"autograd_cache_miss", "autograd_cache_bypass"} & set(again["aot_autograd"])


def test_a_cache_that_was_cut_off_costs_only_time(runs):
    cut_off = runs["cut off"]
    assert cut_off["compiles"] == [1, 0, 0]
    assert cut_off["inductor"]["fxgraph_cache_miss"] >= 1
