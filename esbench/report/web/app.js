// The report page: a choice, its answer, a table with dots, and a comparison of two runs. Every text of a figure comes
// from the JSON in the page; this script selects, sorts and draws.
"use strict";

// --- Data -----------------------------------------------------------------------------------------------------------

const DATA = JSON.parse(document.getElementById("data").textContent);
const RATE = "n_eff_per_ms";
const LATENCY = "latency_ns";
// Positions in the marks of a row, which are the numbers to draw.
const VALUE = 0;
const LOW = 1;
const HIGH = 2;
const EVALUATED = 3;

const ANSWERS = new Map(DATA.answers.map((answer) => [answer.view, answer]));
const VIEWS = DATA.views.map(describeView);
/** The views in the order in which they are preferred: an answer by rate, an answer, a run without flaws, a new run. */
const BY_PREFERENCE = [...VIEWS].sort((a, b) => firstDifference(preference(a), preference(b)));

/** A view with its choice (device, layer, ...), its records and its rows as objects. */
function describeView(view, number) {
  const [run, shape, quantity] = [DATA.runs[view.run], DATA.cases[view.case], DATA.quantities[view.quantity]];
  return {
    ...view,
    number,
    run,
    case: shape,
    quantity,
    key: `${view.run} ${view.case}`,
    columns: DATA.columns[view.columns],
    rows: view.rows.map(([variant, marks, texts, rest]) => ({
      ...{ kind: "", reason: "", remark: "" },
      ...rest,
      variant: DATA.variants[variant],
      marks,
      texts,
    })),
    choice: {
      device: run.device,
      layer: shape.layer,
      members: String(shape.members),
      run: run.id,
      dtype: shape.dtype,
      phase: quantity.phase,
      metric: `${quantity.metric}/${quantity.method}`,
    },
  };
}

/** Values to sort views by, the most important first. */
function preference({ number, quantity, run }) {
  const isAnswer = ANSWERS.has(number);
  const [isRate, isTime] = [quantity.metric === RATE, quantity.metric === LATENCY];
  return [isAnswer && isRate, isAnswer, isRate, isTime, !run.flaws.length, !run.published, -number];
}

/** Compare two lists by their first difference, the larger value first. */
function firstDifference(a, b) {
  const place = a.findIndex((value, number) => value !== b[number]);
  return place < 0 ? 0 : a[place] > b[place] ? -1 : 1;
}

/** Whether a row has a figure; an exact one has no number. */
function isKnown(row) {
  return row.kind === "exact" || isNumber(row.marks[VALUE]);
}

function isNumber(value) {
  return typeof value === "number";
}

/** The text of a row in a column, empty if the view has no such column. */
function cellOf(view, row, column) {
  return row.texts[view.columns.indexOf(column)] ?? "";
}

/** The number that a text begins with or has after a word: 12 for "at least 12x". */
function numberIn(text) {
  if (text === "exact" || text === "more than dense") return Infinity;
  return parseFloat(text.replace(/^\D*?(?=-?\d)/, ""));
}

function withCommas(value) {
  return Number(value).toLocaleString("en-US");
}

// --- Elements: text is inserted as text, never as markup ------------------------------------------------------------

const SVG_NAMESPACE = document.getElementById("pen").namespaceURI;

/** Fill an element with attributes, listeners (`on...`) and children, which are nodes or text. */
function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

function html(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG_NAMESPACE, tag), attributes, children);
}

function byId(id) {
  return document.getElementById(id);
}

/** Replace the content of an element. */
function put(id, ...children) {
  byId(id).replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== ""));
}

