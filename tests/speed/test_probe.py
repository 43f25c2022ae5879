"""Figures that outlive a process, and a store that does no harm."""

import json
import threading

import pytest
import torch
from speed_tier.speed import probe
from speed_tier.speed.probe import Measurements

CPU = torch.device("cpu")


def test_figures_are_there_for_the_next_process(tmp_path):
    folder = tmp_path / "not yet" / "there"
    Measurements(folder).put("a", 12.5, 10.0)
    Measurements(folder).put("b", 1, 2)
    assert Measurements(folder).get("a") == (12.5, 10.0)
    Measurements(folder).put("a", 3.0, 4.0)
    assert Measurements(folder).get("a") == (3.0, 4.0)
    assert Measurements(folder).get("c") is None
    assert [path.name for path in folder.iterdir()] == ["measured.json"]


def test_a_key_names_card_versions_and_what_was_measured(monkeypatch):
    before = probe.key(CPU, "compiled", (1, 2))
    assert torch.__version__ in before and "compiled" in before and "(1, 2)" in before
    monkeypatch.setattr(probe, "pack_version", lambda: "next")
    assert probe.key(CPU, "compiled", (1, 2)) != before


def test_nowhere_to_write():
    store = Measurements(None)
    store.put("a", 1.0, 2.0)
    assert store.get("a") is None


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"[]", b'{"a": 1}', b'{"a": [1]}', b'{"a": ["x", 2]}', b'{"a": [1, -2]}',
     b'{"a": [1, Infinity]}', b'{"a": [true, 2]}', b'{"a": [1, 2'],
)  # fmt: skip
def test_a_damaged_file_is_measured_anew(tmp_path, content):
    (tmp_path / "measured.json").write_bytes(content)
    store = Measurements(tmp_path)
    assert store.get("a") is None
    store.put("a", 1.0, 2.0)
    assert store.get("a") == (1.0, 2.0)


def test_a_file_that_cannot_be_written_costs_only_the_measurement(tmp_path):
    (tmp_path / "file").write_text("")
    store = Measurements(tmp_path / "file")
    store.put("a", 1.0, 2.0)
    assert store.get("a") is None


def test_the_oldest_are_forgotten(tmp_path):
    store = Measurements(tmp_path)
    rows = {str(number): [1, 1] for number in range(500)}
    (tmp_path / "measured.json").write_text(json.dumps(rows))
    store.put("new", 1.0, 2.0)
    assert store.get("new") and store.get("1") and store.get("0") is None


def test_many_threads(tmp_path):
    def work(name):
        for _ in range(20):
            Measurements(tmp_path).put(name, 1.0, 2.0)

    threads = [threading.Thread(target=work, args=(str(i),)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(Measurements(tmp_path).get(str(i)) for i in range(5))
