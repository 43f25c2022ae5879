// The overlay on a node: a DOM widget, the one kind that both node renderers show live.
//
// Its cells have fixed places and its box a fixed height, so that nothing jumps while it changes.

import { element, keepPointer, write } from "./dom.js";
import { DASH, clock, count, milliseconds, perStep, seconds, times } from "./format.js";
import { asideOf } from "./graph.js";
import { stateOf, tierOf } from "./run_store.js";
import { text } from "./texts.js";

export const WIDGET = "speed_tier_overlay";

const MARGIN = 6;
export const HEIGHT = 76;
const WIDTH = 260; // of a new node
const CELLS = ["last", "steady", "tax", "total", "speedup", "recompiles"];

// Serialize is off twice: the option keeps it out of the prompt (where it would break the host's
// cache), the property keeps it out of the saved workflow. Added last: a display widget before
// others would shift their saved values.
export function addOverlay(node, app, openPanel) {
  const box = element("div", "speed-tier-overlay");
  const face = element("button", "speed-tier-face");
  face.type = "button";
  face.addEventListener("click", () => openPanel(node));
  const head = element("span", "speed-tier-head");
  head.append(element("b", "speed-tier-name"), element("span", "speed-tier-state"));
  const track = element("span", "speed-tier-track");
  track.append(element("span", "speed-tier-bar"));
  const cells = element("span", "speed-tier-cells");
  for (const name of CELLS) {
    const cell = element("span", "speed-tier-cell");
    cell.dataset.cell = name;
    cell.append(element("span", "speed-tier-label"), element("span", "speed-tier-value", DASH));
    cells.append(cell);
  }
  face.append(head, track, cells);
  const spoken = element("span", "speed-tier-unseen");
  spoken.setAttribute("role", "status");
  box.append(face, spoken);
  keepPointer(box, app);
  const height = HEIGHT + 2 * MARGIN;
  const widget = node.addDOMWidget(WIDGET, WIDGET, box, {
    serialize: false,
    hideInPanel: true,
    hideOnZoom: true,
    selectOn: [],
    margin: MARGIN,
    getMinHeight: () => height,
    getMaxHeight: () => height,
    getValue: () => "",
    setValue: () => {},
  });
  widget.serialize = false;
  fit(node, WIDTH);
  drawOverlay(node, null);
}

const widgetOf = (node) => node.widgets?.find((widget) => widget.name === WIDGET);

// Hidden, never removed: some frontends leave a hole where a widget was taken out.
export function showOverlay(node, shown) {
  const widget = widgetOf(node);
  if (!widget) return;
  widget.hidden = !shown; // canvas nodes, and Vue nodes in newer frontends
  widget.element.style.display = shown ? "" : "none"; // Vue nodes in the others
  if (shown) fit(node);
  node.setDirtyCanvas?.(true, true);
}

// The user's width is the user's; only what would be cut off makes a node higher.
function fit(node, width = 0) {
  const needed = node.computeSize?.() ?? node.size;
  const size = [Math.max(node.size[0], width), Math.max(node.size[1], needed[1])];
  if (size[0] !== node.size[0] || size[1] !== node.size[1]) node.setSize?.(size);
}

const partsOf = new WeakMap(); // box -> its elements, found once

function findParts(box) {
  const part = (name) => box.querySelector(`.speed-tier-${name}`);
  const cells = [...box.querySelectorAll("[data-cell]")];
  return { face: part("face"), name: part("name"), state: part("state"), bar: part("bar"), cells };
}

export function drawOverlay(node, run) {
  const box = widgetOf(node)?.element;
  if (!box) return;
  if (!partsOf.has(box)) partsOf.set(box, findParts(box));
  const parts = partsOf.get(box);
  const aside = asideOf(node);
  const shown = aside ? null : run;
  const state = shown ? stateOf(shown) : "idle";
  if (box.dataset.state !== state) box.dataset.state = state;
  const { face, bar, cells } = parts;
  if (face.getAttribute("aria-label") !== text("openPanel")) {
    face.setAttribute("aria-label", text("openPanel"));
    for (const cell of cells) write(cell.firstChild, text(cell.dataset.cell));
  }
  const tier = shown ? tierOf(shown) : "";
  write(parts.name, tier);
  if (parts.name.hidden !== !tier) parts.name.hidden = !tier;
  write(parts.state, aside ? text(aside) : stateText(shown, state));
  const title = shown?.error || stateText(shown, state);
  if (face.title !== title) face.title = title;
  const width = `${progress(shown, state)}%`;
  if (bar.style.width !== width) bar.style.width = width;
  const figures = figuresOf(shown);
  for (const cell of cells) {
    write(cell.lastChild, figures[cell.dataset.cell]);
  }
  speak(box, shown, state, figures);
}

function stateText(run, state) {
  if (!run) return text("idle");
  if (state === "compiling" || state === "preparing") return text(state, run);
  if (state === "cached") return text("cached", { time: clock(run.measured_unix_s) });
  if (state === "sampling" && run.step) return text("step", run);
  return text(state);
}

function progress(run, state) {
  if (!run || state === "loading" || state === "cached") return 0;
  return run.kind === "report" ? 100 : Math.round((100 * (run.step ?? 0)) / (run.total || 1));
}

function figuresOf(run) {
  const timing = run?.timing;
  return {
    last: milliseconds(timing?.steps_s.at(-1)),
    steady: perStep(timing?.steady_step_s),
    tax: seconds(timing?.first_step_tax_s),
    total: seconds(timing?.total_s),
    speedup: times(run?.speedup_against_off),
    recompiles: count(run?.compile?.recompiles),
  };
}

// Screen readers are told how a run ended that they could follow, not every step of it.
function speak(box, run, state, figures) {
  const spoken = box.lastChild;
  if (run && run.kind !== "report") {
    box.dataset.follows = run.run_id;
    write(spoken, "");
  } else if (run && box.dataset.follows === run.run_id) {
    write(spoken, text("spoken", { ...figures, tier: tierOf(run), state: stateText(run, state) }));
  }
}
