// Curves in small panels with one cursor. A panel draws columns of metrics.jsonl.
"use strict";

const FLIPS = { incorrect_to_correct: "wrong \u2192 right", correct_to_incorrect: "right \u2192 wrong" };
const NUM_SHOWN = 12; // panels at first
const LINE_COLOURS = 6;
const CURVE_HEIGHT = 132;
const STEP_MARKS = [1, 10, 100, 1000, 10000, 100000].flatMap((power) => [power, 2 * power, 5 * power]);

let charts = []; // those in view: {plot, body}
let curvesResize = null;

// The panels of all runs, with the columns of each that have values.
function mergePanels(runs) {
  const panels = new Map();
  for (const { metrics, columns } of runs) {
    for (const { place, title, columns: names } of metrics.panels) {
      const known = panels.get(title)?.columns || [];
      const merged = [...new Set([...known, ...names.filter((name) => columns[name])])];
      if (merged.length) panels.set(title, { place, title, columns: merged, id: merged[0] });
    }
  }
  return [...panels.values()].sort((one, other) => one.place - other.place);
}

function choosePanels(panels) {
  const wanted = state.find.toLowerCase().split(",").map((part) => part.trim()).filter(Boolean);
  const isNamed = ({ title, columns }) => {
    const names = `${title} ${columns.join(" ")}`.toLowerCase();
    return wanted.some((part) => names.includes(part));
  };
  if (wanted.length) return panels.filter(isNamed);
  return state.all === "1" ? panels : panels.slice(0, NUM_SHOWN);
}

// Weighted mean of the past.
function smoothed(values, weight) {
  let [sum, total] = [0, 0];
  return values.map((value) => {
    if (!isNumber(value)) return null;
    sum = sum * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return sum / total;
  });
}

function smoothing(length) {
  return state.smooth === "" ? (length > 80 ? 0.8 : 0) : Number(state.smooth);
}

// Returns the value of a colour of style.css, which a canvas cannot resolve itself.
function colour(name) {
  const probe = byId("probe");
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

// Returns the place of each row on the axis: its step in the run, or in the chosen stage; null in other stages.
function axisSteps({ global, stage, step }) {
  return state.stage ? step.map((number, place) => (stage[place] === state.stage ? number : null)) : global;
}

// Aligns the columns of all runs by step.
function alignRuns(runs) {
  const steps = [...new Set(runs.flatMap(({ metrics }) => axisSteps(metrics)))].filter(isNumber);
  steps.sort((one, other) => one - other);
  const place = new Map(steps.map((step, index) => [step, index]));
  const aligned = runs.map(({ run, metrics }) => {
    const columns = {};
    for (const [name, values] of Object.entries(metrics.columns)) {
      const column = new Array(steps.length).fill(null);
      axisSteps(metrics).forEach((step, index) => {
        // A measurement after a stage has its last step's number, whose values stay.
        if (step !== null) column[place.get(step)] ??= values[index];
      });
      if (column.some(isNumber)) columns[name] = column;
    }
    return { run, metrics, columns };
  });
  return { steps, runs: aligned };
}

// Draws the curves of the active run, or of all.
async function showRunCurves() {
  const host = byId("curve-panels");
  const active = activeRun();
  const runs = state.overlay === "1" ? index.runs : [active];
  let aligned, stages;
  try {
    const metrics = await Promise.all(runs.map((run) => load(run.metrics)));
    stages = [...new Set(metrics.flatMap(({ stage }) => stage))].filter(Boolean);
    if (!stages.includes(state.stage)) setState({ stage: "" });
    aligned = alignRuns(runs.map((run, place) => ({ run, metrics: metrics[place] })));
  } catch (error) {
    return show(host, problem(error));
  }
  if (!host.isConnected) return null;
  if (!aligned.steps.length) return show(host, empty("No step has been logged yet."));
  const panels = mergePanels(aligned.runs);
  const grid = el("div.panels");
  const redraw = () => {
    clearCurves();
    const chosen = choosePanels(panels);
    show(grid, chosen.length ? chosen.map((panel) => panelElement(panel, aligned, active)) : empty("No such metric."));
    curvesResize = new ResizeObserver(wait(80, resizeCurves));
    curvesResize.observe(grid);
  };
  show(host, curveControls(panels, aligned.steps.length, stages, redraw), grid);
  return redraw();
}

function clearCurves() {
  charts.forEach(({ plot }) => plot.destroy());
  charts = [];
  curvesResize?.disconnect();
}

function resizeCurves() {
  for (const { plot, body } of charts) {
    const width = Math.max(160, body.clientWidth);
    if (width !== plot.width) plot.setSize({ width, height: CURVE_HEIGHT });
  }
}

function curveControls(panels, length, stages, redraw) {
  const oninput = setter("smooth", redraw);
  const weight = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, id: "f-smooth", oninput });
  weight.value = smoothing(length);
  // A stage begins at another step in a run that has other stages before it.
  const axes = [["", "the run"], ...stages.map((name) => [name, name])];
  return el(
    "div.controls", textBox("find", "Find metrics: kl, entropy", redraw, { class: "wide" }),
    el("label.choice", "Smoothing", weight), checkBox("log", "Log axis", redraw),
    stages.length > 1 && choice("stage", "Steps of", axes, showRunCurves),
    panels.length > NUM_SHOWN && checkBox("all", `All ${panels.length} panels`, redraw),
  );
}

