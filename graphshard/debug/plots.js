// How the timeline and the memory curve are drawn: two plots over one time axis.
"use strict";

const GUTTER = 64; // room for labels of bytes
const HIGH = 26; // height of a row of spans
const GAP = 8; // between lanes
const NAME = 18; // height of the name above a lane
const PHASE = 20; // height of the row of phases
const AXIS = 22; // height of the row of times

const memory = data.memory;
const timeline = data.timeline ?? { spans: [], phases: [], seconds: memory.points.at(-1)?.time ?? 0 };
const end = (spans) => spans.reduce((last, span) => Math.max(last, span.end), 0);
const predicted = Math.max(timeline.seconds, end(timeline.spans), end(timeline.fsdp2?.spans ?? []), 1e-9);
const measured = timeline.measured?.spans ?? [];
// Measured lanes far from the predicted ones have a separate axis: `scale` is a second of theirs on the common one.
const scale = data.apart && measured.length ? predicted / end(measured) : 1;
const whole = Math.max(predicted, end(measured) * scale);
const view = { start: 0, end: whole };
const plots = [byId("timeline-plot"), byId("memory-plot")].filter(Boolean);
const fsdp2 = timeline.fsdp2?.spans.length ? timeline.fsdp2 : null; // none where the plan is the same
const several = measured.length > 0 || fsdp2 !== null;
const tracks = [
  ...(fsdp2 ? [makeTrack("FSDP2's order", fsdp2)] : []),
  makeTrack(measured.length ? "predicted" : "this plan", timeline),
  ...(measured.length ? [makeTrack(`measured on rank ${timeline.measured.rank}`, { spans: measured }, scale)] : []),
];
const lanes = tracks.flatMap((track) => track.lanes);
const spans = lanes.flatMap((lane) => lane.spans); // in order of lane and start
let chosen = null; // the selected span
let width = 800;

/** One schedule of the step: its phases, and lanes, compute first. Spans that overlap are put in rows below each other. */
function makeTrack(title, { spans: all, phases = [] }, factor = 1) {
  const plan = all === timeline.spans;
  const made = all.map((span) => ({ ...span, plan, measured: all === measured, from: span.start * factor, to: span.end * factor }));
  const names = [...new Set(["compute", ...all.map((span) => span.lane)])];
  const found = names.map((name) => {
    const own = made.filter((span) => span.lane === name).sort((left, right) => left.start - right.start);
    const ends = [];
    for (const span of own) {
      const free = ends.findIndex((end) => end <= span.start + 1e-12);
      span.row = free < 0 ? ends.length : free;
      ends[span.row] = span.end;
      span.laneName = several ? `${name}, ${title}` : name;
    }
    return { name: several ? `${name}, ${title}` : name, spans: own, rows: Math.max(1, ends.length) };
  });
  return { title, phases, lanes: found, scale: factor };
}

