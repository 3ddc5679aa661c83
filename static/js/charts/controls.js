// What pages with charts share: elements, the view in the URL, the toolbar's controls, colours, and what a chart is saved as.
import { plain } from "./figure.js";

const FALLBACKS = ["#3347c4", "#c2410c", "#0f766e", "#a21caf", "#a16207", "#0369a1", "#be123c", "#4d7c0f"];

/** An element; a name that is no property of it becomes an attribute. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in made && name !== "list") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// ---- the view: what the toolbar sets and the URL keeps

export function viewFromUrl(axes) {
  const query = new URLSearchParams(location.search);
  const edges = [query.get("from"), query.get("to")].map((text) => (text === null ? NaN : Number(text)));
  const smooth = Number(query.get("smooth"));
  return {
    axis: query.get("axis") in axes ? query.get("axis") : "step", log: query.get("log") === "1", outliers: query.get("outliers") !== "0",
    smooth: smooth > 0 && smooth < 1 ? smooth : 0, range: edges.every(Number.isFinite) && edges[0] < edges[1] ? edges : null,
  };
}

export function viewToUrl(view) {
  const query = new URLSearchParams(location.search);
  const put = (key, value, usual) => (value === usual ? query.delete(key) : query.set(key, value));
  put("axis", view.axis, "step");
  put("log", view.log ? "1" : "0", "0");
  put("outliers", view.outliers ? "1" : "0", "1");
  put("smooth", String(view.smooth), "0");
  put("from", view.range ? String(Number(view.range[0].toPrecision(12))) : "", "");
  put("to", view.range ? String(Number(view.range[1].toPrecision(12))) : "", "");
  const text = query.toString();
  history.replaceState(history.state, "", location.pathname + (text ? `?${text}` : "") + location.hash);
}

// ---- controls

const option = (...children) => element("label", { className: "chart-option" }, ...children);

export function axisChoice(axes, chosen, choose) {
  const select = element("select", { "aria-label": "Horizontal axis" });
  for (const [value, label] of Object.entries(axes)) select.append(element("option", { value, textContent: label }));
  select.value = chosen;
  select.addEventListener("change", () => choose(select.value));
  return option("Axis ", select);
}

export function checkbox(label, checked, check) {
  const box = element("input", { type: "checkbox", checked });
  box.addEventListener("change", () => check(box.checked));
  return option(box, ` ${label}`);
}

export function smoothing(weight, smooth) {
  const words = (value) => (value ? value.toFixed(2) : "off");
  const slider = element("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: String(weight) });
  const shown = element("output", { textContent: words(weight) });
  slider.addEventListener("input", () => {
    shown.textContent = words(Number(slider.value));
    smooth(Number(slider.value));
  });
  return option("Smoothing ", slider, " ", shown);
}

/** A menu of the kinds of file that `address`, which exports every point, can give. */
export function exportMenu(address) {
  const kinds = { csv: "CSV", jsonl: "JSON lines", parquet: "Parquet" };
  const links = Object.entries(kinds).map(([format, textContent]) => element("a", { href: `${address}?format=${format}`, download: "", textContent }));
  return element("details", { className: "menu" }, element("summary", { className: "button small", textContent: "Export" }),
    element("div", { className: "menu-list" }, element("p", { className: "who", textContent: "Every point, as" }), ...links));
}

/** What one chart is saved as: a picture, or every point of its metrics at `address`. */
export function saving(address, picture) {
  const png = element("button", { type: "button", textContent: "PNG", title: "Save this chart as a picture" });
  png.addEventListener("click", picture);
  return [png, element("a", { href: address, textContent: "CSV", title: "Every point, never sampled", download: "" })];
}

export async function savePicture(body, title, colours, more = {}) {
  const layout = { ...body.layout, title: { text: plain(title), font: { size: 14 } }, margin: { l: 50, r: 15, t: 60, b: 35 }, paper_bgcolor: colours.surface, ...more };
  const url = await Plotly.toImage({ data: body.data, layout }, { format: "png", width: 1000, height: 480, scale: 2 });
  element("a", { href: url, download: `${title}.png` }).click();
}

// ---- colours

export function readColours() {
  const style = getComputedStyle(document.documentElement);
  const get = (name, fallback) => style.getPropertyValue(name).trim() || fallback;
  return {
    series: FALLBACKS.map((fallback, index) => get(`--chart-${index + 1}`, fallback)), grid: get("--chart-grid", "#e7eaef"),
    text: get("--text", "#1a1d21"), muted: get("--muted", "#5b6470"), surface: get("--surface", "#ffffff"),
    danger: get("--danger", "#c02626"), warning: get("--warning", get("--chart-5", "#a16207")),
    font: getComputedStyle(document.body).fontFamily,
  };
}

/** Calls `recolour` when the theme changes. */
export function onTheme(recolour) {
  new MutationObserver(recolour).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme", "class"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
}
