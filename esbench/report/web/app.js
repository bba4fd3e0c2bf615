// The report page: an answer, figures, a table and a comparison, drawn from the JSON records in the page.
"use strict";

// --- Data ----------------------------------------------------------------------------------------------------------

const DATA = JSON.parse(document.getElementById("data").textContent);
const PHASES = ["sample", "forward", "update", "step", "quality"];
const LATENCY = "latency_ns";
const RATE = "n_eff_per_ms";
const PEAK = "peak_bytes";

/** Device -> positions of its runs, newest first as in the data; published runs come last. */
const DEVICES = new Map();
DATA.runs.forEach((run, number) => {
  run.device = `${run.environment.device_name}${run.published ? ", published by others" : ""}`;
  DEVICES.set(run.device, [...(DEVICES.get(run.device) ?? []), number]);
});

/** For each run: "quantity case" -> panel. */
const PANELS = DATA.runs.map((run) => new Map(run.panels.map((panel) => [`${panel.quantity} ${panel.case}`, panel])));
/** For each run: the cases that it measured. */
const CASES = DATA.runs.map((run) => new Set(run.panels.map((panel) => panel.case)));

/** The label of a variant on an operator, as in the tables. */
function labelOf(variant, operator) {
  const one = DATA.variants[variant];
  return `${one.scheme}${one.baseline ? "" : operator}${one.options}`;
}

/**
 * The figures of a quantity on a case in a run, in the unit of the quantity; an empty list where the run has none.
 * `kind` is "exact" or "at least" where the figure is no plain number, `floor` the roofline bound, `speed` and `time`
 * are multipliers, `reason` says why there is no figure, and `remark` warns about its samples.
 */
function figuresOf(run, quantity, number) {
  const panel = PANELS[run]?.get(`${quantity} ${number}`);
  if (!panel) return [];
  const { operator } = DATA.cases[number];
  const { unit, metric } = DATA.quantities[quantity];
  const missing = { kind: null, floor: null, kappa: null, flops: null, moved_bytes: null, reason: "", remark: "" };
  return panel.figures.map(([variant, numbers, more = {}]) => ({
    ...missing,
    ...more,
    ...interval(numbers),
    variant,
    label: labelOf(variant, operator),
    baseline: DATA.variants[variant].baseline,
    counts: !unit && metric !== RATE,
    speed: interval(more.speed),
    time: interval(more.time),
    n_eff: interval(more.n_eff),
  }));
}

/** A stored [value, low, high], with null for what it lacks. */
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
  let most = Array.from(text).length;
  while (most > 1 && textWidth(shorten(text, most)) > pixels) most -= 1;
  return shorten(text, most);
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

/** What a choice consists of; each restricts those after it. A metric is "<metric>/<method>". */
const NAMES = ["device", "operator", "shape", "dtype", "members", "run", "phase", "metric"];
const CASE_NAMES = ["operator", "shape", "dtype", "members"];
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
  const device = [...runs].sort((a, b) => (a.id < b.id ? 1 : -1))[0]?.device;
  const ranked = runs
    .filter((run) => run.device === device)
    .flatMap((run) => run.panels.map((panel) => ({ run, panel })))
    .filter(({ panel }) => DATA.quantities[panel.quantity].metric === RATE);
  if (!ranked.length) return {};
  const order = ({ run, panel }) => {
    const one = DATA.cases[panel.case];
    const rates = panel.figures.filter(([, numbers]) => numbers.length).length;
    return [!run.flaws.length, rates > 2, one.operator === "Linear", one.width ?? 0, one.members, run.id];
  };
  const { run, panel } = ranked.sort((a, b) => lexicographic(order(a), order(b)))[0];
  const { operator, shape, dtype, members } = DATA.cases[panel.case];
  return { device, operator, shape, dtype, members: String(members), run: run.id, phase: "step" };
}

/** Compare two lists by their first difference, the larger one first. */
function lexicographic(a, b) {
  const place = a.findIndex((value, number) => value !== b[number]);
  return place < 0 ? 0 : a[place] > b[place] ? -1 : 1;
}

/** The option to take if none was asked for: the current one, or what most readers look for. */
function preferred(name, options, found) {
  if (name === "metric") {
    const wanted = [state.choice.metric?.split("/")[0], found.phase === "step" ? RATE : LATENCY, LATENCY, "kappa"];
    return wanted.flatMap((metric) => options.filter((one) => one.split("/")[0] === metric))[0] ?? options[0];
  }
  if (name === "members") {
    const near = Number(state.choice.members) || 1024;
    const distance = (option) => Math.abs(Math.log(Number(option) / near));
    return [...options].sort((a, b) => distance(a) - distance(b))[0];
  }
  if (name === "run") {
    const number = caseNumber(found);
    const phase = found.phase ?? state.choice.phase;
    const order = (id) => {
      const run = runNumber(id, found.device);
      const held = quantitiesOf(run, number).some((quantity) => DATA.quantities[quantity].phase === phase);
      return [held, !DATA.runs[run].flaws.length, id === state.choice.run];
    };
    return [...options].sort((a, b) => lexicographic(order(a), order(b)))[0];
  }
  const usual = [state.choice[name], ...(name === "phase" ? ["step", "forward"] : []), ...(name === "operator" ? ["Linear"] : [])];
  return usual.find((option) => options.includes(option)) ?? options[0];
}

/** The options of a choice, given the choices before it. @returns {{value: string, text: string}[]} */
function optionsOf(name, found) {
  const plainOption = (value) => ({ value, text: value });
  if (name === "device") return [...DEVICES.keys()].map(plainOption);
  const runs = DEVICES.get(found.device) ?? [];
  if (CASE_NAMES.includes(name)) {
    const fits = (number) =>
      CASE_NAMES.every((field) => found[field] === undefined || String(DATA.cases[number][field]) === found[field]);
    const numbers = runs.flatMap((run) => [...CASES[run]].filter(fits));
    const values = [...new Set(numbers.map((number) => String(DATA.cases[number][name])))];
    return values.sort(inOrder).map((value) => ({ value, text: name === "members" ? `${value} members` : value }));
  }
  const number = caseNumber(found);
  if (name === "run") return runs.filter((run) => CASES[run].has(number)).map((run) => runOption(DATA.runs[run]));
  const quantities = quantitiesOf(runNumber(found.run, found.device), number).map((one) => DATA.quantities[one]);
  if (name === "phase") {
    return PHASES.filter((phase) => quantities.some((one) => one.phase === phase)).map(plainOption);
  }
  return quantities
    .filter((one) => one.phase === found.phase)
    .map((one) => ({ value: `${one.metric}/${one.method}`, text: `${one.title} (${one.method})` }));
}