/** An SVG element. */
function shape(tag, attributes, ...children) {
  const node = document.createElementNS(plots[0].namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const atPixel = (time) => GUTTER + ((time - view.start) / (view.end - view.start)) * (width - GUTTER);
const atTime = (pixel) => view.start + ((pixel - GUTTER) / (width - GUTTER)) * (view.end - view.start);

// Drawing. At most one shape per pixel and row: short neighbours of one kind are drawn as one.

let pending = 0;

function redrawPlots() {
  pending ||= requestAnimationFrame(drawPlots);
}

function drawPlots() {
  pending = 0;
  width = plots[0].clientWidth;
  if (byId("timeline-plot")) drawTimeline(byId("timeline-plot"));
  if (byId("memory-plot")) drawMemory(byId("memory-plot"));
  byId("range").textContent = `${formatSeconds(view.start)} to ${formatSeconds(view.end)}`;
}

function drawTimeline(plot) {
  const parts = [];
  let top = 0;
  for (const track of tracks) {
    const began = top;
    if (track.phases.length) parts.push(...phaseBands(track, top));
    top += (track.phases.length ? PHASE : 0) + GAP;
    for (const lane of track.lanes) {
      parts.push(shape("text", { x: 8, y: top + NAME - 6, class: "lane" }, lane.name), ...laneShapes(lane, top + NAME));
      top += NAME + lane.rows * HIGH + GAP;
    }
    if (track.scale !== 1 || track === tracks.at(-1) || tracks.at(-1).scale !== 1 && track === tracks.at(-2)) {
      parts.unshift(...timeTicks(top, track.scale === 1 ? 0 : began, track.scale));
      top += AXIS;
    }
  }
  plot.style.height = `${top}px`;
  plot.replaceChildren(...parts);
}

function phaseBands(track, top) {
  const inView = ([, start, end]) => end > view.start && start < view.end;
  return track.phases.filter(inView).flatMap(([name, start, end]) => {
    const [left, right] = [Math.max(GUTTER, atPixel(start)), Math.min(width, atPixel(end))];
    const band = shape("rect", { x: left, y: top, width: Math.max(0, right - left - 1), height: PHASE, class: "band" });
    const label = fitting([several ? `${name}, ${track.title}` : name, name], right - left - 10);
    return [band, shape("text", { x: left + 6, y: top + 14 }, label)];
  });
}

/** Lines and labels of times; `factor` is a second of them on the common axis. */
function timeTicks(bottom, top = 0, factor = 1) {
  const [first, last] = [view.start / factor, view.end / factor];
  const step = niceStep((last - first) / Math.max(2, (width - GUTTER) / 110), 10);
  const parts = [];
  let free = 0; // where the next label may begin
  for (let n = Math.ceil(first / step); n * step <= last; n++) {
    const x = atPixel(n * step * factor);
    parts.push(shape("line", { x1: x, x2: x, y1: top, y2: bottom, class: "tick" }));
    const label = tickLabel(n * step, step, last);
    const left = Math.min(x - textWidth(label) / 2, width - textWidth(label) - 2);
    if (left < free) continue;
    free = left + textWidth(label) + 8;
    parts.push(shape("text", { x: left, y: bottom + 15 }, label));
  }
  return parts;
}

/** 1, 2 or 5 times a power of the base-10 (or, for bytes, 1024-based) unit; not below the given size. */
function niceStep(size, base) {
  const unit = base === 10 ? 1 : 1024 ** Math.floor(Math.log(Math.max(size, 1)) / Math.log(1024));
  const power = unit * 10 ** Math.floor(Math.log10(size / unit));
  return [1, 2, 5, 10].map((n) => n * power).find((step) => step >= size * 0.999);
}

/** A time with the digits that tell it from its neighbours. */
function tickLabel(time, step, last) {
  const [factor, unit] = last < 1e-3 ? [1e6, "us"] : last < 1 ? [1e3, "ms"] : [1, "s"];
  const digits = Math.max(0, -Math.floor(Math.log10(step * factor * 1.001)));
  return `${(time * factor).toFixed(digits)} ${unit}`;
}

function laneShapes(lane, top) {
  const groups = [];
  const open = new Map(); // kind and row -> the group that short spans may still join
  for (const span of lane.spans) {
    if (span.to < view.start || span.from > view.end) continue;
    const [left, right] = [Math.max(GUTTER, atPixel(span.from)), Math.min(width, atPixel(span.to))];
    const key = `${span.kind} ${span.row}`;
    const last = open.get(key);
    const short = right - left < 1.5 && !isMarked(span);
    if (short && last && last.short && left - last.right < 1 && right - last.left < 8) {
      last.right = Math.max(last.right, right);
      last.spans.push(span);
      continue;
    }
    const group = { left, right, short, spans: [span] };
    groups.push(group);
    open.set(key, group);
  }
  const order = (group) => (isMarked(group.spans[0]) ? 2 : group.spans[0].kind === "exposed" ? 1 : 0);
  return groups.sort((left, right) => order(left) - order(right)).map((group) => spanShape(group, top));
}

/** Marked are the selected span and others of the same bucket. */
function isMarked(span) {
  return chosen !== null && (span === chosen || (span.name === chosen.name && bucketRows.has(span.name)));
}

function spanShape({ left, right, spans: own }, top) {
  const span = own[0];
  const y = top + span.row * HIGH;
  const size = { x: left, y, width: Math.max(right - left, 1.5), height: HIGH - 2, class: span.kind };
  const mark = span === chosen ? " chosen" : isMarked(span) ? " same" : "";
  const node = shape("g", { class: `span${mark}`, "data-count": own.length }, shape("rect", size));
  if (own.length === 1 && span.kind !== "exposed") {
    const label = fitting(labelsOf(span), right - left - 10);
    if (label) node.append(shape("text", { x: left + 5, y: y + 16 }, label));
  }
  if (own.some((other) => other.critical)) {
    node.append(shape("line", { x1: left, x2: left + size.width, y1: y + HIGH, y2: y + HIGH, class: "critical" }));
  }
  node.spans = own;
  return node;
}

/** What may stand on a span, the longest first. The colour says the kind, and the band above the phase. */
function labelsOf(span) {
  const kind = `${span.kind} `;
  const name = span.name.startsWith(kind) ? span.name.slice(kind.length) : span.name;
  return [name, name.replace(/ in (forward|backward)$/, ""), ...(span.kind === "compute" ? [name.split(" ")[0]] : [])];
}

const pen = document.createElement("canvas").getContext("2d");
pen.font = "12px system-ui, sans-serif"; // as in the style sheet

function textWidth(text) {
  return pen.measureText(text).width;
}

/** The first of some texts that fits; "" if none does. */
function fitting(all, pixels) {
  return all.find((text) => textWidth(text) <= pixels) ?? "";
}

function drawMemory(plot) {
  const bottom = plot.clientHeight - AXIS;
  const most = Math.max(memory.peak_bytes, ...(timeline.measured?.curve ?? []).map(([, bytes]) => bytes)) * 1.12 || 1;
  const atByte = (bytes) => bottom - (bytes / most) * (bottom - 4);
  const parts = timeTicks(bottom);
  const step = niceStep(most / 5, 1024);
  for (let bytes = 0; bytes < most; bytes += step) {
    const y = atByte(bytes);
    parts.push(shape("line", { x1: GUTTER, x2: width, y1: y, y2: y, class: "tick" }));
    if (bytes) parts.push(shape("text", { x: GUTTER - 8, y: y + 4, "text-anchor": "end" }, formatBytes(bytes)));
  }
  if (chosen) {
    const [left, right] = [chosen.from, chosen.to].map((time) => Math.min(width, Math.max(GUTTER, atPixel(time))));
    parts.push(shape("rect", { x: left, y: 0, width: Math.max(right - left, 1), height: bottom, class: "mark" }));
  }
  parts.push(...stackedGroups(atByte, bottom));
  parts.push(shape("path", { d: curve(atByte, bottom), class: memory.groups.length ? "curve over" : "curve" }));
  const byShare = timeline.measured?.curve ?? []; // stretched to the predicted step
  const seen = byShare.map(([share, bytes]) => [share * timeline.seconds, bytes]).filter(([time]) => time >= view.start && time <= view.end);
  const dots = seen.map(([time, bytes]) => `${atPixel(time).toFixed(1)} ${atByte(bytes).toFixed(1)}`);
  if (dots.length) parts.push(shape("path", { d: `M${dots.join("L")}`, class: "curve over measured", "stroke-dasharray": "5 3" }));
  const [x, y] = [atPixel(memory.peak_time), atByte(memory.peak_bytes)];
  if (x >= GUTTER && x <= width) {
    const label = `peak ${formatBytes(memory.peak_bytes)} at ${formatSeconds(memory.peak_time)}`;
    const room = 1.1 * textWidth(label) + 8; // it is bold
    const anchor = x + room > width ? "end" : "start";
    parts.push(shape("line", { x1: x, x2: x, y1: y, y2: bottom, class: "peak", "stroke-dasharray": "4 3" }));
    parts.push(shape("circle", { cx: x, cy: y, r: 4, class: "peak" }));
    const place = { x: x + (anchor === "end" ? -8 : 8), y: y - 5, "text-anchor": anchor, class: "peak-text" };
    if (anchor === "start" || x - room > GUTTER) parts.push(shape("text", place, label));
  }
  plot.replaceChildren(...parts);
}

/** Areas of the groups in view, stacked; of the changes within a pixel, the one with the most bytes is drawn. */
function stackedGroups(atByte, bottom) {
  const { groups } = memory;
  const times = memory.points.map((point) => point.time);
  const next = groups.map(() => 0);
  const now = groups.map(() => 0);
  const columns = []; // [pixel, the upper borders of all groups]
  for (const [index, time] of times.entries()) {
    groups.forEach((group, i) => {
      while (next[i] < group.points.length && group.points[next[i]][0] <= time) now[i] = group.points[next[i]++][1];
    });
    const following = times[index + 1] ?? Infinity;
    if (following < view.start || time > view.end) continue;
    let total = 0;
    const borders = now.map((bytes) => (total += bytes));
    const pixel = Math.round(Math.max(GUTTER, atPixel(time)));
    const last = columns.at(-1);
    if (last && last[0] === pixel && last[1].at(-1) >= total) continue;
    if (last && last[0] === pixel) columns.pop();
    columns.push([pixel, borders]);
  }
  const right = Math.max(GUTTER, Math.min(width, atPixel(timeline.seconds || whole)));
  return groups.map((group, i) => {
    let upper = "";
    let lower = "";
    columns.forEach(([pixel, borders], n) => {
      const until = columns[n + 1]?.[0] ?? right;
      const [high, low] = [atByte(borders[i]), i ? atByte(borders[i - 1]) : bottom].map((y) => y.toFixed(1));
      upper += `${n ? "L" : "M"}${pixel} ${high}H${until}`;
      lower = `L${until} ${low}H${pixel}${lower}`;
    });
    return shape("path", { d: columns.length ? `${upper}${lower}Z` : "", class: `group m${group.color}`, "data-group": group.name });
  });
}

/** The step curve in view, closed along the bottom. */
function curve(atByte, bottom) {
  const first = Math.max(0, pointAt(view.start));
  let path = `M${GUTTER} ${bottom}`;
  for (let i = first; i < memory.points.length && memory.points[i].time <= view.end; i++) {
    const { time, num_bytes: bytes } = memory.points[i];
    path += `H${Math.max(GUTTER, atPixel(time)).toFixed(1)}V${atByte(bytes).toFixed(1)}`;
  }
  const end = timeline.seconds || whole; // a measured step may be longer
  return `${path}H${Math.max(GUTTER, Math.min(width, atPixel(end)))}V${bottom}Z`;
}

/** Index of the last point at or before a time; -1 if there is none. */
function pointAt(time) {
  let low = 0;
  let high = memory.points.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (memory.points[middle].time <= time) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}
