// The look of everything of ours. Only variables that every frontend from 1.30 to 1.58 has, each
// with a fallback; no animation and no transition, which would paint on the GPU that samples.

export const STYLE = `
.speed-tier-unseen { position: absolute; width: 1px; height: 1px; overflow: hidden;
  clip-path: inset(50%); white-space: nowrap; }
.speed-tier-overlay { position: relative; box-sizing: border-box; width: 100%; height: 100%;
  min-height: 76px; overflow: hidden; container-type: inline-size; }
.speed-tier-face { display: block; box-sizing: border-box; width: 100%; height: 76px; margin: 0; contain: strict;
  padding: 4px 7px; overflow: hidden; text-align: left; cursor: pointer; border-radius: 6px;
  color: var(--input-text, #ddd); background: var(--comfy-input-bg, #222);
  border: 1px solid var(--border-color, #4e4e4e); font: 11px/14px var(--font-inter, sans-serif);
  font-variant-numeric: tabular-nums; }
.speed-tier-face:hover { background: var(--content-hover-bg, #333); }
.speed-tier-face:focus-visible, .speed-tier-button:focus-visible {
  outline: 2px solid var(--primary-background, #0b8ce9); outline-offset: -2px; }
.speed-tier-head { display: flex; gap: 6px; height: 15px; line-height: 15px; white-space: nowrap; }
.speed-tier-head .speed-tier-state { overflow: hidden; text-overflow: ellipsis; }
.speed-tier-track { display: block; height: 3px; margin: 2px 0 3px; border-radius: 2px;
  background: var(--border-color, #4e4e4e); overflow: hidden; }
.speed-tier-bar { display: block; height: 100%; width: 0;
  background: var(--primary-background, #0b8ce9); }
.speed-tier-overlay[data-state="failed"] .speed-tier-bar,
.speed-tier-overlay[data-state="interrupted"] .speed-tier-bar { background: var(--error-text, #f44); }
.speed-tier-overlay[data-state="cached"] :is(.speed-tier-value, .speed-tier-state) {
  color: var(--descrip-text, #999); }
.speed-tier-cells { display: grid; grid-template-columns: 1fr 1fr; column-gap: 10px; }
.speed-tier-cell { display: flex; justify-content: space-between; gap: 4px; min-width: 0;
  white-space: nowrap; }
@container (max-width: 215px) {
  .speed-tier-cells { grid-template-columns: 1fr; }
  .speed-tier-cell:is([data-cell="tax"], [data-cell="speedup"], [data-cell="recompiles"]) {
    display: none; }
}
.speed-tier-label { color: var(--descrip-text, #999); overflow: hidden; text-overflow: ellipsis; }
.speed-tier-value { flex: none; }

.speed-tier-button { padding: 2px 8px; cursor: pointer; border-radius: 4px;
  color: var(--input-text, #ddd); background: var(--comfy-input-bg, #222);
  border: 1px solid var(--border-color, #4e4e4e); font: 12px/1.4 var(--font-inter, sans-serif); }
.speed-tier-button:hover:enabled { background: var(--content-hover-bg, #333); }
.speed-tier-button:disabled { opacity: 0.5; cursor: default; }
.speed-tier-panel { display: grid; grid-template: auto minmax(0, 1fr) / minmax(0, 1fr) auto;
  box-sizing: border-box; height: 100%; padding: 6px 12px; gap: 4px 16px; overflow: hidden; contain: content;
  color: var(--fg-color, #fff); background: var(--comfy-menu-bg, #353535); text-align: left;
  font: 12px/1.45 var(--font-inter, sans-serif); font-variant-numeric: tabular-nums; }
.speed-tier-tools { grid-column: 1 / -1; display: flex; gap: 6px; align-items: center; }
.speed-tier-said { color: var(--descrip-text, #999); }
.speed-tier-cards { display: flex; gap: 16px; overflow: auto; }
.speed-tier-card { flex: 1 1 0; min-width: 340px; max-width: 900px; }
.speed-tier-card h3 { margin: 0 0 4px; font-size: 13px; font-weight: 600; }
.speed-tier-list { overflow: auto; max-width: 50vw; }
.speed-tier-error { color: var(--error-text, #f44); margin: 0; overflow-wrap: anywhere; }
.speed-tier-none { color: var(--descrip-text, #999); }
.speed-tier-chart { margin: 0 0 6px; }
.speed-tier-chart svg { display: block; width: 100%; height: 72px; border-radius: 4px;
  background: var(--comfy-input-bg, #222); }
.speed-tier-step { fill: var(--primary-background, #0b8ce9); }
.speed-tier-step.compile, .speed-tier-step.warm-up { fill-opacity: 0.35;
  stroke: var(--primary-background, #0b8ce9); stroke-width: 1.5; stroke-dasharray: 3 2;
  vector-effect: non-scaling-stroke; }
.speed-tier-step.compile { stroke: var(--error-text, #f44); fill: var(--error-text, #f44); }
.speed-tier-legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 11px;
  color: var(--descrip-text, #999); }
.speed-tier-swatch { display: inline-block; width: 9px; height: 9px; margin-right: 4px;
  border: 1px dashed var(--primary-background, #0b8ce9); }
.speed-tier-swatch.compile { border-color: var(--error-text, #f44); }
.speed-tier-figures { display: grid; grid-template-columns: repeat(2, auto 1fr); margin: 0 0 6px;
  gap: 0 10px; }
.speed-tier-figures dt { color: var(--descrip-text, #999); white-space: nowrap; }
.speed-tier-figures dd { margin: 0; overflow-wrap: anywhere; white-space: pre-line; }
.speed-tier-features, .speed-tier-runs { border-collapse: collapse; width: 100%;
  margin-bottom: 6px; }
.speed-tier-runs caption { text-align: left; font-weight: 600; font-size: 13px; }
.speed-tier-panel th, .speed-tier-panel td { padding: 1px 8px 1px 0; text-align: left;
  vertical-align: top; font-weight: normal; }
.speed-tier-panel th { color: var(--descrip-text, #999); }
.speed-tier-runs td { white-space: nowrap; }
.speed-tier-features tr[data-state="fell_back"] td:nth-child(2) { color: var(--error-text, #f44); }
.speed-tier-features tr[data-state="skipped"] td:nth-child(2) { color: var(--descrip-text, #999); }
.speed-tier-floating { position: fixed; z-index: 999; right: 12px; bottom: 12px; width: 70vw;
  height: 45vh; padding: 6px; border-radius: 8px; background: var(--comfy-menu-bg, #353535);
  border: 1px solid var(--border-color, #4e4e4e); }
.speed-tier-floating-inner { height: calc(100% - 28px); }
`;
