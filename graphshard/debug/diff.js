// The diff of two stages, as the reader sees it: side by side, or in one pane where two are too narrow. Only rows in view
// are in the document.
"use strict";

const ROW = 20; // height of a row in pixels, as in the style sheet

// The texts, decompressed when first asked for.

const texts = new Map();

async function linesOf(stage, full) {
  const node = (!full && byId(`folded-${stage}`)) || byId(`full-${stage}`);
  if (!texts.has(node.id)) {
    const bytes = Uint8Array.from(atob(node.textContent), (char) => char.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const text = await new Response(stream).text();
    texts.set(node.id, text.replace(/\n$/, "").split("\n"));
  }
  return texts.get(node.id);
}

// The view: rows of a fixed height, in two panes that stay in place while the box around them scrolls.

const scroller = byId("diff-scroll");
const [LEFT, RIGHT] = [0, 1];
const panes = [...document.querySelectorAll(".pane")];
const MARKS = { equal: " ", removed: "-", added: "+", changed: "~", moved: "\u2195", empty: " " };
const diff = { a: [], b: [], rows: [], shown: [], changes: [], current: -1 }; // `shown` has folded rows, too
Object.assign(diff, { query: "", matches: [], at: null, atSide: LEFT }); // `at` is the row last gone to
const drawn = new Map(); // index in `shown` -> the row elements, one for each pane
const narrow = matchMedia("(max-width: 700px)"); // as in the style sheet

async function compare() {
  const [before, after, full] = [byId("before").value, byId("after").value, byId("expand").checked];
  const [a, b] = await Promise.all([linesOf(before, full), linesOf(after, full)]);
  if (before !== byId("before").value || after !== byId("after").value || full !== byId("expand").checked) return;
  Object.assign(diff, { a, b, current: -1, at: null, onePane: narrow.matches }, alignedRows(a, b));
  if (diff.onePane) diff.rows = unified(diff.rows);
  diff.shown = foldEqual(diff.rows);
  diff.changes = [];
  diff.rows.forEach((row, i) => {
    row.change = row.left === "equal" ? -1 : diff.changes.length - (diff.rows[i - 1]?.change >= 0 ? 1 : 0);
    if (row.change === diff.changes.length) diff.changes.push(row);
  });
  const width = [...a, ...b].reduce((most, line) => Math.max(most, line.length), 0);
  for (const pane of panes) pane.firstElementChild.style.width = `max(100%, ${width + 9}ch)`;
  summarise();
  find();
  redraw();
  scroller.scrollTop = 0;
  if (diff.changes.length) goToChange(0);
}

function summarise() {
  const count = (side, kind) => diff.rows.filter((row) => row[side] === kind).length;
  const counts = {
    removed: count("left", "removed"),
    added: count("right", "added"),
    changed: count("left", "changed"),
    moved: diff.to.size,
  };
  const parts = Object.entries(counts).map(([kind, n]) => {
    const part = element("span", kind, `${MARKS[kind]} ${n.toLocaleString("en")} ${kind}`);
    part.dataset.kind = kind;
    part.dataset.count = n;
    return part;
  });
  const equal = element("span", "", `${count("left", "equal").toLocaleString("en")} equal lines`);
  byId("diff-summary").replaceChildren(...parts, equal);
  if (!diff.changes.length) byId("diff-summary").replaceChildren("Both texts are equal.");
}

/** Draw all rows anew, for instance after rows were inserted. */
function redraw() {
  for (const pair of drawn.values()) pair.forEach((node) => node.remove());
  drawn.clear();
  draw();
}

/** Keep exactly the rows that are in view in the document. */
function draw() {
  const whole = diff.shown.length * ROW + 20; // room for a scroll bar below
  scroller.style.height = `${whole + 2}px`; // the style sheet limits it
  const height = scroller.clientHeight;
  byId("diff-space").style.height = `${Math.max(whole, height)}px`;
  byId("diff-window").style.height = `${height}px`;
  const first = Math.max(0, Math.floor(scroller.scrollTop / ROW) - 4);
  const last = Math.min(diff.shown.length, Math.ceil((scroller.scrollTop + height) / ROW) + 4);
  for (const [index, pair] of drawn) {
    if (index >= first && index < last) continue;
    if (pair.some((node) => node.contains(document.activeElement))) scroller.focus({ preventScroll: true });
    pair.forEach((node) => node.remove());
    drawn.delete(index);
  }
  for (let index = first; index < last; index++) {
    if (!drawn.has(index)) drawn.set(index, rowElements(diff.shown[index]));
    drawn.get(index).forEach((node, side) => {
      node.style.top = `${index * ROW - scroller.scrollTop}px`;
      if (!node.parentNode) panes[side].firstElementChild.append(node);
    });
  }
  byId("position").textContent = diff.changes.length ? `${diff.current + 1} of ${diff.changes.length}` : "";
}

function rowElements(row) {
  if (row.hidden) {
    const text = `... ${row.hidden.length.toLocaleString("en")} equal lines`;
    const button = element("button", "", `${text}, show`);
    button.type = "button";
    button.addEventListener("click", () => {
      reveal(row);
      scroller.focus({ preventScroll: true });
    });
    const left = element("div", "row gap", button);
    return diff.onePane ? [left] : [left, element("div", "row gap", element("code", "", text))];
  }
  const [left, right] = [diff.a[row.a] ?? "", diff.b[row.b] ?? ""];
  if (diff.onePane) {
    const [side, line, twin] = row.a < 0 ? [RIGHT, right, diff.a[row.twin]] : [LEFT, left, diff.b[row.twin]];
    const isChanged = row.left === "changed" || row.right === "changed";
    return [sideElement(row, side, line, isChanged ? changedWords(line, twin) : undefined)];
  }
  const changed = row.left === "changed" ? [changedWords(left, right), changedWords(right, left)] : [];
  return [sideElement(row, LEFT, left, changed[LEFT]), sideElement(row, RIGHT, right, changed[RIGHT])];
}

function sideElement(row, side, line, changed) {
  const [kind, number] = side === LEFT ? [row.left, row.a] : [row.right, row.b];
  // In one pane it must be seen which of two lines is the old one.
  const look = diff.onePane && kind === "changed" ? (side === LEFT ? "removed" : "added") : kind;
  const sign = diff.onePane && kind === "moved" ? (side === LEFT ? "-" : "+") : "";
  const gutter = element("span", "gutter", number < 0 ? "" : `${sign}${MARKS[look]} ${number + 1}`);
  const node = element("div", `row ${look}`, gutter, element("code", styleOf(line), ...tokens(line, changed)));
  if (row.change >= 0 && row.change === diff.current) node.classList.add("current");
  if (row === diff.at) node.classList.add("at");
  if (kind === "moved") {
    gutter.title = `moved; click to go to line ${otherEnd(row, side) + 1} on the other side`;
    gutter.addEventListener("click", () => goToOtherEnd(row, side));
  }
  return node;
}

function styleOf(line) {
  if (line.startsWith("*")) return "collective";
  if (line.startsWith(">")) return "call";
  if (line.startsWith("  ... ")) return "folded";
  return /^\w.*:$/.test(line) ? "title" : "";
}

const words = (line) => line.match(/[\w.%]+|[^\w.%]/g) ?? [];

/** For each word of a line, whether its other version lacks it: what is not in the longest common subsequence. */
function changedWords(line, other) {
  const [mine, theirs] = [words(line), words(other)];
  const common = Array.from({ length: mine.length + 1 }, () => new Array(theirs.length + 1).fill(0));
  for (let i = mine.length - 1; i >= 0; i--) {
    for (let j = theirs.length - 1; j >= 0; j--) {
      common[i][j] = mine[i] === theirs[j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
    }
  }
  const changed = new Array(mine.length).fill(true);
  for (let i = 0, j = 0; i < mine.length && j < theirs.length; ) {
    if (mine[i] === theirs[j]) [changed[i++], j] = [false, j + 1];
    else if (common[i + 1][j] >= common[i][j + 1]) i++;
    else j++;
  }
  return changed;
}

/** Nodes for a line: values, the comment, and words that changed are marked. */
function tokens(line, changed) {
  const comment = line.lastIndexOf("  # ");
  const found = diff.query && !/^%\d+$/.test(diff.query) && matches(line);
  const nodes = [];
  let place = 0;
  let before = null; // class names of the last node, which the next word joins if it has the same
  words(line).forEach((word, i) => {
    const names = [];
    const isValue = /^%\d+$/.test(word);
    if (isValue) names.push("value");
    if (comment >= 0 && place >= comment) names.push("comment");
    if (changed?.[i]) names.push("part");
    if (found || word === diff.query) names.push("hit");
    const className = names.join(" ");
    if (className === before && !isValue) nodes.at(-1).append(word);
    else nodes.push(element("span", className, word));
    before = className;
    place += word.length;
  });
  return nodes;
}

// Moving about.

function reveal(row) {
  diff.shown.splice(diff.shown.indexOf(row), 1, ...row.hidden);
  redraw();
}

function goTo(row) {
  const holder = diff.shown.find((shown) => shown.hidden?.includes(row));
  if (holder) reveal(holder);
  const top = diff.shown.indexOf(row) * ROW;
  if (top < scroller.scrollTop + 2 * ROW || top > scroller.scrollTop + scroller.clientHeight - 6 * ROW) {
    scroller.scrollTop = top - scroller.clientHeight / 4;
  }
  redraw();
}

function goToChange(index) {
  if (!diff.changes.length) return;
  diff.current = Math.min(Math.max(index, 0), diff.changes.length - 1);
  diff.at = null;
  goTo(diff.changes[diff.current]);
}

function otherEnd(row, side) {
  return side === LEFT ? diff.to.get(row.a) : diff.from.get(row.b);
}

function goToOtherEnd(row, side) {
  const line = otherEnd(row, side);
  diff.at = diff.rows.find((other) => (side === LEFT ? other.b : other.a) === line);
  diff.atSide = 1 - side;
  diff.current = diff.at.change;
  goTo(diff.at);
}

/** From the row last gone to and back, or else from the first moved line of the current change. */
function followMove() {
  const moved = (row) => row && (row.left === "moved" || row.right === "moved");
  const back = diff.at && (diff.atSide === LEFT ? diff.at.left : diff.at.right) === "moved";
  const row = back ? diff.at : diff.rows.find((other) => other.change === diff.current && moved(other));
  if (row) goToOtherEnd(row, back ? diff.atSide : row.left === "moved" ? LEFT : RIGHT);
}

function matches(line) {
  if (/^%\d+$/.test(diff.query)) return (line.match(/%\d+/g) ?? []).includes(diff.query);
  return line.includes(diff.query);
}

function find() {
  diff.query = byId("find").value.trim();
  const isMatch = (row) => matches(diff.a[row.a] ?? "") || matches(diff.b[row.b] ?? "");
  diff.matches = diff.query ? diff.rows.filter(isMatch) : [];
  diff.at = null;
  byId("found").textContent = diff.query ? `${diff.matches.length} lines` : "";
  redraw();
}

function goToMatch(step) {
  const count = diff.matches.length;
  if (!count) return;
  const index = diff.matches.indexOf(diff.at);
  const next = index < 0 ? (step > 0 ? 0 : count - 1) : (index + step + count) % count;
  diff.at = diff.matches[next];
  diff.atSide = LEFT;
  byId("found").textContent = `${next + 1} of ${count} lines`;
  goTo(diff.at);
}

// Events.

for (const id of ["before", "after", "expand"]) byId(id).addEventListener("change", compare);
narrow.addEventListener("change", compare);
byId("next").addEventListener("click", () => goToChange(diff.current + 1));
byId("previous").addEventListener("click", () => goToChange(diff.current - 1));
byId("find").addEventListener("input", find);
byId("find").addEventListener("keydown", (event) => {
  if (event.key === "Enter") goToMatch(event.shiftKey ? -1 : 1);
});

document.addEventListener("keydown", (event) => {
  const elsewhere = event.target !== document.body && !byId("diff").contains(event.target);
  if (isTyping(event) || elsewhere) return;
  if (event.key === "n") goToChange(diff.current + 1);
  else if (event.key === "p") goToChange(diff.current - 1);
  else if (event.key === "m") followMove();
  else if (event.target === scroller && event.key === "ArrowRight") panes[0].scrollLeft += 60;
  else if (event.target === scroller && event.key === "ArrowLeft") panes[0].scrollLeft -= 60;
  else return;
  event.preventDefault();
  byId("diff").scrollIntoView({ block: "nearest" });
});

scroller.addEventListener("scroll", draw);
panes.forEach((pane, side) => {
  pane.addEventListener("scroll", () => {
    panes[1 - side].scrollLeft = pane.scrollLeft;
    if (!pane.scrollTop) return;
    scroller.scrollTop += pane.scrollTop; // the browser brought a focused row into view
    pane.scrollTop = 0;
  });
  pane.addEventListener("click", (event) => {
    if (!event.target.matches(".value") || getSelection().toString()) return;
    byId("find").value = event.target.textContent === diff.query ? "" : event.target.textContent;
    find();
  });
});
new ResizeObserver(draw).observe(scroller);

byId("passes").addEventListener("click", (event) => {
  const after = event.target.dataset.after;
  if (after === undefined) return;
  [byId("before").value, byId("after").value] = [after - 1, after];
  compare();
  byId("diff").scrollIntoView();
  scroller.focus({ preventScroll: true });
});

[byId("before").value, byId("after").value] = data.compare;
compare();
