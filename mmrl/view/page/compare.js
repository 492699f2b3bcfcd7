// One sample over the steps of a run, and two steps, of one run or of two, beside each other.
"use strict";

const NUM_COMPARED = 40; // samples at first; more on demand

// A response is right if a verdict says so, else if its reward is at least half of the largest one.
function isRight(rollout, scale) {
  if (typeof rollout.is_correct === "boolean") return rollout.is_correct;
  return rollout.total >= scale.low + (scale.high - scale.low) / 2;
}

async function showSample(host) {
  const run = activeRun();
  const places = run.samples[state.sample] || [];
  const body = el("div.sample-steps", el("p.empty", "Reading the steps\u2026"));
  watchHover(body);
  host.replaceChildren(section("sample", state.sample, [el("p", el("a", { href: linkTo({ view: "run", sample: "" }) }, "\u2190 back to the rollouts")), body]));
  const draws = [];
  for (const place of places) {
    const step = run.steps[place];
    try {
      const content = await load(step.key);
      for (const group of content.groups) if (group.sample === state.sample) draws.push({ step, group, scale: scaleOf(content) });
    } catch (error) {
      body.append(el("p.notice", error.message));
    }
    if (state.view !== "sample") return;
  }
  const problems = body.querySelectorAll(".notice");
  if (!draws.length) return body.replaceChildren(el("p.empty", "No kept step holds this sample."), ...problems);
  browser = { run, step: draws[0].step, content: { groups: [] }, scale: draws[0].scale, cards: new Map(), groups: [] };
  const order = { test: 2, train: 0, validation: 1 };
  draws.sort((one, other) => one.step.stage === other.step.stage ? one.step.step - other.step.step || order[one.step.kind] - order[other.step.kind] : 0);
  body.replaceChildren(...problems, trend(draws), ...draws.map((draw) => pairCard(draw.step.label, draw.group, [{ ...draw, title: null }])));
}

// Mean reward and its range at each step at which a sample was drawn.
function trend(draws) {
  const all = draws.flatMap(({ group }) => totals(group)).filter(isNumber);
  const [low, high] = [Math.min(0, ...all), Math.max(1, ...all)];
  const width = Math.max(240, 64 * draws.length);
  const y = (value) => 104 - (92 * (value - low)) / (high - low);
  const x = (place) => 32 + ((width - 64) * place) / Math.max(1, draws.length - 1);
  const drawing = svg("svg.trend", { viewBox: `0 0 ${width} 128`, width, height: 128, role: "img", "aria-label": "Reward over the steps" });
  for (const value of [low, high]) drawing.append(svg("line", { x1: 0, x2: width, y1: y(value), y2: y(value), class: "axis" }));
  const means = draws.map(({ group }) => mean(totals(group)));
  const points = means.map((value, place) => (isNumber(value) ? `${x(place)},${y(value)}` : null)).filter(Boolean);
  drawing.append(svg("polyline", { points: points.join(" ") }));
  draws.forEach(({ step, group, scale }, place) => {
    for (const rollout of group.rollouts) {
      if (!isNumber(rollout.total)) continue;
      const dot = svg("circle", { cx: x(place), cy: y(rollout.total), r: 3.5 });
      dot.style.fill = rewardColour(rollout.total, scale.low, scale.high);
      drawing.append(dot);
    }
    drawing.append(svg("text", { x: x(place), y: 124 }, step.label));
  });
  return el("div.scroll", drawing);
}

// A card with the picture once, and the responses of one or two steps beside each other.
function pairCard(title, group, sides) {
  const scale = sides[0].scale;
  const marks = collectMarks(group, scale);
  const responses = (side) => el("div.side", side.title && el("h4", side.title),
    side.group ? side.group.rollouts.map((rollout) => responseElement(rollout, { kind: side.step.kind, scale: side.scale, pattern: null, tokens: false })) : el("p.empty", "Not in this step."),
  );
  return el(
    "article", { class: `group ${sides.length > 1 ? "pair" : ""}`, dataset: { group: group.group } },
    el("header.card-head", el("span.sample", title), el("span.task", group.task)),
    el("div.columns",
      el("div.seen", group.media.map((medium, place) => mediaElement(medium, place, sides.length > 1 ? marks.filter((mark) => mark.kind === "gold") : marks)), questionElement(group, null)),
      el("div.said.sides", sides.map(responses)),
    ),
  );
}

