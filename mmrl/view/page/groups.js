// The browser of a step: the list of kept steps, filters, and a card for each group.
"use strict";

const KINDS = { train: "Training", validation: "Validation", test: "Test" };
const SORTS = {
  "": ["as drawn"],
  spread: ["spread of rewards", (group) => spread(totals(group)) ?? -1],
  advantage: ["largest |advantage|", (group) => most(group, ({ advantage_range: [a, b] }) => Math.max(-a, b))],
  length: ["longest response", (group) => most(group, (rollout) => rollout.tokens_n)],
  best: ["highest mean reward", (group) => mean(totals(group)) ?? -Infinity],
  worst: ["lowest mean reward", (group) => -(mean(totals(group)) ?? Infinity)],
};
const FILTERS = ["q", "id", "task", "min", "max", "adv", "inf", "finish", "flip", "status"];
const ANY = ["", "any"];

let browser = null; // of the step that is open: {run, step, content, groups (shown), cards}

function totals(group) {
  return group.rollouts.map((rollout) => rollout.total);
}

function most(group, value) {
  return Math.max(0, ...group.rollouts.map(value));
}

function isInformative(group) {
  return group.rollouts.some(({ advantage_range: [low, high] }) => low || high);
}

function stepList(run) {
  const stages = run.stages.length > 1;
  const lists = Object.entries(KINDS).map(([kind, title]) => {
    const steps = run.steps.filter((step) => step.kind === kind);
    return steps.length > 0 && el("div.kind", el("span.label", title), steps.map((step) => {
      const name = stages ? `${step.stage} ${step.step}` : step.step;
      return button("", kind === "test" ? step.label.replace(/^test /, "") : name, () => openStep(step.key), {
        title: `${step.label}: ${count(step.groups, "group")}, ${count(step.rollouts, "rollout")}`,
        dataset: { key: step.key }, "aria-current": step.key === state.step ? "true" : null,
      });
    }));
  });
  return el("nav.steps", { id: "steps", "aria-label": "Kept steps" }, lists);
}

function showStepList(run) {
  const old = byId("steps");
  const { scrollLeft } = old;
  old.replaceWith(stepList(run));
  byId("steps").scrollLeft = scrollLeft;
}

// Opens a kept step in place, and with `scroll` brings it into view.
async function openStep(key, scroll = false) {
  setState({ step: key, group: "" }, true);
  showStepList(activeRun());
  charts.forEach(({ plot }) => plot.redraw(false));
  await showStep(byId("browser"));
  if (scroll) byId("rollouts").scrollIntoView();
}

async function showStep(host) {
  const run = activeRun();
  const step = run.steps.find(({ key }) => key === state.step);
  if (!step) return show(host, empty("No rollouts were kept yet."));
  let content;
  try {
    content = await load(step.key);
  } catch (error) {
    return show(host, problem(error));
  }
  if (state.step !== step.key || !host.isConnected) return null; // another one was opened meanwhile
  browser = { run, step, content, cards: new Map(), groups: [] };
  const current = document.querySelector("#steps [aria-current]");
  if (current) byId("steps").scrollTo({ left: current.offsetLeft - 300 });
  show(
    host, stepHead(step, content), filterBar(content),
    el("p.count", { id: "count", role: "status" }), el("div.cards", { id: "cards" }),
  );
  listGroups();
  if (state.group !== "") focusGroup(Number(state.group));
  return null;
}

function facts(pairs) {
  return el("p.facts", pairs.filter(Boolean).map(([value, name]) => el("span", el("b", value), ` ${name}`)));
}

function stepHead(step, { groups }) {
  // Replayed rollouts are in groups of their own. The metrics of the step are about the others, too.
  const own = groups.filter(({ selection }) => selection?.status !== "replayed");
  const replayed = groups.length - own.length;
  const all = own.flatMap(totals);
  const lively = own.filter(isInformative).length;
  return el(
    "div.step-head", el("h3", step.label),
    facts([
      [own.length, "groups"], [all.length, "rollouts"], [number(mean(all)), "mean reward"],
      step.kind === "train" && [`${lively} of ${own.length}`, "informative"],
      replayed > 0 && [replayed, "replayed groups"],
    ]),
  );
}

