// One run in the panel: its chart, figures, optimizations and versions, as the report has them.

import { chart } from "./chart.js";
import { element } from "./dom.js";
import { DASH, clock, count, gib, perStep, seconds, size, times } from "./format.js";
import { stateOf, tierOf } from "./run_store.js";
import { text } from "./texts.js";

export function runTitle(run) {
  const isVae = (run.operation ?? "sampling") !== "sampling";
  const what = isVae ? ` · ${text(run.operation.replace(" ", "_"))}` : "";
  return `${tierOf(run)}${what} · ${text(stateOf(run), run)} · ${clock(run.started_unix_s)}`;
}

export function runCard(run, top) {
  const card = element("section", "speed-tier-card");
  card.dataset.run = run.run_id;
  card.setAttribute("aria-label", runTitle(run));
  card.append(element("h3", "", runTitle(run)));
  if (run.error) card.append(element("p", "speed-tier-error", run.error));
  card.append(chart(run, top), figures(run), features(run), versions(run));
  return card;
}

function figures(run) {
  const { timing, compile, model, shape } = run;
  const breaks = Object.values(compile?.graph_breaks ?? {});
  const rows = {
    model: [model?.family || model?.class_name, model?.dtype].filter(Boolean).join(", ") || DASH,
    device: model?.device || DASH,
    size: size(shape),
    sampler: shape?.sampler || DASH,
    steps: count(shape?.steps || run.total),
    load: seconds(timing?.load_s),
    firstStep: seconds(timing?.first_step_s),
    tax: seconds(timing?.first_step_tax_s),
    steady: perStep(timing?.steady_step_s),
    total: seconds(timing?.total_s),
    speedup: times(run.speedup_against_off),
    peak: gib(run.memory?.peak_bytes),
    compileTime: seconds(compile?.kinds?.length ? compile.seconds : null),
    recompiles: count(compile?.recompiles),
    graphBreaks: run.kind === "report" ? count(breaks.reduce((sum, n) => sum + n, 0)) : DASH,
  };
  const list = pairs("speed-tier-figures", Object.entries(rows).map(([k, v]) => [text(k), v, k]));
  if (run.notes?.length) {
    list.append(element("dt", "", text("notes")), element("dd", "", run.notes.join("\n")));
  }
  return list;
}

function features(run) {
  if (!run.features?.length) {
    const problem = run.model?.note || (run.kind === "report" ? text("noFeatures") : "");
    return element("p", "speed-tier-none", problem);
  }
  const table = element("table", "speed-tier-features");
  table.append(element("caption", "speed-tier-unseen", text("optimizations")));
  table.append(row("th", ["feature", "state", "changes", "why"].map((key) => text(key))));
  for (const feature of run.features) {
    const cells = row("td", [
      text(feature.name),
      text(feature.state),
      feature.state === "engaged" ? text(feature.fidelity) : DASH,
      feature.reason || feature.note || "",
    ]);
    cells.dataset.state = feature.state;
    cells.title = feature.name;
    table.append(cells);
  }
  return table;
}

function versions(run) {
  const found = Object.entries(run.versions ?? {}).filter(([, version]) => version);
  const box = element("details", "speed-tier-versions");
  box.append(element("summary", "", text("versions")), pairs("speed-tier-figures", found));
  return box;
}

function pairs(className, entries) {
  const list = element("dl", className);
  for (const [name, value, key] of entries) {
    const shown = element("dd", "", value);
    if (key) shown.dataset.figure = key;
    list.append(element("dt", "", name), shown);
  }
  return list;
}

export function row(tag, texts) {
  const made = element("tr");
  for (const content of texts) {
    const cell = element(tag, "", content);
    if (tag === "th") cell.scope = "col";
    made.append(cell);
  }
  return made;
}
