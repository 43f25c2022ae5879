"""Both VAEs of a real ComfyUI behind Speed Tier VAE: nothing leaks, nothing of the host is lost."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from speed_tier.speed.tiers import VAE_FEATURES, Tier
from speed_tier.tests.host.vae_in_process import run_cases

KINDS = ("kl", "wan")
CALLS = ("decode", "decode_tiled", "encode", "encode_tiled")


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    with ThreadPoolExecutor() as pool:
        running = {k: pool.submit(run_cases, k, tmp_path_factory.mktemp(k)) for k in KINDS}
        return {kind: future.result() for kind, future in running.items()}


@pytest.fixture(params=KINDS)
def seen(request, sessions):
    return sessions[request.param]


def features(line):
    return {f["name"]: f for f in line["report"]["features"]}


def states(line):
    return {name: feature["state"] for name, feature in features(line).items()}


def test_every_case_leaves_the_process_and_the_vae_as_they_were(seen):
    assert len(seen) > 20
    for case, line in seen.items():
        left = {k: line[k] for k in ("flags_kept", "weights_kept", "patches", "instance")}
        assert left == {
            "flags_kept": True,
            "weights_kept": True,
            "patches": 0,
            "instance": [],
        }, case
    assert seen["plain again"]["untouched"]
    assert seen["plain again"]["digest"] == seen["plain decode"]["digest"]


@pytest.mark.parametrize("call", CALLS)
def test_off_is_the_hosts_own_bytes(seen, call):
    off, plain = seen[f"off {call}"], seen[f"plain {call}"]
    assert (off["digest"], off["layout"]) == (plain["digest"], plain["layout"])
    assert off["report"]["features"] == []
    assert off["report"]["flags"]["before"] == off["report"]["flags"]["after"]


@pytest.mark.parametrize("call", CALLS)
def test_max_with_everything_on(seen, call):
    line = seen[f"max {call}"]
    assert states(line) == dict.fromkeys(VAE_FEATURES[Tier.MAX], "engaged")
    assert line["layout"] == seen[f"plain {call}"]["layout"]
    assert line["error"] < 1e-5
    report = line["report"]
    assert report["outcome"] == "done" and report["model"]["family"] in ("kl_vae", "wan_vae")
    assert report["operation"] == f"vae {call.removesuffix('_tiled')}"
    assert report["flags"]["during"]["cudnn.benchmark"] is True
    assert report["shape"]["pixels"] == [96, 64]
    assert len(report["timing"]["steps_s"]) == report["shape"]["steps"] > ("tiled" in call)
    assert (report["timing"]["vae_decode_s"] is None) is ("encode" in call)


def test_two_dimensional_convolutions_all_get_their_format(sessions):
    """Of the Wan VAE a CPU gives the plain format back; the unit tests stand in for cudnn."""
    for call in CALLS:
        note = features(sessions["kl"][f"max {call}"])["channels_last"]["note"]
        assert note.startswith("all ") and note.endswith("came channels-last")


def test_the_nearest_tier_decides_and_a_copy_keeps_it(seen):
    plain = seen["plain decode"]["digest"]
    for case in ("off behind max", "a copy of the copy"):
        assert seen[case]["digest"] == plain
        assert (seen[case]["report"]["tier"]["resolved"], features(seen[case])) == ("off", {})


def test_out_of_memory_ends_in_the_hosts_own_tiles(seen):
    line, plain = seen["max, out of memory"], seen["plain, out of memory"]
    # The whole picture with features, the whole as off, and then tiles.
    assert line["widths"][:2] == [12, 12] and max(line["widths"][2:]) <= 8
    assert (line["digest"], line["layout"]) == (plain["digest"], plain["layout"])
    assert set(states(line).values()) == {"fell_back"}
    assert "OutOfMemoryError" in features(line)["channels_last"]["reason"]


def test_a_cancel_reaches_the_host(seen):
    line = seen["max, interrupted"]
    assert line["raised"].startswith("InterruptProcessingException")
    assert line["report"]["outcome"] == "interrupted"
    assert "fell_back" not in states(line).values()


def test_default_measures_once_and_remembers(seen):
    first, known = seen["default, measured"], seen["default, known"]
    said = features(first)["channels_last"]
    said = said["reason"] or said["note"]
    assert "ms with it" in said and "measured now" in said, said
    assert known["stored"]
    for case in ("default, known", "default, next process"):
        again = features(seen[case])["channels_last"]
        assert again["state"] == features(first)["channels_last"]["state"]
        assert "measured earlier on this card" in (again["reason"] or again["note"])
    again = features(seen["default, damaged store"])["channels_last"]
    assert "measured now" in (again["reason"] or again["note"])
    for case in ("default, measured", "default, known", "default, damaged store"):
        assert seen[case]["error"] < 1e-5


def test_fp16_stays_finite_where_off_is(sessions):
    seen = sessions["wan"]
    off, line = seen["fp16 plain"], seen["fp16 max"]
    assert off["finite"] and line["finite"]
    assert line["error"] < 0.01
    assert states(line)["vae_compile"] == states(line)["channels_last"] == "engaged"


def test_a_method_that_another_pack_replaced_is_called(seen):
    line = seen["replaced, default"]
    assert line["error"] < 1e-5
    assert states(line)["channels_last"] == "engaged"


def test_weights_that_come_anew_in_each_call(seen):
    line = seen["cast, max"]
    assert line["modules"] > 20
    assert line["error"] < 1e-5 and line["layout"] == seen["plain decode"]["layout"]
    assert states(line) == dict.fromkeys(VAE_FEATURES[Tier.MAX], "engaged")
    compiled = [kind["name"] for kind in line["report"]["compile"]["kinds"]]
    from_host = [name for name in compiled if name.endswith("weights from the host")]
    is_kl = line["report"]["model"]["family"] == "kl_vae"
    assert from_host == (compiled if is_kl else []), "the Wan VAE's norms are not the host's"
