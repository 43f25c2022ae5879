"""The report: one structured object that node text, page, log line and tests all read."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections import deque
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Final

SCHEMA: Final = 2  # 2 adds `operation`, and runs of a VAE
SAMPLING: Final = "sampling"
_KEPT_RUNS: Final = 64
_MIN_STEPS: Final = 3  # a median of fewer is one number
_WORTH_A_WORD_S: Final = 0.5  # of first-step tax
_TIE: Final = 1.02  # two times nearer than that may be the same
_PIXELS_PER_LATENT: Final = 8  # of both families' VAE
# How the sentences begin that become notices.
_NO_COMPILER: Final = (
    "Triton ",
    "torch.compile needs",
    "Speed Tier needs torch",
    "regional compile is not used",
)
_HOST_MEMORY: Final = ("max runs as default does", "dynamic VRAM")


class State(str, Enum):
    """What became of one planned feature."""

    ENGAGED = "engaged"
    SKIPPED = "skipped"
    FELL_BACK = "fell_back"


@dataclass
class FeatureOutcome:
    """One feature in one run.

    Attributes:
        name: The feature's name in the tier table.
        state: Engaged, skipped, or engaged and then dropped.
        reason: Why it was skipped or dropped, in plain words; "" while engaged.
        fidelity: What engaging it changes: bit-identical, rounding or lossy.
        note: Figures and details worth reading while engaged.
    """

    name: str
    state: State
    reason: str = ""
    fidelity: str = ""
    note: str = ""


@dataclass
class ModelFacts:
    """The model that ran.

    Attributes:
        family: "z_image", "qwen_image", or "" where the model is neither.
        class_name: Class of the denoiser.
        stack: "comfyui" or "diffusers".
        dtype: Compute dtype of the weights.
        device: Device that computes.
        compiled_by: Who else compiles it, "" if nobody.
        number: Tells models of one process apart.
        note: Why nothing engaged, where that has to do with the model itself.
    """

    family: str = ""
    class_name: str = ""
    stack: str = ""
    dtype: str = ""
    device: str = ""
    compiled_by: str = ""
    number: int = 0
    note: str = ""


@dataclass
class Timing:
    """Seconds, measured. None = not measured in this run.

    Attributes:
        load_s: From the start of the run to the weights being in place.
        first_step_s: First step, compile and warm-up included.
        first_step_tax_s: First step less a steady one.
        steps_s: Every step.
        steady_step_s: Median of the steps after the first.
        total_s: The whole sampling run, loading included.
        vae_decode_s: Decode time; measured by Speed Tier VAE only.
        vae_note: Why vae_decode_s is empty.
        step_marks: Per step "compile" (something was compiled in it), "warm-up" (the first step
            otherwise) or "".
    """

    load_s: float | None = None
    first_step_s: float | None = None
    first_step_tax_s: float | None = None
    steps_s: list[float] = field(default_factory=list)
    steady_step_s: float | None = None
    total_s: float | None = None
    vae_decode_s: float | None = None
    vae_note: str = "not measured: the decode did not go through a Speed Tier node"
    step_marks: list[str] = field(default_factory=list)


@dataclass
class CompiledKind:
    """What compiling one kind of repeated block cost in one run; how often torch's cache had it."""

    name: str
    blocks: int
    compiles: int = 0
    seconds: float = 0.0
    failed: int = 0
    from_cache: int = 0


@dataclass
class CompileFacts:
    """Dynamo's own counters over one run, and the folder that compiled code is kept in."""

    kinds: list[CompiledKind] = field(default_factory=list)
    graphs: int = 0
    recompiles: int = 0
    graph_breaks: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    cache: str = ""


@dataclass
class GraphFacts:
    """CUDA graphs in one run.

    Attributes:
        captured: Graphs made in this run.
        kept: Graphs of this model that are kept now.
        replayed: Denoiser calls that were replays.
        pool_bytes: Device memory of the kept ones.
        not_replayed: Calls that were not, by reason.
    """

    captured: int = 0
    kept: int = 0
    replayed: int = 0
    pool_bytes: int = 0
    not_replayed: dict[str, int] = field(default_factory=dict)