function panelElement(panel, aligned, active) {
  const [body, legend] = [el("div.plot"), el("div.legend")];
  const meaning = aligned.runs.map(({ metrics }) => (metrics.meanings || {})[panel.columns[0]]).find(Boolean) || "";
  const caption = el("figcaption", { title: `${panel.columns.join(", ")}\n${meaning}` }, panel.title);
  const figure = el("figure.panel", { dataset: { panel: panel.id } }, caption, legend, body);
  const watch = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    watch.disconnect();
    if (figure.isConnected) charts.push(makeChart(panel, aligned, active, body, legend));
  }, { rootMargin: "300px" });
  watch.observe(figure);
  return figure;
}

// The lines of a panel: each column of each run. A run has a colour, or a dash among several columns.
function panelLines(panel, aligned) {
  const lines = [];
  const alone = panel.columns.length === 1;
  aligned.runs.forEach(({ run, columns }, runPlace) => {
    panel.columns.forEach((column, place) => {
      const values = columns[column];
      if (!values) return;
      lines.push({
        column, values,
        label: alone ? run.name : `${shortName(column, panel)}${runPlace ? ` (${run.name})` : ""}`,
        colour: colour(`line${((alone ? runPlace : place) % LINE_COLOURS) + 1}`),
        dash: !alone && runPlace > 0 ? [4, 3] : null,
        sparse: values.filter(isNumber).length < 40,
      });
    });
  });
  return lines;
}

// Returns a column's name without the words with which all columns of its panel begin.
function shortName(column, { columns }) {
  let shared = columns[0];
  while (!columns.every((name) => name.startsWith(shared))) shared = shared.slice(0, -1);
  const name = column.slice(shared.search(/[^/_]*$/)).replace(/_s$/, "");
  return FLIPS[name] || name;
}

// Cuts the steps of other stages, before the first and after the last value.
function trimSteps(steps, lines) {
  const first = Math.min(...lines.map(({ values }) => values.findIndex(isNumber)));
  const last = Math.max(...lines.map(({ values }) => values.findLastIndex(isNumber)));
  for (const line of lines) line.values = line.values.slice(first, last + 1);
  return steps.slice(first, last + 1);
}

function makeChart(panel, aligned, active, body, legend) {
  const lines = panelLines(panel, aligned);
  const data = [trimSteps(aligned.steps, lines)];
  const series = [{}];
  const weight = smoothing(aligned.steps.length);
  const draw = (values, style) => {
    data.push(state.log === "1" ? values.map((value) => (value > 0 ? value : null)) : values);
    series.push({ spanGaps: true, ...style });
  };
  for (const { values, sparse, dash, colour: stroke } of lines) {
    const smooth = weight > 0 && !sparse;
    if (smooth) draw(values, { stroke, width: 1, alpha: 0.22, points: { show: false } });
    const points = { show: sparse, size: 5, fill: stroke, stroke };
    draw(smooth ? smoothed(values, weight) : values, { stroke, width: 1.6, dash, points });
  }
  const numbers = lines.map(() => el("b"));
  const named = lines.length > 1;
  show(legend, lines.map((line, place) => el(
    "span", { title: line.column },
    named && [el("i", { style: { background: line.colour } }), line.label], numbers[place],
  )));
  const showValues = (index) => lines.forEach(({ values }, place) => {
    numbers[place].textContent = number(values[index ?? values.findLastIndex(isNumber)]);
  });
  const plot = new uPlot(chartOptions(body, series, aligned, active, showValues), data, body);
  showValues(null);
  plot.over.addEventListener("click", () => {
    if (plot.cursor.idx !== null) selectNearestStep(active, data[0][plot.cursor.idx]);
  });
  return { plot, body };
}

