// Every text of ours, in English here and in the user's language from locales/<lang>/main.json.
// What the server says, reasons above all, is shown as it says it.

export const ENGLISH = {
  title: "Speed Tier",
  openPanel: "Speed Tier timing: open the panel",
  idle: "not run yet",
  loading: "loading",
  compiling: "compiling {index} of {count}",
  preparing: "preparing {size}, {index} of {count}",
  sampling: "first step",
  decoding: "decoding",
  encoding: "encoding",
  step: "step {step} of {total}",
  done: "done",
  interrupted: "interrupted",
  failed: "failed",
  cached: "from cache, measured {time}",
  muted: "muted",
  bypassed: "bypassed",
  last: "last step",
  steady: "steady",
  tax: "first-run tax",
  total: "total",
  speedup: "against off",
  recompiles: "recompiles",
  spoken: "{tier} {state}, total {total}, steady {steady}",
  noRuns: "No run yet. Queue a workflow with a Speed Tier node.",
  noFeatures: "Nothing planned: the host's own path.",
  copyJson: "Copy as JSON",
  copyText: "Copy as text",
  copy: "Copy",
  copyReport: "Copy the report",
  copied: "Copied",
  notCopied: "Could not copy",
  clearCompiled: "Delete compiled code",
  cleared: "Deleted {size}. The next run of max compiles again.",
  clearedInPart: "Deleted {size}; {kept} are in use. Try again when the run has ended.",
  notCleared: "Could not delete",
  chart: "{count} steps; first {first}, steady {steady}",
  stepTime: "step {step}: {time}",
  compile: "compile",
  "warm-up": "warm-up",
  upTo: "up to {time}",
  optimizations: "Optimizations",
  feature: "Optimization",
  state: "State",
  changes: "Changes",
  why: "Why, or figures",
  engaged: "engaged",
  skipped: "skipped",
  fell_back: "fell back",
  "bit-identical": "nothing, bit-identical",
  rounding: "rounding",
  lossy: "lossy",
  figures: "Figures",
  model: "Model",
  size: "Size",
  sampler: "Sampler",
  steps: "Steps",
  load: "Loading",
  firstStep: "First step",
  compileTime: "Compiling",
  graphBreaks: "Graph breaks",
  peak: "Peak memory",
  device: "Device",
  notes: "Notes",
  versions: "Versions",
  history: "Runs",
  started: "Started",
  tier: "Tier",
  outcome: "Outcome",
  show: "Show",
  compare: "Compare",
  newest: "Newest",
  nothing: "Nothing",
  close: "Close",
  attention_backend: "Attention kernel",
  cudnn_benchmark: "cuDNN tuning",
  eager_patches: "Fused blocks",
  gguf_dequant: "GGUF dequantisation",
  dequant_cache: "Dequantised layers kept",
  tf32: "TF32",
  fused_qkv: "Fused q, k, v",
  regional_compile: "Compiled blocks",
  graph_capture: "CUDA graph",
  channels_last: "Channels-last convolutions",
  vae_compile: "Compiled norms",
  vae_decode: "VAE decode",
  vae_encode: "VAE encode",
  noticeNoCompile: "max runs without compiling",
  noticeFellBack: "A Speed Tier feature fell back",
  noticeHostMemory: "ComfyUI manages this model's memory",
};

let translated = {};

// Frontends serve the packs' translations all together; English stays where one is missing.
export async function loadTexts(api, locale) {
  try {
    const all = await api.getCustomNodesI18n();
    translated = (all?.[locale] ?? all?.[String(locale).split("-")[0]])?.speedTier ?? {};
  } catch {
    translated = {};
  }
}

export function text(key, values = {}) {
  const found = translated[key] ?? ENGLISH[key] ?? key;
  return found.replace(/\{(\w+)\}/g, (whole, name) => String(values[name] ?? whole));
}
