// The report's text on its node: a DOM widget, the one kind that both node renderers show live.

import { button, copy, element, keepPointer, write } from "./dom.js";
import { text } from "./texts.js";

const MARGIN = 10; // the host's own, above and below the element
const HEIGHT = 200; // of the box, until the user makes the node higher
const WIDTH = 420; // of a new node: most lines fit
const EMPTY = "no report yet: run the workflow";

export const WIDGET = "speed_tier_report";

// Serialize is off twice: the option keeps the text out of the prompt (where it would break the
// host's cache), the property keeps it out of the saved workflow.
export function addReportView(node, app) {
  const box = element("div", "speed-tier-report");
  const shown = element("pre", "speed-tier-report-text", EMPTY);
  shown.tabIndex = 0; // to be scrolled with the keyboard
  shown.setAttribute("role", "region");
  shown.setAttribute("aria-label", "Speed Tier report");
  shown.dataset.captureWheel = "true"; // newer frontends leave the wheel to a focused element
  const said = element("span", "speed-tier-unseen");
  said.setAttribute("role", "status");
  const copier = button(text("copy"), "speed-tier-button speed-tier-report-copy", async () => {
    const answer = text((await copy(shown.textContent)) ? "copied" : "notCopied");
    said.textContent = copier.title = answer;
  });
  copier.hidden = true;
  box.append(shown, copier, said);
  keepPointer(box, app, () => shown.scrollHeight > shown.clientHeight);
  const widget = node.addDOMWidget(WIDGET, WIDGET, box, {
    serialize: false,
    hideInPanel: true,
    selectOn: [],
    margin: MARGIN,
    getMinHeight: () => HEIGHT + 2 * MARGIN,
    getValue: () => "",
    setValue: () => {},
  });
  widget.serialize = false;
  const needed = node.computeSize?.() ?? node.size;
  node.setSize?.([Math.max(node.size[0], needed[0], WIDTH), Math.max(node.size[1], needed[1])]);
}

export function showReport(node, report) {
  const box = node.widgets?.find((widget) => widget.name === WIDGET)?.element;
  if (!box) return;
  const [shown, copier] = box.children;
  if (shown.textContent !== (report || EMPTY)) copier.title = text("copyReport");
  write(shown, report || EMPTY);
  copier.hidden = !report;
  write(copier, text("copy"));
  copier.setAttribute("aria-label", text("copyReport"));
}

// The text fills the box without giving it a height: a box that follows its content, in a node
// that follows its box, would grow for ever.
export const STYLE = `
.speed-tier-report { position: relative; box-sizing: border-box; width: 100%; height: 100%;
  min-height: ${HEIGHT}px; }
.speed-tier-report-text { position: absolute; inset: 0; box-sizing: border-box; margin: 0;
  padding: 6px 8px; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere; cursor: text;
  user-select: text; -webkit-user-select: text; text-align: left; border-radius: 6px;
  color: var(--input-text, #ddd); background: var(--comfy-input-bg, #222);
  border: 1px solid var(--border-color, #4e4e4e); font: 11px/1.45 var(--font-mono, monospace); }
.speed-tier-report-text:focus-visible { outline: 2px solid var(--primary-background, #0b8ce9);
  outline-offset: -2px; }
.speed-tier-report-copy { position: absolute; top: 4px; right: 14px; padding: 0 6px; font-size: 11px; }
`;
