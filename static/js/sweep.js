// Parallel coordinates of a sweep, in SVG: a line for each run, an axis for each setting, the outcome last.
//
// The numbers come with the table (data-plot), which htmx keeps up to date. Drag along an axis to keep only the runs that pass
// there; hover or focus a line to see its run; click it to open the run.
import { number } from "./charts/figure.js";

const SVG = "http://www.w3.org/2000/svg";
const TOP = 42;
const BOTTOM = 26;
const HEIGHT = 320;
const SIDE = 88;
const GAP = 128; // least width between two axes; a narrow window scrolls

const root = document.getElementById("parallel");
const hint = document.getElementById("parallel-hint");
const clear = document.getElementById("clear-brush");
const brushes = new Map(); // axis index -> [from, to] as shares of its height, 0 at the bottom

const draw = (tag, attributes = {}, text = "") => {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text) made.textContent = text;
  return made;
};
const plot = () => JSON.parse(document.getElementById("sweep-results").dataset.plot);
const short = (text, limit = 18) => (text.length > limit ? `…${text.slice(1 - limit)}` : text);
const words = (value) => (typeof value === "number" ? number(value) : value === null ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value));

/** Place of each value on its axis, 0 at the bottom and 1 on top; null where there is none. Numbers by size, words in order. */
function scale(values, log) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (known.length && known.every((value) => typeof value === "number")) {
    const sorted = [...known].sort((a, b) => a - b);
    const [low, high] = [sorted[0], sorted.at(-1)];
    // Values over two orders of magnitude were meant to be multiplied.
    const use = low > 0 && (log || high / low >= 100) ? Math.log : (value) => value;
    const share = (value) => (high === low ? 0.5 : (use(value) - use(low)) / (use(high) - use(low)));
    const distinct = [...new Set(sorted)];
    const between = (at) => (use === Math.log ? low * (high / low) ** at : low + (high - low) * at);
    const ticks = distinct.length <= 5 ? distinct : [0, 0.25, 0.5, 0.75, 1].map(between);
    return { share: (value) => (typeof value === "number" ? share(value) : null), ticks: [...new Set(ticks)].map((value) => [share(value), number(Number(value.toPrecision(3)))]) };
  }
  const names = [...new Set(values.filter((value) => value !== undefined).map(words))].sort();
  const share = (value) => (names.length < 2 ? 0.5 : names.indexOf(words(value)) / (names.length - 1));
  return { share, ticks: names.slice(0, 12).map((name) => [names.length < 2 ? 0.5 : names.indexOf(name) / (names.length - 1), short(name, 16)]) };
}

/** Colour of an outcome between the worst (muted) and the best (accent). */
function tint(share) {
  return share === null ? "var(--line-strong)" : `color-mix(in oklab, var(--accent) ${Math.round(15 + 85 * share)}%, var(--line-strong))`;
}

