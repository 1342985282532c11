// How the timeline and the memory curve are used: one zoom and one selected span for both.
"use strict";

// Zoom and pan.

function setView(start, length) {
  length = Math.min(Math.max(length, whole * 1e-6), whole);
  view.start = Math.min(Math.max(start, 0), whole - length);
  view.end = view.start + length;
  hideTip();
  redrawPlots();
}

function zoom(factor, around) {
  const length = view.end - view.start;
  const inView = chosen && chosen.to > view.start && chosen.from < view.end;
  around ??= inView ? (chosen.from + chosen.to) / 2 : (view.start + view.end) / 2;
  const next = Math.min(Math.max(length * factor, whole * 1e-6), whole);
  setView(around - ((around - view.start) / length) * next, next);
}

function pan(share) {
  const length = view.end - view.start;
  setView(view.start + share * length, length);
}

/** Make a span visible, and wide enough to be seen. */
function bringIntoView(span) {
  const duration = span.to - span.from;
  let length = view.end - view.start;
  if ((duration / length) * (width - GUTTER) < 4) length = Math.max(duration, whole * 1e-6) * 40;
  if (length !== view.end - view.start || span.from < view.start || span.to > view.end) {
    length = Math.max(length, duration);
    setView((span.from + span.to - length) / 2, length);
  }
}

// Selection.

function choose(span) {
  chosen = span;
  redrawPlots();
  const aside = byId("span");
  if (!span) aside.replaceChildren(element("p", "muted", "Select a span or a bucket to see it here."));
  else aside.replaceChildren(element("h3", "", span.name), factsOf(span), element("p", "detail", detailOf(span)));
}

function detailOf(span) {
  return [criticalText(span), span.detail].filter(Boolean).join("\n");
}

function factsOf(span) {
  const facts = { Kind: span.kind, Lane: span.laneName, Start: formatSeconds(span.start) };
  facts.Duration = formatSeconds(span.end - span.start);
  if (span.slack !== null) facts.Slack = formatSeconds(span.slack);
  if (memory && span.plan) facts["Memory at start"] = formatBytes(memory.points[pointAt(span.start)]?.num_bytes ?? 0);
  const list = element("dl", "");
  for (const [name, value] of Object.entries(facts)) list.append(element("dt", "", name), element("dd", "", value));
  return list;
}

function pick(span) {
  choose(span);
  if (span) bringIntoView(span);
  selectBucket(span && bucketRows.has(span.name) ? span.name : null);
}

document.addEventListener("bucket", (event) => {
  if (event.detail === null) {
    if (chosen && bucketRows.has(chosen.name)) choose(null);
    return;
  }
  if (chosen?.name === event.detail) return;
  const span = spans.find((other) => other.plan && other.name === event.detail && other.lane !== "compute");
  choose(span ?? null);
  if (span) bringIntoView(span);
});

/** The neighbour of the selected span in its lane; without a selection, the first in view. */
function stepSpan(step) {
  const lane = lanes.find((other) => other.spans.includes(chosen)) ?? lanes[0];
  const index = lane.spans.indexOf(chosen);
  return index < 0 ? lane.spans.find((span) => span.to > view.start) : lane.spans[index + step];
}

/** The span of the next lane above or below that is nearest in time. */
function stepLane(step) {
  const index = lanes.findIndex((lane) => lane.spans.includes(chosen));
  const lane = lanes[index < 0 ? 0 : index + step];
  const middle = chosen ? (chosen.from + chosen.to) / 2 : view.start;
  const distance = (span) => Math.max(span.from - middle, middle - span.to, 0);
  return lane?.spans.reduce((best, span) => (best && distance(best) <= distance(span) ? best : span), null);
}

function nextExposed() {
  const all = spans.filter((span) => span.kind === "exposed" && (span.plan || chosen?.laneName === span.laneName));
  return all.find((span) => span.from > (chosen?.from ?? -1)) ?? all[0];
}

const KEYS = {
  "+": () => zoom(0.5),
  "=": () => zoom(0.5),
  "-": () => zoom(2),
  0: () => setView(0, whole),
  ArrowLeft: () => pan(-0.15),
  ArrowRight: () => pan(0.15),
  "[": () => pickAndTell(stepSpan(-1)),
  "]": () => pickAndTell(stepSpan(1)),
  ArrowUp: () => pickAndTell(stepLane(-1)),
  ArrowDown: () => pickAndTell(stepLane(1)),
  e: () => pickAndTell(nextExposed()),
  Escape: () => (hideTip(), pick(null)),
};

