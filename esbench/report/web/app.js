// The report page: an answer, figures, a table and a comparison, drawn from the JSON records in the page.
"use strict";

// --- Data ----------------------------------------------------------------------------------------------------------

/**
 * @typedef {object} Interval a number with its 95 % interval
 * @property {number|null} value
 * @property {number|null} low
 * @property {number|null} high
 */

/**
 * @typedef {Interval} Figure the figure of one variant, in the unit of its quantity
 * @property {number} variant position in DATA.variants
 * @property {string} label
 * @property {boolean} baseline
 * @property {string|null} kind "exact" or "at least", where the figure is not a plain number
 * @property {boolean} counts whether it is a number of things
 * @property {number|null} floor roofline bound
 * @property {Interval|null} speed speed multiplier
 * @property {Interval|null} time time multiplier
 * @property {Interval|null} n_eff effective population
 * @property {number|null} kappa
 * @property {string} reason why there is no figure
 * @property {string} remark a warning about the samples
 */

const DATA = JSON.parse(document.getElementById("data").textContent);
const PHASES = ["sample", "forward", "update", "step", "quality"];
const LATENCY = "latency_ns";
const RATE = "n_eff_per_ms";
const PEAK = "peak_bytes";

/** Device -> positions of its runs, newest first; published runs come last. */
const DEVICES = new Map();
DATA.runs.forEach((run, number) => {
  run.device = deviceOf(run);
  if (!DEVICES.has(run.device)) DEVICES.set(run.device, []);
  DEVICES.get(run.device).push(number);
});
for (const numbers of DEVICES.values()) {
  numbers.sort((a, b) => (DATA.runs[a].id < DATA.runs[b].id ? 1 : -1));
}

/** For each run: "quantity case" -> panel. */
const PANELS = DATA.runs.map((run) => new Map(run.panels.map((panel) => [`${panel.quantity} ${panel.case}`, panel])));
/** For each run: the cases that it measured. */
const CASES = DATA.runs.map((run) => new Set(run.panels.map((panel) => panel.case)));

/** The name of a run's device. */
function deviceOf(run) {
  const name = String(run.environment.device_name);
  return run.published ? `${name}, published by others` : name;
}

/** The label of a variant on an operator, as in the tables. */
function labelOf(variant, operator) {
  const one = DATA.variants[variant];
  return `${one.scheme}${one.baseline ? "" : operator}${one.options}`;
}

/** The figures of a quantity on a case in a run; an empty list where the run has none. @returns {Figure[]} */
function figuresOf(run, quantity, number) {
  const panel = PANELS[run]?.get(`${quantity} ${number}`);
  if (!panel) return [];
  const { operator } = DATA.cases[number];
  const { unit, metric } = DATA.quantities[quantity];
  return panel.figures.map(([variant, numbers, figure = {}]) => ({
    ...interval(numbers),
    variant,
    label: labelOf(variant, operator),
    baseline: DATA.variants[variant].baseline,
    kind: figure.kind ?? null,
    counts: !unit && metric !== RATE,
    floor: figure.floor ?? null,
    speed: interval(figure.speed),
    time: interval(figure.time),
    n_eff: interval(figure.n_eff),
    kappa: figure.kappa ?? null,
    flops: figure.flops ?? null,
    moved_bytes: figure.moved_bytes ?? null,
    reason: figure.reason ?? "",
    remark: figure.remark ?? "",
  }));
}

/** A stored number with null for what it lacks. @returns {Interval|null} */
function interval(stored) {
  if (!stored) return null;
  const [value = null, low = null, high = null] = stored;
  return { value, low, high };
}

/** The positions of the quantities that a run has of a case. */
function quantitiesOf(run, number) {
  return DATA.quantities.map((_, quantity) => quantity).filter((one) => PANELS[run].has(`${one} ${number}`));
}

/** The quantity of a phase and metric, by the wanted method where it is measured. */
function quantityNumber(run, number, phase, metric, method) {
  const found = quantitiesOf(run, number).filter((one) => {
    const quantity = DATA.quantities[one];
    return quantity.phase === phase && quantity.metric === metric;
  });
  return found.find((one) => DATA.quantities[one].method === method) ?? found[0];
}

/** Whether higher values of a metric are better (1), lower ones (-1), or neither (0). */
function betterOf(metric) {
  if (metric === RATE || metric === "effective_members" || metric === "largest_members" || metric === "cosine") return 1;
  if (/_(ns|bytes|j)$/.test(metric) || metric === "launches" || metric === "kappa") return -1;
  return 0;
}

// --- Numbers as text: the rule of units.py, so that page and tables show the same digits ----------------------------

const ABSENT = "n/a";
const UNSURE = 3;
const MOST = 6;
const SMALLEST = 1e-6;
const ROUNDING = 1e-9;
/** A half width below 1.95 times a power of ten is shown with two digits, others with one. */
const COARSE = 1.95;

/** The power of ten of the leading digit after rounding to a number of digits. */
function exponentOf(value, digits) {
  return Number(value.toExponential(digits - 1).split("e")[1]);
}

/** The distance from a number to the farther end of its interval, null where one end is unknown. */
function halfWidth({ value, low, high }) {
  return low === null || high === null ? null : Math.max(high - value, value - low);
}

/** The power of ten of the last digit shown: last_place in units.py. */
function lastPlace(value, half = null) {
  if (half === null || !Number.isFinite(half) || half <= ROUNDING * Math.abs(value)) {
    return value ? Math.min(0, exponentOf(value, UNSURE) - UNSURE + 1) : 0;
  }
  const first = exponentOf(half, 1);
  const place = half / Number(`1e${first}`) <= COARSE ? first - 1 : first;
  if (!value) return place;
  const leading = exponentOf(value, 1);
  return Math.max(Math.min(place, leading), Math.min(0, leading - MOST + 1));
}

/** A number rounded to a power of ten, half to even. */
function fixed(value, place) {
  const size = Math.abs(value);
  const sign = value < 0 ? "-" : "";
  if (size && size < SMALLEST && place <= exponentOf(value, 1)) {
    return value.toExponential(exponentOf(value, 1) - place).replace(/e-(\d)$/, "e-0$1");
  }
  // All decimals, so that nothing is rounded twice.
  const [whole, part] = size < 1e21 ? size.toFixed(100).split(".") : [String(BigInt(size)), ""];
  const digits = whole + part;
  const kept = whole.length - place;
  const rest = digits.slice(Math.max(kept, 0)).padStart(digits.length - kept, "0");
  const half = "5".padEnd(rest.length, "0");
  let found = BigInt(digits.slice(0, Math.max(kept, 0)) || "0");
  if (rest > half || (rest && rest === half && found % 2n)) found += 1n;
  if (place > 0) return sign + (found * 10n ** BigInt(place)).toLocaleString("en-US");
  const text = found.toString().padStart(1 - place, "0");
  const front = BigInt(text.slice(0, text.length + place)).toLocaleString("en-US");
  return sign + front + (place ? `.${text.slice(place)}` : "");
}

/** A number as text, with half the width of its interval if known: format_number in units.py. */
function numberText(value, half = null) {
  if (value === null || value === undefined || !Number.isFinite(value)) return ABSENT;
  return value === 0 ? "0" : fixed(value, lastPlace(value, half));
}

/** A count as text: whole numbers have all of their digits. */
function countText(value) {
  return Number.isInteger(value) ? fixed(value, 0) : numberText(value);
}

/** A number as text, with the digits that its interval supports. */
function valueText(figure) {
  const half = halfWidth(figure);
  return figure.counts && !half ? countText(figure.value) : numberText(figure.value, half);
}

/** The 95 % interval as text, with the digits of the figure or as many as distinguish its ends; empty without one. */
function intervalText({ value, low, high }) {
  if (low === null || low === high) return "";
  if (high === null) return `at least ${numberText(low)}`;
  const middle = value ?? low;
  for (let place = lastPlace(middle, halfWidth({ value: middle, low, high })); ; place -= 1) {
    const ends = [low, high].map((end) => fixed(end, place));
    if (ends[0] !== ends[1] || place < -20) return ends.join(" to ");
  }
}

/** A multiplier as text. */
function multiplierText(ratio) {
  return ratio && ratio.value !== null ? `${valueText(ratio)}x` : ABSENT;
}

/** A figure as text: "exact", "at least 12", or a number. */
function figureText(figure) {
  if (figure.kind === "exact") return "exact";
  const number = valueText(figure);
  return figure.kind && figure.value !== null ? `${figure.kind} ${number}` : number;
}

// --- Elements: text is always inserted as text, never as markup -----------------------------------------------------

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

/** A new element of HTML. */
function html(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** A new element of SVG. */
function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG_NAMESPACE, tag), attributes, children);
}

/** An element of the page, by its id. */
function byId(id) {
  return document.getElementById(id);
}