function filterBar(content) {
  const { groups, kind } = content;
  const rollouts = groups.flatMap((group) => group.rollouts);
  const values = (of, items) => [...new Set(items.map(of))].filter(Boolean).sort().map((value) => [value, value]);
  const pick = (name, label, options) => options.length > 1 && choice(name, label, [ANY, ...options], listGroups);
  const statuses = values(({ status }) => status, rollouts);
  const flips = [["up", "wrong \u2192 right"], ["down", "right \u2192 wrong"], ["same", "unchanged"]];
  const bound = { type: "number", step: "any" };
  const reset = button(".link", "Clear filters", () => {
    setState(Object.fromEntries(FILTERS.map((name) => [name, ""])));
    showStep(byId("browser"));
  }, { id: "reset" });
  return el(
    "div",
    el("div.controls", textBox("q", "Search text, or /a pattern/", listGroups, { class: "wide" }),
      textBox("id", "Sample id", listGroups), el("span.grow"), displayControls(content)),
    el("div.controls", choice("sort", "Sort", Object.entries(SORTS).map(([key, [text]]) => [key, text]), listGroups),
      pick("task", "Task", values(({ task }) => task, groups)),
      el("span.choice", "Reward", textBox("min", "from", listGroups, bound), textBox("max", "to", listGroups, bound)),
      kind === "train" && pick("adv", "Advantage", [["+", "positive"], ["-", "negative"], ["0", "zero"]]),
      kind === "train" && pick("inf", "Informative", [["1", "yes"], ["0", "no"]]),
      pick("finish", "Finish", values(({ finish }) => finish, rollouts)),
      rollouts.some(({ flip }) => flip) && pick("flip", "Rethinking", flips),
      pick("status", "Status", kind === "train" ? [["untrained", "not trained"], ...statuses] : statuses), reset),
  );
}

function displayControls(content) {
  const legend = el("div");
  const recolour = async () => {
    show(legend, (await readTokens(content)) || tokenLegend(content.scale));
    redrawCards();
  };
  const names = Object.entries(TOKEN_COLOURS).map(([value, { name }]) => [value, name]);
  const colours = choice("color", "Colour tokens by", [["", "nothing"], ...names], recolour);
  if (!content.tokens) {
    colours.querySelector("select").disabled = true;
    colours.title = "The numbers of this step's tokens were not kept.";
  }
  recolour();
  return [legend, colours, checkBox("marks", "Marks", applyMarks)];
}

// Reads the tokens when they are first shown. Returns an element that says what failed.
async function readTokens(content) {
  if (!state.color || !content.tokens) return null;
  try {
    await (content.reading ??= addTokens(content));
    return null;
  } catch (error) {
    return problem(new Error(`The numbers of these tokens cannot be read: ${error.message}`));
  }
}

function applyMarks() {
  document.body.classList.toggle("no-marks", state.marks !== "1");
  const box = byId("f-marks");
  if (box) box.checked = state.marks === "1";
}

function passes(rollout, group, pattern) {
  const { total, advantage_range: [low, high], finish, flip, status, trained, terms, response } = rollout;
  const signs = { "+": high > 0, "-": low < 0, 0: low === 0 && high === 0 };
  if (state.min !== "" && !(total >= Number(state.min))) return false;
  if (state.max !== "" && !(total <= Number(state.max))) return false;
  if (state.adv && !signs[state.adv]) return false;
  if (state.finish && finish !== state.finish) return false;
  if (state.flip && flip !== state.flip) return false;
  if (state.status && (state.status === "untrained" ? trained : status !== state.status)) return false;
  const texts = [response, group.question, group.prompt, ...Object.values(terms).map(({ reason }) => reason)];
  return state.q === "" || texts.some((text) => matches(pattern, text));
}

