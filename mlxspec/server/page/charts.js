// Small charts in plain SVG. Rule: one step to the left is one second; seconds without a value are a gap.

import { element, fill, put } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 72, TOP = 8, BOTTOM = 1;
export const SPAN = 180; // seconds that a chart shows

function shape(parent, kind, name) {
  const made = document.createElementNS(SVG, kind);
  made.setAttribute("class", name);
  return parent.appendChild(made);
}

// The next of a few round numbers, so that the scale changes rarely.
function above(most) {
  const ten = 10 ** Math.floor(Math.log10(most));
  return ten * [1, 1.5, 2, 3, 4, 5, 7.5, 10].find((step) => step * ten >= most);
}

// A figure with one or two lines; `draw(lines, now)` takes up to SPAN values for each of `names`.
export function chart(parent, title, names, format) {
  const figure = element(parent, "figure", "panel chart");
  const caption = element(figure, "figcaption");
  element(caption, "span", "", title);
  const entries = element(caption, "span", "entries");
  const legend = names.map((name, n) => {
    const entry = element(entries, "span", `entry s${n}`);
    if (name) element(entry, "span", "sub", name);
    return element(entry, "b", "", "–");
  });
  const svg = shape(figure, "svg", "");
  svg.setAttribute("role", "img");
  shape(svg, "path", "grid").setAttribute("d", `M0 ${TOP}H4000M0 ${HEIGHT - BOTTOM}H4000`);
  const areas = names.map((_, n) => shape(svg, "path", `area s${n}`));
  const lines = names.map((_, n) => shape(svg, "path", `line s${n}`));
  const scale = shape(svg, "text", "scale");
  scale.setAttribute("y", TOP + 10);

  return function draw(series, now) {
    const width = Math.max(80, svg.clientWidth);
    const top = above(Math.max(1, ...series.flat().filter((v) => v !== null)));
    const y = (v) => HEIGHT - BOTTOM - (v / top) * (HEIGHT - BOTTOM - TOP);
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    series.forEach((values, n) => {
      const x = (i) => width - 2 - ((values.length - 1 - i) / (SPAN - 1)) * (width - 2);
      const [line, area] = paths(values, x, y);
      lines[n].setAttribute("d", line);
      areas[n].setAttribute("d", area);
      put(legend[n], now[n] === null ? "–" : format(now[n]));
    });
    put(scale, top.toLocaleString("en"));
    const said = names.map((name, n) => `${name} ${legend[n].textContent}`.trim()).join(", ");
    svg.setAttribute("aria-label", `${title}, the last three minutes; now ${said}; the scale ends at ${top}`);
  };
}

// The line through the values and the area under it, each interrupted at gaps.
function paths(values, x, y) {
  let line = "", area = "", from = null;
  values.forEach((value, i) => {
    if (value === null) return;
    const at = `${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
    const begins = i === 0 || values[i - 1] === null, ends = i === values.length - 1 || values[i + 1] === null;
    if (begins) from = x(i).toFixed(1);
    line += begins ? `M${at}L${at}` : `L${at}`;
    area += (begins ? `M${from} ${y(0)}L` : "L") + at + (ends ? `L${x(i).toFixed(1)} ${y(0)}Z` : "");
  });
  return [line, area];
}

// A stacked bar with its legend. `parts`: [name, value, text].
export function stack(parent, parts, whole, label) {
  const bar = element(parent, "div", "stack");
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", label);
  const legend = element(parent, "ul", "legend");
  parts.forEach(([name, value, text], n) => {
    const part = element(bar, "span", `part p${n}`);
    part.style.flexGrow = whole > 0 ? value / whole : 0;
    const entry = element(legend, "li", `p${n}`);
    element(entry, "span", "swatch").setAttribute("aria-hidden", "true");
    element(entry, "span", "sub", name);
    element(entry, "b", "", text);
  });
}

// `head` are [text, class], each cell is text or a function of the cell; `keys` identify the rows.
export const table = (parent, head, rows, empty, keys = []) =>
  fill(parent, (made) => drawn(made, head, rows, empty, keys));

function drawn(parent, head, rows, empty, keys) {
  const top = element(element(parent, "thead"), "tr");
  for (const [text, name] of head) element(top, "th", name, text).scope = "col";
  const body = element(parent, "tbody");
  rows.forEach((row, at) => {
    const line = element(body, "tr");
    if (keys[at]) line.dataset.key = keys[at];
    row.forEach((cell, n) => {
      const made = element(line, "td", head[n][1]);
      made.dataset.label = head[n][0]; // shown instead of the head on narrow screens
      if (typeof cell === "function") cell(made);
      else made.textContent = cell;
    });
  });
  if (!rows.length) {
    top.parentElement.remove();
    element(element(body, "tr"), "td", "empty", empty).colSpan = head.length;
  }
}