@dataclass
class CheckFacts:
    """The self-check of one run.

    Attributes:
        calls, blocks: Denoiser calls compared with the untiered path, and blocks in them.
        block_error, output_error: Largest relative distance of a block, and of a whole call.
        seconds: What all comparisons cost.
        restarts: How often the run began again after values that are not finite.
        unchecked: Why calls were not compared, "" if all were.
        notes: What else it saw.
    """

    calls: int = 0
    blocks: int = 0
    block_error: float = 0.0
    output_error: float = 0.0
    seconds: float = 0.0
    restarts: int = 0
    unchecked: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass
class Notice:
    """What a person should be told once, not only find in the report.

    Attributes:
        kind: "no_compile", "fell_back" or "host_memory".
        text: The report's own sentence.
    """

    kind: str
    text: str


@dataclass
class Report:
    """Everything that was measured and decided in one run.

    A run is a sampling run, or one call of a VAE: `operation` is then "vae decode" or "vae encode",
    `sampler_node_id` the node that called it, and a step one call of the VAE's own module (a tile,
    or the pictures that go in together).
    """

    tier_asked: str
    tier: str
    tier_reason: str
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    started_unix_s: float = field(default_factory=time.time)
    outcome: str = "running"
    error: str = ""
    node_id: str = ""
    sampler_node_id: str = ""
    prompt_id: str = ""
    workflow_id: str = ""
    graph_signature: str = ""
    model: ModelFacts = field(default_factory=ModelFacts)
    features: list[FeatureOutcome] = field(default_factory=list)
    timing: Timing = field(default_factory=Timing)
    compile: CompileFacts = field(default_factory=CompileFacts)
    graphs: GraphFacts = field(default_factory=GraphFacts)
    check: CheckFacts = field(default_factory=CheckFacts)
    latent_shape: list[int] = field(default_factory=list)
    text_tokens: int = 0
    sampler: str = ""
    steps: int = 0
    evaluations: int = 0
    peak_bytes: int | None = None
    speedup_against_off: float | None = None
    payback_images: int | None = None
    flags: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    operation: str = SAMPLING

    def work(self) -> tuple[object, ...]:
        """What two runs must share for their speeds to be compared."""
        calls = self.evaluations / self.steps if self.steps else 0
        shape = tuple(self.latent_shape)
        return (self.operation, self.model, shape, self.text_tokens, self.sampler, calls)

    def engaged(self) -> list[str]:
        return [f.name for f in self.features if f.state is State.ENGAGED]

    def feature(self, name: str) -> FeatureOutcome | None:
        return next((f for f in self.features if f.name == name), None)

    def shape(self) -> dict[str, Any]:
        """How much work the run was."""
        return {
            "latent": self.latent_shape,
            "steps": self.steps,
            "evaluations": self.evaluations,
            "text_tokens": self.text_tokens,
            "sampler": self.sampler,
            "pixels": self.pixels(),
        }

    def pixels(self) -> list[int]:
        """Width and height of the picture; empty for a model of no known family."""
        if not self.model.family or len(self.latent_shape) < 4:
            return []
        height, width = self.latent_shape[-2:]
        return [width * _PIXELS_PER_LATENT, height * _PIXELS_PER_LATENT]

    def find_notices(self) -> list[Notice]:
        """What of the outcomes a person should be told, in order of weight."""
        found = [
            Notice("fell_back", f"{feature.name}: {feature.reason}")
            for feature in self.features
            if feature.state is State.FELL_BACK
        ]
        skipped = [f for f in self.features if f.state is State.SKIPPED]
        held = [note for note in self.notes if note.startswith(_HOST_MEMORY)]
        held += [f"{f.name}: {f.reason}" for f in skipped if f.reason.startswith(_HOST_MEMORY)]
        found += [Notice("host_memory", text) for text in held]
        found += [
            Notice("no_compile", f.reason)
            for f in skipped
            if f.name == "regional_compile" and f.reason.startswith(_NO_COMPILER)
        ]
        return found

    def to_dict(self, from_cache: bool = False) -> dict[str, Any]:
        """The report as JSON-able data.

        Args:
            from_cache: The host served this run's result from its cache.
        """
        data = asdict(self)
        tier = {
            "asked": data.pop("tier_asked"),
            "resolved": data.pop("tier"),
            "reason": data.pop("tier_reason"),
        }
        for name in ("latent_shape", "steps", "evaluations", "text_tokens", "sampler"):
            del data[name]
        return {
            "schema": SCHEMA,
            "from_cache": from_cache,
            "measured_at": _clock(self.started_unix_s),
            "tier": tier,
            "shape": self.shape(),
            "memory": {"peak_bytes": data.pop("peak_bytes")},
            **data,
        }

    def to_text(self, from_cache: bool = False) -> str:
        """The report as a person reads it."""
        return "\n".join(_text_lines(self, from_cache))

    def log_line(self) -> str:
        """One line for the server's log."""
        timing = self.timing
        steady = "" if timing.steady_step_s is None else f", {timing.steady_step_s:.3f} s/step"
        tax = timing.first_step_tax_s
        first = "" if tax is None else f", first-step tax {tax:.2f} s"
        engaged = ", ".join(self.engaged()) or "nothing engaged"
        total = "" if timing.total_s is None else f" {timing.total_s:.2f} s"
        what = "" if self.operation == SAMPLING else f"{self.operation} "
        return f"Speed Tier {what}{self.tier} {self.outcome}{total}{steady}{first}; {engaged}"


