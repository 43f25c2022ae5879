// Toasts: what a person must know once. The server says what that is, in a run's notices.

import { text } from "./texts.js";

const SUMMARIES = {
  no_compile: "noticeNoCompile",
  fell_back: "noticeFellBack",
  host_memory: "noticeHostMemory",
};
const LIFE_MS = 12000;

// One of a kind a session, over reloads of the page as well.
export function tellOnce(run, toast) {
  for (const { kind, text: detail } of run?.notices ?? []) {
    if (!(kind in SUMMARIES) || wasTold(kind)) continue;
    toast?.add({ severity: "warn", summary: text(SUMMARIES[kind]), detail, life: LIFE_MS });
  }
}

const toldHere = new Set();

function wasTold(kind) {
  const key = `speed_tier.told.${kind}`;
  let told = toldHere.has(kind);
  toldHere.add(kind);
  try {
    told ||= sessionStorage.getItem(key) !== null;
    sessionStorage.setItem(key, "1");
  } catch {
    // No storage in this browser: once a page then.
  }
  return told;
}
