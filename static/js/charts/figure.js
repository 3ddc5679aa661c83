// From numbers to a Plotly figure. Pure: no DOM, no network; charts.js draws what `figure` returns.
//
// A series is a trace as the API gives it: {metric, attempt, x, step, y, low?, high?, count?, odd}.
// The view is {axis, log, smooth, outliers, range}; a range is in axis units (Unix seconds on the time axis).

const DAY_OFFSET_MS = -new Date().getTimezoneOffset() * 60000; // Plotly's date axis shows UTC; people read local time

/** Position on Plotly's axis of a value as the API gives it. */
export function toAxis(axis, x) {
  return axis === "time" ? x * 1000 + DAY_OFFSET_MS : x;
}

/** Inverse of toAxis; Plotly hands back dates as text. */
export function fromAxis(axis, value) {
  if (axis !== "time") return Number(value);
  const ms = typeof value === "number" ? value : Date.parse(String(value).replace(" ", "T") + "Z");
  return (ms - DAY_OFFSET_MS) / 1000;
}

/** Exponential moving average with the bias of its start removed. Gaps stay gaps. */
export function smoothed(values, weight) {
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/** Text that Plotly shows as it is, rather than as markup. */
export function plain(text, limit = 200) {
  const short = text.length > limit ? text.slice(0, limit - 1) + "…" : text;
  return short.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

export function number(value) {
  if (value === null) return "–";
  const size = Math.abs(value);
  if (value !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

/** {data, layout} of one chart. `unit` is that of its first metric. */
export function figure(chart, seriesOf, marks, view, colours) {
  const traces = [];
  const shown = [];
  const names = shortNames(chart.metrics);
  const longest = Math.max(0, ...chart.metrics.flatMap((metric) => seriesOf(metric).map((series) => series.y.length)));
  const breaks = view.axis === "time" ? marks.attempts.slice(1).map((attempt) => attempt.step) : [];
  chart.metrics.forEach((metric, index) => {
    const colour = colours.series[index % colours.series.length];
    const sign = chart.kind === "mirror" && index > 0 ? -1 : 1;
    const unit = chart.units[metric] ? " " + chart.units[metric] : "";
    const style = { chart, metric, colour, sign, unit, view, index, longest, name: plain(names[index], 60) };
    for (const series of seriesOf(metric)) {
      if (series.attempt !== null && chart.kind === "stacked") continue; // layers of two attempts would add up
      shown.push({ series, sign });
      if (series.attempt !== null) traces.push(superseded(series, style));
      else segments(series, breaks).forEach((part, at) => traces.push(...current(part, { ...style, part: at })));
    }
  });
  if (!shown.length) return null;
  traces.push(...oddMarkers(shown, view, colours), ...eventMarkers(marks.events, view, colours));
  return { data: traces, layout: layout(chart, shown, marks, view, colours) };
}

/** Names without the folder they share: units and title say enough. */
function shortNames(metrics) {
  const last = metrics.map((metric) => metric.slice(metric.lastIndexOf("/") + 1));
  return new Set(last).size === last.length ? last : metrics;
}

/** The series cut where another attempt went on: in between nothing was trained, so no line leads across. */
function segments(series, steps) {
  const cuts = steps.map((step) => series.step.findIndex((known) => known >= step)).filter((at) => at > 0);
  if (!cuts.length) return [series];
  const edges = [0, ...cuts, series.step.length];
  return edges.slice(1).map((end, index) => {
    const part = { ...series };
    for (const key of ["x", "step", "y", "low", "high", "count"]) part[key] = series[key]?.slice(edges[index], end);
    return part;
  });
}

function current(series, { chart, metric, colour, sign, unit, view, index, longest, name, part }) {
  const x = series.x.map((value) => toAxis(view.axis, value));
  const y = series.y.map((value) => (value === null ? null : sign * value));
  const base = { type: "scatter", name, legendgroup: metric, showlegend: part === 0 && chart.metrics.length > 1, x, hovertemplate: hover(series, unit) };
  base.customdata = rows(series);
  if (chart.kind === "stacked") {
    // Where others have a value and this has none it counts as zero, so that what is rare stands out as a peak of its own.
    return [{ ...base, y, mode: longest > 1 ? "lines" : "lines+markers", stackgroup: `part ${part}`, stackgaps: "infer zero",
      line: { width: y.length < longest ? 1.5 : 0.5, color: colour }, fillcolor: alpha(colour, 0.55) }];
  }
  const traces = [];
  if (series.low) traces.push(...band(series, x, sign, colour, metric));
  const smoothing = view.smooth > 0 && y.length > 2;
  if (smoothing) {
    traces.push({ ...base, y, mode: "lines", showlegend: false, hoverinfo: "skip", hovertemplate: undefined,
      line: { color: colour, width: 1 }, opacity: 0.3 });
  }
  // A point with gaps on both sides has no line to be seen by; few points are easier to read as points.
  const alone = y.some((value, at) => value !== null && (y[at - 1] ?? null) === null && (y[at + 1] ?? null) === null);
  const main = { ...base, y: smoothing ? smoothed(y, view.smooth) : y, mode: alone || y.length <= 40 ? "lines+markers" : "lines" };
  main.line = { color: colour, width: 1.8, dash: index > 3 ? "dot" : "solid" };
  main.marker = { color: colour, size: y.length === 1 ? 8 : 4 };
  if (smoothing) main.hovertemplate = hover(series, unit, true);
  if (chart.kind === "mirror") main.fill = "tozeroy";
  if (chart.kind === "mirror") main.fillcolor = alpha(colour, 0.15);
  traces.push(main);
  return traces;
}

function band(series, x, sign, colour, metric) {
  const edge = { type: "scatter", x, mode: "lines", hoverinfo: "skip", showlegend: false, legendgroup: metric,
    line: { width: 0.6, color: alpha(colour, 0.35) } }; // a spike of one row is too narrow for its fill to be seen
  const place = (values) => values.map((value) => (value === null ? null : sign * value));
  return [
    { ...edge, y: place(sign > 0 ? series.low : series.high) },
    { ...edge, y: place(sign > 0 ? series.high : series.low), fill: "tonexty", fillcolor: alpha(colour, 0.18) },
  ];
}

function superseded(series, { metric, colour, sign, unit, view, name }) {
  const x = series.x.map((value) => toAxis(view.axis, value));
  const y = series.y.map((value) => (value === null ? null : sign * value));
  return {
    type: "scatter", x, y, mode: y.length > 1 ? "lines" : "markers", name, legendgroup: metric, showlegend: false,
    opacity: 0.4, line: { color: colour, width: 1, dash: y.length < 100 ? "dash" : "solid" }, marker: { color: colour, size: 5 }, customdata: rows(series),
    hovertemplate: hover(series, unit) + ` (attempt ${series.attempt}, superseded)`,
  };
}

function rows(series) {
  return series.y.map((value, at) => [
    number(value), series.step[at], series.low ? number(series.low[at]) : "", series.high ? number(series.high[at]) : "",
    series.count ? series.count[at] : 1,
  ]);
}

function hover(series, unit, raw = false) {
  const value = raw ? "%{y:.4~g} (raw %{customdata[0]})" : "%{customdata[0]}";
  const spread = series.low ? " · %{customdata[2]} to %{customdata[3]} in %{customdata[4]} points" : "";
  return `${value}${plain(unit)}${spread}`;
}

/** nan and infinities have no place on the axis: crosses along the upper edge. */
function oddMarkers(shown, view, colours) {
  const x = [];
  const text = [];
  for (const { series } of shown) {
    for (const [at, kinds] of series.odd) {
      x.push(toAxis(view.axis, series.x[at]));
      const where = series.count?.[at] > 1 ? `among ${series.count[at]} points up to` : "at";
      text.push(`${plain(series.metric, 60)} is ${kinds.join(", ")} ${where} step ${series.step[at]}`);
    }
  }
  if (!x.length) return [];
  return [{ type: "scatter", x, y: x.map(() => 0.97), yaxis: "y2", mode: "markers", text, hovertemplate: "%{text}<extra></extra>",
    showlegend: false, marker: { symbol: "x", size: 8, color: colours.danger } }];
}

const EVENT_SYMBOLS = { info: "triangle-up", warning: "diamond", error: "x" };

function eventMarkers(events, view, colours) {
  if (!events.length) return [];
  const colour = { info: colours.muted, warning: colours.warning, error: colours.danger };
  return [{
    type: "scatter", yaxis: "y2", mode: "markers", showlegend: false, hovertemplate: "%{text}<extra></extra>",
    x: events.map((event) => toAxis(view.axis, event.x)), y: events.map(() => 0.015),
    text: events.map((event) => plain(`${event.name}: ${event.text}`, 120)),
    marker: { symbol: events.map((event) => EVENT_SYMBOLS[event.level]), color: events.map((event) => colour[event.level]), size: 7 },
  }];
}

function layout(chart, shown, marks, view, colours) {
  const font = { family: colours.font, size: 11, color: colours.muted };
  const grid = { gridcolor: colours.grid, zerolinecolor: colours.grid, linecolor: colours.grid, automargin: true };
  const log = view.log && chart.kind === "line";
  const xaxis = { ...grid, type: view.axis === "time" ? "date" : "linear", hoverformat: view.axis === "time" ? "%H:%M:%S" : ",~r" };
  if (view.axis === "tokens") xaxis.tickformat = "~s";
  if (view.range) xaxis.range = view.range.map((x) => toAxis(view.axis, x));
  else xaxis.autorange = true;
  const yaxis = { ...grid, type: log ? "log" : "linear", fixedrange: true, autorange: true, nticks: 6, hoverformat: ".4~g" };
  const range = yRange(chart, shown, view);
  if (range) Object.assign(yaxis, { autorange: false, range: log ? range.map(Math.log10) : range });
  if (chart.kind === "mirror") Object.assign(yaxis, absoluteTicks(shown, range), { zerolinecolor: colours.muted });
  const limit = limitLine(chart, log, font, colours);
  const boundaries = marks.attempts.filter((attempt) => attempt.number > marks.attempts[0].number);
  return {
    font, xaxis, yaxis, margin: { l: 44, r: 10, t: 6, b: 26 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    yaxis2: { overlaying: "y", range: [0, 1], fixedrange: true, visible: false },
    hovermode: "x unified", hoverlabel: { bgcolor: colours.surface, bordercolor: colours.grid, font: { ...font, color: colours.text } },
    showlegend: chart.metrics.length > 1, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font },
    dragmode: "zoom", uirevision: "kept", barmode: "stack", autosize: true,
    shapes: [...limit.shapes, ...boundaries.map((attempt) => ({
      type: "line", yref: "paper", y0: 0, y1: 1, x0: toAxis(view.axis, attempt.x), x1: toAxis(view.axis, attempt.x),
      line: { color: colours.muted, width: 1, dash: "dot" },
    }))],
    annotations: [...limit.annotations, ...boundaries.map((attempt) => ({
      x: toAxis(view.axis, attempt.x), yref: "paper", y: 1, yanchor: "top", xanchor: "left", showarrow: false,
      text: `attempt ${attempt.number}`, font: { ...font, size: 10 },
    }))],
  };
}

/** The setting that bounds what a chart shows: a dashed line with its name. A log axis has no place for zero. */
function limitLine(chart, log, font, colours) {
  if (!chart.limit || (log && chart.limit.value <= 0)) return { shapes: [], annotations: [] };
  const { name, value } = chart.limit;
  return {
    shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: value, y1: value, line: { color: colours.danger, width: 1.2, dash: "dash" } }],
    annotations: [{
      xref: "paper", x: 0, xanchor: "left", y: log ? Math.log10(value) : value, yanchor: "bottom", showarrow: false,
      text: plain(`${name} ${number(value)}`), font: { ...font, size: 10, color: colours.danger },
      bgcolor: alpha(colours.surface, 0.75), borderpad: 1,
    }],
  };
}

/** The visible values' range, when Plotly's own (over all values) is not what is wanted: zoomed in, or without outliers. */
export function yRange(chart, shown, view) {
  if ((!view.range && view.outliers) || chart.kind === "stacked") return null;
  const values = [];
  for (const { series, sign } of shown) {
    series.x.forEach((x, at) => {
      if (view.range && (x < view.range[0] || x > view.range[1])) return;
      const edges = view.outliers && series.low ? [series.low[at], series.high[at]] : [series.y[at]];
      for (const value of edges) {
        if (value !== null && !(view.log && chart.kind === "line" && value <= 0)) values.push(sign * value);
      }
    });
  }
  if (!values.length) return null;
  values.sort((a, b) => a - b);
  const limit = chart.limit && !(view.log && chart.limit.value <= 0) ? [chart.limit.value] : [];
  const at = (share) => values[Math.round(share * (values.length - 1))];
  const edges = view.outliers ? [values[0], values[values.length - 1]] : [at(0.02), at(0.98)];
  const low = Math.min(edges[0], ...limit);
  const high = Math.max(edges[1], ...limit);
  if (view.log && chart.kind === "line") return [low * 0.9, high * 1.1];
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low - pad, high + pad];
}

/** Both halves of a mirrored chart count upwards from zero. */
function absoluteTicks(shown, range) {
  let [low, high] = range ?? [0, 0];
  if (!range) {
    for (const { series, sign } of shown) {
      for (const value of series.high ?? series.y) {
        low = Math.min(low, sign * (value ?? 0));
        high = Math.max(high, sign * (value ?? 0));
      }
    }
  }
  const step = niceStep((high - low) / 5);
  const tickvals = [];
  for (let tick = Math.ceil(low / step); tick <= Math.floor(high / step); tick += 1) tickvals.push(tick * step);
  return { tickmode: "array", tickvals, ticktext: tickvals.map((tick) => number(Math.abs(tick))) };
}

export function niceStep(rough) {
  if (!(rough > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 5, 10].find((factor) => factor * power >= rough) ?? 10);
}

export function alpha(colour, share) {
  const hex = /^#([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2})$/i.exec(colour);
  if (!hex) return colour;
  return `rgba(${hex.slice(1).map((part) => parseInt(part, 16)).join(",")},${share})`;
}
