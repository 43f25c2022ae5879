// The report's text on its node: a DOM widget, the one kind that both node renderers show live.

const MARGIN = 10; // the host's own, above and below the element
const HEIGHT = 200; // of the box, until the user makes the node higher
const WIDTH = 420; // of a new node: most lines fit
const EMPTY = "no report yet: run the workflow";

export const WIDGET = "speed_tier_report";

// Serialize is off twice: the option keeps the text out of the prompt (where it would break the
// host's cache), the property keeps it out of the saved workflow.
export function addReportView(node, app) {
  const box = document.createElement("div");
  box.className = "speed-tier-report";
  const text = document.createElement("pre");
  text.className = "speed-tier-report-text";
  text.textContent = EMPTY;
  text.tabIndex = 0; // to be scrolled with the keyboard
  text.setAttribute("role", "region");
  text.setAttribute("aria-label", "Speed Tier report");
  text.dataset.captureWheel = "true"; // newer frontends leave the wheel to a focused element
  box.append(text);
  keepPointer(box, text, app);
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

export function showReport(node, text) {
  const box = node.widgets?.find((widget) => widget.name === WIDGET)?.element;
  const shown = box?.firstElementChild;
  const wanted = text || EMPTY;
  if (shown && shown.textContent !== wanted) shown.textContent = wanted;
}

// Selecting text must not drag the node, and the wheel scrolls the text where it can.
function keepPointer(box, text, app) {
  const vue = () => Boolean(window.LiteGraph?.vueNodesMode);
  for (const type of ["pointerdown", "pointermove", "pointerup"]) {
    box.addEventListener(type, (event) => {
      if (vue()) event.stopPropagation();
    });
  }
  box.addEventListener(
    "wheel",
    (event) => {
      const scrolls = text.scrollHeight > text.clientHeight && !event.ctrlKey && !event.metaKey;
      if (scrolls) event.stopPropagation();
      else if (!vue()) app.canvas?.processMouseWheel?.(event); // dead over a DOM widget otherwise
    },
    { passive: false },
  );
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
`;
