// The panel: the newest run or the one that was picked, beside it one to compare with, and the list
// of runs. Drawn only while it is open; each part only when what it shows has changed.

import { commonTop } from "./chart.js";
import { button, copy, element, patch, write } from "./dom.js";
import { DASH, clock, mebibytes, perStep, seconds, size, times } from "./format.js";
import { row, runCard } from "./run_card.js";
import { stateOf, tierOf } from "./run_store.js";
import { text } from "./texts.js";

const COLUMNS = [
  "show", "compare", "started", "tier", "outcome", "model", "size", "steady", "total", "speedup",
]; // prettier-ignore

export class Panel {
  #store;
  #onOpen;
  #clearCompiled;
  #parts = null;
  #shown = ""; // run id; "" follows the newest
  #compared = ""; // run id; "" compares with nothing
  #drawn = {}; // what each part was drawn from

  constructor(store, onOpen, clearCompiled) {
    this.#store = store;
    this.#onOpen = onOpen;
    this.#clearCompiled = clearCompiled;
  }

  get isOpen() {
    return this.#parts !== null;
  }

  mount(container) {
    const root = element("div", "speed-tier-panel");
    const bar = element("div", "speed-tier-tools");
    const cards = element("div", "speed-tier-cards");
    const list = element("div", "speed-tier-list");
    const said = element("span", "speed-tier-said");
    said.setAttribute("role", "status");
    const copiers = [
      button(text("copyJson"), "speed-tier-button", () => this.#copy((run) => asJson(run))),
      button(text("copyText"), "speed-tier-button", () => this.#copy((run) => run.text)),
    ];
    const cleaner = button(text("clearCompiled"), "speed-tier-button", () => this.#clear(cleaner));
    bar.append(...copiers, cleaner, said);
    root.append(bar, cards, list);
    container.replaceChildren(root);
    this.#parts = { root, cards, list, said, copiers };
    this.#drawn = {};
    this.draw();
    this.#onOpen();
  }

  unmount() {
    this.#parts?.root.remove();
    this.#parts = null;
  }

  // A run that is the newest is followed by the next one.
  show(runId) {
    this.#shown = runId === this.#store.newestFirst()[0]?.run_id ? "" : runId;
    this.draw();
  }

  draw() {
    if (!this.#parts) return;
    const runs = this.#store.newestFirst();
    const shown = this.#store.get(this.#shown) ?? runs[0];
    const compared = this.#store.get(this.#compared);
    const pair = [shown, compared === shown ? null : compared].filter(Boolean);
    this.#part("cards", [pair], () => this.#drawCards(pair));
    const facts = runs.map((run) => [run.run_id, stateOf(run), run.index, Boolean(run.shape)]);
    this.#part("list", [facts, this.#shown, this.#compared], () => this.#drawList(runs));
    for (const copier of this.#parts.copiers) copier.disabled = !shown?.report;
  }

  #part(name, from, drawPart) {
    const key = JSON.stringify(from.map((x) => (Array.isArray(x) ? x.map(runKey) : x)));
    if (this.#drawn[name] === key) return;
    this.#drawn[name] = key;
    drawPart();
  }

  #drawCards(pair) {
    const { cards } = this.#parts;
    const open = new Set(
      [...cards.querySelectorAll("details[open]")].map((e) => e.parentElement.dataset.run),
    );
    const top = commonTop(pair);
    const made = pair.map((run) => runCard(run, top));
    for (const card of made) card.querySelector("details").open = open.has(card.dataset.run);
    if (!made.length) made.push(element("p", "speed-tier-none", text("noRuns")));
    const wanted = element("div", cards.className);
    wanted.append(...made);
    patch(cards, wanted);
  }

  #drawList(runs) {
    const { list } = this.#parts;
    const focused = list.contains(document.activeElement) ? document.activeElement.id : "";
    const table = element("table", "speed-tier-runs");
    table.append(element("caption", "", text("history")));
    table.append(row("th", COLUMNS.map((key) => text(key))));
    const last = row("td", ["", "", text("newest"), DASH, ...COLUMNS.slice(4).map(() => "")]);
    last.cells[0].append(this.#choice("show", "", text("newest")));
    last.cells[1].append(this.#choice("compare", "", text("nothing")));
    table.append(last);
    for (const run of runs) {
      const made = row("td", [
        "",
        "",
        clock(run.started_unix_s),
        tierOf(run),
        text(stateOf(run), run),
        run.model?.family || run.model?.class_name || DASH,
        size(run.shape),
        perStep(run.timing?.steady_step_s),
        run.kind === "report" ? seconds(run.timing?.total_s) : DASH,
        times(run.speedup_against_off),
      ]);
      made.dataset.run = run.run_id;
      const name = `${tierOf(run)} ${clock(run.started_unix_s)}`;
      made.cells[0].append(this.#choice("show", run.run_id, name));
      made.cells[1].append(this.#choice("compare", run.run_id, name));
      table.append(made);
    }
    list.replaceChildren(table);
    if (focused) document.getElementById(focused)?.focus();
  }

  #choice(group, runId, name) {
    const input = element("input");
    input.type = "radio";
    input.name = `speed-tier-${group}`;
    input.id = `speed-tier-${group}-${runId || "none"}`;
    input.checked = (group === "show" ? this.#shown : this.#compared) === runId;
    input.setAttribute("aria-label", `${text(group)}: ${name}`);
    input.addEventListener("change", () => {
      if (group === "show") this.#shown = runId;
      else this.#compared = runId;
      this.draw();
    });
    return input;
  }

  async #copy(contentOf) {
    const run = this.#store.get(this.#shown) ?? this.#store.newestFirst()[0];
    if (!run?.report) return;
    const copied = await copy(contentOf(run));
    if (this.#parts) write(this.#parts.said, text(copied ? "copied" : "notCopied"));
  }

  async #clear(cleaner) {
    let answer = text("notCleared");
    cleaner.disabled = true;
    try {
      const { freed, kept } = await this.#clearCompiled();
      const sizes = { size: mebibytes(freed), kept: mebibytes(kept) };
      answer = text(kept ? "clearedInPart" : "cleared", sizes);
    } catch {
      // The host is away, or the folder cannot be read: it says so.
    }
    cleaner.disabled = false;
    if (this.#parts) write(this.#parts.said, answer);
  }
}

const asJson = (run) => JSON.stringify(run.report, null, 2);

// A run in progress is drawn anew at every change; one that has ended, once.
function runKey(item) {
  if (!item?.run_id) return item;
  return [item.run_id, item.kind, item.step, item.phase, item.index, item.features?.length];
}