/** A run as an option: date, suite and flaws. */
function runOption(run) {
  const text = run.published ? run.suite : `${run.started.slice(0, 16).replace("T", " ")} ${run.suite}`;
  return { value: run.id, text: [text, run.flaws.join(" and ")].filter(Boolean).join(", ") };
}

/** Compare numbers by size and words alphabetically. */
function inOrder(a, b) {
  return a.localeCompare(b, "en", { numeric: true });
}

/** The position of the chosen case. */
function caseNumber(choice) {
  return DATA.cases.findIndex((one) => CASE_NAMES.every((name) => String(one[name]) === choice[name]));
}

/** The position of a run by its id, on a device if that is given. */
function runNumber(id, device) {
  return DATA.runs.findIndex((run) => run.id === id && (device === undefined || run.device === device));
}

/** The chosen run, and after it all runs of its device. */
function runsFrom(at) {
  return [at.run, ...(DEVICES.get(state.choice.device) ?? [])];
}

/** The choice as positions in DATA. */
function chosen() {
  const { choice } = state;
  const [metric, ...rest] = choice.metric.split("/");
  const method = rest.join("/");
  const run = runNumber(choice.run, choice.device);
  const number = caseNumber(choice);
  return { run, case: number, phase: choice.phase, metric, method, quantity: quantityNumber(run, number, choice.phase, metric, method) };
}