function pickAndTell(span) {
  if (!span) return;
  pick(span);
  cancelAnimationFrame(pending);
  drawPlots();
  const node = document.querySelector(".span.chosen rect");
  if (!node) return;
  const box = node.getBoundingClientRect();
  showTip(describe(span), box.left + Math.min(box.width, 40) / 2, box.bottom);
}

// The tooltip.

function describe(span) {
  const times = `start ${formatSeconds(span.start)}, duration ${formatSeconds(span.end - span.start)}`;
  const name = span.kind === "exposed" ? `waiting for ${span.name}` : span.name;
  return [name, times, detailOf(span)].filter(Boolean).join("\n");
}

/** What a longer span would do to the step. */
function criticalText(span) {
  if (span.critical) return "on the critical path: if it takes longer, so does the step";
  return span.slack ? `could be ${formatSeconds(span.slack)} later or longer, and the step no longer` : "";
}

function showTip(text, x, y) {
  const tip = byId("tooltip");
  tip.textContent = text;
  tip.hidden = false;
  const { width: wide, height: high } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - wide - 4))}px`;
  tip.style.top = `${y + 14 + high > innerHeight ? Math.max(4, y - high - 40) : y + 14}px`;
}

function hideTip() {
  byId("tooltip").hidden = true;
}

function tipFor(event) {
  const own = event.target.closest(".span")?.spans;
  if (own?.length === 1) return describe(own[0]);
  const range = own && `${formatSeconds(own[0].start)} to ${formatSeconds(own.at(-1).end)}`;
  if (own) return `${own.length} spans from ${range}; zoom in`;
  const pixel = event.clientX - event.currentTarget.getBoundingClientRect().left;
  if (event.currentTarget.id !== "memory-plot" || pixel < GUTTER) return "";
  const time = atTime(pixel);
  const group = event.target.dataset.group;
  const held = memory.groups.find((other) => other.name === group)?.points.findLast(([at]) => at <= time)?.[1];
  const total = `${formatBytes(memory.points[pointAt(time)]?.num_bytes ?? 0)}\nat ${formatSeconds(time)}`;
  return held === undefined ? total : `${group}: ${formatBytes(held)} of ${total}`;
}

// Events.

byId("zoom").addEventListener("click", (event) => {
  const key = event.target.closest("button")?.dataset.key;
  if (key) KEYS[key]();
});

for (const plot of plots) {
  let drag = null;
  plot.addEventListener("keydown", (event) => {
    if (isTyping(event) || !Object.hasOwn(KEYS, event.key)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  plot.addEventListener("wheel", (event) => {
    const wanted = event.ctrlKey || event.metaKey || document.activeElement === plot;
    const atLimit = event.deltaY > 0 && view.end - view.start >= whole;
    if (!wanted || (atLimit && !event.ctrlKey)) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / width);
    else zoom(Math.exp(event.deltaY / 300), atTime(event.clientX - plot.getBoundingClientRect().left));
  }, { passive: false });
  plot.addEventListener("pointerdown", (event) => {
    if (event.button === 0) drag = { x: event.clientX, start: view.start, target: event.target, moved: false };
  });
  plot.addEventListener("pointermove", (event) => {
    if (drag && (drag.moved || Math.abs(event.clientX - drag.x) > 4)) {
      if (!drag.moved) plot.setPointerCapture(event.pointerId);
      drag.moved = true;
      const length = view.end - view.start;
      setView(drag.start - ((event.clientX - drag.x) / (width - GUTTER)) * length, length);
      return;
    }
    const text = tipFor(event);
    if (text) showTip(text, event.clientX, event.clientY);
    else hideTip();
  });
  plot.addEventListener("pointerup", () => {
    const own = drag && !drag.moved ? drag.target.closest(".span")?.spans : null;
    if (own?.length === 1) pick(own[0] === chosen ? null : own[0]);
    else if (own) setView(own[0].from, own.at(-1).to - own[0].from);
    drag = null;
  });
  plot.addEventListener("pointercancel", () => (drag = null));
  plot.addEventListener("pointerleave", hideTip);
  plot.addEventListener("blur", hideTip);
}

new ResizeObserver(redrawPlots).observe(plots[0]);
redrawPlots();
