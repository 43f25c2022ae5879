// Speed Tier Report on the page: every report node shows the text of its last report.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { executionIds, rootGraph, workflowKey } from "./lib/graph.js";
import { ReportTexts, reportText } from "./lib/report_texts.js";
import { STYLE, addReportView, showReport } from "./lib/report_view.js";
import { runs } from "./lib/run_store.js";

const CLASS_ID = "SpeedTierReport";

const texts = new ReportTexts();
const asked = new Set(); // workflows whose texts were looked for in the host's history

const workflowId = () => workflowKey(app);

function reportNodes(graph, found = new Set(), seen = new Set()) {
  if (!graph || seen.has(graph)) return found;
  seen.add(graph);
  for (const node of graph.nodes ?? []) {
    if (node.comfyClass === CLASS_ID) found.add(node);
    reportNodes(node.subgraph, found, seen);
  }
  return found;
}

function draw() {
  const root = rootGraph(app);
  for (const node of reportNodes(root)) {
    showReport(node, texts.get(workflowId(), executionIds(node, root)));
  }
}

// By event, not by the node's own hook: the prompt may belong to a workflow in another tab.
function onExecuted({ detail }) {
  const text = reportText(detail?.output);
  if (text === null) return;
  const workflow = texts.workflowOf(detail.prompt_id) ?? workflowId();
  texts.put(workflow, detail.display_node ?? detail.node, text);
  draw();
}

async function restore(id) {
  if (!id || asked.has(id)) return;
  asked.add(id);
  try {
    if (await texts.restore(api, id)) draw();
  } catch {
    asked.delete(id); // the host is away; asked again when a graph is next loaded
  }
}

// At module level: the page warns of an event that nobody listens to.
api.addEventListener("speed_tier.update", ({ detail }) => runs.take(detail));
api.addEventListener("executed", onExecuted);

const queuePrompt = api.queuePrompt;
api.queuePrompt = async function (...args) {
  const answer = await queuePrompt.apply(this, args);
  texts.queued(answer?.prompt_id, workflowKey(app, args[1]?.workflow?.id));
  return answer;
};

app.registerExtension({
  name: "SpeedTier.Report",
  setup() {
    const style = document.createElement("style");
    style.textContent = STYLE;
    document.head.append(style);
  },
  nodeCreated(node) {
    if (node.comfyClass === CLASS_ID) addReportView(node, app);
  },
  afterConfigureGraph() {
    draw();
    void restore(workflowId());
  },
});