function listGroups() {
  const { content, cards } = browser;
  const pattern = searchPattern(state.q);
  const wanted = content.groups.filter((group) => (
    (!state.task || group.task === state.task) && group.sample.toLowerCase().includes(state.id.toLowerCase())
    && (!state.inf || (state.inf === "1") === isInformative(group))
  ));
  const found = wanted.map((group) => {
    const passing = group.rollouts.filter((rollout) => passes(rollout, group, pattern));
    return { group, matched: new Set(passing) };
  });
  const shown = found.filter(({ matched }) => matched.size);
  const key = (SORTS[state.sort] || SORTS[""])[1];
  if (key) shown.sort((one, other) => key(other.group) - key(one.group));
  browser.groups = shown;
  cards.forEach(({ watch }) => watch.disconnect());
  cards.clear();
  show(byId("cards"), shown.map(({ group, matched }) => cardElement(group, matched, pattern)));
  const total = content.groups.flatMap(totals).length;
  const kept = shown.reduce((sum, { matched }) => sum + matched.size, 0);
  const counts = `${shown.length} of ${count(content.groups.length, "group")}, ${kept} of ${count(total, "rollout")}`;
  const malformed = state.q && !pattern ? "The pattern is malformed. " : "";
  const filtered = FILTERS.some((name) => state[name] !== "");
  byId("count").textContent = filtered ? malformed + counts : "";
  byId("reset").hidden = !filtered;
}

// A card is empty while it is far from the window: coloured tokens would be a quarter of a million elements.
function cardElement(group, matched, pattern) {
  const card = el("article.group", {
    tabindex: -1, id: `group-${group.group}`, dataset: { group: group.group }, "aria-label": `Group ${group.group}`,
    style: { "min-height": `${120 + 90 * group.rollouts.length}px` },
  });
  const draw = () => {
    const before = card.offsetHeight;
    const above = card.getBoundingClientRect().bottom < 70;
    show(card, cardContent(group, matched, pattern));
    card.style.minHeight = "";
    // The text being read must stay in place.
    if (above) scrollBy(0, card.offsetHeight - before);
  };
  const watch = new IntersectionObserver((entries) => {
    const near = entries.at(-1).isIntersecting;
    if (near && !card.firstChild) draw();
    else if (!near && card.firstChild && !card.contains(document.activeElement)) {
      card.style.minHeight = `${card.offsetHeight}px`;
      show(card);
    }
  }, { rootMargin: "1500px" });
  watch.observe(card);
  browser.cards.set(group.group, { watch, draw: () => card.firstChild && draw() });
  return card;
}

function redrawCards() {
  browser?.cards.forEach((card) => card.draw());
}

function cardContent(group, matched, pattern) {
  const { scale } = browser.content;
  const marks = collectMarks(group, scale);
  const options = { scale, pattern, tokens: state.color !== "" };
  const said = group.rollouts.map((rollout) => responseElement(rollout, { ...options, matched: matched.has(rollout) }));
  return [cardHead(group), el("div.columns", seenElement(group, marks, pattern), el("div.said", said))];
}

function seenElement(group, marks, pattern) {
  const media = group.media.map((medium, place) => mediaElement(medium, place, marks));
  const kinds = [["gold", "target"], ["predicted", "responses, by reward"], ["crop", "tool crops"]];
  const legend = kinds.filter(([kind]) => marks.some((mark) => mark.kind === kind));
  return el(
    "div.seen", el(
      "div.stuck", media.length ? media : empty("This sample has no picture."),
      legend.length > 0 && el("p.mark-legend", legend.map(([kind, name]) => el("span", el(`i.${kind}`), name))),
      questionElement(group, pattern),
    ),
  );
}

