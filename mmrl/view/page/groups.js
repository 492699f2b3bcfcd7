// The browser of a step: the list of kept steps, filters, and a card for each group.
"use strict";

const KINDS = { train: "Training", validation: "Validation", test: "Test" };
const SORTS = {
  "": ["As drawn", null],
  spread: ["Spread of rewards", (group) => spread(totals(group)) ?? -1],
  advantage: ["Largest |advantage|", (group) => Math.max(0, ...group.rollouts.map((rollout) => Math.abs(rollout.advantage ?? 0)))],
  length: ["Longest response", (group) => Math.max(0, ...group.rollouts.map((rollout) => rollout.tokens_n ?? 0))],
  best: ["Highest mean reward", (group) => mean(totals(group)) ?? -Infinity],
  worst: ["Lowest mean reward", (group) => -(mean(totals(group)) ?? Infinity)],
};

let browser = null; // of the step that is open: {step, run, content, scale, groups, cards}

function totals(group) {
  return group.rollouts.map((rollout) => rollout.total);
}

// The range of rewards and the largest |advantage| of a step, for colours.
function scaleOf(content) {
  let [low, high, advantage] = [Infinity, -Infinity, 0];
  for (const group of content.groups) {
    for (const rollout of group.rollouts) {
      if (typeof rollout.total === "number") [low, high] = [Math.min(low, rollout.total), Math.max(high, rollout.total)];
      advantage = Math.max(advantage, Math.abs(rollout.advantage ?? 0));
    }
  }
  if (low >= 0 && high <= 1) [low, high] = [0, 1]; // most rewards lie there, and steps should look alike
  return { low, high, advantage };
}

function stepList(run) {
  const lists = Object.entries(KINDS).map(([kind, title]) => {
    const steps = run.steps.filter((step) => step.kind === kind);
    if (!steps.length) return null;
    return el("div.kind", el("span.label", title), steps.map((step) => el("button", {
      type: "button", class: "step", dataset: { key: step.key }, title: `${step.label}: ${count(step.groups, "group")}, ${count(step.rollouts, "rollout")}`,
      "aria-current": step.key === state.step ? "true" : null, onclick: () => openStep(step.key),
    }, stepName(step, run))));
  });
  return el("nav.steps", { id: "steps", "aria-label": "Kept steps" }, lists);
}

function stepName(step, run) {
  if (step.kind === "test") return step.label.replace(/^test[ -]/, "");
  return run.stages.length > 1 ? `${step.stage} ${step.step}` : String(step.step);
}

function showStepList(run) {
  const old = document.getElementById("steps");
  if (!old) return;
  const scrolled = old.scrollLeft;
  const fresh = stepList(run);
  old.replaceWith(fresh);
  fresh.scrollLeft = scrolled;
}

// Opens a kept step in place. `scroll` brings it into view, for a step that was picked on the curves.
async function openStep(key, scroll = false) {
  if (state.view !== "run") return go({ view: "run", step: key, group: "" });
  setState({ step: key, group: "" }, true);
  const run = activeRun();
  for (const button of document.querySelectorAll("#steps .step")) {
    if (button.dataset.key === key) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  }
  redrawMarks();
  await showStep(run, document.getElementById("browser"));
  if (scroll) document.getElementById("rollouts").scrollIntoView({ behavior: calm() ? "auto" : "smooth" });
}

async function showStep(run, host) {
  const step = run.steps.find((other) => other.key === state.step);
  if (!step) {
    host.replaceChildren(el("p.empty", run.steps.length ? "Choose a step." : "No rollouts were kept yet."));
    return;
  }
  host.setAttribute("aria-busy", "true");
  let content;
  try {
    content = await load(step.key);
  } catch (error) {
    host.replaceChildren(el("p.notice", error.message));
    return;
  } finally {
    host.removeAttribute("aria-busy");
  }
  if (state.step !== step.key) return; // another step was opened meanwhile
  browser = { run, step, content, scale: scaleOf(content), cards: new Map(), groups: [] };
  const current = document.querySelector("#steps [aria-current]");
  if (current) current.parentElement.parentElement.scrollTo({ left: current.offsetLeft - 300 });
  host.replaceChildren(stepHead(step, content), filterBar(content), el("p.count", { id: "count", role: "status" }), el("div.cards", { id: "cards" }));
  listGroups();
  if (state.group !== "") focusGroup(Number(state.group), "auto");
}

