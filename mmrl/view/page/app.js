// The frame of the page: what the URL names is shown, keys are obeyed, and a live run is followed.
"use strict";

const POLL_MS = 2000;
const VIEWS = { run: showRun, benchmarks: showBenchmarks, compare: showCompare, config: showConfig, sample: showSample };
const KEYS = [
  ["j, k", "next and previous group"], ["n, p", "next and previous kept step"], ["/", "search"], ["t", "colour tokens by the next number"],
  ["r", "show or hide all reward tables"], ["m", "show or hide marks"], ["f", "fold or unfold thinking"], ["?", "this help"], ["Esc", "close"],
];
let index = null;

function activeRun() {
  return index.runs.find((run) => run.id === state.run) || index.runs[0];
}

function calm() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}

// Shows another part of the page, as if a link had been followed.
function go(changes) {
  setState(changes, true);
  return render();
}

async function render() {
  document.body.classList.toggle("no-marks", state.marks !== "1");
  document.getElementById("bar").replaceChildren(...barContent());
  clearCurves();
  const host = document.getElementById("view");
  document.title = `${activeRun().name} \u00b7 mmrl view`;
  await (VIEWS[state.view] || showRun)(host);
}

function barContent() {
  const run = activeRun();
  const tabs = [["run", "Run"], run.benchmarks.length && ["benchmarks", "Benchmarks"], ["compare", "Compare"], ["config", "Settings"]].filter(Boolean);
  const here = state.view === "sample" ? "run" : state.view;
  const overlay = el("input", { type: "checkbox", id: "overlay", onchange: (event) => go({ overlay: event.target.checked ? "1" : "0" }) });
  overlay.checked = state.overlay === "1";
  return [
    el("span.brand", "mmrl", el("i", "view")),
    index.runs.length > 1 && el("div.runs", { role: "group", "aria-label": "Runs" }, index.runs.map((other, place) => el("a.run", { href: linkTo({ run: other.id, step: "", group: "", bench: "" }), "aria-current": other === run ? "true" : null },
      el("i", { style: { background: `var(--line${(place % LINE_COLOURS) + 1})` } }), other.name,
    ))),
    el("nav", { "aria-label": "Views" }, tabs.map(([view, name]) => el("a", { href: linkTo({ view, sample: "" }), "aria-current": view === here ? "page" : null }, name))),
    el("span.grow"),
    index.runs.length > 1 && state.view === "run" && el("label.check", overlay, "All runs on the curves"),
    index.live && el("span.live", { id: "live", title: "The page follows the run" }, "live"),
    el("button", { type: "button", id: "theme", "aria-label": "Dark or light", title: "Dark or light", onclick: switchTheme }, "\u25d0"),
    el("button", { type: "button", id: "help-button", "aria-label": "Keys", title: "Keys (?)", onclick: showHelp }, "?"),
  ].filter(Boolean);
}

function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function switchTheme() {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  try {
    localStorage.setItem("mmrl-theme", document.documentElement.dataset.theme);
  } catch {
    // A browser may forbid a file to remember; the theme then lasts as long as the page.
  }
  if (state.view === "run") render();
}

function restoreTheme() {
  try {
    const theme = localStorage.getItem("mmrl-theme");
    if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
  } catch {
    // As above.
  }
}

function showHelp() {
  const dialog = el("dialog.help", { id: "help", "aria-label": "Keys", onclick: () => dialog.close() },
    el("h2", "Keys"), el("dl", KEYS.map(([key, meaning]) => [el("dt", key), el("dd", meaning)])));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function nextColour() {
  const select = document.getElementById("f-color");
  if (!select || select.disabled) return;
  select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
  select.dispatchEvent(new Event("change"));
}

function toggleAll(name) {
  setState({ [name]: state[name] === "1" ? "0" : "1" });
  if (browser) redrawCards();
}

function obeyKey(event) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox";
  if (event.key === "Escape" && typing) event.target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog")) return;
  const search = { run: "f-q", benchmarks: "bq", config: "cq" }[state.view];
  const inRun = state.view === "run";
  const actions = {
    j: inRun && (() => moveGroup(1)), k: inRun && (() => moveGroup(-1)),
    n: inRun && (() => moveStep(1)), p: inRun && (() => moveStep(-1)),
    t: inRun && nextColour, r: inRun && (() => toggleAll("table")), f: inRun && (() => toggleAll("folded")),
    m: () => setMarks(state.marks !== "1"), "?": showHelp,
    "/": search && (() => document.getElementById(search)?.focus()),
  };
  const action = actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

// Follows a run that is written: the head, the curves and the list of steps; what is being read stays where it is.
async function follow() {
  let delay = POLL_MS;
  try {
    const fresh = await load("index", true);
    const before = index.runs;
    index = fresh;
    document.getElementById("live")?.classList.remove("lost");
    const changed = fresh.runs.filter((run, place) => JSON.stringify(run) !== JSON.stringify(before[place]));
    if (changed.length) await showChanges(changed);
  } catch {
    document.getElementById("live")?.classList.add("lost");
    delay = 5 * POLL_MS;
  }
  setTimeout(follow, delay);
}

async function showChanges(changed) {
  changed.forEach((run) => documents.delete(run.metrics));
  const run = activeRun();
  document.getElementById("run-head")?.replaceChildren(...runHeadContent(run).filter(Boolean));
  if (state.view !== "run") return;
  showStepList(run);
  if (!document.getElementById("cards")) await showStep(run, document.getElementById("browser"));
  // A redrawn menu would close, and a search would lose its cursor.
  const curves = document.querySelector("#curves");
  if (document.activeElement && curves.contains(document.activeElement)) return;
  const shown = index.runs.length > 1 && state.overlay === "1" ? index.runs : [run];
  const metrics = await Promise.all(shown.map((other) => load(other.metrics)));
  const holder = curves.lastElementChild;
  if (!metrics.some(({ global }) => global.length)) return;
  holder.style.minHeight = `${holder.offsetHeight}px`;
  drawCurves(holder, shown.map((other, place) => ({ run: other, metrics: metrics[place] })), run);
}

async function start() {
  restoreTheme();
  readState();
  document.getElementById("app").append(
    el("header.bar", { id: "bar" }), el("main", { id: "view", tabindex: -1 }),
    el("div", { id: "tip", role: "tooltip", hidden: true }), el("span", { id: "probe", hidden: true }),
  );
  try {
    index = await load("index");
    if (!index.runs.length) throw new Error("This page has no run.");
    await render();
    if (page.mode === "live" && index.live) setTimeout(follow, POLL_MS);
  } catch (error) {
    document.getElementById("view").replaceChildren(el("p.notice", error.message));
    throw error;
  } finally {
    document.documentElement.dataset.ready = String(Math.round(performance.now()));
  }
  addEventListener("hashchange", () => {
    readState();
    render();
  });
  addEventListener("keydown", obeyKey);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => state.view === "run" && render());
}

start();