function allSteps() {
  return index.runs.flatMap((run) => run.steps.map((step) => ({ run, step, name: index.runs.length > 1 ? `${run.name}: ${step.label}` : step.label })));
}

// The last test or validation of each run; with one run, its first and last.
function defaultPair(steps) {
  const judged = steps.filter(({ step }) => step.kind !== "train");
  const pool = judged.length > 1 ? judged : steps;
  const first = index.runs.length > 1 ? pool.filter(({ run }) => run === index.runs[0]).at(-1) : pool[0];
  const second = index.runs.length > 1 ? pool.filter(({ run, step }) => run === index.runs[1] && (!first || step.label === first.step.label)).at(-1) : pool.at(-1);
  return [(first || steps[0]).step.key, (second || steps.at(-1)).step.key];
}

async function showCompare(host) {
  const steps = allSteps();
  if (steps.length < 2) return host.replaceChildren(section("compare", "Compare", el("p.empty", "There are not two steps to compare.")));
  const [a, b] = defaultPair(steps);
  const keys = new Set(steps.map(({ step }) => step.key));
  setState({ a: keys.has(state.a) ? state.a : a, b: keys.has(state.b) ? state.b : b });
  const body = el("div", { id: "pairs" });
  const changed = (changes) => {
    setState(changes);
    comparePair(body, steps);
  };
  const options = steps.map(({ step, name }) => [step.key, name]);
  const flips = el("input", { type: "checkbox", id: "flips", onchange: (event) => changed({ flips: event.target.checked ? "1" : "" }) });
  flips.checked = state.flips === "1";
  const label = el("label.check", { title: "Samples whose first response is right on one side alone: by its verdict, else by half of the largest reward." }, flips, "Only flips");
  host.replaceChildren(section("compare", "Compare", [el("div.controls", choice("a", "Left", options, changed), choice("b", "Right", options, changed), label), body], "The same samples beside each other."));
  await comparePair(body, steps);
}

async function comparePair(body, steps) {
  const chosen = [state.a, state.b];
  const sides = chosen.map((key) => steps.find(({ step }) => step.key === key));
  let contents;
  try {
    contents = await Promise.all(chosen.map((key) => load(key)));
  } catch (error) {
    return body.replaceChildren(el("p.notice", error.message));
  }
  if (state.a !== chosen[0] || state.b !== chosen[1]) return;
  const scales = contents.map(scaleOf);
  const scale = { low: Math.min(scales[0].low, scales[1].low), high: Math.max(scales[0].high, scales[1].high), advantage: 1 };
  const right = new Map(contents[1].groups.map((group) => [group.sample, group]));
  const pairs = [];
  const outcomes = { both: 0, left: 0, right: 0, neither: 0 };
  for (const group of contents[0].groups) {
    const other = right.get(group.sample);
    if (!other || !group.rollouts.length || !other.rollouts.length) continue;
    const [one, two] = [isRight(group.rollouts[0], scale), isRight(other.rollouts[0], scale)];
    outcomes[one && two ? "both" : one ? "left" : two ? "right" : "neither"] += 1;
    if (state.flips !== "1" || one !== two) pairs.push([group, other]);
  }
  const counted = el("p.outcomes", { role: "status" }, [["both right", outcomes.both], ["only left right", outcomes.left], ["only right right", outcomes.right], ["neither", outcomes.neither]].map(([name, total]) => el("span", el("b", String(total)), ` ${name}`)));
  const cards = el("div.cards");
  watchHover(cards);
  showMore(cards, pairs, ([group, other]) => pairCard(group.sample, group, [
    { ...sides[0], title: sides[0].name, group, scale }, { ...sides[1], title: sides[1].name, group: other, scale },
  ]));
  body.replaceChildren(counted, pairs.length ? cards : el("p.empty", "The two steps share no such sample."));
}

// Fills a list page by page.
function showMore(list, items, make, most = NUM_COMPARED) {
  const place = list.querySelectorAll(":scope > article").length;
  list.append(...items.slice(place, place + most).map(make));
  const left = items.length - place - most;
  if (left <= 0) return;
  const button = el("button", { type: "button", class: "more", onclick: () => {
    button.remove();
    showMore(list, items, make, most);
  } }, `Show more (${left.toLocaleString("en")} left)`);
  list.append(button);
}
