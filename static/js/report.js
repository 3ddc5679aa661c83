// Live charts in a report: each block draws some metrics of some runs over each other.
import { readColours } from "./charts/controls.js";
import { RunData } from "./charts/data.js";
import { number, plain, toAxis } from "./charts/figure.js";

const LIVE_MS = 3000;
const HEIGHT = 280;
const DASHES = ["solid", "dash", "dot", "dashdot"];

const runs = new Map(); // address of the numbers -> RunData, shared by all charts with the same axis
let charts = [];

function dataOf(url, axis) {
  const key = `${axis} ${url}`;
  if (!runs.has(key)) runs.set(key, new RunData(url));
  return runs.get(key);
}

function find() {
  charts = [...document.querySelectorAll("[data-report-chart]")].map((root) => {
    const wanted = JSON.parse(root.dataset.reportChart);
    return { root, ...wanted, runs: wanted.runs.map((run) => ({ ...run, data: dataOf(run.url, wanted.axis) })), body: root.querySelector(".chart-body"), empty: root.querySelector(".chart-empty") };
  });
}

function lines(chart, look) {
  const made = [];
  const several = chart.runs.length > 1;
  chart.runs.forEach((run, at) => {
    chart.metrics.forEach((metric, which) => {
      const series = run.data.of(metric.name).find((found) => found.attempt === null);
      if (!series || !series.x.length) return;
      const colour = look.series[(several ? at : which) % look.series.length];
      const label = several && chart.metrics.length > 1 ? `${run.name}: ${metric.name}` : several ? run.name : metric.name;
      made.push({
        type: "scatter", mode: series.x.length <= 40 ? "lines+markers" : "lines", x: series.x.map((x) => toAxis(chart.axis, x)), y: series.y, name: plain(label, 48),
        line: { color: colour, width: 1.8, dash: several ? DASHES[which % DASHES.length] : "solid" }, marker: { color: colour, size: 4 },
        customdata: series.y.map((value, row) => `${number(value)} at step ${series.step[row]}`), hovertemplate: "%{customdata}",
      });
    });
  });
  return made;
}

function draw(chart) {
  const look = readColours();
  const data = lines(chart, look);
  if (!data.length && !chart.loaded) return;
  chart.empty.hidden = data.length > 0;
  chart.body.hidden = data.length === 0;
  if (!data.length) {
    chart.empty.textContent = chart.problem ?? "These runs have not reported it.";
    return;
  }
  chart.body.style.height = `${HEIGHT}px`; // Plotly takes it from here when the window changes
  chart.root.querySelector(".chart-unit").textContent = chart.metrics[0].unit ?? "";
  const font = { family: look.font, size: 11, color: look.muted };
  const axis = { gridcolor: look.grid, zerolinecolor: look.grid, linecolor: look.grid, automargin: true };
  Plotly.react(chart.body, data, {
    font, xaxis: { ...axis, type: chart.axis === "time" ? "date" : "linear" }, yaxis: { ...axis, nticks: 6 }, margin: { l: 44, r: 10, t: 8, b: 28 }, autosize: true,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "x unified", dragmode: "zoom", uirevision: "kept",
    hoverlabel: { bgcolor: look.surface, bordercolor: look.grid, font: { ...font, color: look.text } },
    showlegend: data.length > 1, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font },
  }, { displayModeBar: false, responsive: true, displaylogo: false });
}

async function load(chart) {
  chart.problem = null;
  for (const run of chart.runs) {
    const missing = chart.metrics.map((metric) => metric.name).filter((name) => !run.data.series.has(name));
    try {
      if (missing.length) await run.data.load(missing, chart.axis, null);
    } catch (error) {
      chart.problem = error.message;
    }
  }
  chart.loaded = true;
  draw(chart);
}

async function poll() {
  if (document.hidden) return;
  for (const [key, data] of runs) {
    if (!data.live || !data.cursor) continue;
    const axis = key.split(" ")[0];
    try {
      if (await data.poll(axis) === null) {
        const metrics = data.metrics;
        data.clear();
        await data.load(metrics, axis, null);
      }
    } catch {
      continue; // the next round asks again
    }
  }
  charts.filter((chart) => chart.runs.some((run) => run.data.live)).forEach(draw);
}

function begin() {
  find();
  charts.forEach(load);
}

begin();
document.addEventListener("htmx:afterSwap", begin); // the preview has changed
new MutationObserver(() => charts.forEach(draw)).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
setInterval(poll, LIVE_MS);
