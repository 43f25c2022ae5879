// A run's step times as bars. Steps that compiled or warmed up are hatched and named.

import { element } from "./dom.js";
import { perStep, seconds } from "./format.js";
import { text } from "./texts.js";

const SVG = "http://www.w3.org/2000/svg";
const SLOT = 10;
const HEIGHT = 60;
const HEADROOM = 1.25;

function svg(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// What the charts of all shown runs have as their top: a first step that compiled may take a
// hundred times as long as the others, which must stay readable. Its bar is cut and says so.
export function commonTop(runs) {
  const all = runs.flatMap(({ timing }) => timing?.steps_s ?? []);
  const steady = runs.flatMap(({ timing }) =>
    (timing?.steps_s ?? []).filter((_, i) => !timing.step_marks?.[i]),
  );
  return Math.max(0, ...(steady.length ? steady : all)) * HEADROOM;
}

function titleOf(step, i, mark) {
  const title = svg("title", {});
  title.textContent =
    text("stepTime", { step: i + 1, time: seconds(step) }) + (mark ? `, ${text(mark)}` : "");
  return title;
}

export function chart(run, top) {
  const { steps_s: steps = [], step_marks: marks = [] } = run.timing ?? {};
  const figure = element("figure", "speed-tier-chart");
  const drawing = svg("svg", {
    viewBox: `0 0 ${Math.max(1, steps.length) * SLOT} ${HEIGHT}`,
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": text("chart", {
      count: steps.length,
      first: seconds(run.timing?.first_step_s),
      steady: perStep(run.timing?.steady_step_s),
    }),
  });
  steps.forEach((step, i) => {
    const height = Math.max(1, Math.min(1, step / (top || 1)) * HEIGHT);
    const bar = svg("rect", { x: i * SLOT + 1, width: SLOT - 2, y: HEIGHT - height, height });
    bar.setAttribute("class", `speed-tier-step ${marks[i] || "steady"}`);
    if (run.kind === "report") bar.append(titleOf(step, i, marks[i])); // nobody points at one before
    drawing.append(bar);
  });
  const legend = element("figcaption", "speed-tier-legend");
  legend.append(element("span", "", text("upTo", { time: seconds(top) })));
  for (const mark of new Set(marks.filter(Boolean))) {
    const found = steps.flatMap((step, i) =>
      marks[i] === mark ? [`${i + 1} (${seconds(step)})`] : [],
    );
    const item = element("span");
    item.append(element("span", `speed-tier-swatch ${mark}`), `${text(mark)}: ${found.join(", ")}`);
    legend.append(item);
  }
  figure.append(drawing, legend);
  return figure;
}