function cardHead(group) {
  const { samples } = browser.run;
  const values = totals(group);
  const { low, high } = browser.content.scale;
  const { status, reason, carried_over: carried } = group.selection || {};
  const draws = (samples[group.sample] || []).length;
  const sighted = number(mean(values), 2);
  const over = linkTo({ view: "sample", sample: group.sample, group: "" });
  const probes = Object.entries(group.probes || {}).map(([name, { total }]) => (
    badge(`${name} ${number(total, 2)} \u00b7 sighted ${sighted}`, "", "Mean reward without the picture, and with it.")
  ));
  return el(
    "header.card-head", el("a.sample", { href: linkTo({ group: String(group.group) }) }, group.sample),
    el("span.who", group.task), status === "rejected" && badge(`rejected${reason ? `: ${reason}` : ""}`, "warn"),
    status === "no_room" && badge("no room", "quiet"), status === "replayed" && badge("replayed"),
    carried && badge("carried over", "", "Drawn for an earlier step, which had no room for it."), probes,
    el("span.grow"), draws > 1 && el("a.times-link", { href: over }, `drawn in ${draws} kept steps`),
    el("span.dots", values.map((value) => el("i", { style: { background: rewardColour(value, low, high) } }))),
    el("span.who", { title: "Mean, least and largest reward" }, el("b", sighted),
      spread(values) > 0 && ` ${number(Math.min(...values), 2)} to ${number(Math.max(...values), 2)}`),
  );
}

function questionElement({ question, target, prompt }, pattern) {
  const marked = (text) => highlight(cut(text, MOST_CHARACTERS), pattern);
  const open = matches(pattern, prompt) && !matches(pattern, question);
  return el(
    "div.question", el("p.asked", marked((question || "").replace(/<(image|video)>/g, "").trim())),
    target && el("p.target", el("span", "target"), cut(target, 600)),
    prompt && el("details.prompt", { open }, el("summary", "Prompt as the model reads it"), el("pre", marked(prompt))),
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

function focusGroup(number) {
  const card = byId(`group-${number}`);
  if (!card) return;
  document.querySelectorAll(".group.current").forEach((other) => other.classList.remove("current"));
  card.classList.add("current");
  card.scrollIntoView();
  setState({ group: String(number) });
  // Again once the cards around it are drawn and have heights.
  setTimeout(() => state.group === String(number) && card.scrollIntoView(), 50);
}

function moveGroup(by) {
  const { groups } = browser || { groups: [] };
  const place = groups.findIndex(({ group }) => String(group.group) === state.group);
  const next = groups[place < 0 ? 0 : place + by];
  if (next) focusGroup(next.group.group);
}

function moveStep(by) {
  const { steps } = activeRun();
  const next = steps[steps.findIndex(({ key }) => key === state.step) + by];
  if (next) openStep(next.key);
}

// Hovering a response highlights its marks, and the other way around; hovering a token shows its numbers.
function watchHover(host) {
  const clear = () => {
    for (const one of host.querySelectorAll(".lit, .hovering")) one.classList.remove("lit", "hovering");
  };
  host.addEventListener("mouseover", ({ target }) => {
    const owner = target.closest("[data-rollout]");
    const card = target.closest(".group");
    clear();
    if (owner && card) {
      card.querySelectorAll(`[data-rollout="${owner.dataset.rollout}"]`).forEach((one) => one.classList.add("lit"));
      card.classList.toggle("hovering", card.querySelector(".marks .lit") !== null);
    }
    showTip(target.closest(".token"), card, owner);
  });
  host.addEventListener("mouseleave", () => {
    clear();
    showTip(null);
  });
}

function showTip(token, card, owner) {
  const tip = byId("tip");
  tip.hidden = !token;
  if (!token) return;
  const { rollouts } = browser.content.groups.find((group) => String(group.group) === card.dataset.group);
  const rollout = rollouts.find((one) => String(one.rollout) === owner.dataset.rollout);
  show(tip, tokenTip(rollout, Number(token.dataset.token)));
  const { left, top, bottom } = token.getBoundingClientRect();
  const fits = bottom + 8 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.min(innerWidth - tip.offsetWidth - 12, left)}px`;
  tip.style.top = `${fits ? bottom + 8 : top - tip.offsetHeight - 8}px`;
}
