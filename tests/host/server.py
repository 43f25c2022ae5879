"""One real ComfyUI process on this machine: start it, queue graphs, follow events, stop it."""

from __future__ import annotations

import atexit
import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .events import EventLog
from .provision import REPO, cache_dir, clean_environment, find_host

PACK_NAME = "ComfyUI-SpeedTier"
TEST_PACK = Path(__file__).resolve().parent / "test_nodes"
INSTANCE_FOLDERS = (
    "custom_nodes",
    "input",
    "output",
    "user",
    "models/diffusion_models",
    "models/vae",
    "models/loras",
)


class HostCrashedError(RuntimeError):
    """The host process ended while something waited for it."""


class PromptFailedError(RuntimeError):
    """A prompt was rejected, raised or was interrupted."""


@dataclass
class PromptResult:
    """What one prompt left in the host's history."""

    prompt_id: str
    status: str
    outputs: dict[str, dict[str, Any]]
    messages: list[list[Any]]
    seconds: float
    rejected: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        return self.status == "success"

    @property
    def error(self) -> dict[str, Any] | None:
        """The host's `execution_error` message, or None."""
        return next((m[1] for m in self.messages if m[0] == "execution_error"), None)

    @property
    def interrupted(self) -> bool:
        return any(m[0] == "execution_interrupted" for m in self.messages)

    @property
    def cached(self) -> set[str]:
        """Ids of the nodes that were served from the host's cache."""
        nodes = [m[1].get("nodes", []) for m in self.messages if m[0] == "execution_cached"]
        return {node for group in nodes for node in group}

    def ui(self, node: str, key: str) -> Any:
        """First value of one ui entry of one output node."""
        return self.outputs[node][key][0]


