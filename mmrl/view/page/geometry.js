// Pictures and video frames with gold and predicted boxes, points, spans and tool crops drawn over them as SVG.
"use strict";

const MOST_WIDTH = 460; // pixels of a picture in a card; a click shows it larger

// The colour of a prediction by its reward between the least and the largest of the group's step: red, amber, blue.
function rewardColour(value, low, high) {
  if (value === null || value === undefined) return "var(--muted)";
  const share = high > low ? Math.min(1, Math.max(0, (value - low) / (high - low))) : 1;
  const hue = share < 0.5 ? 4 + 76 * share : 42 + 420 * (share - 0.5);
  return `hsl(${Math.round(hue)} 85% ${Math.round(54 + 6 * share)}%)`;
}

// Returns what a card draws: gold marks, and those of each rollout with its number and colour, and the crops of tools.
function collectMarks(group, scale) {
  const marks = group.marks.map((mark) => ({ ...mark, kind: "gold", rollout: null }));
  for (const rollout of group.rollouts) {
    const stroke = rewardColour(rollout.total, scale.low, scale.high);
    for (const mark of rollout.marks) marks.push({ ...mark, kind: "predicted", rollout: rollout.rollout, stroke });
    let order = 0;
    for (const segment of rollout.segments) {
      if (!segment.crop) continue;
      order += 1;
      const crop = { shape: "box", medium: 0, at: segment.crop, label: String(order), frame: null };
      marks.push({ ...crop, kind: "crop", rollout: rollout.rollout, stroke });
    }
  }
  return marks;
}

// Returns a picture or a strip of frames with its marks. Where nobody knows the size, any shape will do.
function mediaElement(given, index, marks) {
  const medium = given.width && given.height ? given : { ...given, width: 400, height: 300, unknown: true };
  const own = marks.filter((mark) => mark.medium === index);
  if (medium.kind === "video") return videoElement(medium, own);
  const drawn = own.filter((mark) => mark.shape !== "span");
  return el("figure.medium", frameElement(medium, medium.frames[0], drawn), mediumCaption(medium));
}

function videoElement(medium, marks) {
  const frames = medium.frames.map((frame, index) => {
    const drawn = marks.filter((mark) => mark.shape !== "span" && (mark.frame === null || mark.frame === index));
    const time = frame.second === null ? `frame ${index + 1}` : seconds(frame.second);
    return el("div.frame", frameElement(medium, frame, drawn), el("span.time", time));
  });
  const spans = marks.filter((mark) => mark.shape === "span");
  return el("figure.medium.video",
    el("div.strip", { tabindex: 0, "aria-label": `${frames.length} frames of ${medium.name}` }, frames),
    spans.length ? timeline(medium, spans) : null,
    mediumCaption(medium),
  );
}

function mediumCaption(medium) {
  const [width, height] = medium.original || [medium.width, medium.height];
  const resized = width !== medium.width || height !== medium.height;
  return el("figcaption",
    el("span.name", medium.name),
    !medium.unknown && el("span", resized ? `${width}\u00d7${height} \u2192 ${medium.width}\u00d7${medium.height}` : `${medium.width}\u00d7${medium.height}`),
    medium.kind === "video" && el("span", count(medium.frames.length, "frame")),
  );
}

function frameElement(medium, frame, marks, large = false) {
  const url = frame ? mediaUrl(frame.src) : null;
  const shown = el("div.picture", { style: { "aspect-ratio": `${medium.width} / ${medium.height}` } });
  if (!large) {
    const width = medium.kind === "video" ? 168 : Math.min(MOST_WIDTH, Math.max(medium.width, 240));
    shown.style.width = `${width}px`;
    if (medium.width * 2 < width) shown.classList.add("enlarged");
  }
  const missing = (why) => shown.prepend(el("div.missing", why));
  if (url) {
    const image = el("img", { src: url, alt: `${medium.name}, as the model saw it`, loading: "lazy", decoding: "async", draggable: "false" });
    image.addEventListener("error", () => {
      image.remove();
      missing("The picture cannot be read");
    });
    shown.append(image);
  } else {
    missing(medium.problem || "No picture was kept");
  }
  if (medium.problem && url) shown.append(el("div.problem", medium.problem));
  shown.append(overlay(medium, marks));
  if (!large) shown.addEventListener("click", () => enlarge(medium, frame, marks));
  return shown;
}

