// The algorithm of the diff: patience, that is, lines that occur once in each text are anchors, and the rest is matched
// between them. Numbers of values make nearly every line unique, so that there is little to be done without anchors.
"use strict";

const CONTEXT = 3; // equal lines shown around a change

/** Pairs (i, j) with a[i] === b[j], unique in both ranges, increasing, as many as possible. Null matches nothing. */
function anchors(a, a0, a1, b, b0, b1) {
  const places = new Map();
  const count = (line, i, j) => {
    if (line === null) return;
    const place = places.get(line) ?? places.set(line, { i: -1, j: -1, ok: true }).get(line);
    if ((i >= 0 && place.i >= 0) || (j >= 0 && place.j >= 0)) place.ok = false;
    if (i >= 0) place.i = i;
    else place.j = j;
  };
  for (let i = a0; i < a1; i++) count(a[i], i, -1);
  for (let j = b0; j < b1; j++) count(b[j], -1, j);
  const unique = [...places.values()].filter((place) => place.ok && place.i >= 0 && place.j >= 0);
  return longestIncreasing(unique);
}

/** The longest subsequence with increasing `j`, as [i, j] pairs. */
function longestIncreasing(places) {
  const tails = []; // tails[n] ends the best subsequence of length n + 1
  for (const place of places) {
    let low = 0;
    let high = tails.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (tails[middle].j < place.j) low = middle + 1;
      else high = middle;
    }
    place.before = tails[low - 1];
    tails[low] = place;
  }
  const pairs = [];
  for (let place = tails.at(-1); place; place = place.before) pairs.push([place.i, place.j]);
  return pairs.reverse();
}

/** Ranges [a0, a1, b0, b1] that differ, in order; everything between them is equal. */
function unequalRanges(a, b) {
  const ranges = [];
  const todo = [[0, a.length, 0, b.length]];
  while (todo.length) {
    let [a0, a1, b0, b1] = todo.pop();
    while (a0 < a1 && b0 < b1 && a[a0] === b[b0]) [a0, b0] = [a0 + 1, b0 + 1];
    while (a0 < a1 && b0 < b1 && a[a1 - 1] === b[b1 - 1]) [a1, b1] = [a1 - 1, b1 - 1];
    if (a0 === a1 && b0 === b1) continue;
    const pairs = a0 === a1 || b0 === b1 ? [] : anchors(a, a0, a1, b, b0, b1);
    if (pairs.length) splitAt(pairs, a0, a1, b0, b1).reverse().forEach((piece) => todo.push(piece));
    else ranges.push([a0, a1, b0, b1]);
  }
  return ranges;
}

function splitAt(pairs, a0, a1, b0, b1) {
  const pieces = [];
  for (const [i, j] of pairs) {
    pieces.push([a0, i, b0, j]);
    [a0, b0] = [i + 1, j + 1];
  }
  pieces.push([a0, a1, b0, b1]);
  return pieces;
}

/** What a line defines: "%12", "as output:0"; null if nothing. Lines that define the same are one line, changed. */
function definedBy(line) {
  const found = /^. (%\d+):/.exec(line) ?? / (as \S+)$/.exec(line);
  return found && found[1];
}

/** Lines that are in both texts but out of order, as a map from line to line, for each side. */
function movedLines(a, b, ranges) {
  const removed = new Map();
  for (const [a0, a1] of ranges) {
    for (let i = a0; i < a1; i++) {
      if (!/%\d/.test(a[i])) continue;
      if (removed.has(a[i])) removed.get(a[i]).push(i);
      else removed.set(a[i], [i]);
    }
  }
  const from = new Map();
  const to = new Map();
  for (const [, , b0, b1] of ranges) {
    for (let j = b0; j < b1; j++) {
      const i = removed.get(b[j])?.shift();
      if (i === undefined) continue;
      from.set(j, i);
      to.set(i, j);
    }
  }
  return { from, to };
}

/** Aligned rows { a, b, left, right }: line numbers (-1: none) and what happened to the line on each side. */
function alignedRows(a, b) {
  const ranges = unequalRanges(a, b);
  const { from, to } = movedLines(a, b, ranges);
  const leftKeys = a.map((line, i) => (to.has(i) ? null : definedBy(line)));
  const rightKeys = b.map((line, j) => (from.has(j) ? null : definedBy(line)));
  const rows = [];
  let [i, j] = [0, 0];
  for (const [a0, a1, b0, b1] of [...ranges, [a.length, a.length, b.length, b.length]]) {
    for (; i < a0; i++, j++) rows.push({ a: i, b: j, left: "equal", right: "equal" });
    const changed = anchors(leftKeys, a0, a1, rightKeys, b0, b1);
    for (const [p0, p1, q0, q1] of splitAt(changed, a0, a1, b0, b1)) {
      for (let k = 0; k < Math.max(p1 - p0, q1 - q0); k++) {
        const [p, q] = [p0 + k < p1 ? p0 + k : -1, q0 + k < q1 ? q0 + k : -1];
        const left = p < 0 ? "empty" : to.has(p) ? "moved" : "removed";
        const right = q < 0 ? "empty" : from.has(q) ? "moved" : "added";
        rows.push({ a: p, b: q, left, right });
      }
      if (p1 < a1 && q1 < b1) rows.push({ a: p1, b: q1, left: "changed", right: "changed" });
    }
    [i, j] = [a1, b1];
  }
  return { rows, from, to };
}

/** Rows for one pane: of each change what was there before, then what is there behind. `twin` is the other line. */
function unified(rows) {
  const found = [];
  for (let i = 0; i < rows.length; ) {
    if (rows[i].left === "equal") {
      found.push(rows[i++]);
      continue;
    }
    const start = i;
    while (i < rows.length && rows[i].left !== "equal") i++;
    const change = rows.slice(start, i);
    for (const { a, b, left } of change) if (a >= 0) found.push({ a, b: -1, left, right: "empty", twin: b });
    for (const { a, b, right } of change) if (b >= 0) found.push({ a: -1, b, left: "empty", right, twin: a });
  }
  return found;
}

/** Fold runs of equal rows into { hidden: [rows] }, but for some context. */
function foldEqual(rows) {
  const shown = [];
  let start = 0;
  while (start < rows.length) {
    let end = start;
    while (end < rows.length && rows[end].left === "equal") end++;
    const first = start === 0 ? 0 : start + CONTEXT;
    const last = end === rows.length ? end : end - CONTEXT;
    if (last - first > 1) {
      shown.push(...rows.slice(start, first), { hidden: rows.slice(first, last) });
      start = last;
    }
    while (start < end) shown.push(rows[start++]);
    while (start < rows.length && rows[start].left !== "equal") shown.push(rows[start++]);
  }
  return shown;
}
