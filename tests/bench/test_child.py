"""Measurements in other processes: their rows arrive whatever becomes of the process."""

import json
import sys

from speed_tier.bench.child import print_rows, rows_of

ROW = {"width": 1024, "height": 1024, "ms_p50": 1.5}


def command(code):
    return [sys.executable, "-c", f"import json, os, sys, time\nrow = {json.dumps(ROW)}\n{code}"]


def said(code, sizes=(1024, 512), timeout_s=30.0):
    return rows_of(command(code), list(sizes), timeout_s, {})


PRINT = "print('ROW ' + json.dumps(row), flush=True)\n"


def test_rows_of_a_process_that_ends_well():
    assert said(PRINT * 2) == [ROW, ROW]


def test_what_else_is_printed_is_no_row():
    assert said("print('hello')\n" + PRINT, sizes=[1024]) == [ROW]


def test_a_process_that_dies_keeps_its_rows_and_says_how_it_ended():
    first, second = said(PRINT + "sys.stderr.write('a\\nCUDA error: x\\n'); os.abort()")
    assert first == ROW
    assert (second["width"], second["height"]) == (512, 512)
    assert second["failed"].startswith("the process ended with code -6: a | CUDA error: x")


def test_a_process_that_hangs_is_stopped():
    first, second = said(PRINT + "time.sleep(60)", timeout_s=3.0)
    assert first == ROW
    assert second["failed"].startswith("still running after 3 s")


def test_the_environment_of_a_process(monkeypatch):
    monkeypatch.setenv("BENCH_CHILD_A", "a")
    code = 'names = [n for n in os.environ if n.startswith("BENCH_CHILD_")]\n'
    code += "print('ROW ' + json.dumps(sorted(names)))"
    environment = {"BENCH_CHILD_A": None, "BENCH_CHILD_B": "b"}
    assert rows_of(command(code), [1024], 30.0, environment) == [["BENCH_CHILD_B"]]


def test_a_size_that_fails_says_how_and_the_others_go_on(capsys):
    def measure(size):
        if size == 512:
            raise ValueError("planted")
        return {"ms_p50": size / 2}

    print_rows([1024, 512, 256], measure, start_s=1.5)
    lines = capsys.readouterr().out.splitlines()
    rows = [json.loads(line.removeprefix("ROW ")) for line in lines]
    assert [row["width"] for row in rows] == [1024, 512, 256]
    assert [row.get("ms_p50") for row in rows] == [512.0, None, 128.0]
    assert [row.get("failed") for row in rows] == [None, "ValueError: planted", None]
    assert {row["start_s"] for row in rows} == {1.5}
