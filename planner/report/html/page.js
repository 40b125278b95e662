"use strict";
/* The page's own script: tables that sort, filter and download, the packed table of all layouts, and when pictures are drawn. */

const $ = (id) => document.getElementById(id);
const read = (id) => JSON.parse($(id).textContent);
const make = (name, props = {}, ...kids) => {
  const el = Object.assign(document.createElement(name), props);
  el.append(...kids);
  return el;
};

/* ---- A store: named columns over rows. get(i) is what is compared, text(i) what is shown, number whether that is a number. ---- */

function storeOfTable(table) {
  const rows = [...table.tBodies[0].rows];
  const value = (row, c) => row.cells[c].dataset.v ?? row.cells[c].textContent;
  const columns = [...table.tHead.rows[0].cells].map((th, c) => {
    const number = rows.length > 0 && rows.every((row) => value(row, c) === "" || !isNaN(value(row, c)));
    const get = (i) => (number ? parseFloat(value(rows[i], c) || "NaN") : value(rows[i], c));
    return { key: th.dataset.key || th.textContent, title: th.textContent, number, get, text: (i) => rows[i].cells[c].textContent };
  });
  return { rows: rows.length, columns, elements: rows };
}

const TYPES = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f4: Float32Array };

async function storeOfPayload(payload) {
  const bytes = Uint8Array.from(atob(payload.bytes), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const by = {};
  let start = 0;
  const shown = (column) => (v) => {
    const x = column.percent ? v * 100 : v;
    return column.digits || Math.abs(x) < 1000 ? x.toFixed(column.digits) : Math.round(x).toLocaleString("en");
  };
  for (const column of payload.columns) {
    const end = start + TYPES[column.type].BYTES_PER_ELEMENT * payload.rows;
    const values = new TYPES[column.type](buffer.slice(start, end));
    start = end;
    const words = column.words.length > 0, digits = shown(column);
    const get = words ? (i) => column.words[values[i]] : (i) => values[i] * column.scale;
    by[column.key] = { key: column.key, title: column.title, number: !words, get, values, text: words ? get : (i) => digits(get(i)), unit: column.percent ? "%" : "" };
  }
  for (const d of payload.derived) {
    const stack = by.software.values, step = by.step_seconds.values, digits = shown(d);
    const get = (i) => (d.over ? d.factors[stack[i]] / step[i] : d.factors[stack[i]] * step[i]);
    by[d.key] = { key: d.key, title: d.title, number: true, get, text: (i) => digits(get(i)), unit: d.percent ? "%" : "" };
  }
  const label = (i) => labelOf((axis) => by[axis].get(i));
  const columns = [{ key: "rank", title: "#", number: true, get: (i) => i + 1, text: (i) => String(i + 1) }, { key: "layout", title: "layout", number: false, get: label, text: label }, ...Object.values(by)];
  return { rows: payload.rows, columns, by };
}

/* The label of a layout, as solver/layout.py writes it. */
function labelOf(get) {
  const experts = get("expert_tensor_parallel") > 1 ? `-etp${get("expert_tensor_parallel")}` : "";
  const recompute = get("recompute") === "full" ? `full${get("recompute_layers")}` : get("recompute");
  const natural = get("virtual_pipeline") > 1 ? "interleaved_1f1b" : "1f1b";
  const schedule = get("schedule") === natural ? "" : `-${get("schedule")}`;
  return `tp${get("tensor_parallel")}-pp${get("pipeline_parallel")}-vp${get("virtual_pipeline")}-cp${get("context_parallel")}-ep${get("expert_parallel")}${experts}-dp${get("data_parallel")}-zero${get("zero_stage")}-mb${get("micro_batch_size")}-${recompute}${schedule}`;
}

/* ---- Filter: words such as `tp4`, `fits`, `selective`, or comparisons such as `gib<70`, all of which must hold. ---- */

const SHORT = { tp: "tensor_parallel", pp: "pipeline_parallel", vp: "virtual_pipeline", cp: "context_parallel", ep: "expert_parallel", etp: "expert_tensor_parallel", dp: "data_parallel", zero: "zero_stage", mb: "micro_batch_size", gib: "memory_gib", step: "step_seconds" };
const COMPARE = { "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b, "=": (a, b) => a === b };

function predicate(store, word) {
  const find = (name) => store.columns.find((c) => [SHORT[name], name].includes(c.key.toLowerCase()) || c.title.toLowerCase() === name);
  const compared = word.match(/^([^<>=]+)(<=|>=|<|>|=)(-?[0-9.]+)$/);
  if (compared && find(compared[1])) {
    const column = find(compared[1]), limit = parseFloat(compared[3]) / (column.unit === "%" ? 100 : 1);
    return (i) => COMPARE[compared[2]](column.get(i), limit);
  }
  const size = word.match(/^([a-z]+)(\d+)$/);
  if (size && SHORT[size[1]] && find(size[1])) return ((column, n) => (i) => column.get(i) === n)(find(size[1]), Number(size[2]));
  const texts = store.columns.filter((c) => !c.number && c.key !== "layout");
  return (i) => texts.some((c) => c.text(i).toLowerCase().includes(word));
}

function ordered(store, sort, words) {
  const tests = words.toLowerCase().split(/\s+/).filter(Boolean).map((word) => predicate(store, word));
  let kept = [];
  for (let i = 0; i < store.rows; i++) if (tests.every((test) => test(i))) kept.push(i);
  if (!sort.column) return kept;
  const sign = sort.down ? -1 : 1, keys = new Array(store.rows);
  for (const i of kept) keys[i] = sort.column.get(i);
  const compare = sort.column.number
    ? (a, b) => (isNaN(keys[a]) - isNaN(keys[b])) || sign * (keys[a] - keys[b]) || a - b
    : (a, b) => (keys[a] === keys[b] ? a - b : sign * (keys[a] < keys[b] ? -1 : 1));
  return kept.sort(compare);
}

const csvCell = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : /^[=+@]/.test(text) ? `'${text}` : text);

function download(name, store, order, hidden) {
  const columns = store.columns.filter((c) => !hidden.has(c.key));
  const lines = [columns.map((c) => csvCell(c.key)).join(",")];
  for (const i of order) lines.push(columns.map((c) => csvCell(c.number ? (isNaN(c.get(i)) ? "" : String(Number(c.get(i).toPrecision(7)))) : String(c.get(i)).trim())).join(","));
  const link = make("a", { href: URL.createObjectURL(new Blob([lines.join("\n") + "\n"], { type: "text/csv" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/* Gives a table its tools; draw(order, hidden) shows the rows in their order. */
function equip(box, heads, store, name, draw, hidden = new Set()) {
  const sort = { column: null, down: false };
  const status = make("span", { className: "status" });
  status.setAttribute("role", "status");
  const search = make("input", { type: "search", placeholder: "tp4 selective gib<70", spellcheck: false });
  search.setAttribute("aria-label", "Filter: sizes, words, comparisons");
  let order = [];
  const update = () => {
    order = ordered(store, sort, search.value);
    status.textContent = `${order.length.toLocaleString("en")} of ${store.rows.toLocaleString("en")} layouts`;
    heads().forEach((th) => th.setAttribute("aria-sort", th.dataset.key !== sort.column?.key ? "none" : sort.down ? "descending" : "ascending"));
    draw(order, hidden);
  };
  let timer;
  search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(update, 120); });
  const choosers = store.columns.filter((c) => c.title.trim()).map((column) => {
    const tick = make("input", { type: "checkbox", checked: !hidden.has(column.key) });
    tick.addEventListener("change", () => { hidden[tick.checked ? "delete" : "add"](column.key); update(); });
    return make("label", {}, tick, ` ${column.title}`);
  });
  const chooser = make("details", {}, make("summary", { textContent: "Columns" }), make("div", { className: "columns" }, ...choosers));
  const save = make("button", { type: "button", textContent: "Download CSV" });
  save.addEventListener("click", () => download(name, store, order, hidden));
  box.append(make("div", { className: "tools" }, search, save, chooser, status));
  const sortBy = (key) => {
    const column = store.columns.find((c) => c.key === key);
    Object.assign(sort, sort.column === column ? (sort.down ? { column: null, down: false } : { down: true }) : { column, down: false });
    update();
  };
  return { update, sortBy };
}

function sortable(th, key, title, sortBy) {
  th.dataset.key = key;
  th.setAttribute("aria-sort", "none");
  const button = make("button", { type: "button", textContent: title });
  button.addEventListener("click", () => sortBy(key));
  th.replaceChildren(button);
}

function shortlist(table) {
  const store = storeOfTable(table), body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const box = make("div");
  table.parentElement.before(box);
  const draw = (order, hidden) => {
    body.replaceChildren(...order.map((i) => store.elements[i]));
    store.columns.forEach((column, c) => [heads[c], ...store.elements.map((row) => row.cells[c])].forEach((cell) => (cell.hidden = hidden.has(column.key))));
  };
  const off = new Set(heads.filter((th) => th.dataset.off !== undefined).map((th) => th.dataset.key));
  const tools = equip(box, () => heads.filter((th) => th.dataset.key), store, "shortlist.csv", draw, off);
  store.columns.forEach((column, c) => column.title.trim() && sortable(heads[c], column.key, column.title, tools.sortBy));
  tools.update();
}

/* All layouts: only the rows in view exist. */
function virtualTable(place, store) {
  const row = make("div", { style: "height:var(--row)" });
  const head = make("tr"), body = make("tbody"), table = make("table", {}, make("caption", { textContent: "All ranked layouts, stages split evenly, best first" }), make("thead", {}, head), body);
  const box = make("div", { className: "scroll virtual", tabIndex: 0 }, table);
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", "All ranked layouts");
  place.append(row);
  const height = row.getBoundingClientRect().height;
  row.remove();
  let order = [], columns = [], first = -1;
  const cell = (column, i) => make("td", { className: column.number ? "num" : "", textContent: column.text(i) + (column.unit || "") });
  const spacer = (rows) => { const td = make("td", { colSpan: columns.length }); td.style.height = `${rows * height}px`; const tr = make("tr", { className: "spacer" }, td); tr.setAttribute("aria-hidden", "true"); return tr; };
  const render = (force) => {
    const from = Math.max(Math.floor(box.scrollTop / height) - 8, 0), to = Math.min(from + Math.ceil(box.clientHeight / height) + 16, order.length);
    if (from === first && !force) return;
    first = from;
    const rows = [];
    for (let place = from; place < to; place++) {
      const tr = make("tr", {}, ...columns.map((column) => cell(column, order[place])));
      tr.setAttribute("aria-rowindex", place + 2);
      rows.push(tr);
    }
    body.replaceChildren(spacer(from), ...rows, spacer(order.length - to));
    table.setAttribute("aria-rowcount", order.length + 1);
  };
  const draw = (next, hidden) => {
    const before = columns.length;
    order = next;
    columns = store.columns.filter((c) => !hidden.has(c.key));
    if (columns.length !== before) {
      head.replaceChildren(...columns.map((column) => { const th = make("th", { scope: "col", className: column.number ? "num" : "" }); sortable(th, column.key, column.title, tools.sortBy); return th; }));
      tools.update();
      return;
    }
    box.scrollTop = 0;
    render(true);
  };
  const hidden = new Set(["expert_tensor_parallel", "recompute_layers", "software"]);
  const tools = equip(place, () => [...head.cells], store, "layouts.csv", draw, hidden);
  place.append(box);
  box.addEventListener("scroll", () => requestAnimationFrame(() => render(false)), { passive: true });
  tools.update();
}

/* ---- Pictures ---- */

const dark = matchMedia("(prefers-color-scheme: dark)");

function themed(config, width) {
  config.legend.columns = Math.max(Math.floor(width / 150), 2);
  if (!dark.matches) return config;
  const ink = getComputedStyle(document.documentElement).getPropertyValue("--ink").trim(), grid = getComputedStyle(document.documentElement).getPropertyValue("--grid").trim();
  for (const part of [config.axis, config.legend, config.header]) Object.assign(part, { labelColor: ink, titleColor: ink });
  Object.assign(config.axis, { gridColor: grid });
  config.title.color = config.text.color = ink;
  return config;
}

async function drawChart(el, spec) {
  el.finish?.();
  const canvas = el.dataset.renderer === "canvas", config = themed(read("chart-config"), el.clientWidth);
  if (canvas) config.background = getComputedStyle(document.documentElement).getPropertyValue("--paper").trim(); // pixels keep their colours on paper
  const result = await vegaEmbed(el, spec, { actions: false, renderer: canvas ? "canvas" : "svg", config, tooltip: { theme: "custom" } });
  el.querySelector("svg")?.setAttribute("aria-hidden", "true"); // the place around it has the words, the table below the numbers
  el.finish = () => result.finalize();
  el.dataset.drawn = "yes";
}

/* Points of all layouts for the picture of the space: of those that would lie on each other only the best ranked. */
function spacePoints(store, axis) {
  const step = store.by.step_seconds, gib = store.by.memory_gib, colour = store.by[axis], label = store.columns[1], points = [], seen = new Set();
  let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
  for (let i = 0; i < store.rows; i++) {
    x0 = Math.min(x0, step.values[i]); x1 = Math.max(x1, step.values[i]);
    y0 = Math.min(y0, gib.values[i]); y1 = Math.max(y1, gib.values[i]);
  }
  const place = (v, low, high, count) => Math.min(Math.floor(((v - low) / Math.max(high - low, 1e-12)) * count), count - 1);
  for (let i = 0; i < store.rows; i++) {
    const cell = `${place(Math.log(step.values[i]), Math.log(x0), Math.log(x1), 360)},${place(gib.values[i], y0, y1, 240)},${colour.values[i]}`;
    if (seen.has(cell)) continue;
    seen.add(cell);
    points.push({ layout: label.get(i), step_seconds: step.values[i], gib: gib.values[i], colour: String(colour.get(i)) });
  }
  return points;
}

function spaceSpec(spec, store, axis, title) {
  const points = spacePoints(store, axis), range = read("chart-config").range;
  const values = [...new Set(points.map((p) => p.colour))].sort((a, b) => a - b || (a < b ? -1 : 1));
  const layer = spec.layer.find((one) => one.data?.name === "points");
  layer.data.values = points;
  for (const [channel, marks] of [["color", range.category], ["shape", range.symbol]]) Object.assign(layer.encoding[channel], { title, scale: { domain: values, range: values.map((_, n) => marks[n % marks.length]) } });
  layer.encoding.tooltip.at(-1).title = title;
  return spec;
}

function pictures(storeReady) {
  const chooser = $("space-colour");
  const specOf = async (el) => {
    const spec = read(el.dataset.spec);
    if (el.dataset.spec !== "spec-step-against-memory-0" || !storeReady || !chooser) return spec;
    return spaceSpec(spec, await storeReady, chooser.value, chooser.selectedOptions[0].textContent);
  };
  const all = [...document.querySelectorAll(".chart")];
  const show = async (el) => drawChart(el, await specOf(el));
  const seen = new IntersectionObserver((entries) => entries.forEach((entry) => { if (entry.isIntersecting) { seen.unobserve(entry.target); show(entry.target); } }), { rootMargin: "400px" });
  const near = (el) => el.getBoundingClientRect().top < innerHeight + 400;
  all.forEach((el) => (near(el) ? show(el) : seen.observe(el))); // what is in sight waits for no scrolling
  window.addEventListener("beforeprint", () => window.drawEverything());
  chooser?.addEventListener("change", () => show(all.find((el) => el.dataset.spec === "spec-step-against-memory-0")));
  dark.addEventListener("change", () => all.filter((el) => el.dataset.drawn).forEach(show));
  const wide = matchMedia("(min-width: 40rem)");
  wide.addEventListener("change", () => all.filter((el) => el.dataset.drawn).forEach(show));
  window.drawEverything = () => Promise.all(all.filter((el) => !el.dataset.drawn).map(show)); // for printing programs
}

/* ---- Links to ledgers open them. ---- */

function openTarget() {
  const target = location.hash && $(decodeURIComponent(location.hash.slice(1)));
  if (target?.tagName === "DETAILS") { target.open = true; target.scrollIntoView(); target.querySelector("summary").focus({ preventScroll: true }); }
}

document.querySelectorAll("table[data-sortable]").forEach(shortlist);
const storeReady = $("layouts-data") ? new Promise((resolve) => setTimeout(() => resolve(storeOfPayload(read("layouts-data"))), 0)) : null;
const everyone = $("all-layouts");
everyone?.addEventListener("toggle", async () => {
  if (!everyone.open || everyone.dataset.ready) return;
  everyone.dataset.ready = "yes";
  virtualTable($("all-layouts-place"), await storeReady);
});
if ($("chart-config")) pictures(storeReady);
window.addEventListener("hashchange", openTarget);
window.addEventListener("beforeprint", () => $("ledger-1")?.setAttribute("open", "")); // paper gets the pick's ledger
document.addEventListener("click", (event) => { if (event.target.closest?.("a[href^='#ledger']")) setTimeout(openTarget, 0); });
openTarget();
