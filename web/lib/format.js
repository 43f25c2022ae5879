// Figures as a person reads them. What was not measured is a dash.

export const DASH = "–";

const known = (value) => typeof value === "number" && Number.isFinite(value);

export const milliseconds = (s) => (known(s) ? `${Math.round(s * 1000)} ms` : DASH);

export function seconds(s) {
  if (!known(s)) return DASH;
  return `${s.toFixed(s < 9.9995 ? 3 : s < 99.95 ? 2 : 1)} s`;
}

export const perStep = (s) => (known(s) ? `${seconds(s)}/it` : DASH);

export const times = (factor) => (known(factor) ? `${factor.toFixed(2)}x` : DASH);

export const count = (value) => (known(value) ? String(value) : DASH);

export const gib = (bytes) => (known(bytes) ? `${(bytes / 2 ** 30).toFixed(2)} GiB` : DASH);

export const mebibytes = (bytes) => (known(bytes) ? `${(bytes / 2 ** 20).toFixed(1)} MiB` : DASH);

export function clock(unixS) {
  return known(unixS) ? new Date(unixS * 1000).toLocaleTimeString() : DASH;
}

// "1024x1024", with the batch where there is one; the latent's own size where pixels are unknown
export function size(shape) {
  const latent = shape?.latent ?? [];
  if (latent.length < 4) return DASH;
  const [width, height] = shape.pixels?.length ? shape.pixels : [latent.at(-1), latent.at(-2)];
  const unit = shape.pixels?.length ? "" : " (latent)";
  return `${width}x${height}${unit}${latent[0] > 1 ? ` (${latent[0]})` : ""}`;
}
