// One sample over the steps of a run; and two steps, of one run or of two, beside each other.
"use strict";

async function showSample(host) {
  const run = activeRun();
  const body = el("div.cards", empty("Reading the steps\u2026"));
  watchHover(body);
  const back = el("p.hint", el("a", { href: linkTo({ view: "run", sample: "" }) }, "\u2190 back to the rollouts"));
  show(host, section("sample", state.sample, back, body));
  const draws = [];
  const problems = [];
  for (const place of run.samples[state.sample] || []) {
    const step = run.steps[place];
    try {
      const { groups, scale } = await load(step.key);
      for (const group of groups.filter(({ sample }) => sample === state.sample)) draws.push({ step, group, scale });
    } catch (error) {
      problems.push(problem(error));
    }
  }
  if (!body.isConnected) return;
  if (!draws.length) return show(body, empty("No kept step has this sample."), problems);
  show(body, problems, trend(draws), draws.map((side) => pairCard(side.step.label, [side])));
}

// Rewards at each step at which a sample was drawn, and a line through their means.
function trend(draws) {
  const all = draws.flatMap(({ group }) => totals(group)).filter(isNumber);
  const [low, high] = [Math.min(0, ...all), Math.max(1, ...all)];
  const width = Math.max(240, 80 * draws.length);
  const y = (value) => 104 - (92 * (value - low)) / (high - low);
  const x = (place) => 70 + ((width - 110) * place) / Math.max(1, draws.length - 1);
  const means = draws.map(({ group }) => mean(totals(group)));
  const points = means.map((value, place) => (isNumber(value) ? `${x(place)},${y(value)}` : "")).join(" ");
  const axes = [low, (low + high) / 2, high].map((value) => [
    svg("line.axis", { x1: 30, x2: width, y1: y(value), y2: y(value) }),
    svg("text.tick", { x: 24, y: y(value) + 4 }, number(value, 2)),
  ]);
  const marks = draws.map(({ step, group, scale }, place) => [
    totals(group).filter(isNumber).map((total) => svg("circle", {
      cx: x(place), cy: y(total), r: 4, style: { fill: rewardColour(total, scale.low, scale.high) },
    })),
    svg("text", { x: x(place), y: 124 }, step.label),
  ]);
  const box = { viewBox: `0 0 ${width} 128`, width, height: 128, "aria-label": "Reward over the steps" };
  return el("div.scroll", svg("svg.trend", box, axes, svg("polyline", { points }), marks));
}

// A card of the responses of one or two steps. A side: {step, group, scale, title}.
function pairCard(title, sides) {
  const { group } = sides[0];
  const names = sides.length > 1 ? ["left ", "right "] : [""];
  const marks = sides.flatMap((side, place) => (
    collectMarks(side.group, side.scale, names[place]).filter(({ kind }) => place === 0 || kind !== "gold")
  ));
  const columns = sides.map((side, place) => {
    const options = { scale: side.scale, side: names[place] };
    const responses = side.group.rollouts.map((rollout) => responseElement(rollout, options));
    return el("div.side", side.title && el("h4", side.title), responses);
  });
  const head = el("header.card-head", el("span.sample", title), el("span.who", group.task));
  const body = el("div.columns", seenElement(group, marks, null), el("div.said.sides", columns));
  return el(sides.length > 1 ? "article.group.pair" : "article.group", head, body);
}

// The first choice: the last step of each of two runs; with one run, its first and last. Steps of two kinds have
// other samples.
function defaultPair(steps) {
  const [first, second] = index.runs;
  for (const wanted of ["test", "validation", "train"]) {
    const [left, right] = [first, second || first].map((run) => (
      steps.filter((one) => one.run === run && one.step.kind === wanted).map(({ step }) => step.key)
    ));
    if (second ? left.length && right.length : left.length > 1) return { a: left.at(second ? -1 : 0), b: right.at(-1) };
  }
  return { a: steps[0].step.key, b: steps.at(-1).step.key };
}

async function showCompare(host) {
  const many = index.runs.length > 1;
  const name = (run, step) => (many ? `${run.name}: ${step.label}` : step.label);
  const steps = index.runs.flatMap((run) => run.steps.map((step) => ({ run, step, name: name(run, step) })));
  const framed = (...content) => show(host, section("compare", "Compare", "The same samples, side by side.", content));
  if (steps.length < 2) return framed(empty("There are not two steps to compare."));
  const find = (wanted) => steps.find(({ step }) => step.key === wanted);
  const { a, b } = defaultPair(steps);
  setState({ a: find(state.a) ? state.a : a, b: find(state.b) ? state.b : b });
  const body = el("div");
  const change = () => comparePair(body, steps);
  const options = steps.map((one) => [one.step.key, one.name]);
  const title = "First responses of which one is right: by its verdict, else with at least half of the largest reward.";
  const flips = checkBox("flips", "Only flips", change, { title });
  // The other side follows to a step of the same kind.
  const side = (name, label, other) => choice(name, label, options, () => {
    const { kind } = find(state[name]).step;
    const { run, step } = find(state[other]);
    const same = steps.filter((one) => one.step.kind === kind);
    if (step.kind !== kind) setState({ [other]: (same.findLast((one) => one.run === run) || same.at(-1)).step.key });
    byId(`f-${other}`).value = state[other];
    change();
  });
  framed(el("div.controls", side("a", "Left", "b"), side("b", "Right", "a"), flips), body);
  return change();
}

async function comparePair(body, steps) {
  const keys = [state.a, state.b];
  const chosen = keys.map((key) => steps.find(({ step }) => step.key === key));
  let contents;
  try {
    contents = await Promise.all(keys.map((key) => load(key)));
  } catch (error) {
    return show(body, problem(error));
  }
  if (state.a !== keys[0] || state.b !== keys[1]) return null;
  const [one, other] = contents.map(({ scale }) => scale);
  const scale = { low: Math.min(one.low, other.low), high: Math.max(one.high, other.high) };
  const isRight = ({ is_correct: verdict, total }) => verdict ?? total >= (scale.low + scale.high) / 2;
  const others = new Map(contents[1].groups.map((group) => [group.sample, group]));
  const counts = { "right on both": 0, "right on the left only": 0, "right on the right only": 0, "wrong on both": 0 };
  const pairs = [];
  for (const group of contents[0].groups) {
    const both = [group, others.get(group.sample)];
    if (!both.every((one) => one && one.rollouts.length)) continue;
    const [left, right] = both.map(({ rollouts }) => isRight(rollouts[0]));
    counts[Object.keys(counts)[left ? (right ? 0 : 1) : right ? 2 : 3]] += 1;
    if (state.flips !== "1" || left !== right) pairs.push(both);
  }
  const cards = el("div.cards");
  watchHover(cards);
  const side = (group, place) => ({ step: chosen[place].step, title: chosen[place].name, group, scale });
  showPaged(cards, pairs, (both) => pairCard(both[0].sample, both.map(side)));
  const outcomes = facts(Object.entries(counts).map(([words, times]) => [times, words]));
  return show(body, outcomes, pairs.length ? cards : empty("The two steps share no such sample."));
}
