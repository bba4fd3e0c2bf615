// What the page holds: the JSON that stands in it, read once, and the ways to find something in it.

/**
 * @typedef {object} Figure one variant's figure, in the unit of its quantity
 * @property {number} v number of the variant
 * @property {string} label
 * @property {boolean} baseline
 * @property {number|null} m the figure
 * @property {number|null} l lower end of its 95 % interval
 * @property {number|null} h upper end
 * @property {string|null} k "exact" or "at least", where it is no plain number
 * @property {boolean} counts whether it is a number of things
 * @property {number|null} f floor
 * @property {number|null} s speed multiplier (sl, sh its interval)
 * @property {number|null} t time multiplier (tl, th its interval)
 * @property {string} reason why there is no figure
 * @property {string} remark what else must be said of it
 */

const DATA = JSON.parse(document.getElementById("data").textContent);
const PHASES = ["sample", "forward", "update", "step", "quality"];
const LATENCY = "latency_ns";
const RATE = "n_eff_per_ms";
const PEAK = "peak_bytes";

/** Device -> its runs' numbers, the newest first; what others published comes last. */
const DEVICES = new Map();
DATA.runs.forEach((run, number) => {
  run.device = deviceOf(run);
  if (!DEVICES.has(run.device)) DEVICES.set(run.device, []);
  DEVICES.get(run.device).push(number);
});
for (const numbers of DEVICES.values()) {
  numbers.sort((a, b) => (DATA.runs[a].id < DATA.runs[b].id ? 1 : -1));
}

/** For each run: "quantity case" -> block. */
const BLOCKS = DATA.runs.map((run) => new Map(run.blocks.map((block) => [`${block[0]} ${block[1]}`, block])));
/** For each run: the cases that it has figures of. */
const CASES = DATA.runs.map((run) => new Set(run.blocks.map((block) => block[1])));

/** The name of a run's device. */
function deviceOf(run) {
  const name = String(DATA.environments[run.environment].device_name);
  return run.published ? `${name}, published by others` : name;
}

/** The label of a variant on an operator, as in the tables. */
function labelOf(variant, operator) {
  const one = DATA.variants[variant];
  return `${one.scheme}${one.baseline ? "" : operator}${one.options}`;
}

/** The figures of a quantity on a case in a run: an empty list where the run has none. @returns {Figure[]} */
function figuresOf(run, quantity, number) {
  const block = BLOCKS[run]?.get(`${quantity} ${number}`);
  if (!block) return [];
  const [, , roster, columns] = block;
  const operator = DATA.cases[number].operator;
  const counts = isCount(DATA.quantities[quantity]);
  return DATA.rosters[roster].map((variant, place) => {
    const figure = { v: variant, label: labelOf(variant, operator), baseline: DATA.variants[variant].baseline };
    for (const name of ["m", "l", "h", "k", "f", "s", "sl", "sh", "t", "tl", "th", "w", "b", "e", "el", "eh", "p"]) {
      figure[name] = columns[name]?.[place] ?? null;
    }
    figure.counts = counts;
    figure.reason = textOf(columns.r?.[place]);
    figure.remark = textOf(columns.n?.[place]);
    return figure;
  });
}

/** Whether a quantity is a number of things, and no rate. */
function isCount(quantity) {
  return !quantity.unit && quantity.metric !== RATE;
}

/** A text by its number, empty without one. */
function textOf(number) {
  return number === null || number === undefined ? "" : DATA.texts[number];
}

/** The numbers of the quantities that a run has of a case. */
function quantitiesOf(run, number) {
  return DATA.quantities.map((_, quantity) => quantity).filter((one) => BLOCKS[run].has(`${one} ${number}`));
}

/** The quantity of a phase and metric, by the method that is wanted where there is one. */
function quantityNumber(run, number, phase, metric, method) {
  const found = quantitiesOf(run, number).filter((one) => {
    const quantity = DATA.quantities[one];
    return quantity.phase === phase && quantity.metric === metric;
  });
  return found.find((one) => DATA.quantities[one].method === method) ?? found[0];
}

/** Whether more of a metric is better (1), less is (-1), or neither (0). */
function betterOf(metric) {
  if (metric === RATE || metric === "effective_members" || metric === "largest_members" || metric === "cosine") return 1;
  if (/_(ns|bytes|j)$/.test(metric) || metric === "launches" || metric === "kappa") return -1;
  return 0;
}
