// What one sees of a run at first: its state and facts, results with intervals, health, curves; and its settings.
"use strict";

const STATES = {
  running: "running", finished: "finished", stopped: "stopped", failed: "failed",
  dead: "dead: it no longer reports", unknown: "state unknown",
};

function runHead(run) {
  return el("header.run-head", { id: "run-head" }, runHeadContent(run));
}

function runHeadContent(run) {
  const { status } = run;
  const progress = status && status.steps ? Math.min(1, status.step / status.steps) : null;
  return [
    el("div.title",
      el("h1", run.name),
      el("span", { class: `state ${run.state}`, id: "state" }, STATES[run.state] || run.state),
      status && el("span.at", `${status.stage ? `${status.stage}, ` : ""}step ${status.step}${status.steps ? ` of ${status.steps}` : ""}`),
    ),
    progress !== null && run.state === "running" &&
      el("div.progress", { role: "progressbar", "aria-label": "Steps of the stage", "aria-valuenow": Math.round(100 * progress), "aria-valuemin": 0, "aria-valuemax": 100 }, el("i", { style: { width: `${100 * progress}%` } })),
    el("dl.run-facts", [["path", run.path], ...run.facts].map(([name, value]) => el("div", el("dt", name), el("dd", value)))),
    run.notices.length > 0 && el("ul.notices", run.notices.map((notice) => el("li", notice))),
  ];
}

async function showRun(host) {
  const run = activeRun();
  if (!state.step || !run.steps.some((step) => step.key === state.step)) {
    const train = run.steps.filter((step) => step.kind === "train");
    setState({ step: ((train.length ? train : run.steps).at(-1) || { key: "" }).key });
  }
  const curves = el("div");
  const opened = el("div", { id: "browser" });
  watchHover(opened);
  host.replaceChildren(
    runHead(run),
    ...[
      run.summary && section("results", "Results", resultsTable(run.summary), run.summary.mean_rise !== undefined && `mean rise ${signed(run.summary.mean_rise, 3)}`),
      (run.events || []).length > 0 && section("health", "Health", healthList(run)),
      section("curves", "Curves", curves, "Click a step to open the nearest kept one below; drag to zoom, double-click to reset."),
      section("rollouts", "Rollouts", [stepList(run), opened]),
    ].filter(Boolean),
  );
  const shown = index.runs.length > 1 && state.overlay === "1" ? index.runs : [run];
  try {
    const metrics = await Promise.all(shown.map((other) => load(other.metrics)));
    if (curves.isConnected) {
      if (metrics.some(({ global }) => global.length)) drawCurves(curves, shown.map((other, place) => ({ run: other, metrics: metrics[place] })), run);
      else curves.replaceChildren(el("p.empty", "No step has been logged yet."));
    }
  } catch (error) {
    curves.replaceChildren(el("p.notice", error.message));
  }
  await showStep(run, opened);
}

function section(id, title, content, hint) {
  return el("section.block", { id, "aria-labelledby": `${id}-title` }, el("div.block-head", el("h2", { id: `${id}-title` }, title), hint && el("p.hint", hint)), content);
}

function resultsTable(summary) {
  const bounds = summary.tasks.flatMap((task) => [task.before, task.after, ...(task.before_ci || []), ...(task.after_ci || [])]).filter(isNumber);
  const [low, high] = [Math.min(0, ...bounds), Math.max(1, ...bounds)];
  const interval = (range, sign) => range && el("span.interval", sign ? `${signed(range[0])} to ${signed(range[1])}` : `${range[0].toFixed(2)}\u2013${range[1].toFixed(2)}`);
  const rows = summary.tasks.map((task) => {
    const sure = task.ci && (task.ci[0] > 0 ? "up" : task.ci[1] < 0 ? "down" : "");
    return el("tr",
      el("th", { scope: "row" }, task.task),
      el("td.dumbbell", dumbbell(task, low, high)),
      el("td", number(task.before), interval(task.before_ci)),
      el("td", el("b", number(task.after)), interval(task.after_ci)),
      el("td", { class: sure || "" }, isNumber(task.after) && isNumber(task.before) ? signed(task.after - task.before, 3) : "\u2013", interval(task.ci, true)),
      el("td", task.n ?? "\u2013"),
    );
  });
  return el("div.scroll", el("table.results",
    el("thead", el("tr", ["Task", "", "Before", "After", "Rise", "Samples"].map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", rows),
  ));
}

function dumbbell(task, low, high) {
  const x = (value) => 6 + (288 * (value - low)) / (high - low);
  const drawing = svg("svg", { viewBox: "0 0 300 24", width: 300, height: 24, role: "img", "aria-label": `from ${number(task.before)} to ${number(task.after)}` });
  const line = (from, to, y, name) => drawing.append(svg("line", { x1: x(from), x2: x(to), y1: y, y2: y, class: name }));
  line(low, high, 12, "axis");
  if (task.before_ci) line(...task.before_ci, 8, "before");
  if (task.after_ci) line(...task.after_ci, 16, "after");
  if (isNumber(task.before)) drawing.append(svg("circle", { cx: x(task.before), cy: 8, r: 3.5, class: "before" }));
  if (isNumber(task.after)) drawing.append(svg("circle", { cx: x(task.after), cy: 16, r: 4, class: "after" }));
  return drawing;
}

function healthList(run) {
  return el("ul.health", run.events.map((event) => el(
    "li", { class: event.end === null ? "lasting" : "" },
    el("span.when", `${event.stage || ""} ${event.begin}${event.end === null ? " \u2013 still" : event.end === event.begin ? "" : `\u2013${event.end}`}`),
    el("b", event.name), el("span", event.message),
  )));
}

// The settings, and with two runs those that differ.
function showConfig(host) {
  const run = activeRun();
  const other = index.runs.find((candidate) => candidate.id !== run.id);
  const table = el("div");
  const draw = () => {
    const values = new Map(run.config);
    const others = other ? new Map(other.config) : new Map();
    const names = [...new Set([...values.keys(), ...others.keys()])];
    const needle = state.cq.toLowerCase();
    const shown = names.filter((name) => {
      if (other && state.diff === "1" && values.get(name) === others.get(name)) return false;
      return !needle || `${name} ${values.get(name)} ${others.get(name)}`.toLowerCase().includes(needle);
    });
    table.replaceChildren(
      el("p.count", { role: "status" }, count(shown.length, "setting")),
      el("div.scroll", el("table.config",
        el("thead", el("tr", el("th", { scope: "col" }, "Setting"), el("th", { scope: "col" }, run.name), other && el("th", { scope: "col" }, other.name))),
        el("tbody", shown.map((name) => el(
          "tr", { class: other && values.get(name) !== others.get(name) ? "differs" : "" },
          el("th", { scope: "row" }, name), el("td", values.get(name) ?? "\u2013"), other && el("td", others.get(name) ?? "\u2013"),
        ))),
      )),
    );
  };
  const search = el("input", { type: "search", id: "cq", class: "wide", placeholder: "Find a setting or a value", "aria-label": "Find a setting or a value", oninput: wait(100, (event) => {
    setState({ cq: event.target.value });
    draw();
  }) });
  search.value = state.cq;
  const only = el("input", { type: "checkbox", id: "diff", onchange: (event) => {
    setState({ diff: event.target.checked ? "1" : "" });
    draw();
  } });
  only.checked = state.diff === "1";
  host.replaceChildren(runHead(run), section("config", "Settings", [el("div.controls", search, other && el("label.check", only, "Only what differs")), table]));
  draw();
}
