// What each report node last showed, by workflow and execution id.
//
// Node objects are thrown away at tab switch, undo and page reload; the texts outlive them here,
// and after a reload they come back from the host's history. Nothing is saved in the workflow.

const KEPT_TEXTS = 64;
const KEPT_PROMPTS = 64;
const HISTORY_ITEMS = 16;

// The text of a report node's output, or null for the output of any other node.
export function reportText(output) {
  const text = output?.text;
  return Array.isArray(text) && Array.isArray(output.json) ? text.join("\n") : null;
}

export class ReportTexts {
  #texts = new Map(); // "workflow id|execution id" -> { text, order }
  #workflows = new Map(); // prompt id -> id of the workflow it was queued from
  #order = 0;

  // Two open workflows often have the same node ids: a prompt belongs to the one it came from.
  queued(promptId, workflowId) {
    if (!promptId || !workflowId) return;
    this.#workflows.set(promptId, String(workflowId));
    trim(this.#workflows, KEPT_PROMPTS);
  }

  workflowOf(promptId) {
    return this.#workflows.get(promptId);
  }

  put(workflowId, executionId, text) {
    const key = `${workflowId}|${executionId}`;
    this.#texts.delete(key);
    this.#texts.set(key, { text, order: ++this.#order });
    trim(this.#texts, KEPT_TEXTS);
  }

  has(workflowId, executionIds) {
    return executionIds.some((id) => this.#texts.has(`${workflowId}|${id}`));
  }

  // The newest text among the ids of one node; "" where it has shown none.
  get(workflowId, executionIds) {
    let newest = null;
    for (const id of executionIds) {
      const found = this.#texts.get(`${workflowId}|${id}`);
      if (found && found.order > (newest?.order ?? 0)) newest = found;
    }
    return newest?.text ?? "";
  }

  // Fill in from the host's history what is not known, newest first. False if there was nothing.
  async restore(api, workflowId) {
    const answer = await api.fetchApi(`/history?max_items=${HISTORY_ITEMS}`);
    if (!answer.ok) return false;
    let found = false;
    for (const entry of Object.values(await answer.json()).reverse()) {
      if (entry.prompt?.[3]?.extra_pnginfo?.workflow?.id !== workflowId) continue;
      for (const [id, output] of Object.entries(entry.outputs ?? {})) {
        const text = reportText(output);
        if (text === null || this.has(workflowId, [id])) continue;
        this.put(workflowId, id, text);
        found = true;
      }
    }
    return found;
  }
}

function trim(map, size) {
  while (map.size > size) map.delete(map.keys().next().value);
}
