// Every URL the page asks, and nothing else: ours and two of the host's own lists.

const HISTORY_ITEMS = 16;

async function json(api, path) {
  const answer = await api.fetchApi(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

// Runs that ended and runs that go on, as nodes/routes.py gives them.
export const fetchReports = (api) => json(api, "/speed_tier/report");

// Deletes the compiled code that no run uses now; how much went and how much stayed.
export async function clearCompiled(api) {
  const path = "/speed_tier/compiled/clear";
  const answer = await api.fetchApi(path, { method: "POST" });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  const { freed_bytes: freed, kept_bytes: kept } = await answer.json();
  return { freed, kept };
}

// Prompts that run or wait, as { id, clientId, workflowId }.
export async function fetchQueue(api) {
  const queue = await json(api, "/queue");
  return [...(queue.queue_running ?? []), ...(queue.queue_pending ?? [])].map(promptFacts);
}

// Prompts that ended, newest first, each with its outputs by node id.
export async function fetchHistory(api) {
  const history = await json(api, `/history?max_items=${HISTORY_ITEMS}`);
  return Object.values(history)
    .reverse()
    .map((entry) => ({ ...promptFacts(entry.prompt ?? []), outputs: entry.outputs ?? {} }));
}

function promptFacts(item) {
  const extra = item[3] ?? {};
  return {
    id: item[1],
    clientId: extra.client_id,
    workflowId: String(extra.extra_pnginfo?.workflow?.id ?? ""),
  };
}