@dataclass
class HostServer:
    """Starts in `start()` or on entering a with block; every server has a private folder.

    Args:
        with_pack: False gives the host alone, the reference for byte identity.
        extra_args, env: added to the command line and the environment.
        models: files linked into models/, as {"vae/tiny.safetensors": path}.
        custom_nodes: more packs to link, as {"folder name": path}.
        test_nodes: links the test-only nodes.
        threads: torch threads; one is fastest for tiny models and makes runs repeatable.
    """

    with_pack: bool = True
    extra_args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    models: dict[str, Path] = field(default_factory=dict)
    custom_nodes: dict[str, Path] = field(default_factory=dict)
    test_nodes: bool = True
    threads: int | None = 1
    cpu: bool = True
    tag: str = "server"
    python: str = sys.executable
    start_timeout_s: float = 180.0

    process: subprocess.Popen[bytes] | None = None
    port: int = 0
    instance: Path = Path()
    log_path: Path = Path()
    client_id: str = ""
    events: EventLog = field(default_factory=EventLog)
    start_seconds: float = 0.0

    # -- life -----------------------------------------------------------------------------------
    def start(self) -> HostServer:
        host = find_host()
        parent = cache_dir() / "instances"
        parent.mkdir(parents=True, exist_ok=True)
        self.instance = Path(tempfile.mkdtemp(prefix=f"{self.tag}-", dir=parent))
        self._fill_instance()
        logs = REPO / "test_output"
        logs.mkdir(exist_ok=True)
        self.log_path = logs / f"{self.instance.name}.log"
        self.port = free_port()
        self.client_id = uuid.uuid4().hex
        began = time.monotonic()
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self._command(host),
                cwd=self.instance,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the test run must not race with stop()
            )
        atexit.register(self.stop)
        self._wait_until_up(began + self.start_timeout_s)
        self.start_seconds = time.monotonic() - began
        self.events.follow(f"ws://127.0.0.1:{self.port}/ws?clientId={self.client_id}")
        return self

    def stop(self, keep: bool = False) -> int | None:
        """Ends the process (SIGINT, then SIGKILL) and removes its folder unless `keep`."""
        atexit.unregister(self.stop)
        self.events.close()
        code = None
        if self.process is not None:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                try:
                    self.process.wait(20)
                except subprocess.TimeoutExpired:
                    self.process.kill()
                    self.process.wait()
            code = self.process.returncode
            self.process = None
        if not keep and self.instance != Path():
            shutil.rmtree(self.instance, ignore_errors=True)
        return code

    def __enter__(self) -> HostServer:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _fill_instance(self) -> None:
        for name in INSTANCE_FOLDERS:
            (self.instance / name).mkdir(parents=True, exist_ok=True)
        packs = dict(self.custom_nodes)
        if self.with_pack:
            packs[PACK_NAME] = REPO
        if self.test_nodes:
            packs["speed_tier_test_nodes"] = TEST_PACK
        for name, target in packs.items():
            (self.instance / "custom_nodes" / name).symlink_to(target, target_is_directory=True)
        for name, target in self.models.items():
            place = self.instance / "models" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(Path(target).resolve())

    def _command(self, host: Path) -> list[str]:
        # --base-directory moves models, custom_nodes, input, output, temp and user in one go.
        command = [self.python, "-u", str(host / "main.py"), "--port", str(self.port)]
        command += ["--base-directory", str(self.instance), "--disable-auto-launch"]
        command += ["--database-url", "sqlite:///:memory:", "--disable-api-nodes"]
        if self.cpu:
            command.append("--cpu")
        return command + list(self.extra_args)

    def _environment(self) -> dict[str, str]:
        env = clean_environment()
        # Some hosts install packages when they start; a test must not change its own venv.
        env["PIP_NO_INDEX"] = "1"
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        if self.threads is not None:
            env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(self.threads)
        env.update(self.env)
        return env

    def _wait_until_up(self, deadline: float) -> None:
        while True:
            try:
                self.get("/system_stats")
                return
            except OSError:
                pass
            if time.monotonic() > deadline:
                raise TimeoutError(f"host did not answer in time\n{self.log_tail()}")
            time.sleep(0.1)

    # -- http -----------------------------------------------------------------------------------
    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def check_alive(self) -> None:
        """Raises HostCrashedError with the end of the log when the process is gone."""
        if self.process is None or self.process.poll() is not None:
            code = None if self.process is None else self.process.returncode
            raise HostCrashedError(f"host ended with code {code}\n{self.log_tail()}")

    def get(self, path: str, timeout: float = 30.0) -> Any:
        return self._request(path, None, timeout)

    def post(self, path: str, data: Any = None, timeout: float = 60.0) -> Any:
        return self._request(path, json.dumps(data if data is not None else {}).encode(), timeout)

    def _request(self, path: str, body: bytes | None, timeout: float) -> Any:
        self.check_alive()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError:
            raise
        except ConnectionResetError:
            # The process is likely ending; its exit code comes a moment after its sockets close.
            if self.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(2)
            self.check_alive()
            raise
        except OSError:
            self.check_alive()
            raise
        return json.loads(text) if text else None

    # -- prompts --------------------------------------------------------------------------------
    def queue(self, graph: dict[str, Any], **extra: Any) -> str:
        """Queues a graph; returns the prompt id, raises PromptFailedError when it is rejected."""
        body = {"prompt": graph, "client_id": self.client_id, **extra}
        try:
            return self.post("/prompt", body)["prompt_id"]
        except urllib.error.HTTPError as error:
            raise PromptFailedError(f"rejected: {error.read().decode()[:3000]}") from error

    def wait(self, prompt_id: str, timeout: float = 300.0) -> PromptResult:
        """Waits until the prompt is in the history, whatever became of it."""
        began = time.monotonic()
        while time.monotonic() - began < timeout:
            entry = self.get(f"/history/{prompt_id}").get(prompt_id)
            if entry is not None:
                status = entry.get("status") or {}
                return PromptResult(
                    prompt_id,
                    status.get("status_str", "unknown"),
                    entry.get("outputs", {}),
                    status.get("messages", []),
                    time.monotonic() - began,
                )
            time.sleep(0.05)
        raise TimeoutError(f"prompt {prompt_id} took over {timeout} s\n{self.log_tail()}")

    def run(
        self, graph: dict[str, Any], *, check: bool = True, timeout: float = 300.0, **extra: Any
    ) -> PromptResult:
        """Queues, waits, and with `check` raises PromptFailedError unless the prompt succeeded."""
        result = self.wait(self.queue(graph, **extra), timeout)
        if check and not result.ok:
            error = result.error or {}
            text = "".join(error.get("traceback", [])) or json.dumps(result.messages)[:2000]
            raise PromptFailedError(f"{error.get('exception_message', result.status)}\n{text}")
        return result

    def interrupt(self) -> None:
        self.post("/interrupt")

    def free(self, unload_models: bool = True, free_memory: bool = False) -> None:
        """Asks the host to unload; it acts after the running prompt, so wait for the effect."""
        self.post("/free", {"unload_models": unload_models, "free_memory": free_memory})
        self.wait_idle()

    def wait_idle(self, timeout: float = 60.0) -> None:
        """Waits until the queue is empty and the worker has had time to act on flags."""
        began = time.monotonic()
        while time.monotonic() - began < timeout:
            if self.get("/prompt")["exec_info"]["queue_remaining"] == 0:
                time.sleep(0.3)
                return
            time.sleep(0.05)
        raise TimeoutError("the queue did not empty")

    # -- the test nodes' routes -----------------------------------------------------------------
    def flags(self) -> dict[str, Any]:
        return self.get("/speed_tier_test/flags")

    def state(self) -> dict[str, Any]:
        return self.get("/speed_tier_test/state")

    def collect(self) -> dict[str, Any]:
        """Collects garbage in the host, then returns its state."""
        return self.post("/speed_tier_test/collect")

    def counters(self, reset: bool = False) -> dict[str, Any]:
        if reset:
            return self.post("/speed_tier_test/counters/reset")
        return self.get("/speed_tier_test/counters")

    # -- files ----------------------------------------------------------------------------------
    @property
    def output_dir(self) -> Path:
        return self.instance / "output"

    def log_text(self) -> str:
        if not self.log_path.is_file():
            return ""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def log_tail(self, chars: int = 4000) -> str:
        return self.log_text()[-chars:]


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tracebacks(log: str) -> list[str]:
    """Every traceback in a log, each with its exception line."""
    pattern = r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n(?=[ \t]))*.*$"
    return re.findall(pattern, log, re.MULTILINE)
