// What is chosen: device, operator, shape, type, population, run, phase and metric, and the link that says so.

/**
 * @typedef {object} Choice what the page shows; each is one of what the ones before it leave
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

/** What is chosen, and how it is looked at. */
const state = { choice: {}, view: {} };

/**
 * A choice with everything that it leaves open, or that there is not, filled in.
 * @param {object} wanted what is asked for, by name
 * @param {object} start what to take where nothing is, if there is such
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

/** Where a reader begins: the widest layer that a whole run of the newest device ranks, a linear one if there is any. */
function first() {
  const runs = DATA.runs.filter((run) => !run.published);
  const device = runs.reduce((newest, run) => (newest === null || run.id > newest.id ? run : newest), null)?.device;
  const ranked = runs
    .filter((run) => run.device === device)
    .flatMap((run) => run.blocks.map((block) => ({ run, block })))
    .filter(({ block }) => DATA.quantities[block[0]].metric === RATE);
  if (!ranked.length) return {};
  ranked.sort((a, b) => inTurn(worthOf(a), worthOf(b)));
  const { run, block } = ranked[0];
  const { operator, shape, dtype, members } = DATA.cases[block[1]];
  return { device, operator, shape, dtype, members: String(members), run: run.id, phase: "step" };
}

/** How good a ranking is to begin with, the weightiest first; of equals the newest. */
function worthOf({ run, block }) {
  const one = DATA.cases[block[1]];
  const rates = (block[3].m ?? []).filter((rate) => rate !== null).length;
  return [!run.flaws.length, !run.thinned, rates > 2, one.operator === "Linear", one.width ?? 0, one.members, run.id];
}

/** Compare two lists, the first difference counts, the larger comes first. */
function inTurn(a, b) {
  const place = a.findIndex((value, number) => value !== b[number]);
  return place < 0 ? 0 : a[place] > b[place] ? -1 : 1;
}

/** The option to take where none was asked for. */
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

/** The run to show: one that has the phase, whole before flawed, the one that is shown before others, then the newest. */
function preferredRun(options, found) {
  const number = caseNumber(found);
  const phase = found.phase ?? state.choice.phase;
  const worth = (id) => {
    const run = runNumber(id, found.device);
    const held = quantitiesOf(run, number).some((quantity) => DATA.quantities[quantity].phase === phase);
    return [held, !DATA.runs[run].flaws.length, id === state.choice.run];
  };
  return [...options].sort((a, b) => inTurn(worth(a), worth(b)))[0];
}

/** What may be chosen of a name, given the ones before it. @returns {{value: string, text: string}[]} */
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

/** An option that is called as it is. */
function plainOption(value) {
  return { value, text: value };
}

/** A run as an option: when, which suite, and what is wrong with it. */
function runOption(run) {
  const flaws = run.flaws.length ? `, ${run.flaws.join(" and ")}` : "";
  const text = run.published ? run.suite : `${run.started.slice(0, 16).replace("T", " ")} ${run.suite}`;
  return { value: run.id, text: `${text}${run.thinned ? ", thinned" : ""}${flaws}` };
}

/** Numbers by size, words by the alphabet. */
function inOrder(a, b) {
  return a.localeCompare(b, "en", { numeric: true });
}

/** What was measured here before what others published. */
function byPublished(a, b) {
  const published = (device) => Number(DATA.runs[DEVICES.get(device)[0]].published);
  return published(a) - published(b) || (DATA.runs[DEVICES.get(a)[0]].id < DATA.runs[DEVICES.get(b)[0]].id ? 1 : -1);
}

/** The number of the chosen case. */
function caseNumber(choice) {
  return DATA.cases.findIndex(
    (one) =>
      one.operator === choice.operator &&
      one.shape === choice.shape &&
      one.dtype === choice.dtype &&
      String(one.members) === choice.members,
  );
}

/** The number of a run by its id; of several of one id that of the device. */
function runNumber(id, device) {
  const numbers = device === undefined ? DATA.runs.map((_, number) => number) : (DEVICES.get(device) ?? []);
  return numbers.find((number) => DATA.runs[number].id === id) ?? -1;
}

/** What is chosen, as numbers. */
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

/** Read the link: what it chooses, and what is wrong with it. */
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

/** Write the link, without a step in the browser's history where only the view changes. */
function writeLink(step = false) {
  const link = new URLSearchParams(Object.entries(state.choice));
  for (const name of VIEWS) if (state.view[name]) link.set(name, state.view[name]);
  const address = `#${link}`;
  if (address === location.hash) return;
  history[step ? "pushState" : "replaceState"](null, "", address);
}