function stepHead(step, content) {
  const all = content.groups.flatMap(totals);
  const lively = content.groups.filter((group) => group.rollouts.some((rollout) => rollout.advantage)).length;
  const facts = [
    [count(content.groups.length, "group"), ""], [count(all.length, "rollout"), ""], [number(mean(all)), "mean reward"],
    step.kind === "train" ? [`${lively} of ${content.groups.length}`, "informative"] : null,
  ].filter(Boolean);
  return el("div.step-head",
    el("h3", step.label),
    el("p.facts", facts.map(([value, name]) => el("span", el("b", value), name && ` ${name}`))),
    el("span.grow"), histogram(all, browser ? browser.scale : scaleOf(content)),
  );
}

function histogram(values, scale) {
  const known = values.filter((value) => typeof value === "number");
  if (known.length < 8 || scale.high <= scale.low) return null;
  const bins = new Array(20).fill(0);
  for (const value of known) bins[Math.min(19, Math.max(0, Math.floor((20 * (value - scale.low)) / (scale.high - scale.low))))] += 1;
  const most = Math.max(...bins);
  const bars = bins.map((bin, index) => {
    const height = bin ? Math.max(1.5, (30 * bin) / most) : 0;
    const bar = svg("rect", { x: index * 8, y: 31 - height, width: 7, height, rx: 1 });
    bar.style.fill = rewardColour(scale.low + ((index + 0.5) / 20) * (scale.high - scale.low), scale.low, scale.high);
    return bar;
  });
  return el("figure.histogram", { role: "img", "aria-label": `Rewards from ${number(scale.low)} to ${number(scale.high)}` },
    svg("svg", { viewBox: "0 0 160 31", width: 160, height: 31 }, bars),
    el("figcaption", el("span", number(scale.low)), el("span", "total reward"), el("span", number(scale.high))),
  );
}

function choice(name, label, options, changed) {
  const select = el("select", { id: `f-${name}`, "aria-label": label, onchange: (event) => changed({ [name]: event.target.value }) },
    options.map(([value, text]) => el("option", { value }, text)));
  select.value = state[name];
  return el("label.choice", el("span", label), select);
}

function filterBar(content) {
  const changed = (changes) => {
    setState(changes);
    listGroups();
    reset.hidden = !isFiltered();
  };
  const tasks = [...new Set(content.groups.map((group) => group.task))].sort();
  const statuses = [...new Set(content.groups.flatMap((group) => group.rollouts.map((rollout) => rolloutStatus(rollout))))].sort();
  const finishes = [...new Set(content.groups.flatMap((group) => group.rollouts.map((rollout) => rollout.finish)))].sort();
  const flips = content.groups.some((group) => group.rollouts.some(flipOf));
  const input = (name, label, type, more) => {
    const box = el("input", { type, id: `f-${name}`, "aria-label": label, placeholder: label, oninput: wait(150, (event) => changed({ [name]: event.target.value })), ...more });
    box.value = state[name];
    return box;
  };
  const train = content.kind === "train";
  const any = ["", "any"];
  const reset = el("button", { type: "button", id: "reset", class: "link", onclick: () => {
    setState(Object.fromEntries(FILTERS.map((name) => [name, ""])));
    showStep(browser.run, document.getElementById("browser"));
  } }, "Clear filters");
  reset.hidden = !isFiltered();
  return el("div.filters",
    el("div.controls", input("q", "Search text, or /a pattern/", "search", { class: "wide" }), input("id", "Sample id", "search"),
      el("span.grow"), displayControls(content)),
    el("div.controls.small",
      choice("sort", "Sort", Object.entries(SORTS).map(([value, [text]]) => [value, text]), changed),
      tasks.length > 1 && choice("task", "Task", [any, ...tasks.map((task) => [task, task])], changed),
      el("label.choice", el("span", "Reward"), input("min", "from", "number", { step: "any" }), input("max", "to", "number", { step: "any" })),
      train && choice("adv", "Advantage", [any, ["+", "positive"], ["-", "negative"], ["0", "zero"]], changed),
      train && choice("inf", "Informative", [any, ["1", "yes"], ["0", "no"]], changed),
      finishes.length > 1 && choice("finish", "End", [any, ...finishes.map((name) => [name, name])], changed),
      flips && choice("flip", "Rethinking", [any, ["up", "wrong \u2192 right"], ["down", "right \u2192 wrong"], ["same", "unchanged"]], changed),
      statuses.length > 1 && choice("status", "Status", [any, ...statuses.map((name) => [name, name])], changed),
      reset,
    ),
  );
}