/** Read the choice and the view from the address; return the names of what does not exist. */
function readLink() {
  const link = new URLSearchParams(location.hash.replace(/^#/, ""));
  const named = (names) => Object.fromEntries(names.filter((name) => link.has(name)).map((name) => [name, link.get(name)]));
  const { found, missing } = resolved(named(NAMES), first());
  state.choice = found;
  state.view = named(VIEWS);
  const { variant } = state.view;
  if (variant !== undefined && variantNumber(variant) < 0) {
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

/** The columns and the rows of the choice. A column is better with higher figures (1), lower ones (-1), or neither (0). */
function table() {
  const at = chosen();
  const quantity = DATA.quantities[at.quantity];
  const rows = new Map();
  const main = { key: "main", title: shortTitle(quantity), unit: quantity.unit, better: betterOf(at.metric) };
  const columns = [main];

  function rowOf({ variant, label, baseline }) {
    if (!rows.has(variant)) rows.set(variant, { variant, label, baseline, cells: {}, reason: "", remark: "" });
    return rows.get(variant);
  }
  /** Add the reasons, the remarks and a column of some figures. */
  function add(figures, column, cell = (figure) => figure) {
    const cells = figures.map((figure) => [figure, cell(figure)]).filter(([, one]) => one !== null);
    if (!cells.some(([, one]) => rank(one) !== null)) return;
    columns.push({ unit: "", ...column });
    for (const [figure, one] of cells) rowOf(figure).cells[column.key] = one;
  }
  function explain(figures) {
    for (const figure of figures) {
      const row = rowOf(figure);
      row.reason ||= figure.reason;
      row.remark ||= figure.remark;
    }
  }

  const here = figuresOf(at.run, at.quantity, at.case);
  explain(here);
  for (const figure of here) rowOf(figure).cells.main = figure;
  if (at.metric !== RATE && at.metric !== LATENCY) {
    add(here, { key: "multiple", title: "vs. base", better: -1, kind: "times" }, (one) => one.time);
  } else {
    const rates = at.phase === "step" ? other(at, "step", RATE) : [];
    const latencies = other(at, at.phase, LATENCY);
    if (at.metric === RATE) add(latencies, { key: "time", title: "Step", unit: "ms", better: -1 });
    else add(rates, { key: "rate", title: "n_eff / ms", better: 1 });
    explain(latencies);
    add(latencies, { key: "speed", title: "vs. naive", better: 1, kind: "times" }, (one) => one.speed);
    add(latencies, { key: "multiple", title: "vs. base", better: -1, kind: "times" }, (one) => one.time);
    add(latencies, { key: "floor", title: "Floor", unit: "%", better: 1 }, (one) =>
      one.floor === null || !one.value ? null : plain((100 * one.floor) / one.value),
    );
    const { members } = DATA.cases[at.case];
    add(rates, { key: "kept", title: "n_eff / n", unit: "%", better: 1 }, (one) => memberShare(one, members));
    add(rates, { key: "kappa", title: "kappa", better: -1 }, (one) => (one.kappa === null ? null : plain(one.kappa)));
    add(peaks(at), { key: "peak", title: "Peak", unit: "MB", better: -1 });
  }
  return { columns, rows: [...rows.values()], main, quantity, at };
}

/** A short title of a quantity. */
function shortTitle(quantity) {
  return quantity.metric === RATE ? "n_eff / ms" : quantity.title.split(/ above| \(|,/)[0];
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
  return { value, low: null, high: null };
}

/** n_eff / n in percent, at most 100 unless the interval is above. */
function memberShare(figure, members) {
  if (figure.kind === "exact") return { ...plain(null), kind: "exact" };
  if (figure.n_eff === null) return null;
  const share = (end) => (end === null ? null : (100 * end) / members);
  const [value, low, high] = [figure.n_eff.value, figure.n_eff.low, figure.n_eff.high].map(share);
  return { value: low !== null && low <= 100 ? Math.min(value, 100) : value, low, high, kind: figure.kind };
}

/** The rows whose label contains every word of the filter. */
function filtered(rows) {
  const words = (state.view.filter ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const baselines = state.view.baselines !== "no";
  return rows.filter((row) => (baselines || !row.baseline) && words.every((word) => row.label.toLowerCase().includes(word)));
}

/** Rows sorted as asked for, otherwise by the main column, best first; those without a number come last. */
function sorted(rows, columns, main) {
  const asked = state.view.sort ?? "";
  const key = asked.replace(/^-/, "");
  const known = key === "label" ? { key } : columns.find((one) => one.key === key);
  const column = known ?? main;
  const falling = known ? asked.startsWith("-") : column.better > 0;
  const sign = falling ? -1 : 1;
  const found = [...rows].sort((a, b) => {
    if (column.key === "label") return sign * inOrder(a.label, b.label);
    const [x, y] = [rank(a.cells[column.key]), rank(b.cells[column.key])];
    if (x === null || y === null) return Number(x === null) - Number(y === null) || inOrder(a.label, b.label);
    if (x === Infinity && y === Infinity) return (a.cells.time?.value ?? 0) - (b.cells.time?.value ?? 0);
    return x === y ? inOrder(a.label, b.label) : sign * (x < y ? -1 : 1);
  });
  return { rows: found, key: column.key, falling };
}

/** The sort key of a cell, null without a figure: an exact estimate is above every number. */
function rank(cell) {
  if (!cell) return null;
  return cell.kind === "exact" ? Infinity : cell.value;
}

// --- The answer: which variant to train with ----------------------------------------------------------------------------

/** Write the answer of the chosen case: by n_eff per ms where a run of the device ranks it, otherwise by time. */
function showAnswer() {
  const at = chosen();
  const one = DATA.cases[at.case];
  put("answer-where", `${one.operator} ${one.shape}, ${one.dtype}, ${one.members} members, on ${state.choice.device}`);
  const run = runsFrom(at).find((number) => quantityNumber(number, at.case, "step", RATE, at.method) !== undefined);
  const ranked = run === undefined ? [] : other({ ...at, run }, "step", RATE);
  const figures = ranked.filter((figure) => !figure.baseline && rank(figure) !== null);
  const answer = figures.length ? byRate(figures, { ...at, run }) : byTime(at);
  put("answer-title", ...answer.title);
  put("answer-why", answer.why);
  const source = DATA.runs[figures.length ? run : at.run];
  const flaws = source.flaws.length ? ` This run ${source.flaws.join(" and ")}.` : "";
  put("answer-origin", `Run ${source.id}: ${source.origin}${flaws}`);
}

/** The answer by n_eff per ms, from figures that are sorted by it. */
function byRate(figures, at) {
  const [best, ...others] = figures;
  const isExact = best.kind === "exact";
  const members = DATA.cases[at.case].members;
  const latency = other(at, "step", LATENCY);
  const step = latency.find((figure) => figure.variant === best.variant);
  const fast = fastest(latency);
  const close = others.filter((figure) => !isExact && figure.high !== null && best.low !== null && figure.high >= best.low);
  const sentences = [];
  if (step) {
    const against = step.time ? `, ${multiplierText(step.time)} the plain layer's time` : "";
    sentences.push(`A step of ${counted(members)} members takes ${valueText(step)} ms${against}.`);
  }
  const share = memberShare(best, members);
  if (!isExact && share) sentences.push(`${membersCount(share)}.`);
  if (close.length) sentences.push(`Tied with ${listed(close.map((figure) => figure.label))}: their intervals overlap.`);
  if (step && step.low === null) sentences.push("Its step has too few rounds for an interval: measure it again before relying on it.");
  if (fast && fast.variant !== best.variant) {
    const figure = figures.find((one) => one.variant === fast.variant);
    const counts = figure && memberShare(figure, members);
    const worth = counts ? `with which ${membersCount(counts).toLowerCase()}` : "but its n_eff is not known";
    sentences.push(`${fast.label} has the fastest step, ${valueText(fast)} ms, ${worth}.`);
  }
  const gives = isExact ? "the exact gradient of a linear fitness in each step" : `${figureText(best)} n_eff per ms`;
  const or = close.length ? [" or ", html("em", {}, breakable(close[0].label))] : [];
  return { title: ["Use ", html("em", {}, breakable(best.label)), ...or, `: ${gives}`], why: sentences.join(" ") };
}

/** n_eff / n as a sentence. */
function membersCount(share) {
  return share.value >= 99.95 ? "All members count" : `${figureText(share)} % of the members count`;
}

/** The answer by time, if no run ranks the case. */
function byTime(at) {
  const fast = fastest(other(at, at.phase, LATENCY));
  if (!fast) return { title: ["No variant has a time here"], why: "The table shows the reasons." };
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
  return known.sort((a, b) => a.value - b.value)[0];
}

/** The first names and the number of others. */
function listed(names) {
  return names.slice(0, 3).join(", ") + (names.length > 3 ? ` and ${names.length - 3} more` : "");
}

// --- The table -------------------------------------------------------------------------------------------------------------

/** A table with a caption, of rows that are elements; a heading is a text or an element. */
function tableOf(caption, heads, rows) {
  const head = heads.map((one) => (one instanceof Element ? one : html("th", { scope: "col" }, one)));
  return html("table", {}, caption ? html("caption", {}, caption) : "", html("thead", {}, html("tr", {}, head)), html("tbody", {}, rows));
}

/** Write the table of the choice; return what it shows, for the figures. */
function showTable() {
  const { columns, rows, main, quantity, at } = table();
  const { rows: order, key, falling } = sorted(filtered(rows), columns, main);
  const best = order.find((row) => !row.baseline && rank(row.cells.main) !== null);
  const isRanking = key === "main" && main.better !== 0 && falling === main.better > 0;
  const heads = [{ key: "label", title: "Variant", unit: "" }, ...columns].map((column) => heading(column, key, falling));
  const caption = `${quantity.title}, ${quantity.phase}, method ${quantity.method}; run ${DATA.runs[at.run].id}`;
  put("table-scroll", tableOf(caption, heads, order.map((row) => line(row, columns, isRanking && row === best))));
  put("count", `${order.length} of ${rows.length} variants`);
  put("table-note", "The 95 % interval is below each figure. Click a variant for its details, or a heading to sort.");
  return { main, quantity, at, rows: order };
}

/** The heading of a column: a button that sorts by it, best first; a second time reverses the order. */
function heading(column, key, falling) {
  const here = column.key === key;
  const sort = () => {
    const down = here ? !falling : (column.better ?? 0) > 0;
    state.view.sort = (down ? "-" : "") + column.key;
    refresh();
    document.querySelector(`[data-sort="${column.key}"]`)?.focus();
  };
  const text = column.unit ? `${column.title} (${column.unit})` : column.title;
  return html(
    "th",
    { scope: "col", "aria-sort": here ? (falling ? "descending" : "ascending") : null },
    html("button", { type: "button", "data-sort": column.key, onclick: sort }, text),
  );
}

/** A variant's row: its cells, or the reason why it has no figure. */
function line(row, columns, isBest) {
  const open = { type: "button", class: "link", "data-variant": row.variant, onclick: () => openDetail(row.variant) };
  const name = html("th", { scope: "row" }, html("button", open, breakable(row.label)));
  if (columns.every((column) => rank(row.cells[column.key]) === null)) {
    return html("tr", {}, name, html("td", { class: "reason", colspan: columns.length }, row.reason || "not in this run"));
  }
  return html("tr", { class: isBest ? "best" : null }, name, columns.map((column) => cellOf(row, column)));
}

/** A cell: the figure with its interval, or in the first column the reason why there is none. */
function cellOf(row, column) {
  const cell = row.cells[column.key];
  if (rank(cell) === null) {
    const reason = column.key === "main" ? row.reason : "";
    return html("td", { class: reason ? "reason" : null }, reason || "–");
  }
  const number = column.kind === "times" ? multiplierText(cell) : figureText(cell);
  const range = cell.kind ? "" : intervalText(cell);
  const remark = column.key === "main" ? row.remark : "";
  return html("td", {}, number, [range, remark].filter(Boolean).map((text) => html("small", {}, text)));
}

// --- Axes ------------------------------------------------------------------------------------------------------------------

/** A linear scale from 0, or a logarithmic one: `at` is the place of a value in the picture. */
function scale(values, from, to, logarithmic) {
  const known = values.filter((value) => Number.isFinite(value) && (!logarithmic || value > 0));
  const most = Math.max(...known);
  if (!logarithmic) {
    const ticks = evenly(0, most || 1, 4);
    const end = Math.max(ticks.at(-1), most || 1);
    return { at: (value) => from + ((to - from) * value) / end, ticks };
  }
  const [low, high] = [Math.log10(Math.min(...known)) - 0.07, Math.log10(most) + 0.07];
  return { at: (value) => from + ((to - from) * (Math.log10(value) - low)) / (high - low), ticks: decades(10 ** low, 10 ** high) };
}

/** Ticks of a logarithmic axis: powers of ten, in a small range also 2 and 5 times them, or at least two even steps. */
function decades(least, most) {
  const found = [];
  const digits = Math.log10(most / least) < 2.2 ? [1, 2, 5] : [1];
  for (let power = Math.floor(Math.log10(least)); power <= Math.ceil(Math.log10(most)); power += 1) {
    found.push(...digits.map((one) => one * 10 ** power).filter((value) => value >= least && value <= most));
  }
  return found.length > 1 ? found : evenly(least, most, 2);
}

/** The multiples in a range of the largest round step that has so many steps in it. */
function evenly(least, most, count) {
  const size = 10 ** Math.floor(Math.log10(most - least));
  const inside = (step) => Math.floor(most / step + 1e-9) - Math.ceil(least / step - 1e-9) + 1;
  const step = [1, 0.5, 0.25, 0.2, 0.1].map((one) => one * size).find((one) => inside(one) >= count);
  const first = Math.ceil(least / step - 1e-9);
  return Array.from({ length: inside(step) }, (_, place) => Number(((first + place) * step).toPrecision(12)));
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
  const size = Math.abs(value);
  if (value !== 0 && (size >= 1e6 || size < 1e-4)) return value.toExponential(0).replace("e+", "e");
  return Number(value.toPrecision(3)).toLocaleString("en-US", { maximumFractionDigits: 8 });
}

/** Rising positions moved apart to a gap: downwards, and from the upper bound back where they passed it. */
function spaced(wanted, gap, high) {
  const found = [];
  wanted.forEach((place, number) => found.push(number ? Math.max(place, found[number - 1] + gap) : place));
  for (let number = found.length - 1, end = high; number >= 0; number -= 1) {
    found[number] = Math.min(found[number], end);
    end = found[number] - gap;
  }
  return found;
}

/** The width available for a figure, in pixels. */
function room(id) {
  const box = byId(id);
  box.hidden = false; // a hidden figure has no width
  const style = getComputedStyle(box);
  return Math.max(260, Math.floor(box.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight)));
}

/** A line of a picture. */
function stroke(kind, x1, x2, y1, y2) {
  return svg("line", { class: kind, x1, x2, y1, y2 });
}

/** A text of a picture. */
function words(x, y, text, anchor = "start", kind = null) {
  return svg("text", { class: kind, x, y, "text-anchor": anchor }, text);
}

// --- Bars from 0, or dots on a logarithmic axis; a whisker is the 95 % interval, a tick the roofline bound ----------------

const ROW = 24;
const LARGE = 20;

/** Draw the bars of what the table shows. */
function showBars({ main, quantity, rows, at }) {
  const told = rows.filter((row) => rank(row.cells.main) !== null && row.cells.main.kind !== "exact" && row.cells.main.value >= 0);
  if (!told.length) return show("bars", "", null);
  const width = room("bars");
  const ends = told.flatMap(({ cells }) => [cells.main.value, cells.main.floor ?? cells.main.value]);
  const positive = ends.filter((end) => end > 0);
  const logarithmic = positive.length > 1 && Math.max(...positive) / Math.min(...positive) > LARGE;
  const left = Math.min(Math.max(...told.map((row) => textWidth(row.label))) + 12, width * 0.46);
  const axis = scale(ends, left, width - 64, logarithmic);
  const top = 22;
  const bottom = top + told.length * ROW + 4;
  const best = told.find((row) => !row.baseline);
  const lines = labelled(axis.ticks, axis.at, tick).map((value) => [
    stroke("gridline", axis.at(value), axis.at(value), top - 4, bottom),
    words(axis.at(value), 11, tick(value), "middle", "soft"),
  ]);
  const bars = told.map((row, place) => {
    const kind = row.baseline ? "baseline" : row === best && main.better !== 0 ? "best" : "";
    return bar(row, kind, top + place * ROW, { axis, left, logarithmic, width });
  });
  const name = `${quantity.title}${quantity.unit ? ` (${quantity.unit})` : ""}`;
  const hidden = rows.length - told.length;
  const notes = [
    logarithmic && "Logarithmic axis.",
    told.some((row) => isSure(row.cells.main)) && "The whisker is the 95 % interval.",
    told.some((row) => row.cells.main.floor !== null) && "The orange tick is the roofline bound.",
    hidden > 0 && `${hidden} variants without a number, or with an exact gradient, are only in the table.`,
  ];
  const description = `${name} as ${logarithmic ? "dots" : "bars"} for ${told.length} variants, in the order of the table below.`;
  const caption = `${name}, ${quantity.phase}; ${DATA.cases[at.case].label}`;
  return show("bars", caption, picture(width, bottom + 4, description, lines, bars), notes.filter(Boolean).join(" "));
}

/** Whether both ends of an interval are known and differ. */
function isSure({ low, high }) {
  return low !== null && high !== null && low < high;
}

/** A variant's bar, or its dot. */
function bar(row, kind, y, { axis, left, logarithmic, width }) {
  const figure = row.cells.main;
  const middle = y + ROW / 2;
  const at = (value) => (value > 0 || !logarithmic ? Math.min(Math.max(axis.at(value), left), width - 4) : left);
  const end = at(figure.value);
  let beside = end;
  const parts = [
    svg("title", {}, `${row.label}: ${figureText(figure)} (${intervalText(figure) || "no interval"})`),
    svg("rect", { x: 0, y, width, height: ROW, fill: "transparent" }),
    words(left - 8, middle + 4, fitText(row.label, left - 10), "end"),
  ];
  if (!logarithmic) parts.push(svg("rect", { class: "bar", x: left, y: middle - 6, width: Math.max(end - left, 1), height: 12, rx: 2 }));
  else if (figure.value > 0) parts.push(stroke("guide", left, end, middle, middle), svg("circle", { class: "bar", cx: end, cy: middle, r: 4.5 }));
  if (isSure(figure)) {
    const [low, high] = [at(figure.low), at(figure.high)];
    parts.push(stroke("whisker", low, high, middle, middle));
    parts.push(...[low, high].map((x) => stroke("whisker", x, x, middle - 3, middle + 3)));
    beside = Math.max(beside, high);
  }
  if (figure.floor > 0) {
    parts.push(stroke("floor", at(figure.floor), at(figure.floor), middle - 8, middle + 8));
    beside = Math.max(beside, at(figure.floor));
  }
  parts.push(words(Math.min(beside + 6, width - 44), middle + 4, figureText(figure), "start", "soft"));
  return svg("g", { class: `chosen ${kind}`, onclick: () => openDetail(row.variant) }, parts);
}

// --- Plots with two logarithmic axes, whose points are named on the right ----------------------------------------------

/** A frame for points: its scales, its grid, and the place of a name beside the end of each variant. */
function frame(id, points, named, { left, name, at }) {
  const width = room(id);
  const height = Math.min(Math.max(320, width * 0.62), 430);
  const bottom = height - 38;
  const right = width - Math.min(Math.max(...named.map((point) => textWidth(point.label))) + 24, width * 0.42);
  const x = scale(points.map((point) => point.x), left, right, true);
  const y = scale(points.map((point) => point.y), bottom, 12, true);
  const grid = [
    (at ?? x.ticks).map((value) => stroke("gridline", x.at(value), x.at(value), 12, bottom)),
    labelled(at ?? x.ticks, x.at, at ? counted : tick).map((value) => words(x.at(value), height - 22, at ? counted(value) : tick(value), "middle", "soft")),
    y.ticks.map((value) => [
      stroke("gridline", left, right, y.at(value), y.at(value)),
      words(left - 6, y.at(value) + 4, tick(value), "end", "soft"),
    ]),
    words((left + right) / 2, height - 4, name, "middle", "soft"),
  ];
  const ordered = [...named].sort((a, b) => y.at(a.y) - y.at(b.y));
  const places = spaced(ordered.map((point) => y.at(point.y)), 16, height - 44);
  const names = ordered.map((point, order) => [
    svg("path", { class: "leader", d: `M${x.at(point.x) + 7},${y.at(point.y)}L${right + 4},${places[order]}` }),
    point.mark ? point.mark(right + 10, places[order]) : "",
    words(right + (point.mark ? 19 : 7), places[order] + 4, fitText(point.label, width - right - 20)),
  ]);
  const nameOf = (point) => names[ordered.indexOf(point)];
  return { x, y, nameOf, drawn: (description, ...parts) => picture(width, height, description, grid, ...parts) };
}

/** A group that opens a variant when it is clicked. */
function opening(variant, ...parts) {
  return svg("g", { class: "chosen", onclick: () => openDetail(variant) }, ...parts);
}

/** Draw n_eff per ms against peak memory for the chosen case, with the Pareto front. */
function showPareto({ at, rows }) {
  const shown = new Set(rows.map((row) => row.variant));
  const most = new Map(peaks({ ...at, phase: "step" }).map((figure) => [figure.variant, figure]));
  const points = other(at, "step", RATE)
    .filter((rate) => shown.has(rate.variant) && rate.value > 0 && most.get(rate.variant)?.value > 0)
    .map((rate) => ({ ...rate, rate, peak: most.get(rate.variant), x: most.get(rate.variant).value, y: rate.value }));
  if (points.length < 2) return show("pareto", "", null);
  const front = [];
  for (const point of [...points].sort((a, b) => a.x - b.x || b.y - a.y)) {
    if (!front.length || point.y > front.at(-1).y) front.push(point);
  }
  const { x, y, nameOf, drawn } = frame("pareto", points, front, { left: 46, name: "peak memory (MB), lower is better" });
  const corners = front.map((point, place) => `${place ? `H${x.at(point.x)}V` : `M${x.at(point.x)},`}${y.at(point.y)}`);
  const dots = points.map((point) => {
    const ahead = front.includes(point);
    return opening(
      point.variant,
      svg("title", {}, `${point.label}: ${figureText(point.rate)} n_eff per ms, peak ${figureText(point.peak)} MB`),
      svg("circle", { class: ahead ? "dot ahead" : "dot", cx: x.at(point.x), cy: y.at(point.y), r: ahead ? 5.5 : 4 }),
    );
  });
  const description = `n_eff per ms against peak memory of ${points.length} variants. On the front: ${front.map((point) => point.label).join(", ")}.`;
  return show(
    "pareto",
    "n_eff per ms of a step against peak memory",
    drawn(description, svg("path", { class: "front", d: corners.join("") }), dots, front.map((point) => opening(point.variant, nameOf(point)))),
    "Labelled variants are on the Pareto front: no other has more n_eff per ms with less memory. Both axes are logarithmic.",
  );
}

const LINES = 8;
const FEWEST = 3;

/** Draw the metric against the population for the first variants of the table, where a run has three populations. */
function showSweep({ at, main, quantity, rows }) {
  const swept = sweepOf(at);
  const told = swept ? rows.filter((row) => swept.lines.get(row.variant)?.length > 1) : [];
  const picked = told.slice(0, LINES).map((row, place) => {
    const points = swept.lines.get(row.variant);
    const color = `var(--s${place + 1})`;
    return { ...row, points, color, ...points.at(-1), mark: (x, y) => markOf(place, x, y, color) };
  });
  if (!picked.length) return show("sweep", "", null);
  const points = picked.flatMap((one) => one.points);
  const { x, y, nameOf, drawn } = frame("sweep", points, picked, { left: 56, name: "members", at: swept.members });
  const lines = picked.map((one) => {
    const path = one.points.map((point, step) => `${step ? "L" : "M"}${x.at(point.x)},${y.at(point.y)}`).join("");
    return opening(
      one.variant,
      svg("title", {}, one.label),
      svg("path", { d: path, fill: "none", stroke: one.color, "stroke-width": 2 }),
      one.points.map((point) => one.mark(x.at(point.x), y.at(point.y))),
      nameOf(one),
    );
  });
  const from = swept.run === at.run ? "" : ` From run ${DATA.runs[swept.run].id}: the chosen run has too few populations.`;
  const more = told.length > LINES ? ` The first ${LINES} of ${told.length} in the table: filter or sort it to see others.` : "";
  return show(
    "sweep",
    `${shortTitle(quantity)}${main.unit ? ` (${main.unit})` : ""}, ${quantity.phase}, against the population`,
    drawn(`${quantity.title} against the population, for ${picked.map((one) => one.label).join(", ")}.`, lines),
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
  const family = [...DATA.cases.keys()]
    .filter((number) => ["operator", "shape", "dtype"].every((name) => DATA.cases[number][name] === here[name]))
    .sort((a, b) => DATA.cases[a].members - DATA.cases[b].members);
  for (const run of runsFrom(at)) {
    const lines = new Map();
    const members = new Set();
    for (const number of family) {
      for (const { variant, value } of figuresOf(run, at.quantity, number)) {
        if (!(value > 0)) continue;
        if (!lines.has(variant)) lines.set(variant, []);
        lines.get(variant).push({ x: DATA.cases[number].members, y: value });
        members.add(DATA.cases[number].members);
      }
    }
    if (members.size >= FEWEST) return { run, lines, members: [...members] };
  }
  return null;
}

// --- Details of a variant: formula, closed forms, measurements, usage -----------------------------------------------------

const CLOSED = ["Memory", "Work", "Quality"];

/** The name by which a link holds a variant. */
function variantKey(number) {
  return `${DATA.variants[number].scheme}${DATA.variants[number].options}`;
}

/** The position of a variant by that name. */
function variantNumber(key) {
  return DATA.variants.findIndex((_, number) => variantKey(number) === key);
}

/** Open a variant, by its number. */
function openDetail(number) {
  state.view.variant = variantKey(number);
  writeLink(true);
  showDetail();
}

/** Show the details of the variant in the address, or close them. */
function showDetail() {
  const dialog = byId("detail");
  const number = variantNumber(state.view.variant);
  if (number < 0) {
    if (dialog.open) dialog.close();
    return;
  }
  const title = html("h2", { id: "detail-title" }, breakable(labelOf(number, state.choice.operator)));
  const close = html("button", { type: "button", id: "detail-close", onclick: () => dialog.close() }, "Close");
  put(dialog, html("header", {}, title, close), html("div", { class: "body" }, detailBody(number)));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
}

/** Everything below the title. */
function detailBody(number) {
  const variant = DATA.variants[number];
  const about = DATA.schemes[variant.scheme];
  const at = chosen();
  const told = about
    ? [html("p", { class: "formula" }, about.summary || "This scheme has no docstring."), ...about.text.map((text) => html("p", {}, text))]
    : [html("p", { class: "warning" }, `No run stores the docstring of ${variant.scheme}: only its measurements are known.`)];
  if (variant.source) told.push(html("p", { class: "quiet" }, `Source: ${variant.source}`));
  return [...told, ...usage(variant, about, at), ...closedForm(variant.scheme, about), ...measured(number, at), ...qualityTable(number, at)];
}

/** The code that trains with it. */
function usage(variant, about, at) {
  if (!variant.code || !about) return [];
  const { members, sigma } = DATA.cases[at.case];
  const imports = about.module === "impls"
    ? `from impls import ${[variant.scheme, "perturb"].sort().join(", ")}`
    : `from impls import perturb; from ${about.module} import ${variant.scheme}`;
  const code = `${imports}\npopulation = perturb(model, ${variant.code}, members=${members}, sigma=${sigma})`;
  return [html("h3", {}, "Usage"), html("pre", { tabindex: "0", id: "usage" }, html("code", {}, code))];
}

/** Memory, work and quality in closed form, also those of the scheme that a fused variant computes. */
function closedForm(scheme, about) {
  const found = [];
  for (const [name, one] of [[scheme, about], [about?.of, DATA.schemes[about?.of]]]) {
    const told = CLOSED.filter((key) => one?.closed[key]);
    if (!told.length) continue;
    found.push(html("h3", {}, name === scheme ? "Closed forms" : `Closed forms of ${name}, which it computes`));
    found.push(html("dl", { class: "closed" }, told.map((key) => [html("dt", {}, key), html("dd", {}, one.closed[key])])));
  }
  const letters = "n members, r repeats, g groups, o and i channels out and in, taps of a kernel, d perturbed numbers.";
  return found.length ? [...found, html("p", { class: "note" }, letters)] : [];
}

/** A small table of a run's figures on the chosen case, in a frame that scrolls. */
function small(title, run, at, heads, rows) {
  const caption = `${DATA.cases[at.case].label}; run ${DATA.runs[run].id}`;
  const body = rows.map(([first, ...rest]) => html("tr", {}, html("th", { scope: "row" }, first), rest.map((cell) => html("td", {}, cell))));
  const frame = { class: "scroll small", tabindex: "0", role: "region", "aria-label": `${title}, ${caption}` };
  return html("div", frame, tableOf(caption, heads, body));
}

/** Measurements on the chosen case from the chosen run, or from the newest other run that has any. */
function measured(number, at) {
  const found = runsFrom(at).map((run) => measuredIn(number, { ...at, run })).find((parts) => parts.length);
  const label = DATA.cases[at.case].label;
  return [html("h3", {}, "Measured"), ...(found ?? [html("p", {}, `No run of this device measured it on ${label}.`)])];
}

/** One row per phase and method of a run, and the reasons for missing ones. */
function measuredIn(number, at) {
  const rows = [];
  const reasons = [];
  for (const { figure, phase, method, metric } of figuresOfVariant(number, at.run, at)) {
    if (metric !== LATENCY) continue;
    if (figure.value === null) {
      reasons.push(html("p", { class: "note" }, `${phase} (${method}): ${figure.reason}`));
      continue;
    }
    const beside = [PEAK, "noise_bytes", "launches"].map((name) => {
      const found = other({ ...at, method }, phase, name).find((one) => one.variant === number);
      return found ? figureText(found) : ABSENT;
    });
    const traffic = figure.moved_bytes === null ? null : figure.moved_bytes / 1e6;
    rows.push([
      `${phase} (${method})`,
      figureText(figure),
      intervalText(figure) || ABSENT,
      multiplierText(figure.time),
      numberText(figure.floor),
      countText(figure.flops),
      numberText(traffic),
      ...beside,
    ]);
  }
  const heads = ["Phase", "Time (ms)", "95 % interval", "vs. base", "Roofline bound (ms)", "Minimum flops", "Minimum traffic (MB)", "Peak (MB)", "Noise (MB)", "Launches"];
  return [...(rows.length ? [small("Measured", at.run, at, heads, rows)] : []), ...reasons];
}

/** The figures of its quality on the chosen case. */
function qualityTable(number, at) {
  for (const run of runsFrom(at)) {
    const found = figuresOfVariant(number, run, at).filter(
      ({ figure, phase, metric }) => (phase === "quality" || metric === RATE) && rank(figure) !== null,
    );
    if (!found.length) continue;
    const rows = found.map(({ figure, title, method }) => [title, method, figureText(figure), intervalText(figure) || ABSENT]);
    const heads = ["Figure", "Method", "Value", "95 % interval"];
    return [html("h3", {}, "Quality of the gradient"), small("Quality", run, at, heads, rows)];
  }
  return [];
}

/** The figures of a variant on the chosen case in a run, each with its quantity, by phase. */
function figuresOfVariant(number, run, at) {
  const found = quantitiesOf(run, at.case).flatMap((quantity) =>
    figuresOf(run, quantity, at.case)
      .filter((figure) => figure.variant === number)
      .map((figure) => ({ figure, ...DATA.quantities[quantity] })),
  );
  return found.sort((a, b) => PHASES.indexOf(a.phase) - PHASES.indexOf(b.phase));
}

// --- Two runs compared -----------------------------------------------------------------------------------------------------

const SHOWN = 200;
const SAME_DEVICE = ["device_name", "cpu", "threads", "device_memory_bytes"];

/** Fill a select. */
function fill(id, options, value) {
  const select = put(id, options.map((option) => html("option", { value: option.value }, shorten(option.text, 90))));
  select.value = value;
  select.disabled = options.length < 2;
}

/** Write the comparison of the two runs that are chosen. */
function showComparison() {
  const runs = DATA.runs.map((run) => ({ value: run.id, text: `${run.device}: ${runOption(run).text}` }));
  runs.sort((a, b) => (a.value < b.value ? 1 : -1));
  for (const side of ["a", "b"]) fill(`compare-${side}`, [{ value: "", text: "Choose a run" }, ...runs], state.view[side] ?? "");
  put("compare-scroll");
  const [a, b] = [runNumber(state.view.a), runNumber(state.view.b)];
  const common = a < 0 || b < 0 ? [] : commonQuantities(a, b);
  if (!common.length) {
    const lost = ["a", "b"].filter((side) => state.view[side] && runNumber(state.view[side]) < 0);
    const choose = `${lost.map((side) => `Run ${state.view[side]} is not in this page. `).join("")}Choose two runs.`;
    put("compare-status", a < 0 || b < 0 ? choose : "These two runs have no case, phase, metric and method in common.");
    fill("compare-quantity", [{ value: "", text: "None in common" }], "");
    return;
  }
  const options = common.map((quantity) => {
    const { title, phase, metric, method } = DATA.quantities[quantity];
    return { value: `${phase}/${metric}/${method}`, text: `${phase}: ${title} (${method})` };
  });
  const wanted = state.view.quantity ?? `${state.choice.phase}/${state.choice.metric}`;
  const place = options.findIndex((option) => option.value === wanted);
  fill("compare-quantity", options, options[Math.max(place, 0)].value);
  const missed = state.view.quantity !== undefined && place < 0 ? [`Not in both runs: ${wanted}. Another quantity is shown.`] : [];
  writeComparison(a, b, common[Math.max(place, 0)], missed);
}

/** The quantities that both runs measured on the same case, times first. */
function commonQuantities(a, b) {
  const shared = DATA.runs[a].panels.filter((panel) => PANELS[b].has(`${panel.quantity} ${panel.case}`));
  const order = (quantity) => {
    const { phase, metric } = DATA.quantities[quantity];
    return [metric === LATENCY, -["step", "forward", "update", "sample", "quality"].indexOf(phase), -quantity];
  };
  return [...new Set(shared.map((panel) => panel.quantity))].sort((x, y) => lexicographic(order(x), order(y)));
}

/** Write the rows of a quantity, after warnings. */
function writeComparison(a, b, quantity, missed) {
  const { both, only, reasons } = matched(a, b, quantity);
  both.sort((x, y) => (y.ratio.value ?? -1) - (x.ratio.value ?? -1));
  const { title, unit, phase, method } = DATA.quantities[quantity];
  const changed = both.filter(({ ratio }) => ratio.low !== null && (ratio.low > 1 || ratio.high < 1)).length;
  const remarks = [
    `${both.length} rows are in both${both.length > SHOWN ? `, the first ${SHOWN} are shown` : ""}; `
      + `for ${changed} of them the interval of B / A excludes 1. ${only[0]} only in A, ${only[1]} only in B.`,
    ...reasons,
    "The interval of B / A divides the ends of the two 95 % intervals, so its level is at least 90 %. It covers the spread "
      + "within each process, not between processes: use `esbench gate` for a decision.",
  ];
  const paragraphs = (kind, texts) => texts.map((text) => html("p", { class: kind }, text));
  put("compare-status", ...paragraphs("warning", [...missed, ...warnings(a, b)]), ...paragraphs("quiet", remarks));
  const inUnit = unit ? ` (${unit})` : "";
  const heads = ["Variant", "Case", `A${inUnit}`, `B${inUnit}`, "B / A", "Interval"].map((text, place) =>
    html("th", { scope: "col", class: ["words", "words case"][place] ?? null }, text),
  );
  const rows = both.slice(0, SHOWN).map((row) =>
    html(
      "tr",
      {},
      html("th", { scope: "row" }, breakable(row.a.label), html("small", { class: "narrow" }, row.label)),
      html("td", { class: "words case" }, row.label),
      [figureText(row.a), figureText(row.b), multiplierText(row.ratio), intervalText(row.ratio) || ABSENT].map((text) => html("td", {}, text)),
    ),
  );
  const caption = `${title}, ${phase}, method ${method}; A is ${DATA.runs[a].id}, B is ${DATA.runs[b].id}`;
  put("compare-scroll", tableOf(caption, heads, rows));
}

/** The rows of both runs, the number of rows in only one of them, and the first reasons. */
function matched(a, b, quantity) {
  const both = [];
  const only = [0, 0];
  const reasons = new Set();
  for (const number of new Set([...CASES[a], ...CASES[b]])) {
    const [here, there] = [a, b].map((run) => new Map(figuresOf(run, quantity, number).map((figure) => [figure.variant, figure])));
    for (const variant of new Set([...here.keys(), ...there.keys()])) {
      const [x, y] = [here.get(variant), there.get(variant)];
      const [inA, inB] = [rank(x) !== null, rank(y) !== null];
      const { label } = DATA.cases[number];
      if (inA && inB) both.push({ a: x, b: y, label, ratio: divided(x, y) });
      else if (inA || inB) {
        only[inA ? 0 : 1] += 1;
        const reason = (inA ? y : x)?.reason;
        if (reason && reasons.size < 3) reasons.add(`${(x ?? y).label}, ${label}: ${reason}`);
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
  const found = [["A", a], ["B", b]]
    .filter(([, run]) => DATA.runs[run].flaws.length)
    .map(([side, run]) => `Run ${side} ${DATA.runs[run].flaws.join(" and ")}.`);
  const text = (value) => (value === undefined ? "unknown" : shorten(String(value), 60));
  const apart = (names) =>
    names.filter((name) => x[name] !== y[name]).map((name) => `${name}: ${text(x[name])} in A, ${text(y[name])} in B`).join("; ");
  const devices = apart(SAME_DEVICE.filter((name) => x[name] !== undefined && y[name] !== undefined));
  if (devices) found.push(`Different devices (${devices}): the ratio of times compares devices, not variants.`);
  const others = apart([...new Set([...Object.keys(x), ...Object.keys(y)])].filter((name) => !SAME_DEVICE.includes(name)));
  if (others) found.push(`Different in A and B: ${others}.`);
  return found;
}

// --- The page: drawing order, events -----------------------------------------------------------------------------

/** Draw everything from the current choice. */
function refresh({ step = false } = {}) {
  writeLink(step);
  const found = {};
  for (const name of NAMES) {
    fill(`choose-${name}`, optionsOf(name, found), state.choice[name]);
    found[name] = state.choice[name];
  }
  showAnswer();
  byId("baselines").checked = state.view.baselines !== "no";
  if (byId("filter").value !== (state.view.filter ?? "")) byId("filter").value = state.view.filter ?? "";
  showPictures(showTable());
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
  const before = NAMES.slice(0, NAMES.indexOf(name)).map((one) => [one, state.choice[one]]);
  state.choice = resolved({ ...Object.fromEntries(before), [name]: value }).found;
  delete state.view.sort;
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

/** List the runs of the page. */
function showRuns() {
  const runs = [...DATA.runs].sort((a, b) => Number(a.published) - Number(b.published) || (a.id < b.id ? 1 : -1));
  const rows = runs.map((run) => {
    const cells = [run.device, run.suite, run.started, run.flaws.join("; ") || "none"];
    return html("tr", {}, html("th", { scope: "row" }, run.id), cells.map((text) => html("td", { class: "words" }, text)));
  });
  put("runs-scroll", tableOf("", ["Run", "Device", "Suite", "Started", "Flaws"], rows));
}

/** Register all event listeners. */
function listen() {
  const on = (id, event, action) => byId(id).addEventListener(event, action);
  for (const name of NAMES) on(`choose-${name}`, "change", (event) => choose(name, event.target.value));
  on("choice", "submit", (event) => event.preventDefault());
  on("filter", "input", (event) => {
    state.view.filter = event.target.value;
    refresh();
  });
  on("baselines", "change", (event) => {
    state.view.baselines = event.target.checked ? "" : "no";
    refresh();
  });
  for (const name of ["a", "b", "quantity"]) {
    on(`compare-${name}`, "change", (event) => {
      state.view[name] = event.target.value;
      writeLink();
      showComparison();
      byId(`compare-${name}`).focus();
    });
  }
  on("compare-swap", "click", () => {
    [state.view.a, state.view.b] = [state.view.b, state.view.a];
    writeLink();
    showComparison();
  });
  on("detail", "close", () => {
    const number = variantNumber(state.view.variant);
    delete state.view.variant;
    writeLink();
    document.querySelector(`#table [data-variant="${number}"]`)?.focus();
  });
  on("detail", "click", (event) => {
    if (event.target === byId("detail")) byId("detail").close();
  });
  // The address holds the choice, so that links inside of the page cannot be fragments.
  on("skip", "click", (event) => {
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

showRuns();
listen();
follow();
