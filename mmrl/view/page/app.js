// The frame of the page: it shows what the URL names, obeys keys, and follows a live run.
"use strict";

const POLL_MS = 2000;
const VIEWS = {
  run: showRun, benchmarks: showBenchmarks, compare: showCompare, config: showConfig, sample: showSample,
};
const KEYS = [
  ["j k", "next and previous group"], ["n p", "next and previous kept step"], ["/", "search"],
  ["t", "colour tokens by the next number"], ["r", "show or hide reward tables"], ["f", "fold or unfold thinking"],
  ["m", "show or hide marks"], ["?", "this help"],
];
let index = null;

function activeRun() {
  return index.runs.find(({ id }) => id === state.run) || index.runs[0];
}

// An evaluation has no steps to show.
function currentView() {
  return state.view === "run" && activeRun().kind === "eval" ? "benchmarks" : state.view;
}

async function render() {
  if (!TOKEN_COLOURS[state.color]) state.color = "";
  applyMarks();
  show(byId("bar"), barContent());
  clearCurves();
  document.title = `${activeRun().name} \u00b7 mmrl view`;
  await (VIEWS[currentView()] || showRun)(byId("view"));
}

function barContent() {
  const run = activeRun();
  const many = index.runs.length > 1;
  const tabs = [["run", "Run"], ["benchmarks", "Benchmarks"], ["compare", "Compare"], ["config", "Settings"]];
  const here = state.view === "sample" ? "run" : currentView();
  const isThere = { run: run.kind !== "eval", benchmarks: run.benchmarks.length, compare: true, config: true };
  const link = (changes, current, ...label) => (
    el("a", { href: linkTo(changes), "aria-current": current && "true" }, label)
  );
  const runs = index.runs.map((other, place) => {
    const dot = el("i", { style: { background: `var(--line${(place % LINE_COLOURS) + 1})` } });
    return link({ run: other.id, step: "", group: "", bench: "" }, other === run, dot, other.name);
  });
  const overlay = checkBox("overlay", "All runs on the curves", showRunCurves);
  return [
    el("span.brand", "mmrl", el("i", "view")), many && el("nav", { "aria-label": "Runs" }, runs),
    el("nav", { "aria-label": "Views" }, tabs.map(([view, name]) => (
      isThere[view] ? link({ view, sample: "" }, view === here, name) : null
    ))),
    el("span.grow"), many && here === "run" && overlay,
    index.live && el("span.live", { id: "live", title: "The page follows the run." }, "live"),
    button(".icon", "\u25d0", switchTheme, { id: "theme", "aria-label": "Dark or light" }),
    button(".icon", "?", showHelp, { "aria-label": "Keys" }),
  ];
}

function switchTheme() {
  const { dataset } = document.documentElement;
  const dark = dataset.theme ? dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  dataset.theme = dark ? "light" : "dark";
  setState({ theme: dataset.theme });
  if (state.view === "run") showRunCurves();
}

function showHelp() {
  const list = KEYS.map(([key, meaning]) => [el("dt", key), el("dd", meaning)]);
  openDialog("help", "Keys", el("h2", "Keys"), el("dl", list));
}

function nextColour() {
  const select = byId("f-color");
  if (!select || select.disabled) return;
  select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
  select.dispatchEvent(new Event("change"));
}

function toggle(name) {
  setState({ [name]: state[name] === "1" ? "0" : "1" });
  if (name === "marks") applyMarks();
  else redrawCards();
}

function obeyKey(event) {
  const { target, key } = event;
  const typing = target.matches("input:not([type=checkbox]), select");
  if (key === "Escape" && typing) target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog")) return;
  const search = byId({ run: "f-q", benchmarks: "f-bq", config: "f-cq" }[state.view]);
  const everywhere = { m: () => toggle("marks"), "?": showHelp };
  if (search) everywhere["/"] = () => search.focus();
  const inRun = {
    j: () => moveGroup(1), k: () => moveGroup(-1), n: () => moveStep(1), p: () => moveStep(-1),
    t: nextColour, r: () => toggle("table"), f: () => toggle("folded"),
  };
  const action = everywhere[key] || (state.view === "run" && inRun[key]);
  if (!action) return;
  event.preventDefault();
  action();
}

// Follows a run: its head, curves and list of steps. Open content stays.
async function follow() {
  const light = byId("live");
  try {
    const before = JSON.stringify(index.runs);
    index = await load("index", true);
    light.classList.remove("lost");
    if (JSON.stringify(index.runs) !== before) await showChanges();
  } catch {
    light.classList.add("lost");
  }
  setTimeout(follow, POLL_MS);
}

async function showChanges() {
  index.runs.forEach(({ metrics }) => documents.delete(metrics));
  const head = byId("run-head");
  if (head) show(head, runHeadContent());
  if (state.view !== "run") return;
  showStepList(activeRun());
  if (!byId("cards")) await showStep(byId("browser"));
  const curves = byId("curve-panels");
  // A search would lose its cursor.
  if (curves.contains(document.activeElement)) return;
  curves.style.minHeight = `${curves.offsetHeight}px`;
  await showRunCurves();
}

async function start() {
  readState();
  if (state.theme) document.documentElement.dataset.theme = state.theme;
  byId("app").append(
    el("header.bar", { id: "bar" }), el("main", { id: "view", tabindex: -1 }),
    el("div", { id: "tip", role: "tooltip", hidden: true }), el("span", { id: "probe", hidden: true }),
  );
  addEventListener("hashchange", () => {
    readState();
    render();
  });
  addEventListener("keydown", obeyKey);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
  try {
    index = await load("index");
    await render();
  } catch (error) {
    show(byId("view"), problem(error));
    throw error;
  } finally {
    document.documentElement.dataset.ready = String(Math.round(performance.now()));
  }
  if (page.mode === "live") setTimeout(follow, POLL_MS);
}

start();
