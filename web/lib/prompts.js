// Which open workflow a prompt was queued from, found out by asking and never by standing between.
//
// Node ids repeat in other workflows, so a result belongs to a node only with its workflow. The id
// in the file tells workflows apart; two open copies of one file share it, and a graph from an API
// file has none but zeros: there the tab counts that was on screen when the prompt was queued.

import { isRealId, rootGraph } from "./graph.js";
import { fetchHistory, fetchQueue } from "./server.js";

const KEPT = 128;

class Prompts {
  #app;
  #api;
  #workflows = new Map(); // prompt id -> workflow id in its file
  #tabs = new Map(); // prompt id -> path of the tab it was queued from

  constructor(app, api) {
    this.#app = app;
    this.#api = api;
  }

  // The host's page has queued a prompt and does not say which: it is the one not seen before.
  async queued() {
    if (!this.#ambiguous()) return;
    const tab = this.#tab();
    try {
      for (const prompt of await fetchQueue(this.#api)) this.#learn(prompt, tab);
    } catch {
      // Asked too early or too late: the workflow's id alone decides then.
    }
  }

  // The id of the workflow of a prompt of this page; "" where nobody knows.
  async workflowOf(promptId) {
    if (!this.#workflows.has(promptId)) {
      try {
        for (const prompt of await fetchQueue(this.#api)) this.#learn(prompt);
        if (!this.#workflows.has(promptId)) {
          for (const prompt of await fetchHistory(this.#api)) this.#learn(prompt);
        }
      } catch {
        return "";
      }
    }
    return this.#workflows.get(promptId) ?? "";
  }

  // Whether a prompt's results belong to the workflow on screen.
  isOnScreen(promptId, workflowId) {
    const shown = rootGraph(this.#app)?.id;
    if (isRealId(workflowId) && String(workflowId) !== String(shown)) return false;
    if (!isRealId(workflowId) && isRealId(shown)) return false;
    const tab = this.#tabs.get(promptId);
    return tab === undefined || !this.#ambiguous() || tab === this.#tab();
  }

  #learn({ id, clientId, workflowId }, tab) {
    if (!id || clientId !== this.#api.clientId) return;
    if (tab !== undefined && !this.#tabs.has(id)) keep(this.#tabs, id, tab);
    if (!this.#workflows.has(id)) keep(this.#workflows, id, workflowId);
  }

  #tab() {
    return this.#app.extensionManager?.workflow?.activeWorkflow?.path ?? "";
  }

  // Whether another open tab could be taken for the one on screen.
  #ambiguous() {
    const shown = rootGraph(this.#app)?.id;
    const store = this.#app.extensionManager?.workflow;
    const others = (store?.openWorkflows ?? []).filter((w) => w.path !== this.#tab());
    if (!isRealId(shown)) return others.length > 0;
    return others.some((other) => String(other.activeState?.id ?? "") === String(shown));
  }
}

function keep(map, key, value) {
  map.set(key, value);
  while (map.size > KEPT) map.delete(map.keys().next().value);
}

let shared = null;

// One for the page: what a prompt belongs to is asked once.
export const promptsOf = (app, api) => (shared ??= new Prompts(app, api));
