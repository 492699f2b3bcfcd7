// Predictions on benchmarks: the text that was read for the answer, by which rule, and both scores.
"use strict";

async function showBenchmarks(host) {
  const run = activeRun();
  if (!run.benchmarks.some(({ key }) => key === state.bench)) setState({ bench: (run.benchmarks[0] || { key: "" }).key });
  const items = el("div", { id: "bench-items" });
  const rows = run.benchmarks.map((bench) => el(
    "tr", { class: bench.key === state.bench ? "chosen" : "" },
    el("th", { scope: "row" }, el("a", { href: linkTo({ bench: bench.key }) }, bench.name)), el("td.left", bench.label),
    el("td", count(bench.items, "item")), el("td", isNumber(bench.accuracy) ? `${(100 * bench.accuracy).toFixed(1)} %` : "\u2013"),
  ));
  const list = el("div.scroll", el("table.results", el("thead", el("tr", ["Benchmark", "Weights", "Size", "Accuracy"].map((head) => el("th", { scope: "col" }, head)))), el("tbody", rows)));
  host.replaceChildren(runHead(run), section("benchmarks", "Benchmarks", rows.length ? [list, items] : el("p.empty", "This run has no benchmark results.")));
  if (!rows.length) return;
  try {
    drawBenchmark(items, await load(state.bench));
  } catch (error) {
    items.replaceChildren(el("p.notice", error.message));
  }
}

const OUTCOMES = {
  "": ["all", () => true],
  disagree: ["strict and official disagree", (response) => isYes(response.strict) !== isYes(response.official)],
  right: ["right (strict)", (response) => isYes(response.strict)],
  wrong: ["wrong (strict)", (response) => !isYes(response.strict)],
  unread: ["no answer read", (response) => !isNumber(response.start)],
};

function isYes(verdict) {
  return verdict === true || (isNumber(verdict) && verdict >= 0.5);
}

function drawBenchmark(host, content) {
  const list = el("div");
  const draw = () => {
    const pattern = searchPattern(state.bq);
    const keep = (OUTCOMES[state.only] || OUTCOMES[""])[1];
    const texts = (item) => [item.id, item.question, ...item.responses.flatMap((response) => [response.response, response.rule])];
    const shown = content.items.filter((item) => item.responses.some(keep) && (!state.bq || texts(item).some((text) => matches(pattern, text))));
    const cards = el("div.cards");
    showMore(cards, shown, (item) => predictionCard(item, pattern));
    list.replaceChildren(el("p.count", { role: "status" }, `${shown.length} of ${count(content.items.length, "item")}`), cards);
  };
  const changed = (changes) => {
    setState(changes);
    draw();
  };
  const search = el("input", { type: "search", id: "bq", class: "wide", placeholder: "Search predictions, or /a pattern/", "aria-label": "Search predictions", oninput: wait(150, (event) => changed({ bq: event.target.value })) });
  search.value = state.bq;
  host.replaceChildren(
    el("p.facts", content.metrics.map(([name, value]) => el("span", el("b", number(value)), ` ${name}`))),
    el("div.controls", search, choice("only", "Show", Object.entries(OUTCOMES).map(([value, [name]]) => [value, name]), changed)),
    list,
  );
  draw();
}

function predictionCard(item, pattern) {
  const responses = item.responses.map((response) => {
    const read = isNumber(response.start) && isNumber(response.end) ? [response.start, response.end] : null;
    const shown = { response: response.response, segments: [], thinking: null, answer_chars: null, tokens: null };
    const verdict = (name, value) => value !== null && value !== undefined && badge(`${name} ${typeof value === "boolean" ? (value ? "right" : "wrong") : number(value)}`, isYes(value) ? "good" : "bad");
    return el("section.prediction",
      el("header", verdict("strict", response.strict), verdict("official", response.official), isYes(response.strict) !== isYes(response.official) && badge("disagree", "warn"),
        response.outcome && badge(response.outcome, "quiet"), response.finish === "length" && badge("truncated", "warn"),
        response.rule && el("span.rule", { title: "The rule that read the answer" }, response.rule),
        response.value !== null && response.value !== undefined && el("span.answer-text", "read as ", el("b", cut(typeof response.value === "object" ? JSON.stringify(response.value) : String(response.value), 200))),
        el("span.grow"), isNumber(response.tokens) && el("span.length", count(response.tokens, "token"))),
      responseText(shown, { span: read, pattern }),
    );
  });
  const subsets = Object.entries(item.subsets || {}).map(([name, value]) => badge(`${name}: ${value}`, "quiet"));
  return el("article.group",
    el("header.card-head", el("span.sample", item.id), subsets),
    el("div", { class: `columns ${item.media.length || item.question ? "" : "alone"}` },
      (item.media.length > 0 || item.question) && el("div.seen", item.media.map((medium, place) => mediaElement(medium, place, [])), questionElement({ question: item.question, target: item.target, prompt: "" }, pattern)),
      el("div.said", responses)),
  );
}
