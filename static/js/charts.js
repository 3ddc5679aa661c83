// The charts of a run's page; docs/charts.md says which elements and attributes a page offers.
//
// This file has the page's side: toolbar, view in the URL, mounting on scroll, polling. charts/data.js keeps the numbers,
// charts/figure.js turns them into Plotly figures, charts/controls.js has what other pages with charts need too.
"use strict";

(async () => {
  const section = document.getElementById("charts");
  if (!section) return;
  const base = new URL("charts/", document.currentScript?.src ?? section.dataset.script ?? "/static/js/");
  const parts = ["data.js", "figure.js", "controls.js"].map((name) => import(new URL(name, base)));
  const [{ RunData }, figures, controls] = await Promise.all(parts);
  const { element } = controls;

  const LIVE_MS = 1500;
  const ENDED_MS = 30000; // a run may be resumed
  const CATALOG_MS = 30000;
  const SLOWEST_RETRY_MS = 30000;
  const AXES = { step: "Step", time: "Time", tokens: "Tokens" };

  const exported = section.dataset.url.replace(/chart$/, "metrics/export");
  const data = new RunData(section.dataset.url);
  const view = controls.viewFromUrl(AXES);
  const charts = [];
  const waiting = new Set(); // charts that came into view and have no numbers yet
  let colours = controls.readColours();
  let updatedAt = null;
  let problem = null;
  let failures = 0;
  let timer = null;

  // ---- toolbar

  const status = element("span", { className: "chart-status", role: "status" });
  const resetZoom = element("button", { type: "button", className: "button small", textContent: "Reset zoom", hidden: !view.range });

  function toolbar() {
    const set = (key) => (value) => {
      view[key] = value;
      changed();
    };
    resetZoom.addEventListener("click", () => zoom(null));
    section.prepend(element("div", { className: "chart-toolbar" },
      controls.axisChoice(AXES, view.axis, (axis) => {
        Object.assign(view, { axis, range: null });
        reload();
      }),
      controls.checkbox("Log scale", view.log, set("log")), controls.checkbox("Hide outliers", !view.outliers, (hide) => set("outliers")(!hide)),
      controls.smoothing(view.smooth, set("smooth")), resetZoom, controls.exportMenu(exported), status));
  }

  function changed() {
    controls.viewToUrl(view);
    charts.forEach(draw);
  }

  // ---- one chart

  function prepare(root) {
    if (root.dataset.prepared) return;
    root.dataset.prepared = "1";
    const metrics = JSON.parse(root.dataset.metrics);
    const body = element("div", { className: "chart-body" });
    const empty = element("p", { className: "chart-empty", textContent: "Loading…" });
    const unit = element("span", { className: "chart-unit" });
    const help = element("p", { className: "chart-help", hidden: true, textContent: root.dataset.help ?? "" });
    const chart = { root, body, empty, unit, help, metrics, kind: root.dataset.kind ?? "line", limit: root.dataset.limit ? JSON.parse(root.dataset.limit) : null, units: {}, visible: false, drawn: false };
    const ask = element("button", { type: "button", textContent: "?", title: root.dataset.help ?? "", "aria-label": `About ${root.dataset.title}` });
    ask.addEventListener("click", () => { help.hidden = !help.hidden; });
    const query = new URLSearchParams(metrics.map((metric) => ["metric", metric]));
    const save = controls.saving(`${exported}?${query}`, () => chart.drawn && controls.savePicture(body, root.dataset.title, colours));
    root.append(
      element("div", { className: "chart-head" }, element("h3", { textContent: root.dataset.title }), unit,
        element("span", { className: "chart-actions" }, ask, ...save)),
      help, empty, body);
    body.style.height = "240px";
    charts.push(chart);
    observer.observe(root);
  }

  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const chart = charts.find((known) => known.root === entry.target);
      chart.visible = entry.isIntersecting;
      if (!chart.visible) continue;
      if (chart.metrics.every((metric) => data.series.has(metric))) draw(chart);
      else waiting.add(chart);
    }
    if (waiting.size) soon(loadWaiting);
  }, { rootMargin: "300px 0px" });

  let queued = null;
  function soon(action) {
    clearTimeout(queued);
    queued = setTimeout(action, 20);
  }

  async function loadWaiting() {
    const fresh = [...waiting];
    waiting.clear();
    const metrics = [...new Set(fresh.flatMap((chart) => chart.metrics))].filter((metric) => !data.series.has(metric));
    const loaded = await attemptTo(() => data.load(metrics, view.axis, view.range));
    if (!loaded) {
      fresh.forEach((chart) => waiting.add(chart));
      setTimeout(loadWaiting, retryMs());
      return;
    }
    if (timer === null) schedule();
    await drawInTurn(fresh);
  }

  /** What is in the window first; the others, which are near it, one at a time, so that the page answers meanwhile. */
  async function drawInTurn(list) {
    const inWindow = (chart) => {
      const box = chart.root.getBoundingClientRect();
      return box.bottom > 0 && box.top < innerHeight;
    };
    const first = list.filter(inWindow);
    first.forEach(draw);
    for (const chart of list.filter((known) => !first.includes(known))) {
      await new Promise((done) => setTimeout(done));
      draw(chart);
    }
  }

  function draw(chart) {
    if (!chart.visible) return; // drawn when it comes into view
    chart.units = data.units;
    const first = chart.metrics[0];
    chart.unit.textContent = data.units[first] ?? "";
    if (!chart.help.textContent) chart.help.textContent = data.help[first] ?? "";
    const made = data.series.has(first) ? figures.figure(chart, (metric) => data.of(metric), data.marks, view, colours) : null;
    chart.empty.hidden = made !== null;
    chart.body.hidden = made === null;
    chart.root.classList.toggle("is-empty", made === null);
    if (made === null) {
      if (data.series.has(first)) chart.empty.textContent = emptyText();
      return;
    }
    const config = { displayModeBar: false, responsive: true, displaylogo: false, scrollZoom: false, doubleClick: false };
    Plotly.react(chart.body, made.data, made.layout, config);
    if (!chart.drawn) {
      chart.drawn = true;
      chart.body.on("plotly_relayout", (event) => zoomed(event));
      chart.body.on("plotly_doubleclick", () => zoom(null));
    }
  }

  function emptyText() {
    if (data.marks.attempts.length) return "Not reported by this run so far.";
    return data.live ? "No value yet: appears with the first optimizer step." : "The run reported no value.";
  }

  // ---- zoom, the same in all charts

  function zoomed(event) {
    const edges = [event["xaxis.range[0]"], event["xaxis.range[1]"]];
    if (edges.every((edge) => edge !== undefined)) zoom(edges.map((edge) => figures.fromAxis(view.axis, edge)));
  }

  function zoom(range) {
    const refined = view.range !== null;
    view.range = range;
    resetZoom.hidden = range === null;
    changed();
    const loaded = data.metrics;
    if (refined || data.thinned(loaded)) soon(() => refine(loaded)); // finer rows, or all of them again
  }

  async function refine(metrics) {
    if (await attemptTo(() => data.load(metrics, view.axis, view.range))) charts.forEach(draw);
  }

  async function reload() {
    controls.viewToUrl(view);
    resetZoom.hidden = view.range === null;
    const metrics = data.metrics;
    data.clear();
    if (await attemptTo(() => data.load(metrics, view.axis, view.range))) charts.forEach(draw);
    else metrics.forEach((metric) => charts.filter((chart) => chart.metrics.includes(metric)).forEach((chart) => waiting.add(chart)));
    if (waiting.size) soon(loadWaiting);
  }

  // ---- staying up to date

  function retryMs() {
    return Math.min(LIVE_MS * 2 ** failures, SLOWEST_RETRY_MS);
  }

  async function attemptTo(action) {
    try {
      const result = await action();
      updatedAt = Date.now();
      failures = 0;
      problem = null;
      return result ?? true;
    } catch (error) {
      failures += 1;
      problem = error.final ? error.message : "Connection lost; trying again.";
      return false;
    } finally {
      showStatus();
    }
  }

  function schedule() {
    clearTimeout(timer);
    const live = data.live ?? section.dataset.live === "1";
    timer = setTimeout(poll, failures ? retryMs() : live ? LIVE_MS : ENDED_MS);
  }

  async function poll() {
    if (document.hidden) return; // goes on when the tab is looked at again
    if (!data.cursor) {
      schedule();
      return;
    }
    const before = data.state;
    let reset = false;
    const result = await attemptTo(async () => {
      const metrics = await data.poll(view.axis);
      reset = metrics === null;
      return metrics ?? new Set();
    });
    if (reset) await reload();
    else if (result) charts.filter((chart) => chart.metrics.some((metric) => result.has(metric))).forEach(draw);
    if (before !== data.state) {
      charts.forEach(draw);
      document.dispatchEvent(new CustomEvent("run-state", { detail: { state: data.state, live: data.live } }));
    }
    if (!problem || failures) schedule();
  }

  function showStatus() {
    status.classList.toggle("is-lost", problem !== null);
    if (problem) {
      status.textContent = problem;
    } else if (updatedAt) {
      const seconds = Math.round((Date.now() - updatedAt) / 1000);
      status.textContent = (data.live ? "Live" : "Ended") + (seconds < 2 ? " · updated now" : ` · updated ${seconds} s ago`);
    }
  }

  // ---- every metric, by stage

  async function allMetrics(root) {
    const search = element("input", { type: "search", placeholder: "Search all metrics", "aria-label": "Search all metrics" });
    const stages = element("div", { className: "stages" });
    root.append(element("div", { className: "chart-search" }, element("h2", { textContent: "All metrics" }), search), stages);
    const known = new Map(); // stage -> {details, grid, count}
    search.addEventListener("input", () => filter(stages, search.value));
    const refresh = async () => {
      const answer = await fetch(section.dataset.url.replace(/chart$/, "metrics")).catch(() => null);
      if (answer?.ok) (await answer.json()).forEach((metric) => place(metric, stages, known));
      filter(stages, search.value);
      root.hidden = known.size === 0; // nothing was reported yet
      setTimeout(refresh, CATALOG_MS);
    };
    await refresh();
  }

  function place(metric, stages, known) {
    if (!known.has(metric.stage)) {
      const grid = element("div", { className: "stage-charts chart-grid" });
      const count = element("span", { className: "stage-count" });
      const details = element("details", { className: "stage" }, element("summary", {}, metric.stage, " ", count), grid);
      details.addEventListener("toggle", () => { if (details.open) grid.querySelectorAll(".chart").forEach(prepare); });
      stages.append(details);
      known.set(metric.stage, { details, grid, count, names: new Set() });
    }
    const { details, grid, count, names } = known.get(metric.stage);
    if (names.has(metric.name)) return;
    names.add(metric.name);
    const root = element("div", { className: "chart" });
    Object.assign(root.dataset, { kind: "line", title: metric.name, help: metric.help, metrics: JSON.stringify([metric.name]) });
    root.dataset.words = `${metric.name} ${metric.help}`.toLowerCase();
    grid.append(root);
    count.textContent = String(names.size);
    if (details.open) prepare(root);
  }

  function filter(stages, text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    for (const details of stages.children) {
      let hits = 0;
      for (const root of details.querySelectorAll(".chart")) {
        root.hidden = !words.every((word) => root.dataset.words.includes(word));
        hits += root.hidden ? 0 : 1;
      }
      details.hidden = hits === 0;
      if (words.length && hits) details.open = true;
    }
  }

  controls.onTheme(() => {
    colours = controls.readColours();
    charts.forEach(draw);
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
  setInterval(showStatus, 1000);
  toolbar();
  section.querySelectorAll(".chart").forEach(prepare);
  const all = document.getElementById("all-metrics");
  if (all) allMetrics(all);
})();
