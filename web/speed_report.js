// Speed Tier Report and Speed Tier Compare: every such node shows the text of its last run.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { executionIds, isRealId, nodesOf, rootGraph } from "./lib/graph.js";
import { promptsOf } from "./lib/prompts.js";
import { ReportTexts, reportText } from "./lib/report_texts.js";
import { STYLE, addReportView, showReport } from "./lib/report_view.js";

const CLASSES = new Set(["SpeedTierReport", "SpeedTierCompare"]);
const TAB_SETTLES_MS = 300; // the frontend names the tab on screen after it has shown its graph

const texts = new ReportTexts();
const prompts = promptsOf(app, api);
const asked = new Set(); // workflows whose texts were looked for in the host's history

// Graphs without an id of their own share one key; the tab tells them apart.
const workflowKey = (id) => (isRealId(id) ? String(id) : "");

function draw() {
  const root = rootGraph(app);
  const shown = workflowKey(root?.id);
  for (const node of nodesOf(CLASSES, root)) {
    const isOnScreen = (promptId) => prompts.isOnScreen(promptId, shown);
    showReport(node, texts.get(shown, executionIds(node, root), isOnScreen));
  }
}

// By event, not by the node's own hook: the prompt may belong to a workflow in another tab.
async function onExecuted({ detail }) {
  const text = reportText(detail?.output);
  if (text === null) return;
  const order = texts.nextOrder();
  const workflow = workflowKey(await prompts.workflowOf(detail.prompt_id));
  texts.put(workflow, detail.display_node ?? detail.node, text, detail.prompt_id, order);
  draw();
}

async function restore(id) {
  if (!isRealId(id) || asked.has(id)) return;
  asked.add(id);
  try {
    if (await texts.restore(api, String(id))) draw();
  } catch {
    asked.delete(id); // the host is away; asked again when a graph is next loaded
  }
}

api.addEventListener("executed", onExecuted);

app.registerExtension({
  name: "SpeedTier.Report",
  setup() {
    const style = document.createElement("style");
    style.textContent = STYLE;
    document.head.append(style);
  },
  nodeCreated(node) {
    if (CLASSES.has(node.comfyClass)) addReportView(node, app);
  },
  afterConfigureGraph() {
    draw();
    setTimeout(draw, TAB_SETTLES_MS);
    void restore(rootGraph(app)?.id);
  },
});
