"""The harness itself: a bare host runs, repeats, interrupts, fails; the pack loads cleanly."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest
from speed_tier.tests.host import provision
from speed_tier.tests.host.graphs import Graph, tiny_run
from speed_tier.tests.host.provision import ProvisionError, write_once
from speed_tier.tests.host.server import (
    PACK_NAME,
    HostCrashedError,
    HostServer,
    PromptFailedError,
    tracebacks,
)

ARCHS = ["zimage", "qwen", "other"]


@pytest.mark.parametrize("arch", ARCHS)
def test_same_graph_gives_same_bytes(bare_server: HostServer, arch: str) -> None:
    first = bare_server.run(tiny_run(arch))
    # Another seed in between, or the second run would come from the host's cache.
    other = bare_server.run(tiny_run(arch, seed=9))
    again = bare_server.run(tiny_run(arch))
    assert first.ui("sink", "finite") is True
    assert first.ui("sink", "std") > 0.01
    assert first.ui("sink", "sha256") == again.ui("sink", "sha256")
    assert first.ui("sink", "sha256") != other.ui("sink", "sha256")


@pytest.mark.parametrize("arch", ARCHS)
def test_two_servers_give_same_bytes(
    bare_server: HostServer, server: HostServer, arch: str
) -> None:
    graph = tiny_run(arch, seed=3, cfg=2.0, dim=64)
    hashes = {s.run(graph).ui("sink", "sha256") for s in (bare_server, server)}
    assert len(hashes) == 1


def test_pack_loads_without_a_complaint(server: HostServer) -> None:
    # The host prints tracebacks of its own for optional packages such as torchaudio.
    # It may lie in a folder with our name in it: the cache of a clone.
    text = server.log_text().replace(str(provision.find_host()), "the host")
    assert [t for t in tracebacks(text) if PACK_NAME in t or "speed_tier" in t] == []
    assert [line for line in text.splitlines() if "FAILED" in line and PACK_NAME in line] == []
    assert "SpeedTier" in server.get("/object_info")


def test_events_are_followed_in_order(bare_server: HostServer) -> None:
    mark = bare_server.events.mark()
    prompt_id = bare_server.queue(tiny_run("zimage", seed=21, steps=3))
    bare_server.events.wait_for(
        lambda e: e.type == "execution_success" and e.data["prompt_id"] == prompt_id, mark=mark
    )
    types = [e.type for e in bare_server.events.since(mark)]
    assert types.index("execution_start") < types.index("executing")
    assert types.index("executing") < types.index("progress")
    assert types.index("progress") < types.index("execution_success")


@pytest.mark.parametrize("arch", ["zimage", "qwen"])
def test_interrupt_lands_in_mid_run(bare_server: HostServer, arch: str) -> None:
    graph = Graph()
    model = graph.add("TestSleep", model=graph.tiny_model(arch), seconds=0.3)
    graph.sink(graph.sample(model, steps=40, node_id="sampler"), node_id="sink")
    mark = bare_server.events.mark()
    prompt_id = bare_server.queue(graph.prompt)
    bare_server.events.wait_for(
        lambda e: e.type == "progress" and e.data["value"] >= 2, mark=mark, timeout=60
    )
    began = time.monotonic()
    bare_server.interrupt()
    result = bare_server.wait(prompt_id, timeout=20)
    assert result.interrupted
    assert time.monotonic() - began < 8
    assert bare_server.run(tiny_run(arch)).ok


@pytest.mark.parametrize("where", ["attention", "layer"])
@pytest.mark.parametrize("kind", ["runtime error", "out of memory"])
@pytest.mark.parametrize("arch", ["zimage", "qwen"])
def test_error_is_raised_inside_a_block(
    bare_server: HostServer, arch: str, kind: str, where: str
) -> None:
    graph = Graph()
    inputs = {"kind": kind, "where": where, "step": 1, "block": 1}
    model = graph.add("TestRaise", model=graph.tiny_model(arch), **inputs)
    graph.sink(graph.sample(model, steps=3, node_id="sampler"), node_id="sink")
    result = bare_server.run(graph.prompt, check=False)
    assert result.error is not None
    assert "inside a block" in result.error["exception_message"]
    raised = bare_server.post("/speed_tier_test/records/clear")["raised"]
    assert [r["call"] for r in raised] == [1]
    bare_server.run(tiny_run(arch))
    assert bare_server.collect()["leftovers"].get("tiny", {}).get("shadowed", []) == []


@pytest.mark.parametrize("where", ["attention", "layer"])
def test_unsprung_trap_changes_nothing(bare_server: HostServer, where: str) -> None:
    graph = Graph()
    inputs = {"kind": "none", "where": where, "step": 0, "block": 0}
    model = graph.add("TestRaise", model=graph.tiny_model("qwen"), **inputs)
    graph.sink(graph.sample(model, node_id="sampler"), node_id="sink")
    plain = bare_server.run(tiny_run("qwen")).ui("sink", "sha256")
    assert bare_server.run(graph.prompt).ui("sink", "sha256") == plain


CHANGES = {
    "TestAttentionOverride": {"amount": 0.5},
    "TestForwardHook": {"block": 0, "on": "layer", "amount": 0.5},
    "TestBlockPatch": {"block": 0, "amount": 0.5},
}


@pytest.mark.parametrize("arch", ["zimage", "qwen"])
@pytest.mark.parametrize("node", list(CHANGES))
def test_disturbing_nodes_change_the_result(bare_server: HostServer, arch: str, node: str) -> None:
    if (node, arch) == ("TestBlockPatch", "zimage"):
        pytest.skip("0.3.75 hands no block patch to Z-Image")
    graph = Graph()
    model = graph.add(node, model=graph.tiny_model(arch), **CHANGES[node])
    graph.sink(graph.sample(model, node_id="sampler"), node_id="sink")
    plain = bare_server.run(tiny_run(arch)).ui("sink", "sha256")
    changed = bare_server.run(graph.prompt)
    assert changed.ui("sink", "finite")
    assert changed.ui("sink", "sha256") != plain


def test_control_reaches_qwen(bare_server: HostServer) -> None:
    hashes = set()
    for amount in (0.0, 0.5):
        graph = Graph()
        positive = graph.add(
            "TestControl", conditioning=graph.conditioning(), amount=amount, seed=3
        )
        latent = graph.sample(graph.tiny_model("qwen"), positive=positive)
        graph.sink(latent, node_id="sink")
        hashes.add(bare_server.run(graph.prompt).ui("sink", "sha256"))
    assert len(hashes) == 2


@pytest.mark.parametrize("arch", ["zimage", "qwen"])
@pytest.mark.parametrize("kind", ["lora", "lokr", "loha", "dora"])
def test_adapters_change_the_result_and_leave(
    bare_server: HostServer, arch: str, kind: str
) -> None:
    plain = bare_server.run(tiny_run(arch)).ui("sink", "sha256")
    adapted = bare_server.run(tiny_run(arch, lora={"kind": kind})).ui("sink", "sha256")
    assert adapted != plain
    assert bare_server.run(tiny_run(arch, seed=1)).ok
    assert bare_server.run(tiny_run(arch)).ui("sink", "sha256") == plain


def test_flags_and_memory_are_readable(bare_server: HostServer) -> None:
    graph = Graph()
    model = graph.add("TestFlagsDuring", model=graph.tiny_model(label="watched"), name="during")
    latent = graph.sample(model, seed=77)
    graph.add("TestFlags", name="now", after=latent)
    graph.sink(latent, node_id="sink")
    bare_server.run(graph.prompt)
    records = bare_server.post("/speed_tier_test/records/clear")
    assert len(records["during"]) == 2
    assert records["during"][0] == records["now"][0]
    assert "torch.backends.cudnn.benchmark" in records["now"][0]
    assert bare_server.state()["alive"]["watched"] == {"patcher": 1, "module": 1}
    bare_server.free(unload_models=True, free_memory=True)
    assert bare_server.collect()["alive"]["watched"] == {"patcher": 0, "module": 0}


def test_unload_node_unloads(bare_server: HostServer) -> None:
    graph = Graph()
    model = graph.tiny_model()
    latent = graph.sample(model, seed=5)
    graph.add("TestUnload", "unload", model=model, after=latent)
    assert bare_server.run(graph.prompt).ui("unload", "unloaded") == 1
    assert bare_server.state()["loaded"] == []


def test_tiny_vae_decodes(bare_server: HostServer) -> None:
    graph = Graph()
    latent = graph.sample(graph.tiny_model())
    graph.save_image(latent, graph.add("TestTinyVAE", width=32, seed=0), "harness", node_id="save")
    image = bare_server.run(graph.prompt).ui("save", "images")
    assert (bare_server.output_dir / image["filename"]).stat().st_size > 500


def test_rejected_graph_is_reported(bare_server: HostServer) -> None:
    with pytest.raises(PromptFailedError, match="rejected"):
        bare_server.run(tiny_run("nonsense"))


def test_crash_fails_the_waiting_call_at_once() -> None:
    with HostServer(with_pack=False, tag="crash") as server:
        graph = Graph()
        model = graph.add("TestSleep", model=graph.tiny_model(), seconds=5.0)
        graph.sink(graph.sample(model, steps=10))
        prompt_id = server.queue(graph.prompt)
        assert server.process is not None
        server.process.kill()
        began = time.monotonic()
        with pytest.raises(HostCrashedError):
            server.wait(prompt_id, timeout=60)
        assert time.monotonic() - began < 5


def test_wrong_comfyui_path_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    with pytest.raises(provision.ProvisionError, match="COMFYUI_PATH needs a ComfyUI folder"):
        provision.find_host()


def test_half_a_generated_file_is_never_left(tmp_path: Path) -> None:
    def fill_the_disk(part: Path) -> None:
        part.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "models" / "model.safetensors"
    with pytest.raises(OSError, match="No space left"):
        write_once(path, 4, fill_the_disk)
    assert list(path.parent.iterdir()) == []
    assert write_once(path, 4, lambda part: part.write_bytes(b"all")).read_bytes() == b"all"
    assert write_once(path, 4, fill_the_disk).read_bytes() == b"all"


def test_a_full_disk_is_one_sentence_before_the_first_byte(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(ProvisionError, match=r"^model.safetensors needs .* GiB of disk; found .*"):
        write_once(path, 1 << 62, lambda part: part.write_bytes(b"all"))
    assert list(tmp_path.iterdir()) == []