const FILTERS = ["q", "id", "task", "min", "max", "adv", "inf", "finish", "flip", "status"];

function isFiltered() {
  return FILTERS.some((name) => state[name] !== "");
}

function rolloutStatus(rollout) {
  return rollout.dropped ? "dropped" : (rollout.selection || {}).status || "none";
}

function displayControls(content) {
  const legend = el("div", { id: "legend" });
  const redraw = () => {
    legend.replaceChildren(...[tokenLegend(browser.scale)].filter(Boolean));
    redrawCards();
  };
  const withTokens = content.groups.some((group) => group.rollouts.some((rollout) => rollout.tokens));
  const colours = choice("color", "Colour tokens by", [["", "nothing"], ...Object.entries(TOKEN_COLOURS).map(([value, { name }]) => [value, name])], (changes) => {
    setState(changes);
    redraw();
  });
  if (!withTokens) {
    colours.classList.add("unavailable");
    colours.title = "The numbers of this step's tokens were not kept.";
    colours.querySelector("select").disabled = true;
  }
  legend.replaceChildren(...[tokenLegend(browser.scale)].filter(Boolean));
  const marks = el("input", { type: "checkbox", id: "marks", onchange: (event) => setMarks(event.target.checked) });
  marks.checked = state.marks === "1";
  return [legend, colours, el("label.check", marks, "Marks")];
}

function setMarks(on) {
  setState({ marks: on ? "1" : "0" });
  document.body.classList.toggle("no-marks", !on);
  const box = document.getElementById("marks");
  if (box) box.checked = on;
}

// Returns whether a rollout passes the filters that are about rollouts.
function passes(rollout, group, pattern) {
  if (state.min !== "" && !(rollout.total >= Number(state.min))) return false;
  if (state.max !== "" && !(rollout.total <= Number(state.max))) return false;
  if (state.adv !== "" && !({ "+": rollout.advantage > 0, "-": rollout.advantage < 0, 0: rollout.advantage === 0 }[state.adv])) return false;
  if (state.finish && rollout.finish !== state.finish) return false;
  if (state.flip && flipOf(rollout) !== state.flip) return false;
  if (state.status && rolloutStatus(rollout) !== state.status) return false;
  if (!pattern) return state.q === "";
  const reasons = Object.values(rollout.terms || {}).map((term) => term.reason);
  return matches(pattern, rollout.response) || matches(pattern, group.question) || matches(pattern, group.prompt) || reasons.some((reason) => matches(pattern, reason));
}

