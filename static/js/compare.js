// Curves of several runs over each other, one chart for each metric. The numbers come run by run from the same place as
// those of a run's own page; grouped runs are drawn as their mean with a band from the lowest to the highest.
import { axisChoice, checkbox, element, onTheme, readColours, savePicture, saving, smoothing, viewFromUrl, viewToUrl } from "./charts/controls.js";
import { RunData } from "./charts/data.js";
import { alpha, fromAxis, number, plain, smoothed, toAxis } from "./charts/figure.js";

const section = document.getElementById("compare");
const LIVE_MS = 3000;
const GRID = 400; // places at which grouped curves are averaged
const DASHES = ["solid", "dash", "dot", "dashdot"];
const AXES = { step: "Step", time: "Time since the start", tokens: "Tokens" };

if (section) {
  const runs = JSON.parse(section.dataset.runs).map((run) => ({ ...run, data: new RunData(`/api/runs/${run.id}/chart`) }));
  const view = viewFromUrl(AXES);
  const charts = [...section.querySelectorAll(".chart")].map((root) => ({ root, metric: root.dataset.metric, visible: false, drawn: false }));
  const status = element("span", { className: "chart-status", role: "status", textContent: "Loading…" });
  const reset = element("button", { type: "button", className: "button small", textContent: "Reset zoom", hidden: !view.range });
  let colours = readColours();

  const colourOf = (index) => colours.series[index % colours.series.length];
  const dashOf = (index) => DASHES[Math.floor(index / colours.series.length) % DASHES.length];

  function paintSwatches() {
    const groups = [...new Set(runs.map((run) => run.group))];
    for (const swatch of document.querySelectorAll("[data-swatch]")) {
      const at = Number(swatch.dataset.swatch);
      swatch.style.background = colourOf(runs[at].group ? groups.indexOf(runs[at].group) : at);
    }
  }

  // ---- numbers

  /** A run's own curve of a metric, times counted from the run's first attempt. */
  function curve(run, metric) {
    const found = run.data.of(metric).find((series) => series.attempt === null);
    if (!found) return null;
    const start = view.axis === "time" ? run.data.marks.attempts[0]?.x ?? found.x[0] : 0;
    return { ...found, x: found.x.map((x) => x - start) };
  }

  function at(series, x) {
    const { x: places, y } = series;
    if (!places.length || x < places[0] || x > places.at(-1)) return null;
    let low = 0;
    let high = places.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (places[middle] <= x) low = middle;
      else high = middle;
    }
    if (y[low] === null || y[high] === null) return y[low] ?? y[high];
    return high === low || places[high] === places[low] ? y[low] : y[low] + (y[high] - y[low]) * (x - places[low]) / (places[high] - places[low]);
  }

  /** Mean, lowest and highest of some curves at common places; each curve counts where it has values. */
  function grouped(curves) {
    let places = [...new Set(curves.flatMap((series) => series.x))].sort((a, b) => a - b);
    if (places.length > GRID) places = Array.from({ length: GRID }, (_, index) => places[0] + (places.at(-1) - places[0]) * index / (GRID - 1));
    const rows = places.map((x) => curves.map((series) => at(series, x)).filter((value) => value !== null));
    return {
      x: places, count: rows.map((row) => row.length),
      mean: rows.map((row) => (row.length ? row.reduce((sum, value) => sum + value, 0) / row.length : null)),
      low: rows.map((row) => (row.length ? Math.min(...row) : null)), high: rows.map((row) => (row.length ? Math.max(...row) : null)),
    };
  }

  // ---- drawing

  const place = (x) => (view.axis === "time" ? x / 60 : toAxis(view.axis, x));

  function line(x, y, name, index, text) {
    const colour = colourOf(index);
    const base = { type: "scatter", x: x.map(place), name: plain(name, 40), legendgroup: String(index), line: { color: colour, width: 1.8, dash: dashOf(index) } };
    const few = y.length <= 40;
    const traces = [];
    const smoothing = view.smooth > 0 && y.length > 2;
    if (smoothing) traces.push({ ...base, y, mode: "lines", opacity: 0.3, showlegend: false, hoverinfo: "skip", line: { ...base.line, width: 1 } });
    traces.push({ ...base, y: smoothing ? smoothed(y, view.smooth) : y, mode: few ? "lines+markers" : "lines", marker: { color: colour, size: 4 },
      customdata: text, hovertemplate: "%{customdata}" });
    return traces;
  }

  function band(x, low, high, index) {
    const edge = { type: "scatter", x: x.map(place), mode: "lines", hoverinfo: "skip", showlegend: false, legendgroup: String(index), line: { width: 0, color: alpha(colourOf(index), 0.3) } };
    return [{ ...edge, y: low }, { ...edge, y: high, fill: "tonexty", fillcolor: alpha(colourOf(index), 0.18) }];
  }

  function traces(metric) {
    const made = [];
    if (runs.some((run) => run.group)) {
      [...new Set(runs.map((run) => run.group))].forEach((name, index) => {
        const curves = runs.filter((run) => run.group === name).map((run) => curve(run, metric)).filter(Boolean);
        if (!curves.length) return;
        const rows = grouped(curves);
        const text = rows.mean.map((value, row) => `${number(value)} · ${number(rows.low[row])} to ${number(rows.high[row])} of ${rows.count[row]}`);
        made.push(...band(rows.x, rows.low, rows.high, index), ...line(rows.x, rows.mean, name, index, text));
      });
      return made;
    }
    runs.forEach((run, index) => {
      const series = curve(run, metric);
      if (!series) return;
      if (series.low) made.push(...band(series.x, series.low, series.high, index));
      made.push(...line(series.x, series.y, run.name, index, series.y.map((value, row) => `${number(value)} at step ${series.step[row]}`)));
    });
    return made;
  }

  function draw(chart) {
    if (!chart.visible) return;
    const data = traces(chart.metric);
    chart.empty.hidden = data.length > 0;
    chart.body.hidden = data.length === 0;
    chart.root.classList.toggle("is-empty", data.length === 0);
    if (!data.length) {
      chart.empty.textContent = "None of these runs reported it.";
      return;
    }
    const font = { family: colours.font, size: 11, color: colours.muted };
    const axis = { gridcolor: colours.grid, zerolinecolor: colours.grid, linecolor: colours.grid, automargin: true };
    const xaxis = { ...axis, ...(view.range ? { range: view.range } : { autorange: true }), title: view.axis === "time" ? { text: "minutes", font } : undefined };
    Plotly.react(chart.body, data, {
      font, xaxis, yaxis: { ...axis, type: view.log ? "log" : "linear", fixedrange: true, autorange: true, nticks: 6 },
      margin: { l: 44, r: 10, t: 6, b: 26 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "x unified",
      hoverlabel: { bgcolor: colours.surface, bordercolor: colours.grid, font: { ...font, color: colours.text } }, showlegend: runs.some((run) => run.group), // otherwise the table above has each run's colour
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font }, dragmode: "zoom", uirevision: "kept", autosize: true,
    }, { displayModeBar: false, responsive: true, displaylogo: false, doubleClick: false });
    if (chart.drawn) return;
    chart.drawn = true;
    chart.body.on("plotly_relayout", (event) => {
      const range = [event["xaxis.range[0]"], event["xaxis.range[1]"]];
      if (range.every((edge) => edge !== undefined)) zoom(range.map((edge) => fromAxis("step", edge)));
    });
    chart.body.on("plotly_doubleclick", () => zoom(null));
  }

  const drawAll = () => charts.forEach(draw);

  function zoom(range) {
    view.range = range;
    reset.hidden = range === null;
    viewToUrl(view);
    drawAll();
  }

  // ---- asking

  let problem = "";
  async function each(action) {
    problem = "";
    const left = [...runs];
    const worker = async () => {
      for (let run = left.shift(); run; run = left.shift()) {
        try {
          await action(run);
        } catch (error) {
          problem = `${run.name}: ${error.message}`;
        }
      }
    };
    await Promise.all([worker(), worker(), worker(), worker()]);
    status.textContent = problem || `${runs.filter((run) => run.data.live).length} of ${runs.length} live`;
    status.classList.toggle("is-lost", problem !== "");
    drawAll();
  }

  const wanted = () => charts.filter((chart) => chart.visible).map((chart) => chart.metric);
  const load = () => each((run) => {
    const metrics = wanted().filter((metric) => !run.data.series.has(metric));
    return metrics.length ? run.data.load(metrics, view.axis, null) : null;
  });
  const poll = () => each(async (run) => {
    if (!run.data.live || !run.data.cursor || await run.data.poll(view.axis)) return;
    const metrics = run.data.metrics;
    run.data.clear();
    await run.data.load(metrics, view.axis, null);
  });

  // ---- the page

  const set = (key) => (value) => {
    view[key] = value;
    viewToUrl(view);
    drawAll();
  };
  reset.addEventListener("click", () => zoom(null));
  const axis = axisChoice(AXES, view.axis, (chosen) => {
    Object.assign(view, { axis: chosen, range: null });
    reset.hidden = true;
    viewToUrl(view);
    runs.forEach((run) => run.data.clear());
    load();
  });
  section.prepend(element("div", { className: "chart-toolbar" }, axis, checkbox("Log scale", view.log, set("log")), smoothing(view.smooth, set("smooth")), reset, status));

  let queued = null;
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) charts.find((chart) => chart.root === entry.target).visible = entry.isIntersecting;
    clearTimeout(queued);
    queued = setTimeout(load, 30);
  }, { rootMargin: "300px 0px" });
  for (const chart of charts) {
    chart.body = element("div", { className: "chart-body" });
    chart.empty = element("p", { className: "chart-empty", textContent: "Loading…" });
    chart.body.style.height = "240px";
    const heading = element("h3", { textContent: chart.metric, title: chart.root.dataset.help });
    const points = new URLSearchParams([...runs.map((run) => ["run", run.id]), ["metric", chart.metric]]);
    const legend = { showlegend: runs.length > 1 }; // a picture goes without the table that has each run's colour
    const save = saving(`${section.dataset.export}?${points}`, () => chart.drawn && savePicture(chart.body, chart.metric, colours, legend));
    chart.root.append(element("div", { className: "chart-head" }, heading, element("span", { className: "chart-unit", textContent: chart.root.dataset.unit }),
      element("span", { className: "chart-actions" }, ...save)), chart.empty, chart.body);
    observer.observe(chart.root);
  }
  paintSwatches();
  onTheme(() => { colours = readColours(); paintSwatches(); drawAll(); });
  setInterval(() => { if (!document.hidden && runs.some((run) => run.data.live)) poll(); }, LIVE_MS);
}

document.addEventListener("click", async (event) => {
  const drop = event.target.closest("[data-drop-run]");
  if (drop) {
    const query = new URLSearchParams(location.search);
    const left = query.getAll("run").filter((run) => run !== drop.dataset.dropRun);
    query.delete("run");
    left.forEach((run) => query.append("run", run));
    location.search = query;
  }
  const copy = event.target.closest("[data-copy-address]");
  if (copy) {
    await navigator.clipboard.writeText(location.href);
    copy.textContent = "Copied";
  }
});