function render() {
  const { axes, metric, goal, runs } = plot();
  const columns = [...axes.map((axis, index) => ({ title: axis.path, ...scale(runs.map((run) => run.values[index]), axis.log), of: (run) => run.values[index] })),
    { title: metric, ...scale(runs.map((run) => run.best), false), of: (run) => run.best, outcome: true }];
  const width = Math.max(root.clientWidth, 2 * SIDE + GAP * (columns.length - 1));
  const svg = draw("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}` });
  const x = (index) => SIDE + index * (width - 2 * SIDE) / Math.max(1, columns.length - 1);
  const y = (share) => HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM);
  const outcome = columns.at(-1);
  const good = (run) => (run.best === null ? null : goal === "min" ? 1 - outcome.share(run.best) : outcome.share(run.best));
  const inside = (run) => [...brushes].every(([index, [low, high]]) => {
    const share = columns[index]?.share(columns[index].of(run));
    return share !== null && share >= low - 1e-9 && share <= high + 1e-9;
  });

  const lines = draw("g", { class: "lines" });
  const ordered = [...runs].sort((a, b) => (good(a) ?? -1) - (good(b) ?? -1)); // the best on top
  for (const run of ordered) {
    const places = columns.map((column, index) => [x(index), column.share(column.of(run))]).filter(([, share]) => share !== null && share !== undefined);
    const path = draw("path", {
      d: places.map(([at, share], index) => `${index ? "L" : "M"}${at.toFixed(1)} ${y(share).toFixed(1)}`).join(""),
      class: `line${inside(run) ? "" : " out"}${run.leads ? " leads" : ""}`, "data-number": run.number,
    });
    if (inside(run)) path.style.stroke = tint(good(run));
    path.append(draw("title", {}, `${run.name}\n${run.state}, ${metric} ${words(run.best)}`));
    path.addEventListener("mouseenter", () => point(run.number));
    path.addEventListener("mouseleave", () => point(null));
    path.addEventListener("click", () => { location.href = run.url; });
    lines.append(path);
  }
  svg.append(lines);
  columns.forEach((column, index) => svg.append(axis(column, index, x(index), y)));
  root.replaceChildren(svg);
  const chosen = runs.filter(inside).length;
  clear.hidden = brushes.size === 0;
  const scored = runs.filter((run) => run.best !== null).length;
  hint.textContent = brushes.size ? `${chosen} of ${runs.length} runs pass through the chosen parts.` : scored ? "" : `Lines end before the last axis until a run reports ${metric}.`;
  for (const row of document.querySelectorAll("[data-testid=trial]")) {
    row.hidden = brushes.size > 0 && !runs.some((run) => String(run.number) === row.dataset.number && inside(run));
  }
}

function axis(column, index, at, y) {
  const group = draw("g", { class: `axis${column.outcome ? " outcome" : ""}` });
  const anchor = "middle";
  group.append(draw("text", { x: at, y: 18, class: "axis-title", "text-anchor": anchor }, short(column.title, 22)));
  group.lastChild.append(draw("title", {}, column.title));
  group.append(draw("line", { x1: at, x2: at, y1: y(0), y2: y(1), class: "spine" }));
  for (const [share, label] of column.ticks) {
    group.append(draw("line", { x1: at - 4, x2: at, y1: y(share), y2: y(share), class: "tick" }));
    group.append(draw("text", { x: at - 8, y: y(share) + 4, "text-anchor": "end", class: "tick-label" }, label));
  }
  const brush = brushes.get(index);
  if (brush) group.append(draw("rect", { x: at - 7, width: 14, y: y(brush[1]), height: Math.max(3, y(brush[0]) - y(brush[1])), class: "brush" }));
  const grip = draw("rect", { x: at - 14, width: 28, y: y(1) - 8, height: y(0) - y(1) + 16, class: "grip", "data-axis": index });
  grip.addEventListener("pointerdown", (event) => startBrush(event, index, y));
  group.append(grip);
  return group;
}

function startBrush(event, index, y) {
  event.preventDefault();
  const box = root.querySelector("svg").getBoundingClientRect();
  const share = (move) => Math.min(1, Math.max(0, (y(0) - (move.clientY - box.top)) / (y(0) - y(1))));
  const from = share(event);
  brushes.delete(index);
  const move = (next) => {
    const to = share(next);
    if (Math.abs(to - from) < 0.015) return;
    brushes.set(index, [Math.min(from, to), Math.max(from, to)]);
    render();
  };
  const end = () => {
    document.removeEventListener("pointermove", move);
    document.removeEventListener("pointerup", end);
    render();
  };
  document.addEventListener("pointermove", move);
  document.addEventListener("pointerup", end);
}

/** Lift one run out, in the plot and in the table. */
function point(wanted) {
  for (const line of root.querySelectorAll(".line")) line.classList.toggle("pointed", line.dataset.number === String(wanted));
  root.classList.toggle("pointing", wanted !== null);
  for (const row of document.querySelectorAll("[data-testid=trial]")) row.classList.toggle("pointed", row.dataset.number === String(wanted));
}

clear.addEventListener("click", () => { brushes.clear(); render(); });
document.addEventListener("mouseover", (event) => {
  const row = event.target.closest?.("[data-testid=trial]");
  if (row) point(row.dataset.number);
  else if (event.target.closest?.("#sweep-results")) point(null);
});
document.addEventListener("htmx:afterSwap", render);
new ResizeObserver(() => render()).observe(root);
render();