function listGroups() {
  const { content, cards } = browser;
  const pattern = searchPattern(state.q);
  const needle = state.id.toLowerCase();
  const shown = [];
  let kept = 0;
  for (const group of content.groups) {
    if (state.task && group.task !== state.task) continue;
    if (needle && !group.sample.toLowerCase().includes(needle)) continue;
    const lively = group.rollouts.some((rollout) => rollout.advantage);
    if (state.inf && (state.inf === "1") !== lively) continue;
    const matched = new Set(group.rollouts.filter((rollout) => passes(rollout, group, pattern)).map((rollout) => rollout.rollout));
    if (!matched.size) continue;
    kept += matched.size;
    shown.push({ group, matched });
  }
  const key = (SORTS[state.sort] || SORTS[""])[1];
  if (key) shown.sort((one, other) => key(other.group) - key(one.group));
  browser.groups = shown;
  cards.forEach((card) => card.watch.disconnect());
  cards.clear();
  const elements = shown.map(({ group, matched }) => cardElement(group, matched, pattern));
  document.getElementById("cards").replaceChildren(...elements);
  const total = content.groups.reduce((sum, group) => sum + group.rollouts.length, 0);
  const malformed = state.q && !pattern ? "The pattern is malformed. " : "";
  document.getElementById("count").textContent =
    malformed + (isFiltered() ? `${shown.length} of ${count(content.groups.length, "group")}, ${kept} of ${count(total, "rollout")}` : "");
}

// A card is empty until it comes near the window, and empties again when it is far: 250 responses of 1,000 coloured
// tokens would be a quarter of a million elements.
function cardElement(group, matched, pattern) {
  const card = el("article.group", { tabindex: -1, id: `group-${group.group}`, dataset: { group: group.group }, "aria-label": `Group ${group.group}, ${group.sample}`,
    style: { "min-height": `${120 + 90 * group.rollouts.length}px` },
  });
  let drawn = false;
  const draw = () => {
    drawn = true;
    card.replaceChildren(...cardContent(group, matched, pattern));
    card.style.minHeight = "";
  };
  const watch = new IntersectionObserver((entries) => {
    const near = entries[entries.length - 1].isIntersecting;
    if (near && !drawn) draw();
    else if (!near && drawn && !card.contains(document.activeElement)) {
      card.style.minHeight = `${card.offsetHeight}px`;
      card.replaceChildren();
      drawn = false;
    }
  }, { rootMargin: "1500px" });
  watch.observe(card);
  browser.cards.set(group.group, { watch, draw: () => drawn && draw() });
  return card;
}

function redrawCards() {
  browser.cards.forEach((card) => card.draw());
}

function cardContent(group, matched, pattern) {
  const { scale, step, run } = browser;
  const marks = collectMarks(group, scale);
  const options = { kind: step.kind, scale, pattern, tokens: state.color !== "" };
  return [
    cardHead(group, run),
    el("div.columns",
      el("div.seen",
        group.media.length ? group.media.map((medium, index) => mediaElement(medium, index, marks)) : el("p.empty", "This sample has no picture."),
        marks.length ? markLegend(marks) : null,
        questionElement(group, pattern),
      ),
      el("div.said", group.rollouts.map((rollout) => responseElement(rollout, { ...options, matched: matched.has(rollout.rollout) }))),
    ),
  ];
}

function cardHead(group, run) {
  const values = totals(group);
  const { status, reason, carried_over: carried } = group.selection || {};
  const probes = Object.entries(group.probes || {});
  const times = (run.samples || {})[group.sample];
  return el("header.card-head",
    el("a.sample", { href: linkTo({ group: String(group.group) }), title: "Link to this group" }, group.sample),
    el("span.task", group.task),
    status === "rejected" && badge(`rejected${reason ? `: ${reason}` : ""}`, "warn", "Dynamic sampling rejected this group."),
    status === "replayed" && badge("replayed", "info"),
    status === "no_room" && badge("no room", "quiet", "The step had enough groups without it."),
    carried && badge("carried over", "info", "It was drawn for an earlier step, which had no room for it."),
    probes.map(([name, probe]) => badge(`${name} ${number(probe.total, 2)} \u00b7 sighted ${number(mean(values), 2)}`, "info", "Mean reward with the picture hidden, beside the mean with it.")),
    el("span.grow"),
    times && times.length > 1 && el("a.times-link", { href: linkTo({ view: "sample", sample: group.sample, group: "" }) }, `drawn in ${times.length} kept steps`),
    el("span.dots", { title: values.map((value) => number(value)).join(", ") }, group.rollouts.map((rollout) => el("i", { style: { background: rewardColour(rollout.total, browser.scale.low, browser.scale.high) } }))),
    el("span.mean", { title: "Mean reward and its spread" }, el("b", number(mean(values), 2)), spread(values) ? ` \u00b1 ${number(spread(values) / 2, 2)}` : ""),
  );
}