/** Replace what an element holds. */
function put(id, ...children) {
  const element = typeof id === "string" ? byId(id) : id;
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const PENCIL = document.createElement("canvas").getContext("2d");

/** The width of a text in an SVG, in pixels. */
function textWidth(text) {
  PENCIL.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  return PENCIL.measureText(text).width;
}

/** A text shortened to a width in pixels. */
function fitText(text, pixels) {
  if (textWidth(text) <= pixels) return text;
  let [least, most] = [1, Array.from(text).length];
  while (least < most) {
    const middle = Math.ceil((least + most) / 2);
    if (textWidth(shorten(text, middle)) <= pixels) least = middle;
    else most = middle - 1;
  }
  return shorten(text, least);
}

/** A text shortened to a number of characters by leaving out the middle; the end of a label identifies a variant. */
function shorten(text, most) {
  const letters = Array.from(text);
  if (letters.length <= most) return text;
  const front = Math.ceil((most - 1) * 0.6);
  return `${letters.slice(0, front).join("")}…${letters.slice(letters.length - (most - 1 - front)).join("")}`;
}

/** A label that may be broken between its words. */
function breakable(label) {
  return label.split(/(?<=[a-z])(?=[A-Z])|(?<=\()/).flatMap((part, place) => (place ? [html("wbr"), part] : [part]));
}

/** Fill a figure of the page; it is hidden without a picture. */
function show(id, caption, picture, note = "") {
  const figure = byId(id);
  figure.hidden = !picture;
  if (!picture) return;
  put(figure.querySelector("figcaption"), caption);
  put(figure.querySelector(".chart"), picture);
  put(figure.querySelector(".note"), note);
}

/** An SVG of a size in pixels, with a description for screen readers. */
function picture(width, height, description, ...children) {
  const box = `0 0 ${width} ${height}`;
  return svg("svg", { viewBox: box, width, height, role: "img", "aria-label": description }, ...children);
}

// --- The selection and the link that restores it ---------------------------------------------------------------------

/**
 * @typedef {object} Choice what the page shows; each choice restricts those after it
 * @property {string} device
 * @property {string} operator
 * @property {string} shape
 * @property {string} dtype
 * @property {string} members
 * @property {string} run id of the run
 * @property {string} phase
 * @property {string} metric metric and method, with a slash between
 */

const NAMES = ["device", "operator", "shape", "dtype", "members", "run", "phase", "metric"];
const VIEWS = ["sort", "filter", "baselines", "variant", "a", "b", "quantity"];

/** The selection (choice) and how it is displayed (view). */
const state = { choice: {}, view: {} };

/**
 * Complete a choice: what is not asked for, or does not exist, is filled in.
 * @param {object} wanted values asked for, by name
 * @param {object} start values to prefer where none is asked for
 */
function resolved(wanted, start = {}) {
  const found = {};
  const missing = [];
  for (const name of NAMES) {
    const options = optionsOf(name, found).map((option) => option.value);
    const asked = wanted[name];
    if (asked !== undefined && !options.includes(asked)) missing.push(`${name} ${asked}`);
    const usual = name === "run" && wanted.phase !== undefined ? undefined : start[name];
    found[name] = [asked, usual].find((value) => options.includes(value)) ?? preferred(name, options, { ...wanted, ...found });
  }
  return { found, missing };
}

/** The initial choice: the widest Linear layer ranked by a complete run of the newest device. */
function first() {
  const runs = DATA.runs.filter((run) => !run.published);
  const device = runs.reduce((newest, run) => (newest === null || run.id > newest.id ? run : newest), null)?.device;
  const ranked = runs
    .filter((run) => run.device === device)
    .flatMap((run) => run.panels.map((panel) => ({ run, panel })))
    .filter(({ panel }) => DATA.quantities[panel.quantity].metric === RATE);
  if (!ranked.length) return {};
  ranked.sort((a, b) => lexicographic(startOrder(a), startOrder(b)));
  const { run, panel } = ranked[0];
  const { operator, shape, dtype, members } = DATA.cases[panel.case];
  return { device, operator, shape, dtype, members: String(members), run: run.id, phase: "step" };
}

/** What decides which ranking is shown first, the most important criterion first. */
function startOrder({ run, panel }) {
  const one = DATA.cases[panel.case];
  const rates = panel.figures.filter(([, numbers]) => numbers.length).length;
  return [!run.flaws.length, rates > 2, one.operator === "Linear", one.width ?? 0, one.members, run.id];
}

/** Compare two lists by their first difference, the larger one first. */
function lexicographic(a, b) {
  const place = a.findIndex((value, number) => value !== b[number]);
  return place < 0 ? 0 : a[place] > b[place] ? -1 : 1;
}

/** The option to take if none was asked for. */
function preferred(name, options, found) {
  if (name === "phase") {
    if (options.includes(state.choice.phase)) return state.choice.phase;
    return ["step", "forward"].find((phase) => options.includes(phase)) ?? options[0];
  }
  if (name === "metric") {
    const kept = state.choice.metric?.split("/")[0];
    const wanted = [kept, ...(found.phase === "step" ? [RATE] : []), LATENCY, "kappa"];
    for (const metric of wanted) {
      const option = options.find((one) => one.split("/")[0] === metric);
      if (option) return option;
    }
  }
  if (name === "members") {
    const numbers = options.map(Number);
    const near = Number(state.choice.members) || 1024;
    const distance = (number) => Math.abs(Math.log(number / near));
    return String(numbers.reduce((best, number) => (distance(number) < distance(best) ? number : best), numbers[0]));
  }
  if (name === "run") return preferredRun(options, found);
  if (state.choice[name] !== undefined && options.includes(state.choice[name])) return state.choice[name];
  if (name === "operator") return options.includes("Linear") ? "Linear" : options[0];
  return options[0];
}

/** The run to show: one with the phase, then one without flaws, then the current one, then the newest. */
function preferredRun(options, found) {
  const number = caseNumber(found);
  const phase = found.phase ?? state.choice.phase;
  const worth = (id) => {
    const run = runNumber(id, found.device);
    const held = quantitiesOf(run, number).some((quantity) => DATA.quantities[quantity].phase === phase);
    return [held, !DATA.runs[run].flaws.length, id === state.choice.run];
  };
  return [...options].sort((a, b) => lexicographic(worth(a), worth(b)))[0];
}

/** The options of a choice, given the choices before it. @returns {{value: string, text: string}[]} */
function optionsOf(name, found) {
  if (name === "device") return [...DEVICES.keys()].sort(byPublished).map(plainOption);
  const runs = DEVICES.get(found.device) ?? [];
  const fits = (number) =>
    ["operator", "shape", "dtype", "members"].every(
      (field) => found[field] === undefined || String(DATA.cases[number][field]) === found[field],
    );
  if (["operator", "shape", "dtype", "members"].includes(name)) {
    const numbers = new Set(runs.flatMap((run) => [...CASES[run]].filter(fits)));
    const values = [...new Set([...numbers].map((number) => String(DATA.cases[number][name])))];
    return values.sort(inOrder).map((value) => ({ value, text: name === "members" ? `${value} members` : value }));
  }
  const number = caseNumber(found);
  if (name === "run") {
    return runs.filter((run) => CASES[run].has(number)).map((run) => runOption(DATA.runs[run]));
  }
  const run = runNumber(found.run, found.device);
  const quantities = quantitiesOf(run, number).map((one) => DATA.quantities[one]);
  if (name === "phase") {
    const held = new Set(quantities.map((one) => one.phase));
    return PHASES.filter((phase) => held.has(phase)).map(plainOption);
  }
  return quantities
    .filter((one) => one.phase === found.phase)
    .map((one) => ({ value: `${one.metric}/${one.method}`, text: `${one.title} (${one.method})` }));
}

/** An option whose text is its value. */
function plainOption(value) {
  return { value, text: value };
}

/** A run as an option: date, suite and flaws. */
function runOption(run) {
  const flaws = run.flaws.length ? `, ${run.flaws.join(" and ")}` : "";
  const text = run.published ? run.suite : `${run.started.slice(0, 16).replace("T", " ")} ${run.suite}`;
  return { value: run.id, text: `${text}${flaws}` };
}

/** Compare numbers by size and words alphabetically. */
function inOrder(a, b) {
  return a.localeCompare(b, "en", { numeric: true });
}

/** Compare devices: measured before published ones, newest first. */
function byPublished(a, b) {
  const published = (device) => Number(DATA.runs[DEVICES.get(device)[0]].published);
  return published(a) - published(b) || (DATA.runs[DEVICES.get(a)[0]].id < DATA.runs[DEVICES.get(b)[0]].id ? 1 : -1);
}

/** The position of the chosen case. */
function caseNumber(choice) {
  return DATA.cases.findIndex(
    (one) =>
      one.operator === choice.operator &&
      one.shape === choice.shape &&
      one.dtype === choice.dtype &&
      String(one.members) === choice.members,
  );
}

/** The position of a run by its id, on a device if that is given. */
function runNumber(id, device) {
  const numbers = device === undefined ? DATA.runs.map((_, number) => number) : (DEVICES.get(device) ?? []);
  return numbers.find((number) => DATA.runs[number].id === id) ?? -1;
}

/** The choice as positions in DATA. */
function chosen() {
  const { choice } = state;
  const [metric, ...method] = choice.metric.split("/");
  const run = runNumber(choice.run, choice.device);
  const number = caseNumber(choice);
  return {
    run,
    case: number,
    phase: choice.phase,
    metric,
    method: method.join("/"),
    quantity: quantityNumber(run, number, choice.phase, metric, method.join("/")),
  };
}

/** Read the choice and the view from the address; return the names of what does not exist. */
function readLink() {
  const link = new URLSearchParams(location.hash.replace(/^#/, ""));
  const wanted = {};
  for (const name of NAMES) if (link.has(name)) wanted[name] = link.get(name);
  const { found, missing } = resolved(wanted, first());
  state.choice = found;
  state.view = {};
  for (const name of VIEWS) if (link.has(name)) state.view[name] = link.get(name);
  const { variant } = state.view;
  if (variant !== undefined && !DATA.variants.some((_, number) => variantKey(number) === variant)) {
    missing.push(`variant ${variant}`);
    delete state.view.variant;
  }
  return missing;
}

/** Write the choice and the view to the address; a step adds an entry to the browser's history. */
function writeLink(step = false) {
  const link = new URLSearchParams(Object.entries(state.choice));
  for (const name of VIEWS) if (state.view[name]) link.set(name, state.view[name]);
  const address = `#${link}`;
  if (address === location.hash) return;
  history[step ? "pushState" : "replaceState"](null, "", address);
}

// --- Rows and columns of the selection ---------------------------------------------------------------------------------

/**
 * @typedef {object} Column
 * @property {string} key
 * @property {string} title
 * @property {string} unit
 * @property {number} better 1 where more is better, -1 where less is
 * @property {string} kind "figure" or "times"
 */

/** The columns and the rows of the choice. @returns {{columns: Column[], rows: object[], main: Column}} */
function table() {
  const at = chosen();
  const quantity = DATA.quantities[at.quantity];
  const ranks = at.metric === RATE || at.metric === LATENCY;
  const rows = new Map();
  const columns = [];

  /** Add a column with a cell of each variant's figure. */
  function add(column, figures, cell) {
    const told = figures.filter((figure) => cell(figure) !== null);
    if (!told.some((figure) => cell(figure).value !== null || cell(figure).kind)) return;
    columns.push({ kind: "figure", better: 0, unit: "", ...column });
    for (const figure of told) rowOf(figure).cells[column.key] = cell(figure);
  }
  function rowOf(figure) {
    if (!rows.has(figure.variant)) {
      rows.set(figure.variant, { variant: figure.variant, label: figure.label, baseline: figure.baseline, cells: {}, reason: "", remark: "" });
    }
    return rows.get(figure.variant);
  }

  const here = figuresOf(at.run, at.quantity, at.case);
  const main = { key: "main", title: shortTitle(quantity), unit: quantity.unit, better: betterOf(at.metric), kind: "figure" };
  for (const figure of here) {
    const row = rowOf(figure);
    row.cells.main = figure;
    row.reason = figure.reason;
    row.remark = figure.remark;
  }
  columns.push(main);
  if (ranks) {
    const step = at.phase === "step";
    const rates = step ? other(at, "step", RATE) : [];
    const latencies = other(at, at.phase, LATENCY);
    if (at.metric === RATE) {
      add({ key: "time", title: "Step", unit: "ms", better: -1 }, latencies, (one) => one);
    } else {
      add({ key: "rate", title: "n_eff / ms", better: 1 }, rates, (one) => one);
    }
    for (const figure of latencies) {
      const row = rowOf(figure);
      row.reason ||= figure.reason;
      row.remark ||= figure.remark;
    }
    add({ key: "speed", title: "vs. naive", better: 1, kind: "times" }, latencies, (one) => one.speed);
    add({ key: "multiple", title: "vs. base", better: -1, kind: "times" }, latencies, (one) => one.time);
    add({ key: "floor", title: "Floor", unit: "%", better: 1 }, latencies, floorShare);
    const members = DATA.cases[at.case].members;
    add({ key: "kept", title: "n_eff / n", unit: "%", better: 1 }, rates, (one) => memberShare(one, members));
    add({ key: "kappa", title: "kappa", better: -1 }, rates, (one) => plain(one.kappa));
    add({ key: "peak", title: "Peak", unit: "MB", better: -1 }, peaks(at), (one) => one);
  } else {
    add({ key: "multiple", title: "vs. base", better: -1, kind: "times" }, here, (one) => one.time);
  }
  return { columns, rows: [...rows.values()], main, quantity, at };
}

/** A short title of a quantity. */
function shortTitle(quantity) {
  if (quantity.metric === RATE) return "n_eff / ms";
  return quantity.title.split(/ above| \(|,/)[0];
}

/** The figures of another metric of the same run and case, by the same method if possible. */
function other(at, phase, metric) {
  const quantity = quantityNumber(at.run, at.case, phase, metric, at.method);
  return quantity === undefined ? [] : figuresOf(at.run, quantity, at.case);
}

/** The peak memory of the phase; for a step the maximum over all phases. */
function peaks(at) {
  const most = new Map();
  for (const phase of at.phase === "step" ? PHASES : [at.phase]) {
    for (const figure of other(at, phase, PEAK)) {
      if (figure.value !== null && figure.value > (most.get(figure.variant)?.value ?? -1)) most.set(figure.variant, figure);
    }
  }
  return [...most.values()];
}

/** A number without an interval as a cell. */
function plain(value) {
  return value === null ? null : { value, low: null, high: null };
}

/** The roofline bound as a percentage of the time. */
function floorShare(figure) {
  return figure.floor === null || !figure.value ? null : plain((100 * figure.floor) / figure.value);
}

/** n_eff / n in percent, at most 100 unless the interval is above. */
function memberShare(figure, members) {
  if (figure.kind === "exact") return { value: null, low: null, high: null, kind: "exact" };
  if (figure.n_eff === null) return null;
  const share = (end) => (end === null ? null : (100 * end) / members);
  const low = share(figure.n_eff.low);
  const cell = { value: share(figure.n_eff.value), low, high: share(figure.n_eff.high), kind: figure.kind };
  if (low !== null && low <= 100 && cell.value > 100) cell.value = 100;
  return cell;
}

/** The rows whose label contains every word of the filter. */
function filtered(rows) {
  const words = (state.view.filter ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const baselines = state.view.baselines !== "no";
  return rows.filter(
    (row) => (baselines || !row.baseline) && words.every((word) => row.label.toLowerCase().includes(word)),
  );
}

/** Rows sorted as asked for; those without a number come last. */
function sorted(rows, columns, main) {
  const asked = state.view.sort ?? "";
  const key = asked.replace(/^-/, "");
  const column = key === "label" ? null : (columns.find((one) => one.key === key) ?? main);
  let falling = column ? column.better > 0 : false;
  if (asked && (key === "label" || column.key === key)) falling = asked.startsWith("-");
  const sign = falling ? -1 : 1;
  const found = [...rows];
  if (!column) {
    return { rows: found.sort((a, b) => sign * inOrder(a.label, b.label)), key: "label", falling };
  }
  found.sort((a, b) => {
    const [x, y] = [rank(a.cells[column.key]), rank(b.cells[column.key])];
    if (x === null || y === null) return Number(x === null) - Number(y === null) || inOrder(a.label, b.label);
    if (x === Infinity && y === Infinity) return (a.cells.time?.value ?? 0) - (b.cells.time?.value ?? 0);
    return x === y ? inOrder(a.label, b.label) : sign * (x < y ? -1 : 1);
  });
  return { rows: found, key: column.key, falling };
}

/** The sort key of a cell: an exact estimate is above every number. */
function rank(cell) {
  if (!cell) return null;
  return cell.kind === "exact" ? Infinity : cell.value;
}

// --- The answer: which variant to train with ----------------------------------------------------------------------------

/** Write the answer of the chosen case. */
function showAnswer() {
  const at = chosen();
  const one = DATA.cases[at.case];
  const run = rankingRun(at);
  put("answer-where", `${one.operator} ${one.shape}, ${one.dtype}, ${one.members} members, on ${state.choice.device}`);
  const figures = run === null ? [] : ranked(run, at);
  const answer = figures.length ? byRate(figures, run, at) : byTime(at);
  put("answer-title", ...answer.title);
  put("answer-why", answer.why);
  const source = DATA.runs[figures.length ? run : at.run];
  const flaws = source.flaws.length ? ` This run ${source.flaws.join(" and ")}.` : "";
  put("answer-origin", `Run ${source.id}: ${source.origin}${flaws}`);
}

/** The run that ranks the case: the chosen one, or the newest of the device. */
function rankingRun(at) {
  const runs = [at.run, ...(DEVICES.get(state.choice.device) ?? [])];
  return runs.find((run) => quantityNumber(run, at.case, "step", RATE, at.method) !== undefined) ?? null;
}

/** The variants that have n_eff per ms, best first. */
function ranked(run, at) {
  const figures = figuresOf(run, quantityNumber(run, at.case, "step", RATE, at.method), at.case);
  return figures.filter((figure) => !figure.baseline && (figure.value !== null || figure.kind));
}

/** The answer by n_eff per ms. */
function byRate(figures, run, at) {
  const [best, ...others] = figures;
  const members = DATA.cases[at.case].members;
  const latency = figuresOf(run, quantityNumber(run, at.case, "step", LATENCY, at.method), at.case);
  const step = latency.find((figure) => figure.variant === best.variant);
  const took = step ? `A step of ${members.toLocaleString("en-US")} members takes ${valueText(step)} ms` : "";
  const against = step?.time ? `, ${multiplierText(step.time)} the plain layer's time` : "";
  const worth = best.kind === "exact"
    ? "the exact gradient of a linear fitness in each step"
    : `${best.kind ? `${best.kind} ` : ""}${valueText(best)} n_eff per ms`;
  const share = memberShare(best, members);
  const keeps = best.kind === "exact" || !share ? "" : ` ${membersCount(share)}.`;
  const close = others.filter((figure) => best.kind !== "exact" && figure.high !== null && best.low !== null && figure.high >= best.low);
  const alike = close.length ? ` Tied with ${listed(close.map((figure) => figure.label))}: their intervals overlap.` : "";
  const or = close.length ? [" or ", html("em", {}, breakable(close[0].label))] : [];
  const unsure = step && step.low === null ? " Its step has too few rounds for an interval: measure it again before relying on it." : "";
  const fast = fastest(latency);
  const quick = fast && fast.variant !== best.variant
    ? ` ${fast.label} has the fastest step, ${valueText(fast)} ms, ${fastestCount(figures, fast, members)}.`
    : "";
  return {
    title: ["Use ", html("em", {}, breakable(best.label)), ...or, `: ${worth}`],
    why: `${took}${against}.${keeps}${alike}${unsure}${quick}`,
  };
}

/** How many members count with the fastest step. */
function fastestCount(figures, fast, members) {
  const figure = figures.find((other) => other.variant === fast.variant);
  const share = figure ? memberShare(figure, members) : null;
  return share ? `with which ${membersCount(share).toLowerCase()}` : "but its n_eff is not known";
}

/** n_eff / n as a sentence. */
function membersCount(share) {
  return share.value >= 99.95 ? "All members count" : `${figureText(share)} % of the members count`;
}

/** The answer by time, if no run ranks the case. */
function byTime(at) {
  const figures = other(at, at.phase, LATENCY);
  const fast = fastest(figures);
  if (!fast) {
    return { title: ["No variant has a time here"], why: "The table shows the reasons." };
  }
  const against = fast.time === null ? "" : `, ${multiplierText(fast.time)} the plain layer's time`;
  return {
    title: ["Fastest ", `${at.phase}: `, html("em", {}, breakable(fast.label))],
    why: `It takes ${valueText(fast)} ms${against}. No run of this device ranks this case by n_eff `
      + "per ms. Time alone does not measure the gradient: a cheap scheme may waste most of the population.",
  };
}

/** The fastest variant that is not a baseline. */
function fastest(figures) {
  const known = figures.filter((figure) => !figure.baseline && figure.value !== null);
  return known.reduce((best, figure) => (best === null || figure.value < best.value ? figure : best), null);
}

/** The first names and the number of others. */
function listed(names) {
  const rest = names.length - 3;
  return names.slice(0, 3).join(", ") + (rest > 0 ? ` and ${rest} more` : "");
}

// --- The table -------------------------------------------------------------------------------------------------------------

/** Write the table of the choice; return what it shows, for the figures. */
function showTable() {
  const { columns, rows, main, quantity, at } = table();
  const left = filtered(rows);
  const { rows: order, key, falling } = sorted(left, columns, main);
  const head = html(
    "tr",
    {},
    heading({ key: "label", title: "Variant", unit: "" }, key, falling),
    columns.map((column) => heading(column, key, falling)),
  );
  const best = order.find((row) => !row.baseline && rank(row.cells.main) !== null);
  const sortedByMain = key === "main" && main.better !== 0 && falling === main.better > 0;
  const body = order.map((row) => line(row, columns, sortedByMain && row === best));
  const what = `${quantity.title}, ${quantity.phase}, method ${quantity.method}; run ${DATA.runs[at.run].id}`;
  put(
    "table-scroll",
    html("table", {}, html("caption", {}, what), html("thead", {}, head), html("tbody", {}, body)),
  );
  put("count", `${order.length} of ${rows.length} variants`);
  put(
    "table-note",
    "The 95 % interval is below each figure. Click a variant for its details, or a heading to sort.",
  );
  return { columns, main, quantity, at, rows: order };
}

/** The heading of a column: a button that sorts by it. */
function heading(column, key, falling) {
  const here = column.key === key;
  return html(
    "th",
    { scope: "col", "aria-sort": here ? (falling ? "descending" : "ascending") : null },
    html(
      "button",
      { type: "button", "data-sort": column.key, onclick: () => sortBy(column, here, falling) },
      column.unit ? `${column.title} (${column.unit})` : column.title,
    ),
  );
}

/** Sort by a column, best first; a second time reverses the order. */
function sortBy(column, here, falling) {
  const down = here ? !falling : (column.better ?? 0) > 0;
  state.view.sort = (down ? "-" : "") + column.key;
  refresh();
  document.querySelector(`[data-sort="${column.key}"]`)?.focus();
}

/** A variant's row. */
function line(row, columns, isBest) {
  const name = html(
    "th",
    { scope: "row" },
    html("button", { type: "button", class: "link", "data-variant": row.variant, onclick: () => openDetail(row.variant) }, breakable(row.label)),
  );
  const told = columns.filter((column) => row.cells[column.key] && rank(row.cells[column.key]) !== null);
  if (!told.length) {
    return html("tr", {}, name, html("td", { class: "reason", colspan: columns.length }, row.reason || "not in this run"));
  }
  const cells = columns.map((column) => cellOf(row, column));
  return html("tr", { class: isBest ? "best" : null }, name, cells);
}

/** A cell: the figure with its interval, or in the first column the reason why there is none. */
function cellOf(row, column) {
  const cell = row.cells[column.key];
  if (!cell || rank(cell) === null) {
    const reason = column.key === "main" ? (cell?.reason || row.reason) : "";
    return html("td", { class: reason ? "reason" : null }, reason || "–");
  }
  const number = column.kind === "times" ? multiplierText(cell) : figureText(cell);
  const range = cell.kind === "exact" ? "" : intervalText(cell);
  const remark = column.key === "main" && row.remark ? html("small", {}, row.remark) : "";
  return html("td", {}, number, range && cell.kind !== "at least" ? html("small", {}, range) : "", remark);
}

// --- Axes ------------------------------------------------------------------------------------------------------------------

/**
 * @typedef {object} Scale
 * @property {(value: number) => number} at place of a value in the picture
 * @property {number[]} ticks
 */

/** A linear scale from 0, or a logarithmic one. @returns {Scale} */
function scale(values, from, to, logarithmic) {
  const known = values.filter((value) => Number.isFinite(value) && (!logarithmic || value > 0));
  const most = Math.max(...known);
  if (!logarithmic) {
    const ticks = steps(most || 1);
    const end = Math.max(ticks[ticks.length - 1], most || 1);
    return { at: (value) => from + ((to - from) * value) / end, ticks };
  }
  const least = Math.min(...known);
  const [low, high] = [Math.log10(least) - 0.07, Math.log10(most) + 0.07];
  const width = Math.max(high - low, 1e-9);
  const at = (value) => from + ((to - from) * (Math.log10(value) - low)) / width;
  return { at, ticks: decades(10 ** low, 10 ** high) };
}

/** Four to six round numbers from 0 to just above the maximum. */
function steps(most) {
  const raw = most / 4;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * size).find((one) => one >= raw);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, place) => place * step);
}

/** Ticks of a logarithmic axis: powers of ten, in a small range also 2 and 5 times them, or at least two even steps. */
function decades(least, most) {
  const found = [];
  const few = Math.log10(most / least) < 2.2;
  for (let power = Math.floor(Math.log10(least)); power <= Math.ceil(Math.log10(most)); power += 1) {
    for (const one of few ? [1, 2, 5] : [1]) {
      const value = one * 10 ** power;
      if (value >= least && value <= most) found.push(value);
    }
  }
  return found.length > 1 ? found : evenly(least, most);
}

/** Round numbers in a range between two powers of ten. */
function evenly(least, most) {
  const size = 10 ** Math.floor(Math.log10(most - least));
  const step = [1, 0.5, 0.25, 0.2].map((one) => one * size).find((one) => Math.floor(most / one) - Math.ceil(least / one) >= 1);
  const first = Math.ceil(least / step);
  return Array.from({ length: Math.floor(most / step) - first + 1 }, (_, place) => Number(((first + place) * step).toPrecision(12)));
}

/** The values whose labels do not overlap along a horizontal axis. */
function labelled(values, at, text) {
  let end = -Infinity;
  return values.filter((value) => {
    const half = textWidth(text(value)) / 2;
    if (at(value) - half < end + 6) return false;
    end = at(value) + half;
    return true;
  });
}

/** A number with commas. */
function counted(value) {
  return value.toLocaleString("en-US");
}

/** The label of a tick. */
function tick(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(0).replace("e+", "e");
  return Number(value.toPrecision(3)).toLocaleString("en-US", { maximumFractionDigits: 8 });
}

/** Positions at least a gap apart within bounds, as close as possible to the wanted ones and in their order. */
function spaced(wanted, gap, low, high) {
  const pools = [];
  wanted.forEach((place, number) => {
    let pool = { mean: place - number * gap, count: 1 };
    while (pools.length && pools[pools.length - 1].mean > pool.mean) {
      const before = pools.pop();
      const count = before.count + pool.count;
      pool = { mean: (before.mean * before.count + pool.mean * pool.count) / count, count };
    }
    pools.push(pool);
  });
  const last = Math.max(low, high - (wanted.length - 1) * gap);
  const flat = pools.flatMap((pool) => Array(pool.count).fill(Math.min(Math.max(pool.mean, low), last)));
  return flat.map((place, number) => place + number * gap);
}

/** The width available for a figure, in pixels. */
function room(id) {
  const box = byId(id);
  const style = getComputedStyle(box);
  return Math.max(260, Math.floor(box.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight)));
}

// --- Bars from 0, or dots on a logarithmic axis; a whisker is the 95 % interval, a tick the roofline bound ----------------

const ROW = 24;
const LARGE = 20;

/** Draw the bars of what the table shows. */
function showBars(found) {
  const { main, quantity, rows, at } = found;
  const told = rows.filter((row) => rank(row.cells.main) !== null && row.cells.main.kind !== "exact" && row.cells.main.value >= 0);
  if (!told.length) return show("bars", "", null);
  byId("bars").hidden = false;
  const ends = told.flatMap((row) => [row.cells.main.value, row.cells.main.floor ?? row.cells.main.value]);
  const positive = ends.filter((end) => end > 0);
  const logarithmic = positive.length > 1 && Math.max(...positive) / Math.min(...positive) > LARGE;
  const width = room("bars");
  const stacked = width < 480;
  const left = stacked ? 0 : Math.min(Math.max(...told.map((row) => textWidth(row.label))) + 12, width * 0.46);
  const right = width - 64;
  const axis = scale(ends, left, right, logarithmic);
  const height = stacked ? 2 * ROW - 8 : ROW;
  const top = 22;
  const bottom = top + told.length * height + 4;
  const best = told.find((row) => !row.baseline);
  const lines = labelled(axis.ticks, axis.at, tick).map((value) => [
    svg("line", { class: "gridline", x1: axis.at(value), x2: axis.at(value), y1: top - 4, y2: bottom }),
    svg("text", { class: "soft", x: axis.at(value), y: 11, "text-anchor": "middle" }, tick(value)),
  ]);
  const bars = told.map((row, place) => bar(row, top + place * height, { axis, left, stacked, logarithmic, width, best: row === best && main.better !== 0 }));
  const name = `${quantity.title}${quantity.unit ? ` (${quantity.unit})` : ""}`;
  const first = best ?? told[0];
  const description = `${name} as ${logarithmic ? "dots" : "bars"} for ${told.length} variants, in the order of the table below. First: ${first.label}, ${figureText(first.cells.main)}${main.unit ? ` ${main.unit}` : ""}.`;
  const hidden = rows.length - told.length;
  const floors = told.some((row) => row.cells.main.floor !== null);
  const notes = [
    logarithmic ? "Logarithmic axis." : "",
    told.some((row) => isSure(row.cells.main)) ? "The whisker is the 95 % interval." : "",
    floors ? "The orange tick is the roofline bound." : "",
    hidden ? `${hidden} variants without a number, or with an exact gradient, are only in the table.` : "",
  ];
  const caption = `${name}, ${quantity.phase}; ${DATA.cases[at.case].label}`;
  return show("bars", caption, picture(width, bottom + 4, description, lines, bars), notes.filter(Boolean).join(" "));
}

/** Whether both ends of an interval are known and differ. */
function isSure({ low, high }) {
  return low !== null && high !== null && low < high;
}

/** A variant's bar, or its dot. */
function bar(row, y, { axis, left, stacked, logarithmic, width, best }) {
  const figure = row.cells.main;
  const { value, floor } = figure;
  const middle = y + (stacked ? 28 : ROW / 2);
  const end = value > 0 || !logarithmic ? axis.at(value) : left;
  const kind = row.baseline ? "baseline" : best ? "best" : "";
  const clip = (x) => (x > 0 || !logarithmic ? Math.min(Math.max(axis.at(x), left), width - 4) : left);
  const parts = [
    svg("title", {}, `${row.label}: ${figureText(figure)} (${intervalText(figure) || "no interval"})`),
    svg("rect", { x: 0, y, width, height: stacked ? 2 * ROW - 8 : ROW, fill: "transparent" }),
    svg("text", { x: stacked ? 0 : left - 8, y: stacked ? y + 13 : middle + 4, "text-anchor": stacked ? "start" : "end" }, fitText(row.label, stacked ? width : left - 10)),
  ];
  if (logarithmic && value > 0) {
    parts.push(
      svg("line", { class: "guide", x1: left, x2: end, y1: middle, y2: middle }),
      svg("circle", { class: "bar", cx: end, cy: middle, r: 4.5 }),
    );
  }
  if (!logarithmic) parts.push(svg("rect", { class: "bar", x: axis.at(0), y: middle - 6, width: Math.max(end - axis.at(0), 1), height: 12, rx: 2 }));
  let beside = end;
  if (isSure(figure)) {
    const [low, high] = [clip(figure.low), clip(figure.high)];
    parts.push(
      svg("line", { class: "whisker", x1: low, x2: high, y1: middle, y2: middle }),
      svg("line", { class: "whisker", x1: low, x2: low, y1: middle - 3, y2: middle + 3 }),
      svg("line", { class: "whisker", x1: high, x2: high, y1: middle - 3, y2: middle + 3 }),
    );
    beside = Math.max(beside, high);
  }
  if (floor !== null && floor > 0) {
    const place = clip(floor);
    parts.push(svg("line", { class: "floor", x1: place, x2: place, y1: middle - 8, y2: middle + 8 }));
    beside = Math.max(beside, place);
  }
  parts.push(svg("text", { class: "soft", x: Math.min(beside + 6, width - 44), y: middle + 4 }, figureText(figure)));
  return svg("g", { class: `chosen ${kind}`, onclick: () => openDetail(row.variant) }, parts);
}

// --- n_eff per ms against peak memory, with the Pareto front ------------------------------------------------------------

/** Draw n_eff per ms against peak memory for the chosen case. */
function showPareto(found) {
  const { at, rows } = found;
  const points = paretoPoints(at, new Set(rows.map((row) => row.variant)));
  if (points.length < 2) return show("pareto", "", null);
  byId("pareto").hidden = false;
  const width = room("pareto");
  const height = Math.min(Math.max(320, width * 0.62), 440);
  const front = frontOf(points);
  const right = width - Math.min(Math.max(...front.map((point) => textWidth(point.label))) + 12, width * 0.42);
  const x = scale(points.map((point) => point.x), 46, right, true);
  const y = scale(points.map((point) => point.y), height - 38, 12, true);
  const grid = [
    labelled(x.ticks, x.at, tick).map((value) => [
      svg("line", { class: "gridline", x1: x.at(value), x2: x.at(value), y1: 12, y2: height - 38 }),
      svg("text", { class: "soft", x: x.at(value), y: height - 22, "text-anchor": "middle" }, tick(value)),
    ]),
    y.ticks.map((value) => [
      svg("line", { class: "gridline", x1: 46, x2: right, y1: y.at(value), y2: y.at(value) }),
      svg("text", { class: "soft", x: 40, y: y.at(value) + 4, "text-anchor": "end" }, tick(value)),
    ]),
    svg("text", { class: "soft", x: (46 + right) / 2, y: height - 4, "text-anchor": "middle" }, "peak memory (MB), lower is better"),
  ];
  const corners = front.map((point, place) => `${place ? `H${x.at(point.x)}V` : `M${x.at(point.x)},`}${y.at(point.y)}`);
  const dots = points.map((point) =>
    svg(
      "g",
      { class: "chosen", onclick: () => openDetail(point.variant) },
      svg("title", {}, `${point.label}: ${figureText(point.rate)} n_eff per ms, peak ${figureText(point.peak)} MB`),
      svg("circle", { class: front.includes(point) ? "dot ahead" : "dot", cx: x.at(point.x), cy: y.at(point.y), r: front.includes(point) ? 5.5 : 4 }),
    ),
  );
  const ordered = [...front].sort((a, b) => y.at(a.y) - y.at(b.y));
  const places = spaced(ordered.map((point) => y.at(point.y)), 16, 18, height - 44);
  const labels = ordered.map((point, place) =>
    svg(
      "g",
      { class: "chosen", onclick: () => openDetail(point.variant) },
      svg("path", { class: "leader", d: `M${x.at(point.x) + 7},${y.at(point.y)}L${right + 4},${places[place]}` }),
      svg("text", { x: right + 7, y: places[place] + 4 }, fitText(point.label, width - right - 8)),
    ),
  );
  const description = `n_eff per ms against peak memory of ${points.length} variants. On the front: ${front.map((point) => point.label).join(", ")}.`;
  return show(
    "pareto",
    "n_eff per ms of a step against peak memory",
    picture(width, height, description, grid, svg("path", { class: "front", d: corners.join("") }), dots, labels),
    "Labelled variants are on the Pareto front: no other has more n_eff per ms with less memory. Both axes are logarithmic.",
  );
}

/** The points of the variants in the table that have both numbers. */
function paretoPoints(at, shown) {
  const rates = other(at, "step", RATE);
  const most = new Map(peaks({ ...at, phase: "step" }).map((figure) => [figure.variant, figure]));
  return rates
    .filter((figure) => shown.has(figure.variant) && figure.value > 0 && most.get(figure.variant)?.value > 0)
    .map((figure) => ({ variant: figure.variant, label: figure.label, x: most.get(figure.variant).value, y: figure.value, rate: figure, peak: most.get(figure.variant) }));
}

/** The Pareto front, by increasing memory. */
function frontOf(points) {
  const found = [];
  for (const point of [...points].sort((a, b) => a.x - b.x || b.y - a.y)) {
    if (!found.length || point.y > found[found.length - 1].y) found.push(point);
  }
  return found;
}

// --- The metric against the population, where a run has at least three populations of the shape -------------------------

const LINES = 8;
const FEWEST = 3;

/** Draw the lines of the first variants of the table. */
function showSweep(found) {
  const { at, main, quantity, rows } = found;
  const swept = sweepOf(at);
  if (!swept) return show("sweep", "", null);
  const told = rows.filter((row) => swept.lines.has(row.variant) && swept.lines.get(row.variant).length > 1);
  const picked = told.slice(0, LINES);
  if (!picked.length) return show("sweep", "", null);
  byId("sweep").hidden = false;
  const width = room("sweep");
  const height = Math.min(Math.max(320, width * 0.62), 420);
  const right = width - Math.min(Math.max(...picked.map((row) => textWidth(row.label))) + 24, width * 0.42);
  const points = picked.flatMap((row) => swept.lines.get(row.variant));
  const x = scale(points.map((point) => point.x), 56, right, true);
  const y = scale(points.map((point) => point.y), height - 38, 12, true);
  const grid = [
    swept.members.map((value) => svg("line", { class: "gridline", x1: x.at(value), x2: x.at(value), y1: 12, y2: height - 38 })),
    labelled(swept.members, x.at, counted).map((value) =>
      svg("text", { class: "soft", x: x.at(value), y: height - 22, "text-anchor": "middle" }, counted(value)),
    ),
    y.ticks.map((value) => [
      svg("line", { class: "gridline", x1: 56, x2: right, y1: y.at(value), y2: y.at(value) }),
      svg("text", { class: "soft", x: 50, y: y.at(value) + 4, "text-anchor": "end" }, tick(value)),
    ]),
    svg("text", { class: "soft", x: (56 + right) / 2, y: height - 4, "text-anchor": "middle" }, "members"),
  ];
  const last = picked.map((row, place) => ({ row, place, end: swept.lines.get(row.variant).at(-1) }));
  last.sort((a, b) => y.at(a.end.y) - y.at(b.end.y));
  const places = spaced(last.map((one) => y.at(one.end.y)), 16, 18, height - 44);
  const lines = last.map(({ row, place, end }, order) => {
    const color = `var(--s${(place % LINES) + 1})`;
    const track = swept.lines.get(row.variant);
    return svg(
      "g",
      { class: "chosen", onclick: () => openDetail(row.variant) },
      svg("title", {}, row.label),
      svg("path", { d: track.map((point, step) => `${step ? "L" : "M"}${x.at(point.x)},${y.at(point.y)}`).join(""), fill: "none", stroke: color, "stroke-width": 2 }),
      track.map((point) => markOf(place, x.at(point.x), y.at(point.y), color)),
      svg("path", { class: "leader", d: `M${x.at(end.x) + 7},${y.at(end.y)}L${right + 4},${places[order]}` }),
      markOf(place, right + 10, places[order], color),
      svg("text", { x: right + 19, y: places[order] + 4 }, fitText(row.label, width - right - 20)),
    );
  });
  const name = `${quantity.title}${quantity.unit ? ` (${quantity.unit})` : ""}`;
  const from = swept.run === at.run ? "" : ` From run ${DATA.runs[swept.run].id}: the chosen run has too few populations.`;
  const more = told.length > LINES ? ` The first ${LINES} of ${told.length} in the table: filter or sort it to see others.` : "";
  const description = `${name} against the population, for ${picked.map((row) => row.label).join(", ")}.`;
  return show(
    "sweep",
    `${shortTitle(quantity)}${main.unit ? ` (${main.unit})` : ""}, ${quantity.phase}, against the population`,
    picture(width, height, description, grid, lines),
    `Both axes are logarithmic.${more}${from}`,
  );
}

/** One of four marker shapes, so that lines can be distinguished without colour. */
function markOf(place, x, y, color) {
  const shapes = [
    `M${x - 4},${y}a4,4 0 1,0 8,0a4,4 0 1,0 -8,0`,
    `M${x - 4},${y - 4}h8v8h-8z`,
    `M${x},${y - 5}l5,9h-10z`,
    `M${x},${y - 5}l5,5l-5,5l-5,-5z`,
  ];
  return svg("path", { d: shapes[place % shapes.length], fill: color });
}

/** The run and the points of a sweep: the chosen run's, or the newest of the device that has one. */
function sweepOf(at) {
  const here = DATA.cases[at.case];
  const family = DATA.cases
    .map((one, number) => ({ ...one, number }))
    .filter((one) => one.operator === here.operator && one.shape === here.shape && one.dtype === here.dtype)
    .sort((a, b) => a.members - b.members);
  for (const run of [at.run, ...(DEVICES.get(state.choice.device) ?? [])]) {
    const lines = new Map();
    const members = new Set();
    for (const one of family) {
      for (const figure of figuresOf(run, at.quantity, one.number)) {
        if (figure.value === null || figure.value <= 0) continue;
        if (!lines.has(figure.variant)) lines.set(figure.variant, []);
        lines.get(figure.variant).push({ x: one.members, y: figure.value });
        members.add(one.members);
      }
    }
    if (members.size >= FEWEST) return { run, lines, members: [...members] };
  }
  return null;
}

// --- Details of a variant: formula, closed forms, measurements, usage -----------------------------------------------------

const CLOSED = ["Memory", "Work", "Quality"];

/** Open a variant, by its number. */
function openDetail(number) {
  state.view.variant = variantKey(number);
  writeLink(true);
  showDetail();
}

/** The name by which a link holds a variant. */
function variantKey(number) {
  const one = DATA.variants[number];
  return `${one.scheme}${one.options}`;
}

/** Show the details of the variant in the address, or close them. */
function showDetail() {
  const dialog = byId("detail");
  const number = DATA.variants.findIndex((_, place) => variantKey(place) === state.view.variant);
  if (state.view.variant === undefined || number < 0) {
    if (dialog.open) dialog.close();
    return;
  }
  put(dialog, detailHead(number), html("div", { class: "body" }, detailBody(number)));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
}

/** The title and the close button. */
function detailHead(number) {
  return html(
    "header",
    {},
    html("h2", { id: "detail-title" }, breakable(labelOf(number, state.choice.operator))),
    html("button", { type: "button", id: "detail-close", onclick: () => byId("detail").close() }, "Close"),
  );
}

/** Everything below the title. */
function detailBody(number) {
  const variant = DATA.variants[number];
  const about = DATA.schemes[variant.scheme];
  const at = chosen();
  const parts = [];
  if (about) {
    parts.push(html("p", { class: "formula" }, about.summary || "This scheme has no docstring."));
    parts.push(...about.text.map((text) => html("p", {}, text)));
  } else {
    parts.push(html("p", { class: "warning" }, `No run stores the docstring of ${variant.scheme}: only its measurements are known.`));
  }
  if (variant.source) parts.push(html("p", { class: "quiet" }, `Source: ${variant.source}`));
  parts.push(...usage(variant, about, at), ...closedForm(variant.scheme, about), ...measured(number, at));
  parts.push(...qualityTable(number, at));
  return parts;
}

/** The code that trains with it. */
function usage(variant, about, at) {
  if (!variant.code || !about) return [];
  const { members, sigma } = DATA.cases[at.case];
  const imports = about.module === "impls"
    ? `from impls import ${[variant.scheme, "perturb"].sort(inAscii).join(", ")}`
    : `from impls import perturb; from ${about.module} import ${variant.scheme}`;
  const code = `${imports}\npopulation = perturb(model, ${variant.code}, members=${members}, sigma=${sigma})`;
  return [
    html("h3", {}, "Usage"),
    html("pre", { tabindex: "0", id: "usage" }, html("code", {}, code)),
  ];
}

/** Compare by code points, as import lines are sorted. */
function inAscii(a, b) {
  return a < b ? -1 : 1;
}

/** Memory, work and quality in closed form, also those of the scheme that a fused variant computes. */
function closedForm(scheme, about) {
  const found = [];
  for (const [name, one] of [[scheme, about], [about?.of, DATA.schemes[about?.of]]]) {
    const told = one ? CLOSED.filter((key) => one.closed[key]) : [];
    if (!told.length) continue;
    found.push(html("h3", {}, name === scheme ? "Closed forms" : `Closed forms of ${name}, which it computes`));
    found.push(html("dl", { class: "closed" }, told.map((key) => [html("dt", {}, key), html("dd", {}, one.closed[key])])));
  }
  if (found.length) {
    found.push(html("p", { class: "note" }, "n members, r repeats, g groups, o and i channels out and in, taps of a kernel, d perturbed numbers."));
  }
  return found;
}

/** A small table with the name of its region, caption, headings and rows. */
function small(title, caption, heads, rows) {
  const head = html("tr", {}, heads.map((text) => html("th", { scope: "col" }, text)));
  const body = rows.map((row) =>
    html("tr", {}, row.map((cell, place) => (place ? html("td", {}, cell) : html("th", { scope: "row" }, cell)))),
  );
  return html(
    "div",
    { class: "scroll small", tabindex: "0", role: "region", "aria-label": `${title}, ${caption}` },
    html("table", {}, html("caption", {}, caption), html("thead", {}, head), html("tbody", {}, body)),
  );
}

/** Measurements on the chosen case from the chosen run, or from the newest other run that has any. */
function measured(number, at) {
  for (const run of [at.run, ...(DEVICES.get(state.choice.device) ?? [])]) {
    const found = measuredIn(number, { ...at, run });
    if (found.length) return [html("h3", {}, "Measured"), ...found];
  }
  const label = DATA.cases[at.case].label;
  return [html("h3", {}, "Measured"), html("p", {}, `No run of this device measured it on ${label}.`)];
}

/** One row per phase and method of a run, and the reasons for missing ones. */
function measuredIn(number, at) {
  const rows = [];
  const reasons = [];
  const quantities = quantitiesOf(at.run, at.case).filter((one) => DATA.quantities[one].metric === LATENCY);
  quantities.sort((a, b) => PHASES.indexOf(DATA.quantities[a].phase) - PHASES.indexOf(DATA.quantities[b].phase));
  for (const quantity of quantities) {
    const { phase, method } = DATA.quantities[quantity];
    const figure = figuresOf(at.run, quantity, at.case).find((one) => one.variant === number);
    if (!figure) continue;
    if (figure.value === null) {
      reasons.push(html("p", { class: "note" }, `${phase} (${method}): ${figure.reason}`));
      continue;
    }
    const beside = (name) => {
      const found = other({ ...at, method }, phase, name).find((one) => one.variant === number);
      return found ? figureText(found) : ABSENT;
    };
    rows.push([
      `${phase} (${method})`,
      figureText(figure),
      intervalText(figure) || ABSENT,
      multiplierText(figure.time),
      numberText(figure.floor),
      countText(figure.flops),
      figure.moved_bytes === null ? ABSENT : numberText(figure.moved_bytes / 1e6),
      beside(PEAK),
      beside("noise_bytes"),
      beside("launches"),
    ]);
  }
  const heads = ["Phase", "Time (ms)", "95 % interval", "vs. base", "Roofline bound (ms)", "Minimum flops", "Minimum traffic (MB)", "Peak (MB)", "Noise (MB)", "Launches"];
  const caption = `${DATA.cases[at.case].label}; run ${DATA.runs[at.run].id}`;
  return [...(rows.length ? [small("Measured", caption, heads, rows)] : []), ...reasons];
}

/** The figures of its quality on the chosen case. */
function qualityTable(number, at) {
  const runs = [at.run, ...(DEVICES.get(state.choice.device) ?? [])];
  for (const run of runs) {
    const rows = [];
    for (const quantity of quantitiesOf(run, at.case)) {
      const { phase, metric, method, title } = DATA.quantities[quantity];
      if (phase !== "quality" && metric !== RATE) continue;
      const figure = figuresOf(run, quantity, at.case).find((one) => one.variant === number);
      if (!figure || rank(figure) === null) continue;
      rows.push([title, method, figureText(figure), intervalText(figure) || ABSENT]);
    }
    if (!rows.length) continue;
    const caption = `${DATA.cases[at.case].label}; run ${DATA.runs[run].id}`;
    return [html("h3", {}, "Quality of the gradient"), small("Quality", caption, ["Figure", "Method", "Value", "95 % interval"], rows)];
  }
  return [];
}

// --- Two runs compared -----------------------------------------------------------------------------------------------------

const SHOWN = 200;
const SAME_DEVICE = ["device_name", "cpu", "threads", "device_memory_bytes"];
const NO_RUN = "";

/** Fill the selects of the comparison. */
function showComparisonChoice() {
  const options = DATA.runs.map((run) => {
    const option = runOption(run);
    return { value: run.id, text: `${run.device}: ${option.text}` };
  });
  options.sort((a, b) => (a.value < b.value ? 1 : -1));
  for (const side of ["a", "b"]) {
    fill(byId(`compare-${side}`), [{ value: NO_RUN, text: "Choose a run" }, ...options], state.view[side] ?? NO_RUN);
  }
}

/** Fill a select. */
function fill(select, options, value) {
  put(select, options.map((option) => html("option", { value: option.value }, shorten(option.text, 90))));
  select.value = value;
  select.disabled = options.length < 2;
}

/** Write the comparison of the two runs that are chosen. */
function showComparison() {
  showComparisonChoice();
  const [a, b] = [runNumber(state.view.a), runNumber(state.view.b)];
  put("compare-scroll");
  if (a < 0 || b < 0) {
    const lost = ["a", "b"].filter((side) => state.view[side] && runNumber(state.view[side]) < 0);
    const words = lost.map((side) => `Run ${state.view[side]} is not in this page. `).join("");
    put("compare-status", `${words}Choose two runs.`);
    fill(byId("compare-quantity"), [{ value: "", text: "Choose runs first" }], "");
    return;
  }
  const common = commonQuantities(a, b);
  if (!common.length) {
    fill(byId("compare-quantity"), [{ value: "", text: "Nothing in common" }], "");
    put("compare-status", "These two runs have no case, phase, metric and method in common.");
    return;
  }
  const options = common.map((quantity) => {
    const { title, phase, method } = DATA.quantities[quantity];
    return { value: quantityKey(quantity), text: `${phase}: ${title} (${method})` };
  });
  const wanted = state.view.quantity ?? `${state.choice.phase}/${state.choice.metric}`;
  const value = options.some((option) => option.value === wanted) ? wanted : options[0].value;
  fill(byId("compare-quantity"), options, value);
  const missed = state.view.quantity !== undefined && value !== wanted ? [`Not in both runs: ${wanted}. Another quantity is shown.`] : [];
  writeComparison(a, b, common[options.findIndex((option) => option.value === value)], missed);
}

/** The name by which a link holds a quantity. */
function quantityKey(quantity) {
  const { phase, metric, method } = DATA.quantities[quantity];
  return `${phase}/${metric}/${method}`;
}

/** The quantities that both runs measured on the same case, times first. */
function commonQuantities(a, b) {
  const shared = DATA.runs[a].panels.filter((panel) => PANELS[b].has(`${panel.quantity} ${panel.case}`));
  const found = new Set(shared.map((panel) => panel.quantity));
  const place = (quantity) => ["step", "forward", "update", "sample", "quality"].indexOf(DATA.quantities[quantity].phase);
  const isTime = (quantity) => Number(DATA.quantities[quantity].metric !== LATENCY);
  return [...found].sort((x, y) => isTime(x) - isTime(y) || place(x) - place(y) || x - y);
}

/** Write the rows of a quantity, after warnings. */
function writeComparison(a, b, quantity, missed) {
  const { both, only, reasons } = matched(a, b, quantity);
  both.sort((x, y) => (y.ratio.value ?? -1) - (x.ratio.value ?? -1));
  const { title, unit, phase, method } = DATA.quantities[quantity];
  const changed = both.filter(({ ratio }) => ratio.low !== null && (ratio.low > 1 || ratio.high < 1)).length;
  const told = [...missed, ...warnings(a, b)];
  const found = told.length;
  const words = [
    ...told,
    `${both.length} rows are in both${both.length > SHOWN ? `, the first ${SHOWN} are shown` : ""}; `
      + `for ${changed} of them the interval of B / A excludes 1. ${only[0]} only in A, ${only[1]} only in B.`,
    ...reasons,
    "The interval of B / A divides the ends of the two 95 % intervals, so its level is at least 90 %. It covers the spread "
      + "within each process, not between processes: use `esbench gate` for a decision.",
  ];
  put("compare-status", ...words.map((text, place) => html("p", { class: place < found ? "warning" : "quiet" }, text)));
  const heads = ["Variant", "Case", `A${unit ? ` (${unit})` : ""}`, `B${unit ? ` (${unit})` : ""}`, "B / A", "Interval"];
  const rows = both.slice(0, SHOWN).map((row) =>
    html(
      "tr",
      {},
      html("th", { scope: "row" }, breakable(row.a.label), html("small", { class: "narrow" }, row.label)),
      html("td", { class: "words case" }, row.label),
      html("td", {}, figureText(row.a)),
      html("td", {}, figureText(row.b)),
      html("td", {}, multiplierText(row.ratio)),
      html("td", {}, intervalText(row.ratio) || ABSENT),
    ),
  );
  const head = html("tr", {}, heads.map((text, place) => html("th", { scope: "col", class: ["words", "words case"][place] ?? null }, text)));
  const caption = `${title}, ${phase}, method ${method}; A is ${DATA.runs[a].id}, B is ${DATA.runs[b].id}`;
  put("compare-scroll", html("table", {}, html("caption", {}, caption), html("thead", {}, head), html("tbody", {}, rows)));
}

/** The rows of both runs, the number of rows in only one of them, and the first reasons. */
function matched(a, b, quantity) {
  const both = [];
  const only = [0, 0];
  const reasons = new Set();
  const numbers = new Set([...CASES[a], ...CASES[b]]);
  for (const number of numbers) {
    const [here, there] = [a, b].map((run) => new Map(figuresOf(run, quantity, number).map((figure) => [figure.variant, figure])));
    for (const variant of new Set([...here.keys(), ...there.keys()])) {
      const [x, y] = [here.get(variant), there.get(variant)];
      const [known, also] = [x && rank(x) !== null, y && rank(y) !== null];
      if (known && also) both.push({ a: x, b: y, label: DATA.cases[number].label, ratio: divided(x, y) });
      else if (known || also) {
        only[known ? 0 : 1] += 1;
        const reason = (known ? y : x)?.reason;
        if (reason && reasons.size < 3) reasons.add(`${(x ?? y).label}, ${DATA.cases[number].label}: ${reason}`);
      }
    }
  }
  return { both, only, reasons: [...reasons] };
}

/** B / A with its interval. */
function divided(a, b) {
  if (!(a.value > 0) || b.value === null) return { value: null, low: null, high: null };
  const hasEnds = [a.low, a.high, b.low, b.high].every((end) => end !== null) && a.low > 0;
  return { value: b.value / a.value, low: hasEnds ? b.low / a.high : null, high: hasEnds ? b.high / a.low : null };
}

/** Warnings about flaws of the runs and differences between their environments. */
function warnings(a, b) {
  const [x, y] = [a, b].map((run) => DATA.runs[run].environment);
  const found = [];
  for (const [side, run] of [["A", a], ["B", b]]) {
    if (DATA.runs[run].flaws.length) found.push(`Run ${side} ${DATA.runs[run].flaws.join(" and ")}.`);
  }
  const apart = SAME_DEVICE.filter((name) => x[name] !== undefined && y[name] !== undefined && x[name] !== y[name]);
  if (apart.length) {
    found.push(`Different devices (${apart.map((name) => `${name}: ${x[name]} in A, ${y[name]} in B`).join("; ")}): the ratio of times compares devices, not variants.`);
  }
  const others = [...new Set([...Object.keys(x), ...Object.keys(y)])].filter((name) => !SAME_DEVICE.includes(name) && x[name] !== y[name]);
  if (others.length) {
    found.push(`Different in A and B: ${others.map((name) => differing(name, x[name], y[name])).join("; ")}.`);
  }
  return found;
}

/** Two values that differ, shortened if they still differ. */
function differing(name, a, b) {
  const [inA, inB] = brief(a) === brief(b) ? [a, b] : [brief(a), brief(b)];
  return `${name} ${inA} in A, ${inB} in B`;
}

/** A value of an environment, shortened. */
function brief(value) {
  return value === undefined ? "unknown" : shorten(String(value), 24);
}

// --- The page: drawing order, events, theme -----------------------------------------------------------------------------

const THEMES = ["system", "light", "dark"];
let theme = storedTheme();

/** Draw everything from the current choice. */
function refresh({ step = false } = {}) {
  writeLink(step);
  let found = {};
  for (const name of NAMES) {
    fill(byId(`choose-${name}`), optionsOf(name, found), state.choice[name]);
    found = { ...found, [name]: state.choice[name] };
  }
  showAnswer();
  const shown = showTable();
  byId("baselines").checked = state.view.baselines !== "no";
  if (byId("filter").value !== (state.view.filter ?? "")) byId("filter").value = state.view.filter ?? "";
  showPictures(shown);
  showDetail();
}

/** Draw the figures of what the table shows. */
function showPictures(shown) {
  showBars(shown);
  showPareto(shown);
  showSweep(shown);
}

/** Change a choice; the others stay if possible. */
function choose(name, value) {
  const wanted = {};
  for (const one of NAMES) {
    wanted[one] = state.choice[one];
    if (one === name) break;
  }
  wanted[name] = value;
  const { found } = resolved(wanted);
  delete state.view.sort;
  state.choice = found;
  refresh({ step: true });
  showComparison();
}

/** Show what the address says. */
function follow() {
  const missing = readLink();
  put("status", missing.length ? `Not in this page: ${missing.join(", ")}. The closest match is shown.` : "");
  refresh();
  showComparison();
}

/** The stored theme, or the system's. */
function storedTheme() {
  try {
    const stored = localStorage.getItem("esbench-theme");
    return THEMES.includes(stored) ? stored : "system";
  } catch {
    return "system";
  }
}

/** Show a theme and store it. */
function setTheme(wanted) {
  theme = wanted;
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  put("theme", `Theme: ${theme}`);
  try {
    localStorage.setItem("esbench-theme", theme);
  } catch {
    // A page opened from a file may be unable to store it.
  }
}

/** List the runs of the page. */
function showRuns() {
  const heads = ["Run", "Device", "Suite", "Started", "Flaws"];
  const runs = [...DATA.runs].sort((a, b) => Number(a.published) - Number(b.published) || (a.id < b.id ? 1 : -1));
  const rows = runs.map((run) =>
    html(
      "tr",
      {},
      html("th", { scope: "row" }, run.id),
      html("td", { class: "words" }, run.device),
      html("td", { class: "words" }, run.suite),
      html("td", { class: "words" }, run.started),
      html("td", { class: "words" }, run.flaws.join("; ") || "none"),
    ),
  );
  const head = html("tr", {}, heads.map((text) => html("th", { scope: "col" }, text)));
  put("runs-scroll", html("table", {}, html("thead", {}, head), html("tbody", {}, rows)));
}

/** Register all event listeners. */
function listen() {
  for (const name of NAMES) byId(`choose-${name}`).addEventListener("change", (event) => choose(name, event.target.value));
  byId("choice").addEventListener("submit", (event) => event.preventDefault());
  byId("filter").addEventListener("input", (event) => {
    state.view.filter = event.target.value;
    refresh();
  });
  byId("baselines").addEventListener("change", (event) => {
    state.view.baselines = event.target.checked ? "" : "no";
    refresh();
  });
  for (const name of ["a", "b", "quantity"]) {
    byId(`compare-${name}`).addEventListener("change", (event) => {
      state.view[name] = event.target.value;
      writeLink();
      showComparison();
      byId(`compare-${name}`).focus();
    });
  }
  byId("compare-swap").addEventListener("click", () => {
    [state.view.a, state.view.b] = [state.view.b, state.view.a];
    writeLink();
    showComparison();
  });
  byId("detail").addEventListener("close", () => {
    const { variant } = state.view;
    delete state.view.variant;
    writeLink();
    const number = DATA.variants.findIndex((_, place) => variantKey(place) === variant);
    document.querySelector(`#table [data-variant="${number}"]`)?.focus();
  });
  byId("detail").addEventListener("click", (event) => {
    if (event.target === byId("detail")) byId("detail").close();
  });
  byId("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]));
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault();
    byId("main").focus();
  });
  for (const button of document.querySelectorAll("[data-section]")) {
    button.addEventListener("click", () => {
      byId(button.dataset.section).scrollIntoView({ block: "start" });
      byId(button.dataset.section).focus({ preventScroll: true });
    });
  }
  window.addEventListener("hashchange", follow);
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    showPictures(showTable());
  });
}

setTheme(theme);
showRuns();
listen();
follow();
