// The newest message of each sampling run, as the host sent it. Nothing is drawn from here yet.

const KEPT_RUNS = 64;

export class RunStore {
  #runs = new Map();

  // Steps come up to four times a second, so this only files the object.
  take(message) {
    if (!message?.run_id) return;
    const old = this.#runs.get(message.run_id);
    if (old?.kind === "report" && message.kind !== "report") return; // late news of an ended run
    this.#runs.delete(message.run_id); // back in at the end: the first key is the oldest
    this.#runs.set(message.run_id, message);
    if (this.#runs.size > KEPT_RUNS) this.#runs.delete(this.#runs.keys().next().value);
  }

  get(runId) {
    return this.#runs.get(runId);
  }

  newestFirst() {
    return [...this.#runs.values()].sort((a, b) => b.started_unix_s - a.started_unix_s);
  }
}

export const runs = new RunStore();
