"""Figures that outlive a process, and a store that does no harm."""

import contextlib
import json
import threading
import time
from pathlib import Path

import pytest
import torch
from speed_tier.speed import probe
from speed_tier.speed.probe import Figures, Measurements, Trial

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
     b'{"a": [1, Infinity]}', b'{"a": [true, 2]}', b'{"a": [1, 2', b"[" * 200_000],
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


def test_a_folder_that_may_not_be_searched_costs_only_the_measurement(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    for name in ("is_file", "read_text", "write_text", "stat"):
        monkeypatch.setattr(Path, name, refuse)
    store = Measurements(tmp_path)
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


class Call:
    """A call whose time grows with the area of its input, on a clock that a test moves."""

    def __init__(self, monkeypatch, ms_per_unit, size=(64, 64), launch_ms=0.0, first_ms=0.0):
        self.now_s, self.other, self.sizes, self.costs = 100.0, False, [], []
        self.ms_per_unit, self.launch_ms, self.first_ms = ms_per_unit, launch_ms, first_ms
        self.gain, self.set_up_ms, self.is_set_up = 1.0, 0.0, False
        self.trial = Trial("vae decode", size, 8, 8, self.run)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)

    def run(self, height, width):
        self.sizes.append((height, width, self.other))
        cost_ms = self.launch_ms + self.ms_per_unit * height * width
        cost_ms += self.first_ms if len(self.sizes) == 1 else 0.0
        if self.other:
            cost_ms /= self.gain
            cost_ms += 0.0 if self.is_set_up else self.set_up_ms
            self.is_set_up = True
        self.costs.append(cost_ms)
        self.now_s += cost_ms / 1000

    @contextlib.contextmanager
    def other_way(self):
        self.other = True
        try:
            yield
        finally:
            self.other = False

    def measure(self, **more):
        return probe.measure(self.trial, self.other_way, CPU, **more)


def test_a_call_that_fits_is_measured_whole_and_in_turns(monkeypatch):
    call = Call(monkeypatch, ms_per_unit=0.005)  # 20 ms in all
    call.gain = 2.0
    found = call.measure()
    assert (found.plain_ms, found.other_ms) == (pytest.approx(20.48), pytest.approx(10.24))
    assert found.wins and not found.problem
    rounds = call.sizes[-10:]
    assert rounds == [(64, 64, False), (64, 64, True)] * 5
    source = f"measured now in {found.spent_s:.2f} s"
    assert found.text() == f"10.24 ms with it, 20.48 without ({source})"
    assert found.spent_s == pytest.approx(sum(call.costs) / 1000)
    assert found.spent_s < 1.0


@pytest.mark.parametrize("ms_per_unit", [0.005, 0.02, 0.05, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("size", [(64, 64), (128, 96), (16, 300)])
def test_the_cost_is_bounded_whatever_a_call_takes(monkeypatch, ms_per_unit, size):
    call = Call(monkeypatch, ms_per_unit, size, first_ms=700.0)
    found = call.measure()
    counted_s = sum(call.costs[1:]) / 1000  # without what the first call loads
    assert counted_s <= 1.0
    assert found.problem == "" or ms_per_unit == 1.0, found
    height, width, _ = call.sizes[-1]
    assert height <= size[0] and width <= size[1]
    if found.place:
        assert found.place == f" on {width * 8}x{height * 8} px"
        assert (height, width) != size


def test_a_call_that_is_too_long_even_in_small_is_not_measured(monkeypatch):
    call = Call(monkeypatch, ms_per_unit=4.0)
    found = call.measure()
    assert found.problem.startswith("not measured: a call of 64x64 px takes 256 ms")
    assert not found.wins and found.text() == found.problem
    assert len(call.sizes) == 2 and not any(other for *_, other in call.sizes)


def test_a_set_up_that_eats_the_budget_is_no_measurement(monkeypatch):
    call = Call(monkeypatch, ms_per_unit=0.005)
    call.set_up_ms, call.gain = 3000.0, 5.0
    found = call.measure()
    assert "setting it up at 512x512 px took 2.98 s" in found.problem
    assert not found.wins


def test_a_compile_is_not_counted_and_a_search_is_in_part(monkeypatch):
    call = Call(monkeypatch, ms_per_unit=0.005)
    call.set_up_ms, call.gain = 3000.0, 2.0
    found = call.measure(set_up_is_counted=False)
    assert found.other_ms == pytest.approx(10.24)
    assert found.spent_s < 1.0
    call = Call(monkeypatch, ms_per_unit=0.005)
    call.set_up_ms, call.gain = 110.24, 2.0
    found = call.measure(share_of_set_up=0.1)
    assert found.other_ms == pytest.approx(20.24)  # 10.24 and a tenth of 100 above the plain 20.48


def test_launches_do_not_make_a_large_call_look_longer_than_it_is(monkeypatch):
    """8x8 takes 10 ms, as does 64x64 nearly: by area that would be 640 ms, and a crop."""
    call = Call(monkeypatch, ms_per_unit=0.0001, launch_ms=10.0)
    assert call.measure().place == ""


@pytest.mark.parametrize(("other_ms", "wins"), [(9.0, True), (9.8, False), (10.0, False)])
def test_a_tie_is_no_gain(other_ms, wins):
    assert Figures(10.0, other_ms).wins is wins


def test_figures_are_known_in_the_next_process(tmp_path):
    probe.remember("a", tmp_path, Figures(2.0, 1.0, spent_s=0.3))
    assert probe.known("a", tmp_path) == Figures(2.0, 1.0)
    probe.forget()
    assert probe.known("a", tmp_path) == Figures(2.0, 1.0)
    assert "measured earlier on this card" in probe.known("a", tmp_path).text()
    probe.forget()
    assert probe.known("b", tmp_path) is None


@pytest.mark.parametrize("folder", ["nowhere", "a file"])
def test_a_store_that_cannot_be_written_costs_one_measurement_a_process(tmp_path, folder):
    (tmp_path / "a file").write_text("")
    place = None if folder == "nowhere" else tmp_path / folder
    probe.remember("a", place, Figures(2.0, 1.0))
    assert probe.known("a", place) == Figures(2.0, 1.0)
    probe.forget()
    assert probe.known("a", place) is None


def test_what_was_not_measured_is_not_kept_for_the_next_process(tmp_path):
    probe.remember("a", tmp_path, Figures(problem="not measured: too long"))
    assert probe.known("a", tmp_path).problem == "not measured: too long"
    probe.forget()
    assert probe.known("a", tmp_path) is None
    assert list(tmp_path.iterdir()) == []
