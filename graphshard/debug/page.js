// What all parts of the page share: its data, units, tables, and the bucket that is selected.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

/** Three digits, as many as the numbers in the tables have. */
function threeDigits(value) {
  const size = Math.abs(value);
  return value.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}

function formatSeconds(seconds) {
  if (seconds === 0) return "0";
  const size = Math.abs(seconds) * 1.0005; // 999.9 us is shown as 1.00 ms
  if (size < 1e-3) return `${threeDigits(seconds * 1e6)} us`;
  return size < 1 ? `${threeDigits(seconds * 1e3)} ms` : `${threeDigits(seconds)} s`;
}

function formatBytes(bytes) {
  if (bytes < 0) return `-${formatBytes(-bytes)}`;
  if (bytes < 1024) return `${bytes.toFixed(0)} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let unit = -1;
  do {
    bytes /= 1024;
    unit += 1;
  } while (bytes >= 999.5 && unit < units.length - 1);
  return `${threeDigits(bytes)} ${units[unit]}`;
}

/** What is gone to must not lie below the header, whose height depends on the title and the width. */
new ResizeObserver(([entry]) => {
  const sticky = getComputedStyle(entry.target).position === "sticky";
  document.documentElement.style.scrollPaddingTop = `${(sticky ? entry.target.offsetHeight : 0) + 12}px`;
}).observe(document.querySelector("header"));

/** An HTML element with text or elements in it. Nothing here is ever parsed as HTML. */
function element(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

/** True where a letter or an arrow key means something else already. Names in the lists of stages start with digits. */
function isTyping(event) {
  return event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input:not([type=checkbox])");
}

// Tables: a click on a header sorts, a second click turns the order round.

function cellValue(row, column) {
  const cell = row.cells[column];
  const value = cell.dataset.value ?? cell.textContent.trim();
  return value !== "" && !Number.isNaN(Number(value)) ? Number(value) : value;
}

function compareValues(left, right) {
  if (typeof left === "number" && typeof right === "number") return left - right;
  return String(left).localeCompare(String(right), "en", { numeric: true });
}

function sortBy(header) {
  const table = header.closest("table");
  const descending = header.ariaSort === "ascending" || (header.ariaSort === "none" && header.matches(".number"));
  const order = descending && header.ariaSort !== "descending" ? "descending" : "ascending";
  for (const other of table.tHead.querySelectorAll("[aria-sort]")) other.ariaSort = "none";
  header.ariaSort = order;
  const sign = order === "ascending" ? 1 : -1;
  const rows = [...table.tBodies[0].rows].map((row) => [cellValue(row, header.cellIndex), row]);
  rows.sort((left, right) => sign * compareValues(left[0], right[0]));
  const sorted = rows.map((pair) => pair[1]);
  // Members of a group stay below its head.
  const within = Map.groupBy(sorted, (row) => row.dataset.group);
  table.tBodies[0].append(...(within.get(undefined) ?? []).flatMap((row) => [row, ...(within.get(row.dataset.head) ?? [])]));
}

/** Show the rows of a group of alike buckets, or hide them. */
function expandGroup(head, expanded) {
  head.querySelector("button").setAttribute("aria-expanded", String(expanded));
  for (const row of head.parentElement.querySelectorAll(`[data-group="${head.dataset.head}"]`)) row.hidden = !expanded;
}

for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => sortBy(button.parentElement));
}

for (const input of document.querySelectorAll("[data-filters]")) {
  const rows = [...byId(input.dataset.filters).tBodies[0].rows];
  const output = input.closest(".toolbar").querySelector("output");
  const all = output.textContent;
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/);
    const has = (row) => words.every((word) => row.textContent.toLowerCase().includes(word));
    const members = rows.filter((row) => !row.dataset.head);
    for (const row of members) row.hidden = !has(row);
    const shown = members.filter((row) => !row.hidden).length;
    const heads = rows.filter((row) => row.dataset.head);
    for (const head of heads) {
      head.hidden = shown < members.length;
      if (shown === members.length) expandGroup(head, false);
    }
    output.textContent = shown === members.length ? all : `${shown} of ${all}`;
  });
}

// The selected bucket: the table and the timeline tell each other by the event "bucket".

const bucketRows = new Map();
for (const row of document.querySelectorAll("[data-bucket]")) bucketRows.set(row.dataset.bucket, row);

function selectBucket(name) {
  document.dispatchEvent(new CustomEvent("bucket", { detail: name }));
}

document.addEventListener("bucket", (event) => {
  for (const [name, row] of bucketRows) {
    const chosen = name === event.detail;
    row.classList.toggle("selected", chosen);
    row.querySelector("button").setAttribute("aria-pressed", String(chosen));
    if (!chosen) continue;
    const head = row.parentElement.querySelector(`[data-head="${row.dataset.group}"]`);
    if (row.hidden && head) expandGroup(head, true);
    scrollInBox(row);
  }
});

/** Bring a row into view in its own scroll box; the page stays where it is. */
function scrollInBox(row) {
  const box = row.closest(".scroll");
  const above = row.offsetTop - row.closest("table").tHead.offsetHeight - box.scrollTop;
  const below = row.offsetTop + row.offsetHeight - box.scrollTop - box.clientHeight;
  if (above < 0) box.scrollTop += above;
  else if (below > 0) box.scrollTop += below;
}

byId("buckets-table")?.tBodies[0].addEventListener("click", (event) => {
  const row = event.target.closest("tr");
  if (event.target.closest("details") || getSelection().toString()) return;
  if (row.dataset.head) return expandGroup(row, row.querySelector("button").ariaExpanded !== "true");
  selectBucket(row.classList.contains("selected") ? null : row.dataset.bucket);
});
