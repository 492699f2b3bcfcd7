// Curves in small panels with one cursor. A panel has a title and the columns of metrics.jsonl that it draws.
"use strict";

// Patterns of columns in the order of the page; what no pattern takes gets a panel of its own.
const PANELS = [
  ["Reward", /^reward\/mean$/],
  ["Reward by term", /^reward\/term\//],
  ["Validation", /^validation\//],
  ["Informative groups", /^groups\/nonzero_advantage_frac$/],
  ["Response length", /^rollout\/response_tokens_mean$/],
  ["Entropy", /^policy\/entropy_nats$/],
  ["KL divergence", /^policy\/(approx_kl|reference_kl_nats)$/],
  ["Clipped tokens", /^policy\/clip_frac(_low|_high)?$/],
  ["Importance ratio", /^policy\/importance_ratio_(min|max)$/],
  ["Log-prob difference", /^rollout\/(stale_)?logprob_diff_mean$/],
  ["Gradient norm", /^learner\/grad_norm$/],
  ["Truncated", /^rollout\/truncated_frac$/],
  ["Repeated in the group", /^rollout\/duplicate(_answer)?_frac$/],
  ["Reward by task", /^reward\/task\//],
  ["Loss", /^learner\/(loss|sft_loss_nats)$/],
  ["Learning rate", /^learner\/lr$/],
  ["Seconds by activity", /^time\/.*_s$/],
  ["Tokens per second", /^rollout\/tokens_per_s$/],
  ["Gradient norm by component", /^learner\/grad_norm\//],
];
const NUM_SHOWN = 12; // panels at first; the others are a click away
const LINE_COLOURS = 6;
const CURVE_HEIGHT = 132;

let charts = []; // uPlot objects in view, with their panels
let curvesResize = null;

function listPanels(columns) {
  const left = new Set(columns);
  const panels = [];
  for (const [title, pattern] of PANELS) {
    const taken = columns.filter((column) => pattern.test(column) && left.has(column)).slice(0, 12);
    taken.forEach((column) => left.delete(column));
    if (taken.length) panels.push({ title, columns: taken, id: taken[0] });
  }
  for (const column of left) panels.push({ title: column, columns: [column], id: column });
  return panels;
}

function choosePanels(panels) {
  if (state.find) {
    const wanted = state.find.toLowerCase();
    return panels.filter((panel) => [panel.title, ...panel.columns].some((name) => name.toLowerCase().includes(wanted)));
  }
  if (state.metrics === "all") return panels;
  if (state.metrics) {
    const ids = new Set(state.metrics.split(","));
    return panels.filter((panel) => ids.has(panel.id));
  }
  return panels.slice(0, NUM_SHOWN);
}

// Weighted mean of the past, corrected for its beginning; `weight` of 0 changes nothing.
function smoothed(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = sum * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return sum / total;
  });
}

function smoothing(length) {
  return state.smooth === "" ? (length > 80 ? 0.8 : 0) : Number(state.smooth);
}

// Returns the resolved value of a colour of style.css, which a canvas needs.
function colour(name) {
  const probe = document.getElementById("probe");
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

// The steps of all runs on one axis, and each run's columns put to them.
function alignRuns(runs) {
  const steps = [...new Set(runs.flatMap(({ metrics }) => metrics.global))].sort((one, other) => one - other);
  const place = new Map(steps.map((step, index) => [step, index]));
  const aligned = runs.map(({ run, metrics }) => {
    const columns = {};
    for (const [name, values] of Object.entries(metrics.columns)) {
      const row = new Array(steps.length).fill(null);
      metrics.global.forEach((step, index) => (row[place.get(step)] = values[index]));
      columns[name] = row;
    }
    return { run, metrics, columns };
  });
  return { steps, runs: aligned };
}

function drawCurves(host, runs, active) {
  clearCurves();
  const aligned = alignRuns(runs);
  const names = [...new Set(aligned.runs.flatMap((run) => Object.keys(run.columns)))];
  const panels = listPanels(names);
  const grid = el("div.panels", { id: "panels" });
  const redraw = () => {
    clearCurves(grid);
    const chosen = choosePanels(panels);
    grid.append(...chosen.map((panel) => panelElement(panel, aligned, active)));
    if (!chosen.length) grid.append(el("p.empty", `No metric has \u201c${state.find}\u201d in its name.`));
    observeSize(grid);
  };
  host.replaceChildren(curveControls(panels, aligned, redraw), grid);
  redraw();
}

function clearCurves(grid = null) {
  charts.forEach(({ plot }) => plot.destroy());
  charts = [];
  if (curvesResize) curvesResize.disconnect();
  if (grid) grid.replaceChildren();
}

function curveControls(panels, aligned, redraw) {
  const change = (changes) => {
    setState(changes);
    redraw();
  };
  const search = el("input", {
    type: "search", id: "find", placeholder: "Find a metric", "aria-label": "Find a metric",
    oninput: wait(120, (event) => change({ find: event.target.value })),
  });
  search.value = state.find;
  const weight = el("input", {
    type: "range", min: 0, max: 0.98, step: 0.02, id: "smooth",
    oninput: (event) => change({ smooth: event.target.value }),
  });
  weight.value = smoothing(aligned.steps.length);
  const log = el("input", { type: "checkbox", id: "log", onchange: (event) => change({ log: event.target.checked ? "1" : "" }) });
  log.checked = state.log === "1";
  return el("div.controls",
    search,
    el("label.slider", "Smoothing", weight),
    el("label.check", log, "Log axis"),
    el("span.grow"),
    choosePanelsMenu(panels, change),
    panels.length > NUM_SHOWN &&
      el("button", {
        type: "button", id: "all-panels",
        onclick: (event) => {
          change({ metrics: state.metrics === "all" ? "" : "all", find: "" });
          search.value = "";
          event.target.textContent = state.metrics === "all" ? "Show fewer" : `Show all ${panels.length}`;
        },
      }, state.metrics === "all" ? "Show fewer" : `Show all ${panels.length}`),
  );
}

function choosePanelsMenu(panels, change) {
  const shown = new Set(choosePanels(panels).map((panel) => panel.id));
  const boxes = panels.map((panel) => {
    const box = el("input", {
      type: "checkbox", value: panel.id,
      onchange: () => change({ find: "", metrics: boxes.filter(({ input }) => input.checked).map(({ input }) => input.value).join(",") }),
    });
    box.checked = shown.has(panel.id);
    return { input: box, label: el("label.check", box, panel.title) };
  });
  return el("details.menu", el("summary", "Choose"), el("div", boxes.map(({ label }) => label)));
}

function panelElement(panel, aligned, active) {
  const body = el("div.plot");
  const legend = el("div.legend");
  const meaning = aligned.runs.map((run) => (run.metrics.meanings || {})[panel.columns[0]]).find(Boolean);
  const figure = el("figure.panel", { dataset: { panel: panel.id } },
    el("figcaption", { title: `${panel.columns.join(", ")}${meaning ? `\n${meaning}` : ""}` }, panel.title),
    legend, body,
  );
  const watch = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    watch.disconnect();
    if (figure.isConnected) charts.push(makeChart(panel, aligned, active, body, legend));
  }, { rootMargin: "300px" });
  watch.observe(figure);
  return figure;
}

// Returns the lines of a panel: each column of each run, smooth, with the raw values faint behind it.
function panelLines(panel, aligned) {
  const lines = [];
  aligned.runs.forEach((run, runIndex) => {
    panel.columns.forEach((column, columnIndex) => {
      const values = run.columns[column];
      if (!values || values.every((value) => value === null)) return;
      const alone = panel.columns.length === 1;
      lines.push({
        column, runIndex, values,
        label: alone ? run.run.name : shortName(column, panel),
        colour: colour(`line${((alone ? runIndex : columnIndex) % LINE_COLOURS) + 1}`),
        dash: !alone && runIndex > 0 ? [4, 3] : null,
        sparse: values.filter((value) => value !== null).length < 40,
      });
    });
  });
  return lines;
}

function shortName(column, panel) {
  if (panel.columns.length === 1) return column;
  const parts = panel.columns.map((name) => name.split("/"));
  let shared = 0;
  while (parts.every((part) => part.length > shared + 1 && part[shared] === parts[0][shared])) shared++;
  return column.split("/").slice(shared).join("/").replace(/^time\//, "").replace(/_s$/, "");
}

// Cuts the steps before the first and after the last value: a stage of its own would leave most of a panel empty.
function trimSteps(aligned, lines) {
  const known = (value) => value !== null && value !== undefined;
  const first = Math.min(...lines.map(({ values }) => values.findIndex(known)));
  const last = Math.max(...lines.map(({ values }) => values.findLastIndex(known)));
  for (const line of lines) line.values = line.values.slice(first, last + 1);
  return aligned.steps.slice(first, last + 1);
}

function makeChart(panel, aligned, active, body, legend) {
  const lines = panelLines(panel, aligned);
  const steps = trimSteps(aligned, lines);
  const log = state.log === "1";
  const weight = smoothing(aligned.steps.length);
  const positive = (values) => (log ? values.map((value) => (value > 0 ? value : null)) : values);
  const data = [steps];
  const series = [{}];
  for (const line of lines) {
    if (weight > 0 && !line.sparse) {
      data.push(positive(line.values));
      series.push({ stroke: line.colour, width: 1, alpha: 0.22, points: { show: false }, spanGaps: true });
    }
    line.index = data.length;
    data.push(positive(line.sparse ? line.values : smoothed(line.values, weight)));
    series.push({
      stroke: line.colour, width: 1.6, dash: line.dash, spanGaps: true,
      points: { show: line.sparse, size: 5, fill: line.colour, stroke: line.colour },
    });
  }
  const values = el("span.value");
  const entries = lines.map((line) => {
    const shown = el("b");
    const swatch = el("i", { style: { background: line.colour } });
    const named = lines.length > 1;
    return { line, shown, element: el("span", { title: line.column }, named && swatch, named && line.label, shown) };
  });
  legend.replaceChildren(values, ...entries.map(({ element }) => element));
  const showValues = (index) => {
    for (const { line, shown } of entries) {
      let at = index;
      if (at === null || at === undefined) at = line.values.findLastIndex((value) => value !== null);
      shown.textContent = number(line.values[at]);
    }
  };
  const plot = new uPlot(chartOptions(body, series, log, aligned, active, showValues), data, body);
  showValues(null);
  plot.over.addEventListener("click", () => {
    if (plot.cursor.idx !== null) selectNearestStep(active, plot.data[0][plot.cursor.idx]);
  });
  return { plot, body };
}

function chartOptions(body, series, log, aligned, active, showValues) {
  const axis = { stroke: colour("muted"), ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const grid = { stroke: colour("grid"), width: 1 };
  return {
    width: Math.max(160, body.clientWidth),
    height: CURVE_HEIGHT,
    padding: [8, 6, 0, 0],
    legend: { show: false },
    cursor: { y: false, sync: { key: "steps", scales: ["x", null] }, drag: { x: true, y: false, dist: 6 }, points: { size: 6 } },
    scales: { x: { time: false }, y: { distr: log ? 3 : 1, range: log ? undefined : padded } },
    axes: [
      { ...axis, grid: { show: false }, size: 22, gap: 4, space: 50 },
      { ...axis, grid, size: 46, gap: 4, space: 30, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) },
    ],
    series,
    hooks: {
      drawClear: [(plot) => drawMarks(plot, aligned, active)],
      setCursor: [(plot) => showValues(plot.cursor.idx)],
    },
  };
}

function padded(_, low, high) {
  if (low === null) return [0, 1];
  const room = high > low ? 0.08 * (high - low) : Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

// Draws, behind the curves: health problems as bands, the beginnings of stages, and the step that is open below.
function drawMarks(plot, aligned, active) {
  const { ctx, bbox } = plot;
  const { run, metrics } = aligned.runs.find((other) => other.run.id === active.id) || aligned.runs[0];
  const x = (step) => Math.round(plot.valToPos(step, "x", true));
  const globalOf = globalSteps(metrics);
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  for (const event of run.events || []) {
    const begin = x(globalOf(event.stage, event.begin));
    const end = event.end === null ? bbox.left + bbox.width : x(globalOf(event.stage, event.end));
    ctx.fillStyle = colour("warn-band");
    ctx.fillRect(begin, bbox.top, Math.max(2, end - begin), bbox.height);
    ctx.fillStyle = colour("warn");
    ctx.fillRect(begin, bbox.top, 2 * devicePixelRatio, bbox.height);
  }
  ctx.fillStyle = colour("line");
  metrics.stage.forEach((stage, index) => {
    if (index > 0 && stage !== metrics.stage[index - 1]) ctx.fillRect(x(metrics.global[index]), bbox.top, 1, bbox.height);
  });
  const open = (run.steps || []).find((step) => step.key === state.step);
  if (open && open.kind !== "test") {
    ctx.fillStyle = colour("accent");
    ctx.globalAlpha = 0.5;
    ctx.fillRect(x(globalOf(open.stage, open.step)), bbox.top, 1.5 * devicePixelRatio, bbox.height);
  }
  ctx.restore();
}

function globalSteps(metrics) {
  const places = new Map(metrics.global.map((step, index) => [`${metrics.stage[index]} ${metrics.step[index]}`, step]));
  return (stage, step) => places.get(`${stage} ${step}`) ?? step;
}

function redrawMarks() {
  charts.forEach(({ plot }) => plot.redraw(false));
}

function observeSize(grid) {
  curvesResize = new ResizeObserver(wait(80, () => {
    for (const { plot, body } of charts) {
      const width = Math.max(160, body.clientWidth);
      if (width !== plot.width) plot.setSize({ width, height: CURVE_HEIGHT });
    }
  }));
  curvesResize.observe(grid);
}

// Opens the kept step of the run that is nearest to the step of the axis that was clicked.
async function selectNearestStep(run, global) {
  const metrics = await load(run.metrics);
  const globalOf = globalSteps(metrics);
  let nearest = null;
  let least = Infinity;
  for (const step of run.steps) {
    if (step.kind === "test") continue;
    const distance = Math.abs(globalOf(step.stage, step.step) - global) + (step.kind === "train" ? 0 : 0.5);
    if (distance < least) [nearest, least] = [step, distance];
  }
  if (nearest) openStep(nearest.key, true);
}
