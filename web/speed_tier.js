// The timing overlay on every node with a tier, the panel, and what a person must know once.
//
// Listens only: to the pack's one event, to the host's own events, and after a reload to the
// snapshot. What it shows is what the server said; node ids are looked up when something is drawn.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { executionIds, nodesOf, rootGraph } from "./lib/graph.js";
import { tellOnce } from "./lib/notices.js";
import { addOverlay, drawOverlay, showOverlay } from "./lib/overlay.js";
import { Panel } from "./lib/panel.js";
import { PanelPlace } from "./lib/panel_place.js";
import { promptsOf } from "./lib/prompts.js";
import { runs } from "./lib/run_store.js";
import { Scheduler } from "./lib/scheduler.js";
import { clearCompiled, fetchReports } from "./lib/server.js";
import { STYLE } from "./lib/style.js";
import { loadTexts } from "./lib/texts.js";

const CLASSES = new Set([
  "SpeedTier",
  "SpeedTierAdvanced",
  "SpeedTierLoader",
  "SpeedTierCompare",
  "SpeedTierVAE",
]);
const SETTING = "SpeedTier.Overlay.show";
const TAB_SETTLES_MS = 300; // the frontend names the tab on screen after it has shown its graph
const TOGGLE = "SpeedTier.Panel.toggle";

const prompts = promptsOf(app, api);
const panel = new Panel(runs, () => void readSnapshot(), () => clearCompiled(api));
const place = new PanelPlace(app, panel);
// Steps that are slower than this are drawn one by one. Of 30 ms steps a draw every 400 ms takes
// under 1 % of the page's main thread. A draw of the panel, with its growing chart, costs several
// times as much: its script may take this share of the time, and layout and paint come on top.
const GAP_MS = 400;
const PANEL_SHARE = 0.002;
export const scheduler = new Scheduler(draw, GAP_MS);
const panelScheduler = new Scheduler(() => panel.draw(), GAP_MS, PANEL_SHARE);
let shown = true;

// The newest run of a node that this page queued from the workflow on screen, or the earlier one
// that the host served again.
function runOf(node, root) {
  const ids = executionIds(node, root);
  return runs
    .shownNewestFirst()
    .find(
      (run) =>
        ids.includes(String(run.node_id)) &&
        run.client_id === api.clientId &&
        prompts.isOnScreen(run.prompt_id, run.workflow_id),
    );
}

function draw() {
  const root = rootGraph(app);
  if (shown && root) for (const node of nodesOf(CLASSES, root)) drawOverlay(node, runOf(node, root));
  if (runs.newestFirst()[0]?.kind === "report") panel.draw();
  else if (panel.isOpen) panelScheduler.soon();
}

async function readSnapshot() {
  try {
    runs.takeSnapshot(await fetchReports(api));
  } catch {
    return; // the host is away; asked again when the page reconnects
  }
  scheduler.soon();
}

function onUpdate({ detail }) {
  const run = runs.take(detail);
  if (detail?.kind === "report") tellOnce(run, app.extensionManager?.toast);
  scheduler.soon();
}

// The report of a run is sent before its prompt ends. Where it was lost, the snapshot has it; where
// there was no run, the snapshot knows which earlier one the host served from its cache.
function onPromptEnd({ detail }) {
  const id = detail?.prompt_id;
  const silent = () => !runs.hasRun(id) && nodesOf(CLASSES, rootGraph(app)).size > 0;
  if (runs.hasOpenRun(id) || silent()) void readSnapshot();
}

function onCached({ detail }) {
  if (detail?.nodes?.length && runs.takeCached(detail)) void readSnapshot();
}

function openFrom(node) {
  panel.show(runOf(node, rootGraph(app))?.run_id ?? "");
  place.open();
}

function setShown(value) {
  shown = value !== false;
  for (const node of nodesOf(CLASSES, rootGraph(app))) showOverlay(node, shown);
  scheduler.soon();
}

// At module level: the page warns of an event that nobody listens to.
api.addEventListener("speed_tier.update", onUpdate);
api.addEventListener("promptQueued", () => void prompts.queued());
api.addEventListener("reconnected", () => void readSnapshot());
api.addEventListener("execution_cached", onCached);
for (const end of ["execution_success", "execution_error", "execution_interrupted"]) {
  api.addEventListener(end, onPromptEnd);
}
api.addEventListener("graphChanged", () => scheduler.soon()); // muted, bypassed, deleted, pasted
document.addEventListener("visibilitychange", () => scheduler.soon());

app.registerExtension({
  name: "SpeedTier.Overlay",
  settings: [
    {
      id: SETTING,
      name: "Show timing on the nodes",
      tooltip: "Tier, steps and figures of the last run on every node with a tier.",
      category: ["Speed Tier", "Overlay", "Show"],
      type: "boolean",
      defaultValue: true,
      onChange: setShown,
    },
  ],
  commands: [
    {
      id: TOGGLE,
      label: "Toggle the Speed Tier panel",
      icon: "pi pi-chart-bar",
      function: () => place.toggle(),
    },
  ],
  menuCommands: [{ path: ["Extensions", "Speed Tier"], commands: [TOGGLE] }],
  bottomPanelTabs: [place.tab()],
  async setup() {
    const style = document.createElement("style");
    style.textContent = STYLE;
    document.head.append(style);
    await loadTexts(api, app.extensionManager?.setting?.get("Comfy.Locale") ?? "en");
    await readSnapshot();
  },
  nodeCreated(node) {
    if (!CLASSES.has(node.comfyClass)) return;
    addOverlay(node, app, openFrom);
    if (!shown) showOverlay(node, false);
  },
  afterConfigureGraph() {
    scheduler.soon();
    setTimeout(() => scheduler.soon(), TAB_SETTLES_MS);
  },
});
