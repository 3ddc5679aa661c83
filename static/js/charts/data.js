// The numbers behind the charts of one run: asked for once, then kept up to date by what is new since a cursor.

const METRICS_A_REQUEST = 40;
const MOST_POINTS = 4000; // twice what a fresh answer holds; then a fresh, bucketed one is asked for

export class RunData {
  constructor(url) {
    this.url = url;
    this.series = new Map(); // metric -> traces as the API gives them, the run's own curve first
    this.units = {};
    this.help = {};
    this.marks = { attempts: [], events: [] };
    this.cursor = null;
    this.live = null;
    this.state = null;
    this.generation = 0; // grows when everything is asked for anew, so that late answers to old questions are dropped
  }

  of(metric) {
    return this.series.get(metric) ?? [];
  }

  get metrics() {
    return [...this.series.keys()];
  }

  /** Whether some curve was thinned out, so that a zoom should ask for more detail. */
  thinned(metrics) {
    return metrics.some((metric) => this.of(metric).some((series) => series.count));
  }

  /** Forgets all curves: the axis changed, or a new attempt began. */
  clear() {
    this.series.clear();
    this.cursor = null;
    this.generation += 1;
  }

  /** Fetches the curves of these metrics whole, or between two places of the axis. */
  async load(metrics, axis, range) {
    const generation = this.generation;
    for (const part of parts(metrics)) {
      const query = new URLSearchParams(part.map((metric) => ["metric", metric]));
      query.set("axis", axis);
      if (range) {
        query.set("from", range[0]);
        query.set("to", range[1]);
      }
      const answer = await this.ask(query);
      if (generation !== this.generation) return;
      for (const metric of part) this.series.set(metric, []);
      for (const series of answer.series) this.of(series.metric).push(series);
      for (const [metric, info] of Object.entries(answer.metrics)) {
        this.units[metric] = info.unit;
        this.help[metric] = info.help;
      }
      this.marks = { attempts: answer.attempts, events: answer.events };
      this.cursor ??= answer.cursor; // an older cursor only repeats points
      this.note(answer);
    }
  }

  /** Fetches what is new. Returns the metrics that changed, or null when all must be loaded again. */
  async poll(axis) {
    const generation = this.generation;
    const changed = new Set();
    let next = null;
    for (const part of parts(this.metrics)) {
      const query = new URLSearchParams(part.map((metric) => ["metric", metric]));
      query.set("axis", axis);
      query.set("after", this.cursor);
      const answer = await this.ask(query);
      if (generation !== this.generation) return changed;
      this.note(answer);
      if (answer.reset) return null;
      next ??= answer.cursor; // the first of several answers is the oldest
      this.addEvents(answer.events);
      for (const fresh of answer.series) {
        changed.add(fresh.metric);
        if (!this.add(fresh)) return null;
      }
    }
    this.cursor = next ?? this.cursor;
    return changed;
  }

  addEvents(events) {
    const known = new Set(this.marks.events.map((event) => event.id));
    this.marks.events.push(...events.filter((event) => !known.has(event.id)));
  }

  /** Puts new points into the run's own curve. False when there are so many that the curve should be loaded again. */
  add(fresh) {
    const traces = this.of(fresh.metric);
    let series = traces.find((trace) => trace.attempt === null);
    if (!series) {
      series = { metric: fresh.metric, attempt: null, x: [], step: [], y: [], odd: [] };
      traces.unshift(series);
    }
    const odd = new Map(fresh.odd);
    fresh.step.forEach((step, from) => {
      const last = series.step.length - 1;
      if (series.count && step <= series.step[last]) return; // some row stands for it, or will when it is loaded again
      const at = last < 0 || step > series.step[last] ? last + 1 : series.step.findIndex((known) => known >= step);
      const known = series.step[at] === step;
      const remove = known ? 1 : 0;
      series.step.splice(at, remove, step);
      series.x.splice(at, remove, fresh.x[from]);
      series.y.splice(at, remove, fresh.y[from]);
      if (series.count) {
        series.low.splice(at, remove, fresh.y[from]);
        series.high.splice(at, remove, fresh.y[from]);
        series.count.splice(at, remove, 1);
      }
      if (known) series.odd = series.odd.filter(([index]) => index !== at);
      else series.odd = series.odd.map(([index, kinds]) => [index >= at ? index + 1 : index, kinds]);
      if (odd.has(from)) series.odd.push([at, odd.get(from)]);
    });
    return series.step.length <= MOST_POINTS;
  }

  note(answer) {
    this.live = answer.live;
    this.state = answer.state;
  }

  async ask(query) {
    const response = await fetch(`${this.url}?${query}`, { headers: { Accept: "application/json" }, signal: AbortSignal.timeout(20000) });
    if (!response.ok) {
      const problem = new Error(response.status === 401 ? "You are logged out; log in again." : `The server answered ${response.status}.`);
      problem.final = response.status === 401 || response.status === 404;
      throw problem;
    }
    return response.json();
  }
}

function* parts(metrics) {
  for (let start = 0; start < metrics.length; start += METRICS_A_REQUEST) yield metrics.slice(start, start + METRICS_A_REQUEST);
}
