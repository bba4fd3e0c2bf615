// The chosen metric in the order of the table: bars from 0, or dots on a logarithmic axis, where the length of a bar
// would mean nothing; the interval as a whisker, the floor as a tick.

const ROW = 24;
const LARGE = 20;

/** Draw the bars of what the table shows. */
function showBars(found) {
  const { main, quantity, rows, at } = found;
  const told = rows.filter((row) => rank(row.cells.main) !== null && row.cells.main.k !== "exact" && row.cells.main.m >= 0);
  if (!told.length) return show("bars", "", null);
  one("bars").hidden = false;
  const ends = told.flatMap((row) => [row.cells.main.m, row.cells.main.f ?? row.cells.main.m]);
  const positive = ends.filter((end) => end > 0);
  const logarithmic = positive.length > 1 && Math.max(...positive) / Math.min(...positive) > LARGE;
  const width = room("bars");
  const stacked = width < 480;
  const left = stacked ? 0 : Math.min(Math.max(...told.map((row) => wide(row.label))) + 12, width * 0.46);
  const right = width - 64;
  const axis = scale(ends, left, right, logarithmic);
  const height = stacked ? 2 * ROW - 8 : ROW;
  const top = 22;
  const bottom = top + told.length * height + 4;
  const best = told.find((row) => !row.baseline);
  const lines = legible(axis.ticks, axis.at, tick).map((value) => [
    drawn("line", { class: "gridline", x1: axis.at(value), x2: axis.at(value), y1: top - 4, y2: bottom }),
    drawn("text", { class: "soft", x: axis.at(value), y: 11, "text-anchor": "middle" }, tick(value)),
  ]);
  const bars = told.map((row, place) => bar(row, top + place * height, { axis, left, stacked, logarithmic, width, best: row === best && main.better !== 0 }));
  const name = `${quantity.title}${quantity.unit ? ` (${quantity.unit})` : ""}`;
  const first = best ?? told[0];
  const description = `${name} as ${logarithmic ? "dots" : "bars"} for ${told.length} variants, in the order of the table below. First: ${first.label}, ${figureText(first.cells.main)}${unitText(main.unit)}.`;
  const hidden = rows.length - told.length;
  const floors = told.some((row) => row.cells.main.f !== null);
  const notes = [
    logarithmic ? "Logarithmic axis." : "",
    told.some((row) => isSure(row.cells.main)) ? "The whisker is the 95 % interval, where one is known." : "",
    floors ? "The orange tick is the floor, the least time of the variant's work on this device." : "",
    hidden ? `${hidden} without a number, or exact, stand in the table alone.` : "",
  ];
  const caption = `${name}, ${quantity.phase}; ${DATA.cases[at.case].label}`;
  return show("bars", caption, picture(width, bottom + 4, description, lines, bars), notes.filter(Boolean).join(" "));
}

/** Whether both ends of a figure's interval are known, and there is something between them. */
function isSure({ l, h }) {
  return l !== null && h !== null && l < h;
}

/** A variant's bar, or its dot. */
function bar(row, y, { axis, left, stacked, logarithmic, width, best }) {
  const figure = row.cells.main;
  const { m, l, h, f } = figure;
  const middle = y + (stacked ? 28 : ROW / 2);
  const end = m > 0 || !logarithmic ? axis.at(m) : left;
  const kind = row.baseline ? "baseline" : best ? "best" : "";
  const clip = (value) => (value > 0 || !logarithmic ? Math.min(Math.max(axis.at(value), left), width - 4) : left);
  const parts = [
    drawn("title", {}, `${row.label}: ${figureText(figure)} (${between(m, l, h) || "no interval"})`),
    drawn("rect", { x: 0, y, width, height: stacked ? 2 * ROW - 8 : ROW, fill: "transparent" }),
    drawn("text", { x: stacked ? 0 : left - 8, y: stacked ? y + 13 : middle + 4, "text-anchor": stacked ? "start" : "end" }, fitted(row.label, stacked ? width : left - 10)),
  ];
  if (logarithmic && m > 0) {
    parts.push(
      drawn("line", { class: "guide", x1: left, x2: end, y1: middle, y2: middle }),
      drawn("circle", { class: "bar", cx: end, cy: middle, r: 4.5 }),
    );
  }
  if (!logarithmic) parts.push(drawn("rect", { class: "bar", x: axis.at(0), y: middle - 6, width: Math.max(end - axis.at(0), 1), height: 12, rx: 2 }));
  let beside = end;
  if (isSure(figure)) {
    const [low, high] = [clip(l), clip(h)];
    parts.push(
      drawn("line", { class: "whisker", x1: low, x2: high, y1: middle, y2: middle }),
      drawn("line", { class: "whisker", x1: low, x2: low, y1: middle - 3, y2: middle + 3 }),
      drawn("line", { class: "whisker", x1: high, x2: high, y1: middle - 3, y2: middle + 3 }),
    );
    beside = Math.max(beside, high);
  }
  if (f !== null && f > 0) {
    const place = clip(f);
    parts.push(drawn("line", { class: "floor", x1: place, x2: place, y1: middle - 8, y2: middle + 8 }));
    beside = Math.max(beside, place);
  }
  parts.push(drawn("text", { class: "soft", x: Math.min(beside + 6, width - 44), y: middle + 4 }, figureText(figure)));
  return drawn("g", { class: `chosen ${kind}`, onclick: () => openDetail(row.v) }, parts);
}