/** A name that may be broken before a capital letter and after a parenthesis or comma. */
function breakable(name) {
  return name.split(/(?<=[a-z])(?=[A-Z])|(?<=[(,])/).flatMap((part, place) => (place ? [html("wbr"), part] : [part]));
}

function paragraphs(kind, texts) {
  return texts.map((text) => html("p", { class: kind }, text));
}

/** A list of terms, each with its text. */
function listOf(kind, pairs) {
  const groups = pairs.map(([term, text]) => html("div", {}, html("dt", {}, term), html("dd", {}, text)));
  return html("dl", { class: kind || null }, groups);
}

/** A table of texts, the first of each row its heading. */
function tableOf(caption, heads, rows) {
  return html(
    "table",
    {},
    html("caption", {}, caption),
    html("thead", {}, html("tr", {}, heads.map((text) => html("th", { scope: "col" }, text)))),
    html("tbody", {}, rows.map(([first, ...rest]) => {
      return html("tr", {}, html("th", { scope: "row" }, breakable(first)), rest.map((text) => html("td", {}, text)));
    })),
  );
}

/** Fill a select; one with a single option cannot be changed. An option is [value, text, group]. */
function fillSelect(id, options, value) {
  const groups = new Map([["", []]]);
  for (const [option, text, group = ""] of options) {
    groups.set(group, [...(groups.get(group) ?? []), html("option", { value: option }, text)]);
  }
  put(id, [...groups].map(([label, elements]) => (label ? html("optgroup", { label }, elements) : elements)));
  byId(id).value = value;
  byId(id).disabled = options.length < 2;
}

/** A button that copies a text, and says so. */
function copyButton(label, text) {
  const button = html("button", { type: "button", class: "copy", onclick: copy }, label);
  async function copy() {
    const done = await navigator.clipboard.writeText(text()).then(() => "Copied", () => "Not allowed by the browser");
    button.textContent = done;
    put("status", done);
    setTimeout(() => { button.textContent = label; }, 1500);
  }
  return button;
}

// --- The choice, and the link that restores it ----------------------------------------------------------------------

/** A choice restricts those after it. */
const CHOICES = ["device", "layer", "members", "run", "dtype", "phase", "metric"];
const DISPLAY = ["filter", "all", "sort", "open", "a", "b", "quantity"];

/** The chosen view, and how the page displays it. */
const state = { view: null, display: {} };

/** Find the view that fits a choice best; return it with the parts of the choice that the page lacks. */
function findView(wanted, current = {}) {
  const missing = [];
  let left = BY_PREFERENCE;
  for (const name of CHOICES) {
    const values = new Set(left.map((view) => view.choice[name]));
    if (wanted[name] !== undefined && !values.has(wanted[name])) missing.push(`${name} ${wanted[name]}`);
    const usual = name === "members" ? nearestNumber(values, wanted.members ?? current.members) : current[name];
    const value = [wanted[name], usual].find((candidate) => values.has(candidate)) ?? left[0].choice[name];
    left = left.filter((view) => view.choice[name] === value);
  }
  return { view: left[0], missing };
}

function nearestNumber(values, wanted) {
  if (wanted === undefined) return undefined;
  const distance = (value) => Math.abs(Math.log(Number(value) / Number(wanted)));
  return [...values].sort((a, b) => distance(a) - distance(b))[0];
}

/** The options of a choice, given the choices before it: [value, text, group]. */
function optionsOf(name) {
  const before = CHOICES.slice(0, CHOICES.indexOf(name));
  const fits = VIEWS.filter((view) => before.every((earlier) => view.choice[earlier] === state.view.choice[earlier]));
  const option = (view) => [view.choice[name], optionText(name, view), name === "layer" ? view.case.group : ""];
  const options = new Map(fits.map((view) => [view.choice[name], option(view)]));
  if (!["layer", "members"].includes(name)) return [...options.values()];
  const tasks = new Set(fits.filter((view) => view.case.task).map((view) => view.choice[name]));
  // Layers before tasks; of the layers Linear and Conv2d first.
  const rank = ([value, , group]) => [!tasks.has(value), group === "Linear", group === "Conv2d"];
  const inOrder = (a, b) => a[2].localeCompare(b[2], "en") || a[0].localeCompare(b[0], "en", { numeric: true });
  return [...options.values()].sort((a, b) => firstDifference(rank(a), rank(b)) || inOrder(a, b));
}

function optionText(name, { choice, run, quantity }) {
  if (name === "members") return withCommas(choice.members);
  if (name === "metric") return quantity.method === "host" ? quantity.title : `${quantity.title} (${quantity.method})`;
  if (name === "run") return runText(run);
  return choice[name];
}

function runText(run) {
  const text = run.published ? run.suite : `${run.started.slice(0, 10)} ${run.suite}`;
  return [text, ...run.flaws].join(", ");
}

function keptChoice({ choice: { device, layer, members } }) {
  return { device, layer, members };
}

/** Choose a value; the choices before it stay, and device, layer and population stay if possible. */
function choose(name, value) {
  const { choice } = state.view;
  const before = CHOICES.slice(0, CHOICES.indexOf(name)).map((earlier) => [earlier, choice[earlier]]);
  state.view = findView({ ...Object.fromEntries(before), [name]: value }, keptChoice(state.view)).view;
  delete state.display.sort;
  refresh({ step: true });
}

/** Read choice and display from the address; return what the page lacks. */
function readLink() {
  const link = new URLSearchParams(location.hash.replace(/^#/, ""));
  const named = (names) => Object.fromEntries([...link].filter(([name]) => names.includes(name)));
  const { view, missing } = findView(named(CHOICES), keptChoice(VIEWS[DATA.start]));
  state.view = view;
  state.display = named(DISPLAY);
  const { open } = state.display;
  if (open !== undefined && !view.rows.some((row) => row.variant.name === open)) missing.push(`variant ${open}`);
  return missing;
}

/** Write choice and display to the address; a step adds an entry to the browser's history. */
function writeLink(step = false) {
  const link = new URLSearchParams(Object.entries(state.view.choice));
  for (const name of DISPLAY) if (state.display[name]) link.set(name, state.display[name]);
  if (`#${link}` !== location.hash) history[step ? "pushState" : "replaceState"](null, "", `#${link}`);
}

// --- The answer -----------------------------------------------------------------------------------------------------

const LONG_TITLE = 44;

/** Write the answer for the chosen case: that of the chosen run. */
function showAnswer() {
  const { key, run, case: shape } = state.view;
  const answer = DATA.answers.find(({ view }) => VIEWS[view].key === key);
  const [first, second, ...rest] = answer.best.map((number) => html("em", {}, breakable(DATA.variants[number].name)));
  const members = shape.members > 1 ? `, ${withCommas(shape.members)} members` : "";
  put("answer-where", `${shape.layer}${members}, on ${run.device}`);
  const others = rest.length ? [" ", html("small", {}, `tied with ${rest.length + 1} others`)] : second ? [" or ", second] : "";
  put("answer-title", answer.lead, " ", first ?? "", others);
  byId("answer-title").classList.toggle("long", byId("answer-title").textContent.length > LONG_TITLE);
  put("answer-picks", answer.picks.map((pick) => pickOf(pick, answer.picks.length > 1)));
  put("answer-code", codeOf(DATA.variants[answer.best[0]], shape));
  put("answer-notes", answer.notes.map((note) => html("li", {}, note)));
  put("answer-origin", run.origin, run.flaws.length ? ` This run ${run.flaws.join(" and ")}.` : "");
}

/** The figures of a recommended variant; with its name if there are several. */
function pickOf({ variant, figures, why }, isNamed) {
  const name = html("strong", {}, breakable(DATA.variants[variant].name));
  const title = isNamed ? html("p", { class: "pick-name" }, name, why && `: ${why}`) : null;
  return html("div", { class: "pick" }, title, listOf("", figures.map(([text, words]) => [words, text])));
}

/** The code that trains with a variant on a case, with a button that copies it. */
function codeOf(variant, shape) {
  const about = DATA.schemes[variant?.documented];
  if (!variant?.code || shape.task || !about) return null;
  const imports = about.module === "impls"
    ? `from impls import ${[variant.documented, "perturb"].sort().join(", ")}`
    : `from impls import perturb\nfrom ${about.module} import ${variant.documented}`;
  const code = `${imports}\npopulation = perturb(model, ${variant.code}, members=${shape.members}, sigma=${shape.sigma})`;
  const text = html("pre", {}, html("code", {}, code));
  return html("div", { class: "code" }, text, copyButton("Copy", () => code));
}

// --- The rows of the table ------------------------------------------------------------------------------------------

/** The rows to show: the best variant of each scheme or all, filtered and sorted; dense noise and an open row always. */
function shownRows() {
  const { view, display } = state;
  const words = (display.filter ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (row) => words.every((word) => row.variant.name.toLowerCase().includes(word));
  const candidates = words.length || display.all || isShort(view) ? view.rows : bestOfSchemes(view.rows);
  const matching = candidates.filter(matches);
  if (!matching.length) return [];
  const isAlwaysShown = ({ variant }) => variant.role === "dense" || variant.name === display.open;
  return sortedRows(view.rows.filter((row) => matching.includes(row) || isAlwaysShown(row)));
}

/** Whether a view shows all of its variants in any case. */
function isShort(view) {
  return view.case.task && view.rows.length < 20;
}

/** The best variant of each scheme; of dense noise the plain variant, and every baseline with a figure. */
function bestOfSchemes(rows) {
  const best = new Map();
  const hasDense = rows.some((row) => row.variant.role === "dense");
  for (const row of rows) {
    const { scheme, role, name } = row.variant;
    if (role === "baseline" && !isKnown(row) && !isNumber(row.marks[EVALUATED])) continue;
    if (hasDense && scheme === "Perturbed" && role !== "dense") continue;
    const key = role === "baseline" ? name : scheme;
    if (!best.has(key)) best.set(key, row);
  }
  return [...best.values()];
}

/** Rows sorted by a column, those without a number last; without a sort, best first as in the data. */
function sortedRows(rows) {
  const { sort } = state.display;
  if (!sort) return rows;
  const sign = sort.startsWith("-") ? -1 : 1;
  const column = state.view.columns.indexOf(sort.replace(/^-/, ""));
  if (column < 0) return [...rows].sort((a, b) => sign * a.variant.name.localeCompare(b.variant.name, "en"));
  const key = (row) => numberIn(row.texts[column] ?? "");
  return [...rows].sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
    return x === y ? 0 : sign * (x < y ? -1 : 1);
  });
}

// --- The table with dots --------------------------------------------------------------------------------------------

const PHONE = window.matchMedia("(max-width: 40rem)");
const TABLET = window.matchMedia("(max-width: 62rem)");
const N_EFF = "n_eff: the members with independent noise that would give as good a gradient. "
  + "The line between two marks is the loss due to noise that members share.";

/** Write the table of the chosen view, or say that nothing matches the filter. */
function showTable() {
  const { view, display } = state;
  const rows = shownRows();
  const axis = axisOf(rows);
  const columns = shownColumns(rows);
  put("table-title", tableTitle(view));
  put("table-note", view.quantity.metric === RATE ? N_EFF : "");
  put("legend", legendOf(rows));
  put("count", `${rows.length} of ${view.rows.length} variants`);
  byId("filter").value = display.filter ?? "";
  byId("all").checked = Boolean(display.all);
  byId("all").parentElement.hidden = isShort(view);
  byId("empty").hidden = rows.length > 0;
  byId("dots").hidden = !rows.length;
  byId("clear").hidden = !display.filter;
  const nothing = display.filter ? `No variant of this table has “${display.filter}” in its name.` : "No row could be read.";
  put("empty-text", rows.length ? "" : nothing);
  const chart = html("th", { scope: "col", class: "chart" }, axisHead(axis));
  put("dots-head", html("tr", {}, headOf("variant"), chart, columns.map(headOf)));
  put("dots-body", rows.map((row) => rowOf(row, columns, axis)));
}

/** The columns of the table in which any row has a text. */
function shownColumns(rows) {
  const { view } = state;
  return view.columns.slice(0, view.shown).filter((column) => rows.some((row) => cellOf(view, row, column)));
}

function tableTitle({ quantity, columns }) {
  if (quantity.metric === RATE) return "Members evaluated per ms, and how many of them count";
  const { phase, method } = quantity;
  const where = phase === "quality" ? method : method === "host" ? phase : `${phase}, ${method}`;
  return `${columns[0]}: ${where}`;
}

/** A heading that sorts by its column, best first; a second click reverses the order. */
function headOf(column) {
  const { display, view } = state;
  const isSorted = (display.sort ?? "").replace(/^-/, "") === column;
  const isFalling = isSorted && display.sort.startsWith("-");
  const isFirst = column === view.columns[0];
  const isHigherBetter = isFirst ? view.quantity.better > 0 : /evaluated|dense|naive|kept/.test(column);
  const isNextFalling = isSorted ? !isFalling : isHigherBetter;
  const sort = () => {
    display.sort = isNextFalling ? `-${column}` : column;
    refresh();
    byId("dots-head").querySelector(`[data-column="${CSS.escape(column)}"]`)?.focus();
  };
  const order = isSorted ? (isFalling ? "descending" : "ascending") : null;
  const button = html("button", { type: "button", "data-column": column, onclick: sort }, column);
  return html("th", { scope: "col", class: classOf(column), "aria-sort": order }, button);
}

/** The class of a column: a phone shows only "main", a tablet also "mid". */
function classOf(column) {
  if (column === "variant") return "name";
  if (column === state.view.columns[0]) return "main";
  return column.includes("dense") ? "mid" : "wide";
}

function isVisible(column) {
  return !(PHONE.matches ? ["mid", "wide"] : TABLET.matches ? ["wide"] : []).includes(classOf(column));
}

/** Open the details of a variant, or close them if they are open. */
function toggle(name) {
  state.display.open = state.display.open === name ? "" : name;
  refresh();
  byId("dots-body").querySelector(`[data-variant="${CSS.escape(name)}"]`)?.focus();
}

/** A variant's row, and below it its details if it is open. */
function rowOf(row, columns, axis) {
  const { name, role } = row.variant;
  const isOpen = state.display.open === name;
  const onclick = () => toggle(name);
  const attributes = { type: "button", "data-variant": name, "aria-expanded": String(isOpen), onclick };
  const note = { dense: "dense noise", baseline: "baseline", control: "for comparison only" }[role];
  const button = html("button", attributes, breakable(name));
  const head = html("th", { scope: "row", class: "name" }, button, note && html("small", {}, note));
  const cellIn = (column) => html("td", { class: classOf(column) }, shortened(cellOf(state.view, row, column)));
  const width = columns.filter(isVisible).length + 1;
  const cells = row.texts.some(Boolean)
    ? [html("td", { class: "chart" }, dotsOf(row, axis)), columns.map(cellIn)]
    : [html("td", { class: "reason", colspan: width }, row.reason || "not in this run")];
  const line = html("tr", { class: role }, head, cells);
  return isOpen ? [line, html("tr", { class: "detail" }, html("td", { colspan: width + 1 }, detailOf(row)))] : line;
}

function shortened(text) {
  return text.replace("at least ", "≥ ").replace("more than ", "> ").replace("about ", "≈ ") || "–";
}

/** The axis of some rows, logarithmic if all numbers are positive, else linear; `at` returns percent of its length. */
function axisOf(rows) {
  const values = rows.flatMap(({ marks }) => [marks[VALUE], marks[EVALUATED]]).filter(isNumber);
  if (!values.length) return { ticks: [], at: () => 50 };
  const isLogarithmic = values.every((value) => value > 0);
  if (state.view.quantity.metric !== RATE) {
    const ends = rows.flatMap(({ marks }) => [marks[LOW], marks[HIGH]]).filter(isNumber);
    values.push(...ends.filter((end) => !isLogarithmic || end > 0));
  }
  const scaled = isLogarithmic ? Math.log10 : Number;
  const [low, high] = [Math.min(...values, isLogarithmic ? Infinity : 0), Math.max(...values)].map(scaled);
  const span = high - low || 1;
  const share = (value) => (isLogarithmic && value <= 0 ? 0 : (scaled(value) - low) / span);
  const at = (value) => Math.min(97, Math.max(3, 4 + 92 * share(value)));
  return { ticks: ticksOf(low, high, isLogarithmic), at, isLogarithmic };
}

/** Round values on an axis, as many as there is room for: even steps, or 1, 2, 5 or 1, 3 or 1 times powers of ten. */
function ticksOf(low, high, isLogarithmic) {
  const mostTicks = PHONE.matches ? 3 : 6;
  const step = isLogarithmic ? 1 : 10 ** Math.floor(Math.log10(high - low || 1));
  const first = Math.floor(low / step);
  const places = Array.from({ length: Math.ceil(high / step) - first + 1 }, (_, number) => first + number);
  const decades = (digits) => places.flatMap((place) => digits.map((digit) => Number(`${digit}e${place}`)));
  const scaled = isLogarithmic ? Math.log10 : Number;
  const isInside = (value) => scaled(value) >= low - 1e-9 && scaled(value) <= high + 1e-9;
  const choices = isLogarithmic ? [[1, 2, 5], [1, 3], [1]].map(decades) : [places.map((place) => place * step)];
  const inside = choices.map((values) => values.filter(isInside));
  const ticks = inside.find((values) => values.length <= mostTicks) ?? inside.at(-1);
  if (isLogarithmic && ticks.length < 2) return [10 ** low, 10 ** high];
  const stride = Math.ceil(ticks.length / mostTicks);
  return ticks.filter((_, place) => place % stride === 0);
}

function tickText(value) {
  const size = Math.abs(value);
  if (value && (size >= 1e6 || size < 1e-3)) return value.toExponential(0).replace("e+", "e");
  return Number(value.toPrecision(2)).toLocaleString("en-US", { maximumFractionDigits: 6 });
}

function axisHead(axis) {
  const place = (tick) => ({ x: `${axis.at(tick)}%`, y: 14, "text-anchor": "middle" });
  const texts = axis.ticks.map((tick) => svg("text", place(tick), tickText(tick)));
  const name = state.view.quantity.metric === RATE ? "Members per ms of a step" : state.view.columns[0];
  const label = `${name}, ${axis.isLogarithmic ? "logarithmic" : "linear"} axis: ${axis.ticks.map(tickText).join(", ")}`;
  return svg("svg", { class: "axis", role: "img", "aria-label": label }, texts);
}

/** The marks of a row: an open circle for members evaluated, a filled mark for the figure, arrows for bounds. */
function dotsOf(row, axis) {
  const [value, low, high, evaluated] = row.marks;
  const place = (number) => `${axis.at(number)}%`;
  const line = (kind, from, to) => svg("line", { class: kind, x1: from, x2: to, y1: "50%", y2: "50%" });
  const at = (x, shape) => svg("svg", { x, y: "50%", class: "mark" }, shape);
  const upright = (x) => svg("line", { class: "grid", x1: x, x2: x, y1: "-100%", y2: "200%" });
  const parts = axis.ticks.map((tick) => upright(place(tick)));
  if (row.kind) {
    const start = isNumber(value) ? place(value) : isNumber(evaluated) ? place(evaluated) : "50%";
    parts.push(line("join", start, "98%"), at("99%", shapeOf("tip", ARROW)));
  }
  if (isNumber(value)) {
    if (isNumber(evaluated)) parts.push(line("join", place(value), place(evaluated)));
    else if (isNumber(low) && isNumber(high)) parts.push(line("whisker", place(low), place(high)));
  }
  if (isNumber(evaluated)) parts.push(at(place(evaluated), svg("circle", { class: "evaluated", r: 3.5 })));
  if (isNumber(value)) parts.push(at(place(value), shapeOf("value", MARKS[row.variant.family])));
  const label = labelOfMarks(row);
  const attributes = { class: `dots ${familyClass(row.variant.family)}`, role: "img", tabindex: "0", "aria-label": label };
  return svg("svg", attributes, svg("title", {}, label), parts);
}

function shapeOf(kind, path) {
  return svg("path", { class: kind, d: path });
}

const ARROW = "M0,-5L7,0L0,5z";
/** The marks of the families, as in the plots. */
const MARKS = {
  "dense noise": "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0",
  "low rank": "M-4.5,-4.5h9v9h-9z",
  "sparse": "M0,-5.5L5.5,4.5H-5.5z",
  "shared core": "M0,-6L6,0L0,6L-6,0z",
  "dropout": "M0,5.5L5.5,-4.5H-5.5z",
  "other": "M-5,-2.5L-2.5,-5L0,-2.5L2.5,-5L5,-2.5L2.5,0L5,2.5L2.5,5L0,2.5L-2.5,5L-5,2.5L-2.5,0z",
};

function familyClass(family) {
  return `family-${family.replaceAll(" ", "-")}`;
}

/** The figures that a row's marks show, for screen readers and as a hint. */
function labelOfMarks(row) {
  const { view } = state;
  const columns = view.columns.slice(0, view.quantity.metric === RATE ? 2 : 1);
  const figures = columns.map((column) => `${column} ${cellOf(view, row, column) || "unknown"}`);
  return `${row.variant.name}: ${figures.join(", ")} ${cellOf(view, row, "interval")}`.trim();
}

/** The marks of the shown rows with their names. */
function legendOf(rows) {
  const known = rows.filter(isKnown);
  const families = Object.keys(MARKS).filter((family) => known.some((row) => row.variant.family === family));
  const isRate = state.view.quantity.metric === RATE;
  if (!families.length || (!isRate && families.length < 2)) return [];
  const icon = { width: 16, height: 16, viewBox: "-8 -8 16 16", "aria-hidden": "true" };
  const entry = (kind, shape, text) => html("li", {}, svg("svg", { ...icon, class: kind }, shape), text);
  const circle = svg("circle", { class: "evaluated", r: 3.5 });
  return [
    isRate ? [entry("", circle, "members evaluated per ms"), html("li", {}, "n_eff per ms by family:")] : null,
    families.map((family) => entry(familyClass(family), shapeOf("value", MARKS[family]), family)),
    known.some((row) => row.kind) ? entry("", shapeOf("tip", ARROW), "exact, or at least") : null,
  ];
}

// --- Details of a variant, in place ---------------------------------------------------------------------------------

/** Formula, code, and all figures of a variant on the chosen case. */
function detailOf(row) {
  const { variant } = row;
  const about = DATA.schemes[variant.documented];
  const formula = about?.summary ? [html("p", { class: "formula" }, about.summary), paragraphs("", about.text)] : [];
  const remark = row.remark ? paragraphs("warning", [row.remark]) : [];
  const source = variant.source ? paragraphs("quiet", [`Source: ${variant.source}`]) : [];
  return html(
    "div",
    { class: "detail-body" },
    html("div", {}, remark, formula, closedForms(variant.documented, about), source),
    html("div", {}, codeOf(variant, state.view.case), figuresOf(variant)),
  );
}

/** Memory, work and quality in closed form, also those of the scheme that a fused variant computes. */
function closedForms(name, about) {
  const schemes = [[name, about], [about?.of, DATA.schemes[about?.of]]];
  return schemes.filter(([, doc]) => doc && Object.keys(doc.closed).length).map(([scheme, { closed }]) => [
    scheme === name ? null : html("p", { class: "quiet" }, `It computes ${scheme}:`),
    listOf("closed", Object.entries(closed)),
  ]);
}

/** All figures of a variant on the chosen case in the chosen run, or the reasons for missing ones. */
function figuresOf(variant) {
  const views = VIEWS.filter((view) => view.key === state.view.key);
  const lines = views.flatMap((view) => view.rows.filter((row) => row.variant === variant).map((row) => ({ view, row })));
  const ofMetric = (metric) => lines.filter(({ view }) => view.quantity.metric === metric);
  const times = ofMetric(LATENCY);
  const phases = new Set(times.map(({ view }) => view.quantity.phase));
  const isShown = ({ metric, phase }) => [LATENCY, RATE].includes(metric) || (metric === "peak_bytes" && phases.has(phase));
  const others = lines.filter(({ view }) => !isShown(view.quantity));
  const reasons = lines.filter(({ row }) => row.reason).map(({ view, row }) => `${view.quantity.phase}: ${row.reason}`);
  return [
    ofMetric(RATE).map(rankingFigures),
    framed(variant, "Times", ["Phase", "time (ms)", "±", "x plain", "x naive", "bound (ms)", "MB"], times.map(timeTexts)),
    framed(variant, "Other figures", ["Figure", "value", "±"], others.map(otherTexts)),
    paragraphs("quiet", [...new Set(reasons)]),
  ];
}

function otherTexts({ view, row }) {
  const { phase, method } = view.quantity;
  const name = `${view.columns[0]}, ${phase === "quality" ? method : phase}`;
  return [name, row.texts[0], cellOf(view, row, "interval")];
}

/** All columns of a ranking, which a narrow table leaves out. */
function rankingFigures({ view, row }) {
  const name = (column) => (column === "interval" ? "± of n_eff / ms" : column);
  const cells = view.columns.map((column) => [name(column), cellOf(view, row, column)]);
  return listOf("cells", cells.filter(([, text]) => text));
}

function timeTexts({ view, row }) {
  const { phase, method } = view.quantity;
  const [time, plain] = view.columns;
  const columns = [time, "interval", plain, "faster than naive", "roofline bound (ms)", "memory (MB)"];
  return [method === "host" ? phase : `${phase}, ${method}`, ...columns.map((column) => cellOf(view, row, column))];
}

/** A table that scrolls in its own frame, without rows that have no value and without empty columns. */
function framed(variant, name, heads, lines) {
  const rows = lines.filter(([, text]) => text);
  if (!rows.length) return null;
  const isUsed = (_, place) => rows.some((row) => row[place]);
  const frame = { class: "scroll", tabindex: "0", role: "region", "aria-label": `${name} of ${variant.name}` };
  return html("div", frame, tableOf(name, heads.filter(isUsed), rows.map((row) => row.filter(isUsed))));
}

// --- The table as text ----------------------------------------------------------------------------------------------

/** The shown rows as lists of texts, headings first. */
function shownTexts() {
  const rows = shownRows();
  const columns = shownColumns(rows);
  const texts = (row) => columns.map((column, place) => cellOf(state.view, row, column) || (place ? "" : row.reason));
  return [["variant", ...columns], ...rows.map((row) => [row.variant.name, ...texts(row)])];
}

/** The shown rows as numbers, the half width of the interval, and a remark: a reason, or a bound of a number. */
function shownNumbers() {
  const { view } = state;
  const rows = shownRows();
  const columns = [...shownColumns(rows), ...(view.columns.includes("interval") ? ["interval"] : [])];
  const texts = (row) => {
    const remarks = row.reason ? [row.reason] : [];
    const numbers = columns.map((column) => {
      const text = cellOf(view, row, column);
      // "at least 12x" has the words "at least" and the number 12.
      const [, word, number] = /^(\D*?)\s*(-?\d\S*?)?[x%]?$/.exec(text) ?? [];
      if (!/^(± ?)?$/.test(word ?? "")) remarks.push(`${column}: ${word}`);
      return number ?? "";
    });
    return [row.variant.name, ...numbers, remarks.join("; ")];
  };
  return [["variant", ...columns.map((name) => (name === "interval" ? "± 95 %" : name)), "remark"], ...rows.map(texts)];
}

function asMarkdown([head, ...rows]) {
  const clean = (text) => text.replace(/[\\|`*_<>[\]]/g, "\\$&").replace(/\s+/g, " ");
  const rule = [":-", ...head.slice(1).map(() => "-:")];
  const lines = [head.map(clean), rule, ...rows.map((row) => row.map(clean))];
  return `${lines.map((line) => `| ${line.join(" | ")} |`).join("\n")}\n`;
}

/** Comma-separated values; a text that a spreadsheet would take for a formula begins with an apostrophe. */
function asCsv(lines) {
  const clean = (text) => {
    const safe = /^[=+@\t\r]|^-(?!\d)/.test(text) ? `'${text}` : text;
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  return `${lines.map((line) => line.map(clean).join(",")).join("\r\n")}\r\n`;
}

// --- Two runs compared ----------------------------------------------------------------------------------------------

const MOST_ROWS = 200;
/** The fields of an environment that are equal on the same device. */
const DEVICE_FIELDS = ["device_name", "cpu", "threads", "device_memory_bytes"];

/** Write the comparison of the two runs that are chosen. */
function showComparison() {
  const { display } = state;
  const options = DATA.runs.map((run) => [run.id, `${run.device}: ${runText(run)}`]);
  for (const side of ["a", "b"]) fillSelect(`compare-${side}`, [["", "Choose a run"], ...options], display[side] ?? "");
  const [a, b] = [display.a, display.b].map((id) => DATA.runs.find((run) => run.id === id));
  const pairs = a && b ? commonViews(a, b) : new Map();
  const quantity = pairs.has(display.quantity) ? display.quantity : [...pairs.keys()][0];
  fillSelect("compare-quantity", [...pairs.keys()].map((key) => [key, key]), quantity);
  byId("compare-quantity").parentElement.hidden = !pairs.size;
  if (quantity) {
    const lost = display.quantity && display.quantity !== quantity;
    const warning = lost ? [`Not in both runs: ${display.quantity}. Another quantity is shown.`] : [];
    writeComparison(pairs.get(quantity), [...warning, ...differences(a, b)]);
    return;
  }
  const unknown = [display.a, display.b].filter((id) => id && !DATA.runs.some((run) => run.id === id));
  const lacking = unknown.map((id) => `Run ${id} is not in this page. `).join("");
  put("compare-status", a && b ? "These two runs have no case, phase and metric in common." : `${lacking}Choose two runs.`);
  put("compare-table");
}

/** The pairs of views of the same case and quantity in two runs, by the name of the quantity, times first. */
function commonViews(a, b) {
  const keyOf = (view) => `${DATA.cases.indexOf(view.case)} ${DATA.quantities.indexOf(view.quantity)}`;
  const there = new Map(VIEWS.filter((view) => view.run === b).map((view) => [keyOf(view), view]));
  const both = VIEWS.filter((view) => view.run === a && there.has(keyOf(view)));
  const phases = ["quality", "sample", "update", "forward", "step"];
  const order = ({ quantity }) => [quantity.metric === LATENCY, quantity.metric === RATE, phases.indexOf(quantity.phase)];
  const pairs = new Map();
  for (const view of both.sort((x, y) => firstDifference(order(x), order(y)))) {
    const { phase, method } = view.quantity;
    const name = `${phase}: ${view.columns[0]}, ${method}`;
    pairs.set(name, [...(pairs.get(name) ?? []), [view, there.get(keyOf(view))]]);
  }
  return pairs;
}

/** Write the rows that both runs have, the worst change first. */
function writeComparison(pairs, warnings) {
  const rows = pairs.flatMap(([view, other]) => matchedRows(view, other));
  const both = rows.filter((row) => row.ratio !== null).sort((x, y) => y.loss - x.loss);
  const count = (kind) => both.filter((row) => row.kind === kind).length;
  const summary = [
    both.length && `B / A is ${ratioText(medianRatio(both))} in the median of ${both.length} rows. `,
    both.length && `Beyond the intervals of both, ${count("worse")} are worse and ${count("better")} better. `,
    `${rows.length - both.length} rows are in only one of the runs or have no ratio.`,
    both.length > MOST_ROWS && ` The first ${MOST_ROWS} are shown.`,
  ];
  put("compare-status", paragraphs("warning", warnings), html("p", {}, summary.filter(Boolean)));
  const heads = ["Variant", "Case", "A", "B", "B / A", "Interval"];
  const table = tableOf(`${pairs[0][0].columns[0]}, worst change first`, heads, both.slice(0, MOST_ROWS).map(comparisonTexts));
  table.querySelectorAll("tbody tr").forEach((line, place) => line.classList.add(both[place].kind || "same"));
  put("compare-table", table);
}

function comparisonTexts({ name, label, textA, textB, ratio, low, high, kind }) {
  const range = low === null ? "" : `${ratioText(low)} to ${ratioText(high)}`;
  return [name, label, textA, textB, `${ratioText(ratio)}${kind && ` ${kind}`}`, range];
}

function medianRatio(rows) {
  const ratios = rows.map((row) => row.ratio).sort((x, y) => x - y);
  return (ratios[(ratios.length - 1) >> 1] + ratios[ratios.length >> 1]) / 2;
}

/** The variants of two views side by side; the ratio is null where one of them has no number. */
function matchedRows(view, other) {
  const [here, there] = [view, other].map(({ rows }) => new Map(rows.filter(isKnown).map((row) => [row.variant, row])));
  return [...new Set([...here.keys(), ...there.keys()])].map((variant) => {
    const [a, b] = [here.get(variant), there.get(variant)];
    const texts = { textA: a?.texts[0] ?? "", textB: b?.texts[0] ?? "" };
    return { ...change(a, b, view.quantity.better), ...texts, name: variant.name, label: view.case.label };
  });
}

/** B / A, the ends of its interval, how much worse B is (above 1), and "worse" or "better" beyond the interval. */
function change(a, b, better) {
  const [x, y] = [a?.marks ?? [], b?.marks ?? []];
  if (!(x[VALUE] > 0) || !(y[VALUE] >= 0)) return { ratio: null };
  const hasEnds = [x[LOW], x[HIGH], y[LOW], y[HIGH]].every(isNumber) && x[LOW] > 0;
  const [low, high] = hasEnds ? [y[LOW] / x[HIGH], y[HIGH] / x[LOW]] : [null, null];
  const ratio = y[VALUE] / x[VALUE];
  const loss = better > 0 ? 1 / ratio : ratio;
  const isBeyond = better && hasEnds && (low > 1 || high < 1);
  return { ratio, low, high, loss, kind: isBeyond ? (loss > 1 ? "worse" : "better") : "" };
}

/** A ratio with three significant digits, as format_multiplier in units.py without an interval. */
function ratioText(value) {
  return `${value >= 100 ? value.toFixed(0) : value.toPrecision(3)}x`;
}

/** Sentences on flaws of two runs and differences between their environments. */
function differences(a, b) {
  const flaws = [["A", a], ["B", b]].filter(([, run]) => run.flaws.length);
  const sentences = flaws.map(([side, run]) => `Run ${side} ${run.flaws.join(" and ")}.`);
  const [x, y] = [a.environment, b.environment];
  const different = [...new Set([...Object.keys(x), ...Object.keys(y)])].filter((name) => x[name] !== y[name]);
  const sides = (name) => `${name}: ${x[name] ?? "unknown"} in A, ${y[name] ?? "unknown"} in B`;
  const listed = (names) => names.map(sides).join("; ");
  const devices = different.filter((name) => DEVICE_FIELDS.includes(name) && name in x && name in y);
  const others = different.filter((name) => !DEVICE_FIELDS.includes(name));
  if (devices.length) sentences.push(`Different devices (${listed(devices)}): the ratio compares devices, not variants.`);
  if (others.length) sentences.push(`Different in A and B: ${listed(others)}.`);
  return sentences;
}

// --- The page -------------------------------------------------------------------------------------------------------

/** Draw everything from the current choice. */
function refresh({ step = false } = {}) {
  writeLink(step);
  for (const name of CHOICES) fillSelect(`choose-${name}`, optionsOf(name), state.view.choice[name]);
  showAnswer();
  showTable();
  showComparison();
}

/** Show what the address says. */
function followLink() {
  const missing = readLink();
  put("status", missing.length ? `Not in this page: ${missing.join(", ")}. The closest match is shown.` : "");
  byId("more").open ||= state.view !== findView(keptChoice(state.view)).view;
  refresh();
}

function showRuns() {
  const rows = DATA.runs.map((run) => [run.id, run.device, run.suite, run.started, run.flaws.join("; ") || "none"]);
  put("runs", tableOf(`${rows.length} runs`, ["Run", "Device", "Suite", "Started", "Flaws"], rows));
  put("left-out", DATA.left_out.map((line) => html("li", {}, line)));
}

function listen() {
  const on = (id, event, action) => byId(id).addEventListener(event, action);
  const display = (name, value) => {
    state.display[name] = value;
    refresh();
  };
  for (const name of CHOICES) on(`choose-${name}`, "change", (event) => choose(name, event.target.value));
  on("filter", "input", (event) => display("filter", event.target.value));
  on("all", "change", (event) => display("all", event.target.checked ? "yes" : ""));
  on("clear", "click", () => {
    display("filter", "");
    byId("filter").focus();
  });
  on("dots", "keydown", ({ key }) => {
    if (key === "Escape" && state.display.open) toggle(state.display.open);
  });
  on("more", "keydown", ({ key }) => {
    if (key !== "Escape") return;
    byId("more").open = false;
    byId("more").querySelector("summary").focus();
  });
  for (const name of ["a", "b", "quantity"]) {
    on(`compare-${name}`, "change", (event) => display(name, event.target.value));
  }
  on("compare-swap", "click", () => {
    [state.display.a, state.display.b] = [state.display.b, state.display.a];
    refresh();
  });
  // The address holds the choice, so that a link inside the page cannot be a fragment.
  on("skip", "click", (event) => {
    event.preventDefault();
    byId("main").focus();
  });
  window.addEventListener("hashchange", followLink);
  for (const width of [PHONE, TABLET]) width.addEventListener("change", () => refresh());
}

/** Say that there is nothing to show, and why. */
function showNothing() {
  put("answer-title", "No run to show");
  const lines = [...DATA.left_out, "Measure with: python -m esbench run"];
  put("answer-notes", lines.map((line) => html("li", {}, line)));
  for (const id of ["choice", "table", "compare"]) byId(id).hidden = true;
}

showRuns();
if (VIEWS.length) {
  put(
    "copies",
    copyButton("Copy as Markdown", () => asMarkdown(shownTexts())),
    copyButton("Copy as CSV", () => asCsv(shownNumbers())),
    copyButton("Copy link", () => location.href),
  );
  listen();
  followLink();
} else showNothing();
