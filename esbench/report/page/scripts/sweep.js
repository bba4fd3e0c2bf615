// The chosen metric against the population, where a run has at least three populations of the shape.

const LINES = 8;
const FEWEST = 3;

/** Draw the lines of the first variants of the table. */
function showSweep(found) {
  const { at, main, quantity, rows } = found;
  const swept = sweepOf(at);
  if (!swept) return show("sweep", "", null);
  const told = rows.filter((row) => swept.lines.has(row.v) && swept.lines.get(row.v).length > 1);
  const picked = told.slice(0, LINES);
  if (!picked.length) return show("sweep", "", null);
  one("sweep").hidden = false;
  const width = room("sweep");
  const height = Math.min(Math.max(320, width * 0.62), 420);
  const right = width - Math.min(Math.max(...picked.map((row) => wide(row.label))) + 24, width * 0.42);
  const points = picked.flatMap((row) => swept.lines.get(row.v));
  const x = scale(points.map((point) => point.x), 56, right, true);
  const y = scale(points.map((point) => point.y), height - 38, 12, true);
  const grid = [
    swept.members.map((value) => drawn("line", { class: "gridline", x1: x.at(value), x2: x.at(value), y1: 12, y2: height - 38 })),
    legible(swept.members, x.at, counted).map((value) =>
      drawn("text", { class: "soft", x: x.at(value), y: height - 22, "text-anchor": "middle" }, counted(value)),
    ),
    y.ticks.map((value) => [
      drawn("line", { class: "gridline", x1: 56, x2: right, y1: y.at(value), y2: y.at(value) }),
      drawn("text", { class: "soft", x: 50, y: y.at(value) + 4, "text-anchor": "end" }, tick(value)),
    ]),
    drawn("text", { class: "soft", x: (56 + right) / 2, y: height - 4, "text-anchor": "middle" }, "members"),
  ];
  const last = picked.map((row, place) => ({ row, place, end: swept.lines.get(row.v).at(-1) }));
  last.sort((a, b) => y.at(a.end.y) - y.at(b.end.y));
  const places = spaced(last.map((one) => y.at(one.end.y)), 16, 18, height - 44);
  const lines = last.map(({ row, place, end }, order) => {
    const color = `var(--s${(place % LINES) + 1})`;
    const track = swept.lines.get(row.v);
    return drawn(
      "g",
      { class: "chosen", onclick: () => openDetail(row.v) },
      drawn("title", {}, row.label),
      drawn("path", { d: track.map((point, step) => `${step ? "L" : "M"}${x.at(point.x)},${y.at(point.y)}`).join(""), fill: "none", stroke: color, "stroke-width": 2 }),
      track.map((point) => markOf(place, x.at(point.x), y.at(point.y), color)),
      drawn("path", { class: "leader", d: `M${x.at(end.x) + 7},${y.at(end.y)}L${right + 4},${places[order]}` }),
      markOf(place, right + 10, places[order], color),
      drawn("text", { x: right + 19, y: places[order] + 4 }, fitted(row.label, width - right - 20)),
    );
  });
  const name = `${quantity.title}${quantity.unit ? ` (${quantity.unit})` : ""}`;
  const from = swept.run === at.run ? "" : ` Of run ${DATA.runs[swept.run].id}: the chosen one has too few populations.`;
  const more = told.length > LINES ? ` The first ${LINES} of ${told.length} in the table: filter or sort it to see others.` : "";
  const description = `${name} against the population, for ${picked.map((row) => row.label).join(", ")}.`;
  return show(
    "sweep",
    `${shortTitle(quantity)}${main.unit ? ` (${main.unit})` : ""}, ${quantity.phase}, against the population`,
    picture(width, height, description, grid, lines),
    `Both axes are logarithmic.${more}${from}`,
  );
}

/** A mark of one of four shapes, so that lines are told apart without their colour. */
function markOf(place, x, y, color) {
  const shapes = [
    `M${x - 4},${y}a4,4 0 1,0 8,0a4,4 0 1,0 -8,0`,
    `M${x - 4},${y - 4}h8v8h-8z`,
    `M${x},${y - 5}l5,9h-10z`,
    `M${x},${y - 5}l5,5l-5,5l-5,-5z`,
  ];
  return drawn("path", { d: shapes[place % shapes.length], fill: color });
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
        if (figure.m === null || figure.m <= 0) continue;
        if (!lines.has(figure.v)) lines.set(figure.v, []);
        lines.get(figure.v).push({ x: one.members, y: figure.m });
        members.add(one.members);
      }
    }
    if (members.size >= FEWEST) return { run, lines, members: [...members] };
  }
  return null;
}