def _clock(unix_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(unix_s))


def _seconds(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f} s"


def _text_lines(report: Report, from_cache: bool) -> list[str]:
    asked = report.tier_asked or "unset"
    is_vae = report.operation != SAMPLING
    title = f"Speed Tier VAE, {report.operation[4:]}" if is_vae else "Speed Tier"
    lines = [f"{title}: {report.tier} (asked: {asked}, {report.tier_reason}), {report.outcome}"]
    if report.error:
        lines.append(f"  {report.error}")
    if from_cache:
        lines.append(f"served from the host's cache; measured {_clock(report.started_unix_s)}")
    else:
        lines.append(f"measured {_clock(report.started_unix_s)}")
    if report.sampler_node_id:
        caller = "called by" if is_vae else "sampler"
        lines.append(f"{caller} node {report.sampler_node_id}, Speed Tier node {report.node_id}")
    model = report.model
    if model.class_name:
        family = model.family or "no known family"
        lines.append(f"model: {family}, {model.class_name}, {model.dtype} on {model.device}")
    if model.note:
        lines.append(f"  {model.note}")
    if model.compiled_by:
        lines.append(f"  {model.compiled_by} compiles this model; its time is in the steps below")
    for feature in report.features:
        detail = feature.reason or feature.note
        what = f"{feature.state.value}, {feature.fidelity}" if not feature.reason else feature.state
        what = what.value if isinstance(what, State) else what
        lines.append(f"  {feature.name}: {what}" + (f": {detail}" if detail else ""))
    lines += _timing_lines(report)
    lines += [f"note: {note}" for note in report.notes]
    return lines