function overlay(medium, marks) {
  const drawing = svg("svg.marks", { viewBox: `0 0 ${medium.width} ${medium.height}`, preserveAspectRatio: "none", "aria-hidden": "true",
  });
  // Gold first, so that thin predictions lie on top of it.
  const ordered = [...marks].sort((one, other) => (one.kind === "gold" ? 0 : 1) - (other.kind === "gold" ? 0 : 1));
  for (const mark of ordered) drawing.append(markElement(mark, medium));
  return drawing;
}

function markElement(mark, medium) {
  const group = svg("g", {
    class: `mark ${mark.kind}`,
    dataset: mark.rollout === null ? {} : { rollout: mark.rollout },
  });
  const [x, y] = [mark.at[0] * medium.width, mark.at[1] * medium.height];
  const who = mark.kind === "gold" ? "target" : mark.kind === "crop" ? `crop ${mark.label} of response ${mark.rollout}` : `response ${mark.rollout}`;
  group.append(svg("title", mark.label && mark.kind !== "crop" ? `${who}: ${mark.label}` : who));
  const drawn = (shape) => {
    if (mark.stroke) shape.style.stroke = mark.stroke;
    group.append(shape);
  };
  if (mark.shape === "box") {
    const place = { x, y, width: Math.max(0, (mark.at[2] - mark.at[0]) * medium.width), height: Math.max(0, (mark.at[3] - mark.at[1]) * medium.height) };
    group.append(svg("rect", { ...place, class: "halo" }));
    drawn(svg("rect", { ...place, class: "shape" }));
  } else {
    const arm = 0.025 * Math.max(medium.width, medium.height);
    const cross = `M${x - arm} ${y - arm}L${x + arm} ${y + arm}M${x - arm} ${y + arm}L${x + arm} ${y - arm}`;
    group.append(svg("path", { d: cross, class: "halo" }));
    drawn(svg("path", { d: cross, class: "shape" }));
  }
  if (mark.label) {
    const size = 0.035 * Math.max(medium.width, medium.height);
    const text = svg("text", { x: x + size * 0.25, y: y - size * 0.3 < size ? y + size : y - size * 0.3, "font-size": size }, mark.label);
    if (mark.stroke) text.style.fill = mark.stroke;
    group.append(text);
  }
  return group;
}

// Spans as bars over a time line: the target on top, then a bar for each response.
function timeline(medium, spans) {
  const times = medium.frames.map((frame) => frame.second ?? 0);
  const end = Math.max(...times, ...spans.map((mark) => mark.at[1]), 0.001);
  const rows = [...new Set(spans.map((mark) => mark.rollout))].sort((one, other) => (one ?? -1) - (other ?? -1));
  const height = rows.length * 7 + 4;
  const drawing = svg("svg.timeline.marks", { viewBox: `0 0 1000 ${height}`, preserveAspectRatio: "none", style: { height: `${height}px` } });
  for (const second of times) drawing.append(svg("line", { x1: (second / end) * 1000, x2: (second / end) * 1000, y1: 0, y2: height, class: "tick" }));
  for (const mark of spans) {
    const begin = Math.max(0, (mark.at[0] / end) * 1000);
    const group = svg("g", { class: `mark ${mark.kind}`, dataset: mark.rollout === null ? {} : { rollout: mark.rollout } });
    const who = mark.rollout === null ? "target" : `response ${mark.rollout}`;
    group.append(svg("title", `${who}: ${seconds(mark.at[0])} \u2013 ${seconds(mark.at[1])}`));
    const bar = svg("rect.bar", { x: begin, y: rows.indexOf(mark.rollout) * 7 + 3, rx: 2,
      width: Math.max(3, (mark.at[1] / end) * 1000 - begin), height: mark.kind === "gold" ? 5 : 4,
    });
    if (mark.stroke) bar.style.fill = mark.stroke;
    group.append(bar);
    drawing.append(group);
  }
  return el("div.times", { role: "img", "aria-label": "Spans in time" }, drawing,
    el("div.ends", el("span", seconds(0)), el("span", seconds(end))),
  );
}

function enlarge(medium, frame, marks) {
  const dialog = el("dialog.large", { "aria-label": medium.name, onclick: () => dialog.close() });
  const shown = frameElement(medium, frame, marks, true);
  const scale = Math.min((0.92 * innerWidth) / medium.width, (0.86 * innerHeight) / medium.height);
  shown.style.width = `${Math.round(scale * medium.width)}px`;
  dialog.append(shown, mediumCaption(medium));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
