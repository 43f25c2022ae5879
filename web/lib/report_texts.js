// What each report node last showed, by workflow and execution id.
//
// Node objects are thrown away at tab switch, undo and page reload; the texts outlive them here,
// and after a reload they come back from the host's history. Nothing is saved in the workflow.

import { fetchHistory } from "./server.js";

const KEPT_TEXTS = 64;

// The text of a report node's output, or null for the output of any other node.
export function reportText(output) {
  const text = output?.text;
  return Array.isArray(text) && Array.isArray(output.json) ? text.join("\n") : null;
}

export class ReportTexts {
  #texts = new Map(); // "workflow id|execution id" -> { text, order, promptId }
  #order = 0;

  nextOrder() {
    return ++this.#order;
  }

  put(workflowId, executionId, text, promptId, order = this.nextOrder()) {
    const key = `${workflowId}|${executionId}`;
    if ((this.#texts.get(key)?.order ?? 0) > order) return;
    this.#texts.delete(key);
    this.#texts.set(key, { text, order, promptId });
    if (this.#texts.size > KEPT_TEXTS) this.#texts.delete(this.#texts.keys().next().value);
  }

  has(workflowId, executionId) {
    return this.#texts.has(`${workflowId}|${executionId}`);
  }

  // The newest text among the ids of one node; "" where it has shown none.
  get(workflowId, executionIds, isOnScreen) {
    let newest = null;
    for (const id of executionIds) {
      const found = this.#texts.get(`${workflowId}|${id}`);
      if (!found || !isOnScreen(found.promptId)) continue;
      if (found.order > (newest?.order ?? 0)) newest = found;
    }
    return newest?.text ?? "";
  }

  // Fill in from the host's history what is not known, newest first. False if there was nothing.
  async restore(api, workflowId) {
    let found = false;
    for (const prompt of await fetchHistory(api)) {
      if (prompt.workflowId !== workflowId) continue;
      for (const [id, output] of Object.entries(prompt.outputs)) {
        const text = reportText(output);
        if (text === null || this.has(workflowId, id)) continue;
        this.put(workflowId, id, text, prompt.id);
        found = true;
      }
    }
    return found;
  }
}