def _timing_lines(report: Report) -> list[str]:
    timing = report.timing
    steps = ", ".join(f"{s:.3f}" for s in timing.steps_s) or "none"
    lines = [f"load {_seconds(timing.load_s)}, whole run {_seconds(timing.total_s)}"]
    if report.operation != SAMPLING:
        lines.append(f"calls of the VAE (s): {steps}")
    else:
        tax = _seconds(timing.first_step_tax_s)
        lines += [
            f"first step {_seconds(timing.first_step_s)} (tax {tax}), "
            f"steady step {_seconds(timing.steady_step_s)}",
            f"steps (s): {steps}",
        ]
        took = timing.vae_note if timing.vae_decode_s is None else _seconds(timing.vae_decode_s)
        lines.append(f"VAE decode {took}")
    if report.peak_bytes is not None:
        lines.append(f"peak memory {report.peak_bytes / 2**30:.2f} GiB")
    compiled = report.compile
    if compiled.kinds:
        kinds = ", ".join(_kind_text(kind) for kind in compiled.kinds)
        lines.append(
            f"compiled in this run: {kinds}; {compiled.recompiles} of them recompiles, "
            f"{sum(compiled.graph_breaks.values())} graph breaks, {compiled.seconds:.1f} s"
        )
        if compiled.cache:
            lines.append(
                f"compiled from cache: {sum(kind.from_cache for kind in compiled.kinds)} of "
                f"{sum(kind.compiles for kind in compiled.kinds)}; kept in {compiled.cache}"
            )
    graphs = report.graphs
    if graphs.captured or graphs.replayed:
        lines.append(
            f"CUDA graphs: {graphs.captured} captured in this run, {graphs.kept} kept "
            f"({graphs.pool_bytes / 2**30:.2f} GiB), {graphs.replayed} calls replayed"
        )
    lines += _check_lines(report.check)
    lines += [f"graph break x{n}: {reason}" for reason, n in compiled.graph_breaks.items()]
    if report.speedup_against_off is not None:
        off = "last off run" if report.operation == SAMPLING else "fastest off call"
        lines.append(f"{report.speedup_against_off:.2f}x the speed of the {off} of the same work")
    if report.payback_images is not None:
        count = report.payback_images
        lines.append(
            f"the first-step tax is paid back by {count} image{'s' * (count != 1)} like this"
        )
    return lines


def _check_lines(check: CheckFacts) -> list[str]:
    lines = []
    if check.calls:
        lines.append(
            f"self-check: {check.calls} call{'s' * (check.calls != 1)} compared with off in "
            f"{check.seconds:.2f} s; blocks at most {check.block_error:.2%} from off's, "
            f"the whole {check.output_error:.2%}"
        )
    if check.unchecked:
        lines.append(f"self-check: not compared with off: {check.unchecked}")
    return lines + [f"self-check: {note}" for note in check.notes]


def _kind_text(kind: CompiledKind) -> str:
    failed = f" ({kind.failed} failed)" if kind.failed else ""
    return f"{kind.name} x{kind.blocks}: {kind.compiles}{failed}"


class ReportBook:
    """The last runs of this process, newest first. Holds numbers and text, never a model."""

    def __init__(self, keep: int = _KEPT_RUNS) -> None:
        self._runs: deque[Report] = deque(maxlen=keep)
        self._lock = threading.Lock()

    def add(self, report: Report) -> None:
        with self._lock:
            self._runs.appendleft(report)

    def runs(self) -> list[Report]:
        with self._lock:
            return list(self._runs)

    def find(self, **wanted: str) -> Report | None:
        """Newest run whose attributes equal all of `wanted`."""
        for report in self.runs():
            if all(getattr(report, name) == value for name, value in wanted.items()):
                return report
        return None

    def speedup_against_off(self, run: Report) -> float | None:
        """Speed of `run` over the last off run of the same work; None where that says nothing."""
        steady_s = run.timing.steady_step_s
        if not run.engaged() or run.steps < _MIN_STEPS or not steady_s:
            return None
        off_s = self.last_off_step_s(run)
        return off_s / steady_s if off_s else None

    def payback_images(self, run: Report) -> int | None:
        """How many runs like `run` save what its first step cost more; None where none would."""
        off_s, timing = self.last_off_step_s(run), run.timing
        if (
            not run.engaged()
            or not off_s
            or not timing.steady_step_s
            or not timing.first_step_tax_s
        ):
            return None
        if timing.first_step_tax_s < _WORTH_A_WORD_S or off_s < timing.steady_step_s * _TIE:
            return None
        saved_s = (off_s - timing.steady_step_s) * run.steps
        return math.ceil(timing.first_step_tax_s / saved_s)

    def last_off_step_s(self, like: Report) -> float | None:
        """Steady step of the newest finished off run of the same work.

        The same work: the very same model, latent shape, text length, sampler, denoiser calls a
        step and other compile nodes. Off with features switched on is no baseline, nor is a run
        of fewer than three steps.
        """
        for report in self.runs():
            if (
                report.tier == "off"
                and report.outcome == "done"
                and not report.engaged()
                and report.work() == like.work()
                and report.steps >= _MIN_STEPS
                and report.timing.steady_step_s is not None
            ):
                return report.timing.steady_step_s
        return None


REPORTS: Final = ReportBook()
