// The runs as the server told them: by events while they go on, by its report at their end, by the
// snapshot after a reload. Nothing in here is calculated.

const KEPT_RUNS = 64;

export class RunStore {
  #runs = new Map(); // run id -> everything said of it
  #order = null; // the same, newest first; null after a change
  #served = []; // earlier runs, as prompts of the page got them from the host's cache
  #cached = new Map(); // prompt id -> nodes that the host took from its cache

  // A lost or late event does no harm: each has all that is known, and a report is the last word.
  take(message) {
    if (!message?.run_id) return null;
    const old = this.#runs.get(message.run_id);
    if (old?.kind === "report" && message.kind !== "report") return old;
    const run = { ...old, ...message };
    if (run.kind === "report") run.report = reportOf(message);
    this.#runs.set(run.run_id, run);
    this.#order = null;
    while (this.#runs.size > KEPT_RUNS) this.#runs.delete(this.newestFirst().pop().run_id);
    return run;
  }

  // What a page that has just loaded or reconnected is told. A run that the server does not know
  // as going on, and has no report of, is gone: the server was started anew.
  takeSnapshot({ runs = [], texts = {}, clients = {}, live = [], served = [] }) {
    const known = new Set([...runs, ...live].map((run) => run.run_id));
    for (const run of this.#runs.values()) {
      if (run.kind !== "report" && !known.has(run.run_id)) this.#runs.delete(run.run_id);
    }
    this.#order = null;
    for (const run of runs) {
      const id = run.run_id;
      this.take({ ...run, kind: "report", text: texts[id], client_id: clients[id] });
    }
    for (const run of live) {
      const old = this.#runs.get(run.run_id);
      if (!old || (old.step ?? 0) <= (run.step ?? 0)) this.take(run);
    }
    this.#served = served
      .filter((s) => s.ended || this.#cached.get(s.prompt_id)?.includes(s.sampler))
      .flatMap((s) => {
        const run = this.#runs.get(s.run_id);
        return run ? [{ ...run, ...s, from_cache: true, measured_unix_s: run.started_unix_s }] : [];
      });
  }

  // The host has taken nodes from its cache. Whether a sampler is among them whose run is known:
  // the prompt will have no run of its own then.
  takeCached({ prompt_id: promptId, nodes = [] }) {
    this.#cached.set(promptId, nodes);
    if (this.#cached.size > KEPT_RUNS) this.#cached.delete(this.#cached.keys().next().value);
    return [...this.#runs.values()].some((run) =>
      nodes.includes(String(run.sampler_node_id).split(".")[0]),
    );
  }

  // Whether a prompt that has ended still has a run that does not know it.
  hasOpenRun(promptId) {
    return [...this.#runs.values()].some((r) => r.prompt_id === promptId && r.kind !== "report");
  }

  hasRun(promptId) {
    return [...this.#runs.values(), ...this.#served].some((run) => run.prompt_id === promptId);
  }

  get(runId) {
    return this.#runs.get(runId);
  }

  // By the server's clock: after a reload old runs arrive later than the events of the new one.
  newestFirst() {
    return (this.#order ??= newestFirst([...this.#runs.values()]));
  }

  // What the nodes show: of a prompt that was served from the cache, the run that was served.
  shownNewestFirst() {
    if (!this.#served.length) return this.newestFirst();
    return newestFirst([...this.#runs.values(), ...this.#served]);
  }
}

const newestFirst = (runs) => runs.sort((a, b) => b.started_unix_s - a.started_unix_s);

// The report alone, as it is copied, without what the message adds for the page.
function reportOf({ kind, client_id, text, ...report }) {
  return report;
}

// "loading", "compiling", "preparing", "sampling", "done", "interrupted", "failed" or "cached"
export function stateOf(run) {
  if (run.from_cache) return "cached";
  return run.kind === "report" ? run.outcome : (run.phase ?? "loading");
}

export function tierOf(run) {
  return typeof run.tier === "string" ? run.tier : (run.tier?.resolved ?? "");
}

export const runs = new RunStore();