function chartOptions(body, series, aligned, active, showValues) {
  const log = state.log === "1";
  const axis = { stroke: colour("muted"), ticks: { show: false }, gap: 4, font: "11px system-ui, sans-serif" };
  const write = (ticks, digits) => ticks.map((tick) => (tick === null ? "" : number(tick, digits)));
  const values = (_, ticks) => write(ticks, new Set(write(ticks, 3)).size < ticks.length ? 7 : 3);
  const size = (_, texts) => Math.max(46, 10 + 6.5 * Math.max(...(texts || []).map(({ length }) => length)));
  return {
    width: Math.max(160, body.clientWidth),
    height: CURVE_HEIGHT,
    padding: [8, 20, 0, 0],
    legend: { show: false },
    cursor: { y: false, sync: { key: "steps", scales: ["x", null] }, drag: { x: true, y: false, dist: 6 } },
    scales: { x: { time: false }, y: log ? { distr: 3 } : { range: padded } },
    axes: [
      { ...axis, grid: { show: false }, size: 22, space: 36, incrs: STEP_MARKS },
      { ...axis, grid: { stroke: colour("grid"), width: 1 }, size, space: 30, values },
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
  const room = high - low > 1e-9 * Math.abs(high) ? 0.08 * (high - low) : Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low < room ? 0 : low - room, high + room];
}

// Draws, behind the curves: health problems as bands, the beginnings of stages, and the step that is open below.
function drawMarks(plot, aligned, active) {
  const { ctx, bbox } = plot;
  const { run, metrics } = aligned.runs.find((other) => other.run.id === active.id);
  const globalOf = globalSteps(metrics);
  const x = (step) => plot.valToPos(step, "x", true);
  const bar = (from, width, name) => {
    ctx.fillStyle = colour(name);
    ctx.fillRect(Math.round(from), bbox.top, width, bbox.height);
  };
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  for (const event of run.events.filter(({ stage }) => isOnAxis(stage))) {
    const begin = x(globalOf(event.stage, event.begin));
    const end = event.end === null ? bbox.left + bbox.width : x(globalOf(event.stage, event.end));
    bar(begin, Math.max(2, end - begin), "warn-band");
    bar(begin, 2 * devicePixelRatio, "warn");
  }
  metrics.stage.forEach((stage, place) => {
    if (place > 0 && !state.stage && stage !== metrics.stage[place - 1]) bar(x(metrics.global[place]), 1, "line");
  });
  const open = run.steps.find((step) => step.key === state.step);
  if (open && open.kind !== "test" && isOnAxis(open.stage)) {
    bar(x(globalOf(open.stage, open.step)), 1.5 * devicePixelRatio, "open");
  }
  ctx.restore();
}

function isOnAxis(stage) {
  return !state.stage || stage === state.stage;
}

// Returns a function from a step of a stage to its place on the axis.
function globalSteps(metrics) {
  const name = (place) => `${metrics.stage[place]} ${metrics.step[place]}`;
  const places = new Map(axisSteps(metrics).map((step, place) => [name(place), step]));
  return (stage, step) => places.get(`${stage} ${step}`) ?? step;
}

// Opens the kept step of the run that is nearest to the step of the axis that was clicked.
async function selectNearestStep(run, global) {
  const globalOf = globalSteps(await load(run.metrics));
  // Where a validation follows a training step, the training step is meant.
  const distance = ({ stage, step, kind }) => Math.abs(globalOf(stage, step) - global) + (kind === "train" ? 0 : 0.5);
  const kept = run.steps.filter(({ kind, stage }) => kind !== "test" && isOnAxis(stage));
  const [nearest] = kept.sort((one, other) => distance(one) - distance(other));
  if (nearest) openStep(nearest.key, true);
}
