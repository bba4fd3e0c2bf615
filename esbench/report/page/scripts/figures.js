// What is chosen, as rows: a variant each, with its figure first and what belongs beside it.

/**
 * @typedef {object} Column
 * @property {string} key
 * @property {string} title
 * @property {string} unit
 * @property {number} better 1 where more is better, -1 where less is
 * @property {string} kind "figure" or "times"
 */

/** The columns and the rows of what is chosen. @returns {{columns: Column[], rows: object[], main: Column}} */
function table() {
  const at = chosen();
  const quantity = DATA.quantities[at.quantity];
  const ranks = at.metric === RATE || at.metric === LATENCY;
  const rows = new Map();
  const columns = [];

  /** Add a column: what it shows of each variant's figure. */
  function add(column, figures, cell) {
    const told = figures.filter((figure) => cell(figure) !== null);
    if (!told.some((figure) => cell(figure).m !== null || cell(figure).k)) return;
    columns.push({ kind: "figure", better: 0, unit: "", ...column });
    for (const figure of told) rowOf(figure).cells[column.key] = cell(figure);
  }
  function rowOf(figure) {
    if (!rows.has(figure.v)) {
      rows.set(figure.v, { v: figure.v, label: figure.label, baseline: figure.baseline, cells: {}, reason: "", remark: "" });
    }
    return rows.get(figure.v);
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
    add({ key: "speed", title: "vs. naive", better: 1, kind: "times" }, latencies, (one) => ratio(one.s, one.sl, one.sh));
    add({ key: "multiple", title: "vs. base", better: -1, kind: "times" }, latencies, (one) => ratio(one.t, one.tl, one.th));
    add({ key: "floor", title: "Floor", unit: "%", better: 1 }, latencies, floorShare);
    const members = DATA.cases[at.case].members;
    add({ key: "kept", title: "n_eff / n", unit: "%", better: 1 }, rates, (one) => kept(one, members));
    add({ key: "kappa", title: "kappa", better: -1 }, rates, (one) => plain(one.p));
    add({ key: "peak", title: "Peak", unit: "MB", better: -1 }, peaks(at), (one) => one);
  } else {
    add({ key: "multiple", title: "vs. base", better: -1, kind: "times" }, here, (one) => ratio(one.t, one.tl, one.th));
  }
  return { columns, rows: [...rows.values()], main, quantity, at };
}

/** What a quantity is called where there is little room. */
function shortTitle(quantity) {
  if (quantity.metric === RATE) return "n_eff / ms";
  return quantity.title.split(/ above| \(|,/)[0];
}

/** The figures of another metric of the same run and case, by the same method where it has one. */
function other(at, phase, metric) {
  const quantity = quantityNumber(at.run, at.case, phase, metric, at.method);
  return quantity === undefined ? [] : figuresOf(at.run, quantity, at.case);
}

/** The peak of the phase; of a step the most of any phase, since one step has all of them. */
function peaks(at) {
  const most = new Map();
  for (const phase of at.phase === "step" ? PHASES : [at.phase]) {
    for (const figure of other(at, phase, PEAK)) {
      if (figure.m !== null && figure.m > (most.get(figure.v)?.m ?? -1)) most.set(figure.v, figure);
    }
  }
  return [...most.values()];
}

/** A number alone as a cell. */
function plain(value) {
  return value === null ? null : { m: value, l: null, h: null, k: null };
}

/** A multiplier as a cell. */
function ratio(value, low, high) {
  return value === null ? null : { m: value, l: low, h: high, k: null };
}

/** Which part of a figure's time its floor is. */
function floorShare(figure) {
  return figure.f === null || !figure.m ? null : plain((100 * figure.f) / figure.m);
}

/** Which part of its members a variant keeps; more than all is not claimed. */
function kept(figure, members) {
  if (figure.k === "exact") return { m: null, l: null, h: null, k: "exact" };
  if (figure.e === null) return null;
  const share = (end) => (end === null ? null : (100 * end) / members);
  const low = share(figure.el);
  const cell = { m: share(figure.e), l: low, h: share(figure.eh), k: figure.k };
  if (low !== null && low <= 100 && cell.m > 100) cell.m = 100;
  return cell;
}

/** The rows that a filter leaves: every word of it must be in the label. */
function filtered(rows) {
  const words = (state.view.filter ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const baselines = state.view.baselines !== "no";
  return rows.filter(
    (row) => (baselines || !row.baseline) && words.every((word) => row.label.toLowerCase().includes(word)),
  );
}

/** Rows in the order that is asked for: what has no number comes last. */
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
    if (x === Infinity && y === Infinity) return (a.cells.time?.m ?? 0) - (b.cells.time?.m ?? 0);
    return x === y ? inOrder(a.label, b.label) : sign * (x < y ? -1 : 1);
  });
  return { rows: found, key: column.key, falling };
}

/** What a cell is sorted by: an exact estimate is above any number. */
function rank(cell) {
  if (!cell) return null;
  return cell.k === "exact" ? Infinity : cell.m;
}