function markLegend(marks) {
  const has = (kind) => marks.some((mark) => mark.kind === kind);
  return el("p.mark-legend",
    has("gold") && el("span", el("i.gold"), "target"),
    has("predicted") && el("span", el("i.ramp"), "responses, by reward"),
    has("crop") && el("span", el("i.crop"), "tool crops"),
  );
}

function questionElement(group, pattern) {
  const highlighted = (text) => highlight(cut(text, MOST_CHARACTERS), pattern);
  const open = pattern && matches(pattern, group.prompt) && !matches(pattern, group.question);
  return el("div.question",
    el("p.asked", highlighted((group.question || "").replace(/<(image|video)>/g, "").trim())),
    group.target !== null && group.target !== "" && el("p.target", el("span", "target"), el("b", cut(String(group.target), 600))),
    group.prompt && el("details.prompt", { open: Boolean(open) }, el("summary", "Prompt as the model reads it"), el("pre", highlighted(group.prompt))),
  );
}

function highlight(text, pattern) {
  const parts = [];
  let begin = 0;
  for (const [start, end] of findMatches(text, pattern)) {
    parts.push(text.slice(begin, start), el("span.found", text.slice(start, end)));
    begin = end;
  }
  return [...parts, text.slice(begin)];
}

function focusGroup(group, behavior) {
  const card = document.getElementById(`group-${group}`);
  if (!card) return;
  document.querySelectorAll(".group.current").forEach((other) => other.classList.remove("current"));
  card.classList.add("current");
  card.scrollIntoView({ behavior: behavior || (calm() ? "auto" : "smooth"), block: "start" });
  setState({ group: String(group) });
}

function moveGroup(by) {
  if (!browser || !browser.groups.length) return;
  const place = browser.groups.findIndex(({ group }) => String(group.group) === state.group);
  const next = place < 0 ? 0 : Math.min(browser.groups.length - 1, Math.max(0, place + by));
  focusGroup(browser.groups[next].group.group, "auto");
}

function moveStep(by) {
  const { steps } = activeRun();
  const place = steps.findIndex((step) => step.key === state.step);
  const next = steps[place + by];
  if (next) openStep(next.key);
}

// Hovering a response highlights its marks, and the other way around; hovering a token shows its numbers.
function watchHover(host) {
  host.addEventListener("mouseover", (event) => {
    const owner = event.target.closest("[data-rollout]");
    const card = event.target.closest(".group");
    host.querySelectorAll(".lit").forEach((element) => element.classList.remove("lit"));
    host.querySelectorAll(".hovering").forEach((element) => element.classList.remove("hovering"));
    if (owner && card) {
      const related = card.querySelectorAll(`[data-rollout="${owner.dataset.rollout}"]`);
      related.forEach((element) => element.classList.add("lit"));
      if (card.querySelector(".marks .lit")) card.classList.add("hovering");
    }
    showTip(event.target.closest(".token"), card, owner);
  });
  host.addEventListener("mouseleave", () => {
    showTip(null);
    host.querySelectorAll(".lit, .hovering").forEach((element) => element.classList.remove("lit", "hovering"));
  });
}

function showTip(token, card, owner) {
  const tip = document.getElementById("tip");
  const group = token && browser.content.groups.find((other) => String(other.group) === card.dataset.group);
  const rollout = group && group.rollouts.find((other) => String(other.rollout) === owner.dataset.rollout);
  tip.hidden = !rollout;
  if (!rollout) return;
  tip.replaceChildren(...tokenTip(rollout, Number(token.dataset.token)));
  const place = token.getBoundingClientRect();
  tip.style.left = `${Math.min(innerWidth - tip.offsetWidth - 12, Math.max(12, place.left))}px`;
  const below = place.bottom + 8;
  tip.style.top = `${below + tip.offsetHeight > innerHeight ? place.top - tip.offsetHeight - 8 : below}px`;
}
