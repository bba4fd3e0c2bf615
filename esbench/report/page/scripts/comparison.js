// Two runs side by side: what both have, by how much it differs, and what only one of them has.

const SHOWN = 200;
const SAME_DEVICE = ["device_name", "cpu", "threads", "device_memory_bytes"];
const NO_RUN = "";

/** Fill what the comparison is chosen by. */
function showComparisonChoice() {
  const options = DATA.runs.map((run) => {
    const option = runOption(run);
    return { value: run.id, text: `${run.device}: ${option.text}` };
  });
  options.sort((a, b) => (a.value < b.value ? 1 : -1));
  for (const side of ["a", "b"]) {
    fill(one(`compare-${side}`), [{ value: NO_RUN, text: "Choose a run" }, ...options], state.view[side] ?? NO_RUN);
  }
}

/** Fill a select. */
function fill(select, options, value) {
  put(select, options.map((option) => html("option", { value: option.value }, cut(option.text, 90))));
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
    put("compare-status", `${words}Choose two runs, for instance of before and after a change.`);
    fill(one("compare-quantity"), [{ value: "", text: "Choose runs first" }], "");
    return;
  }
  const common = commonQuantities(a, b);
  if (!common.length) {
    fill(one("compare-quantity"), [{ value: "", text: "Nothing in common" }], "");
    put("compare-status", "These two runs have no figure of the same case, phase, metric and method.");
    return;
  }
  const options = common.map((quantity) => {
    const { title, phase, method } = DATA.quantities[quantity];
    return { value: quantityKey(quantity), text: `${phase}: ${title} (${method})` };
  });
  const wanted = state.view.quantity ?? `${state.choice.phase}/${state.choice.metric}`;
  const value = options.some((option) => option.value === wanted) ? wanted : options[0].value;
  fill(one("compare-quantity"), options, value);
  const missed = state.view.quantity !== undefined && value !== wanted ? [`Not in both runs: ${wanted}. What is shown is another quantity.`] : [];
  writeComparison(a, b, common[options.findIndex((option) => option.value === value)], missed);
}

/** The name by which a link holds a quantity. */
function quantityKey(quantity) {
  const { phase, metric, method } = DATA.quantities[quantity];
  return `${phase}/${metric}/${method}`;
}

/** The quantities that both runs have of the same case, times first. */
function commonQuantities(a, b) {
  const found = new Set(DATA.runs[a].blocks.filter((block) => BLOCKS[b].has(`${block[0]} ${block[1]}`)).map((block) => block[0]));
  const place = (quantity) => ["step", "forward", "update", "sample", "quality"].indexOf(DATA.quantities[quantity].phase);
  const isTime = (quantity) => Number(DATA.quantities[quantity].metric !== LATENCY);
  return [...found].sort((x, y) => isTime(x) - isTime(y) || place(x) - place(y) || x - y);
}

/** Write the rows of a quantity, and what was asked for instead. */
function writeComparison(a, b, quantity, missed) {
  const { both, only, reasons } = matched(a, b, quantity);
  both.sort((x, y) => (y.ratio ?? -1) - (x.ratio ?? -1));
  const { title, unit, phase, method } = DATA.quantities[quantity];
  const changed = both.filter((row) => row.low !== null && (row.low > 1 || row.high < 1)).length;
  const told = [...missed, ...warnings(a, b)];
  const found = told.length;
  const words = [
    ...told,
    `${both.length} rows are in both${both.length > SHOWN ? `, the first ${SHOWN} are shown` : ""}; `
      + `for ${changed} of them the interval of B / A leaves out 1. ${only[0]} only in A, ${only[1]} only in B.`,
    ...reasons,
    "An interval of B / A is end divided by end of the two 95 % intervals, so it holds at least 90 %. It knows the spread "
      + "inside each process, not that between processes: this is a look, and no gate.",
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
      html("td", {}, times(row.ratio, row.low, row.high)),
      html("td", {}, row.low === null ? ABSENT : between(row.ratio, row.low, row.high)),
    ),
  );
  const head = html("tr", {}, heads.map((text, place) => html("th", { scope: "col", class: ["words", "words case"][place] ?? null }, text)));
  const caption = `${title}, ${phase}, method ${method}; A is ${DATA.runs[a].id}, B is ${DATA.runs[b].id}`;
  put("compare-scroll", html("table", {}, html("caption", {}, caption), html("thead", {}, head), html("tbody", {}, rows)));
}

/** The rows of both runs, how many only one has, and the first reasons why. */
function matched(a, b, quantity) {
  const both = [];
  const only = [0, 0];
  const reasons = new Set();
  const numbers = new Set([...CASES[a], ...CASES[b]]);
  for (const number of numbers) {
    const [here, there] = [a, b].map((run) => new Map(figuresOf(run, quantity, number).map((figure) => [figure.v, figure])));
    for (const variant of new Set([...here.keys(), ...there.keys()])) {
      const [x, y] = [here.get(variant), there.get(variant)];
      const [known, also] = [x && rank(x) !== null, y && rank(y) !== null];
      if (known && also) both.push({ a: x, b: y, label: DATA.cases[number].label, ...divided(x, y) });
      else if (known || also) {
        only[known ? 0 : 1] += 1;
        const reason = (known ? y : x)?.reason;
        if (reason && reasons.size < 3) reasons.add(`${(x ?? y).label}, ${DATA.cases[number].label}: ${reason}`);
      }
    }
  }
  return { both, only, reasons: [...reasons] };
}

/** B / A with its interval, end by end. */
function divided(a, b) {
  const sure = [a.l, a.h, b.l, b.h].every((end) => end !== null) && a.l > 0 && a.h > 0;
  const value = a.m > 0 && b.m !== null ? b.m / a.m : null;
  return { ratio: value, low: sure && value !== null ? b.l / a.h : null, high: sure && value !== null ? b.h / a.l : null };
}

/** What tells the runs apart before any row is looked at. */
function warnings(a, b) {
  const [x, y] = [a, b].map((run) => DATA.environments[DATA.runs[run].environment]);
  const found = [];
  for (const [side, run] of [["A", a], ["B", b]]) {
    if (DATA.runs[run].flaws.length) found.push(`Run ${side} ${DATA.runs[run].flaws.join(" and ")}.`);
  }
  const apart = SAME_DEVICE.filter((name) => x[name] !== undefined && y[name] !== undefined && x[name] !== y[name]);
  if (apart.length) {
    found.push(`Different devices (${apart.map((name) => `${name}: ${x[name]} in A, ${y[name]} in B`).join("; ")}): a ratio of their times says nothing of the variants.`);
  }
  const others = [...new Set([...Object.keys(x), ...Object.keys(y)])].filter((name) => !SAME_DEVICE.includes(name) && x[name] !== y[name]);
  if (others.length) {
    found.push(`Not the same in both: ${others.map((name) => differing(name, x[name], y[name])).join("; ")}.`);
  }
  return found;
}

/** Two facts that differ, short where they still differ then. */
function differing(name, a, b) {
  const [inA, inB] = brief(a) === brief(b) ? [a, b] : [brief(a), brief(b)];
  return `${name} ${inA} in A, ${inB} in B`;
}

/** A fact about a machine, short. */
function brief(value) {
  return value === undefined ? "unknown" : cut(String(value), 24);
}
