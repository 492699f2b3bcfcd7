// Predictions on benchmarks: the text that was read, by which rule, and both verdicts.
"use strict";

const OUTCOMES = {
  "": ["all", () => true],
  disagree: ["strict and official disagree", (response) => disagrees(response)],
  right: ["right (strict)", ({ strict }) => isYes(strict)],
  wrong: ["wrong (strict)", ({ strict }) => !isYes(strict)],
  unread: ["no answer read", ({ span }) => !span],
};

function isYes(verdict) {
  return verdict === true || verdict >= 0.5;
}

function disagrees({ strict, official }) {
  return isYes(strict) !== isYes(official);
}

async function showBenchmarks(host) {
  const { benchmarks } = activeRun();
  const framed = (...content) => show(host, runHead(), section("benchmarks", "Benchmarks", "", content));
  if (!benchmarks.length) return framed(empty("There are no results."));
  if (!benchmarks.some(({ key }) => key === state.bench)) setState({ bench: benchmarks[0].key });
  const rows = benchmarks.map(({ key, name, label, items, accuracy }) => el(
    key === state.bench ? "tr.chosen" : "tr", rowHead(el("a", { href: linkTo({ bench: key }) }, name)), el("td", label),
    el("td", items), el("td", isNumber(accuracy) ? `${(100 * accuracy).toFixed(1)} %` : "\u2013"),
  ));
  const body = el("div");
  const list = table("results", ["Benchmark", "Weights", "Items", "Accuracy"], rows);
  framed(list, body);
  try {
    return showPredictions(body, await load(state.bench));
  } catch (error) {
    return show(body, problem(error));
  }
}

function showPredictions(host, { items, metrics }) {
  const list = el("div");
  const draw = () => {
    const pattern = searchPattern(state.bq);
    const keep = (OUTCOMES[state.only] || OUTCOMES[""])[1];
    const texts = ({ id, responses }) => [id, ...responses.flatMap(({ response, rule }) => [response, rule])];
    const isFound = (item) => !state.bq || texts(item).some((text) => matches(pattern, text));
    const shown = items.filter((item) => item.responses.some(keep) && isFound(item));
    const cards = el("div.cards");
    showPaged(cards, shown, (item) => predictionCard(item, pattern));
    show(list, el("p.count", { role: "status" }, `${shown.length} of ${count(items.length, "item")}`), cards);
  };
  const options = Object.entries(OUTCOMES).map(([value, [name]]) => [value, name]);
  const search = textBox("bq", "Search predictions, or /a pattern/", draw, { class: "wide" });
  const controls = el("div.controls", search, choice("only", "Show", options, draw));
  show(host, facts(metrics.map(([name, value]) => [number(value), name])), controls, list);
  draw();
}

function predictionCard({ id, subsets, responses }, pattern) {
  const badges = Object.entries(subsets || {}).map(([name, value]) => badge(`${name}: ${value}`, "quiet"));
  const said = el("div.said", responses.map((response) => predictionElement(response, pattern)));
  return el("article.group", el("header.card-head", el("span.sample", id), badges), said);
}

function predictionElement(prediction, pattern) {
  const { response, strict, official, outcome, rule, value, span, tokens, finish } = prediction;
  const verdict = (name, given) => {
    const word = typeof given === "boolean" ? (given ? "right" : "wrong") : number(given);
    return (given ?? null) !== null && badge(`${name} ${word}`, isYes(given) ? "good" : "bad");
  };
  const read = typeof value === "string" ? value : JSON.stringify(value ?? null);
  const text = { response, segments: [{ author: "policy", chars: [0, response.length] }] };
  return el(
    "section.prediction",
    el("header", verdict("strict", strict), verdict("official", official),
      disagrees(prediction) && badge("disagree", "warn"),
      outcome && badge(outcome, "quiet"), finish === "length" && badge("truncated", "warn"),
      rule && el("span.who", { title: "The rule that read the answer" }, rule),
      read !== "null" && el("span.read-as", "read as ", el("b", cut(read, 200))),
      el("span.grow"), isNumber(tokens) && el("span.who", count(tokens, "token"))),
    responseText(text, { span, pattern }),
  );
}
