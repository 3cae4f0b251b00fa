// Numbers as the page writes them.

export const count = (n) => Math.round(n).toLocaleString("en");
export const fixed = (n) => (n >= 100 ? count(n) : n.toFixed(n >= 10 ? 1 : 2));
export const rate = (n) => (n >= 100 ? count(n) : n.toFixed(1));
export const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–");
export const seconds = (s) => (s < 10 ? `${s.toFixed(2)} s` : s < 100 ? `${s.toFixed(1)} s` : `${Math.round(s)} s`);

export function bytes(n) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  for (; n >= 1000 && unit < 4; unit++) n /= 1024;
  return `${n >= 100 || unit === 0 ? Math.round(n) : n.toFixed(n >= 10 ? 1 : 2)} ${units[unit]}`;
}
