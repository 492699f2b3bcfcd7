// The head of a run, its results with intervals, its health, and its settings.
"use strict";

function runHead() {
  return el("header.run-head", { id: "run-head" }, runHeadContent());
}

function runHeadContent() {
  const { name, path, facts: known, notices, state: is, status } = activeRun();
  const { stage, step, steps } = status || {};
  const done = Math.min(1, step / steps);
  const pairs = [["path", path], ...known].map(([key, value]) => el("div", el("dt", key), el("dd", value)));
  return [
    el("div.title", el("h1", name),
      el(`span.state.${is}`, { id: "state" }, is === "dead" ? "dead: it no longer reports" : is),
      status && el("span.who", `${stage ? `${stage}, ` : ""}step ${step}${steps ? ` of ${steps}` : ""}`)),
    is === "running" && done >= 0 && el("progress", { value: done, "aria-label": "Steps of the stage" }),
    el("dl.run-facts", pairs),
    notices.length > 0 && el("ul.notices", notices.map((notice) => el("li.notice", notice))),
  ];
}

async function showRun(host) {
  const run = activeRun();
  if (!run.steps.some(({ key }) => key === state.step)) {
    const last = run.steps.findLast(({ kind }) => kind === "train") || run.steps.at(-1);
    setState({ step: last?.key || "" });
  }
  const curves = el("div", { id: "curve-panels" });
  const opened = el("div", { id: "browser" });
  watchHover(opened);
  const { summary, events } = run;
  const hint = "Click a step to open the nearest kept one below. Drag to zoom, double-click to reset.";
  show(
    host, runHead(),
    summary && section("results", "Results", resultsHint(summary), resultsTable(summary.tasks)),
    section("health", "Health", events.length ? "" : "No warnings.", el("ul.health", events.map(healthItem))),
    section("curves", "Curves", hint, curves),
    section("rollouts", "Rollouts", "", stepList(run), opened),
  );
  await showRunCurves();
  await showStep(opened);
}

function resultsHint({ since, temperature, mean_rise: rise }) {
  const how = temperature ? `temperature ${temperature}` : "greedy"; // older runs do not record it
  return `Held-out reward, ${how}, before stage ${since} and at the end. 95 % intervals. Mean rise ${signed(rise, 3)}`;
}

function resultsTable(tasks) {
  const ends = (task) => [task.before, task.after, ...(task.before_ci || []), ...(task.after_ci || [])];
  const bounds = tasks.flatMap(ends).filter(isNumber);
  const [low, high] = [Math.min(0, ...bounds), Math.max(1, ...bounds)];
  const interval = (range, form) => range && el("span.interval", `${form(range[0])} to ${form(range[1])}`);
  const plain = (value, digits = 2) => (isNumber(value) ? value.toFixed(digits) : "\u2013");
  const rows = tasks.map((task) => {
    const { before, after, ci } = task;
    const sign = !ci ? "" : ci[0] > 0 ? "up" : ci[1] < 0 ? "down" : "";
    const rise = isNumber(before) && isNumber(after) ? after - before : null;
    return el(
      "tr", rowHead(task.task), el("td", dumbbell(task, low, high)),
      el("td", plain(before, 3), interval(task.before_ci, plain)),
      el("td", el("b", plain(after, 3)), interval(task.after_ci, plain)),
      el(`td.${sign}`, signed(rise, 3), interval(ci, signed)), el("td", number(task.n)),
    );
  });
  return table("results", ["Task", "", "Before", "After", "Rise", "Samples"], rows);
}

// Before and after as dots with their intervals on a line from `low` to `high`.
function dumbbell(task, low, high) {
  const x = (value) => 6 + (408 * (value - low)) / (high - low);
  const line = (name, [from, to], y) => svg(`line.${name}`, { x1: x(from), x2: x(to), y1: y, y2: y });
  const dot = (name, value, y) => isNumber(value) && svg(`circle.${name}`, { cx: x(value), cy: y, r: 3.8 });
  const box = { viewBox: "0 0 420 24", width: 420, "aria-hidden": "true" };
  return svg(
    "svg.dumbbell", box, line("axis", [low, high], 12),
    task.before_ci && line("before", task.before_ci, 8), task.after_ci && line("after", task.after_ci, 16),
    dot("before", task.before, 8), dot("after", task.after, 16),
  );
}

function healthItem({ stage, begin, end, name, message }) {
  const until = end === null ? " \u2013 still" : end === begin ? "" : `\u2013${end}`;
  const when = el("span.when", `${stage || ""} ${begin}${until}`);
  return el(end === null ? "li.lasting" : "li", when, el("b", name), message);
}

// The settings, beside those of another run if there is one.
function showConfig(host) {
  const run = activeRun();
  const other = index.runs.find((candidate) => candidate !== run);
  const [left, right] = [new Map(run.config), new Map(other ? other.config : [])];
  const names = [...new Set([...left.keys(), ...right.keys()])];
  const differs = (name) => other && left.get(name) !== right.get(name);
  const list = el("div");
  const draw = () => {
    const text = (name) => `${name} ${left.get(name)} ${right.get(name)}`.toLowerCase();
    const isShown = (name) => (state.diff !== "1" || differs(name)) && text(name).includes(state.cq.toLowerCase());
    const shown = names.filter(isShown);
    const cell = (values, name) => el("td", values.get(name) ?? "\u2013");
    const rows = shown.map((name) => (
      el(differs(name) ? "tr.differs" : "tr", rowHead(name), cell(left, name), other && cell(right, name))
    ));
    const heads = ["Setting", run.name, ...(other ? [other.name] : [])];
    show(list, el("p.count", { role: "status" }, count(shown.length, "setting")), table("config", heads, rows));
  };
  const search = textBox("cq", "Find a setting or a value", draw, { class: "wide" });
  const controls = el("div.controls", search, other && checkBox("diff", "Only what differs", draw));
  show(host, runHead(), section("config", "Settings", "", controls, list));
  draw();
}
