// What a step is worth against the memory it takes: the front is what nothing else beats in both.

/** Draw the plane of the chosen case. */
function showPareto(found) {
  const { at, rows } = found;
  const points = worthPoints(at, new Set(rows.map((row) => row.v)));
  if (points.length < 2) return show("pareto", "", null);
  one("pareto").hidden = false;
  const width = room("pareto");
  const height = Math.min(Math.max(320, width * 0.62), 440);
  const front = frontOf(points);
  const right = width - Math.min(Math.max(...front.map((point) => wide(point.label))) + 12, width * 0.42);
  const x = scale(points.map((point) => point.x), 46, right, true);
  const y = scale(points.map((point) => point.y), height - 38, 12, true);
  const grid = [
    legible(x.ticks, x.at, tick).map((value) => [
      drawn("line", { class: "gridline", x1: x.at(value), x2: x.at(value), y1: 12, y2: height - 38 }),
      drawn("text", { class: "soft", x: x.at(value), y: height - 22, "text-anchor": "middle" }, tick(value)),
    ]),
    y.ticks.map((value) => [
      drawn("line", { class: "gridline", x1: 46, x2: right, y1: y.at(value), y2: y.at(value) }),
      drawn("text", { class: "soft", x: 40, y: y.at(value) + 4, "text-anchor": "end" }, tick(value)),
    ]),
    drawn("text", { class: "soft", x: (46 + right) / 2, y: height - 4, "text-anchor": "middle" }, "peak memory (MB), less is better"),
  ];
  const corners = front.map((point, place) => `${place ? `H${x.at(point.x)}V` : `M${x.at(point.x)},`}${y.at(point.y)}`);
  const dots = points.map((point) =>
    drawn(
      "g",
      { class: "chosen", onclick: () => openDetail(point.v) },
      drawn("title", {}, `${point.label}: ${figureText(point.rate)} effective members per ms, peak ${figureText(point.peak)} MB`),
      drawn("circle", { class: front.includes(point) ? "dot ahead" : "dot", cx: x.at(point.x), cy: y.at(point.y), r: front.includes(point) ? 5.5 : 4 }),
    ),
  );
  const ordered = [...front].sort((a, b) => y.at(a.y) - y.at(b.y));
  const places = spaced(ordered.map((point) => y.at(point.y)), 16, 18, height - 44);
  const labels = ordered.map((point, place) =>
    drawn(
      "g",
      { class: "chosen", onclick: () => openDetail(point.v) },
      drawn("path", { class: "leader", d: `M${x.at(point.x) + 7},${y.at(point.y)}L${right + 4},${places[place]}` }),
      drawn("text", { x: right + 7, y: places[place] + 4 }, fitted(point.label, width - right - 8)),
    ),
  );
  const description = `Effective members per ms against peak memory of ${points.length} variants. On the front: ${front.map((point) => point.label).join(", ")}.`;
  return show(
    "pareto",
    "Effective members per ms of a step, against peak memory",
    picture(width, height, description, grid, drawn("path", { class: "front", d: corners.join("") }), dots, labels),
    "The named ones are the front: nothing else here gives more for less memory. Both axes are logarithmic.",
  );
}

/** The variants that have a rate and a peak, of those that the table shows. */
function worthPoints(at, shown) {
  const rates = other(at, "step", RATE);
  const most = new Map(peaks({ ...at, phase: "step" }).map((figure) => [figure.v, figure]));
  return rates
    .filter((figure) => shown.has(figure.v) && figure.m > 0 && most.get(figure.v)?.m > 0)
    .map((figure) => ({ v: figure.v, label: figure.label, x: most.get(figure.v).m, y: figure.m, rate: figure, peak: most.get(figure.v) }));
}

/** The points that no other beats, from the least memory on. */
function frontOf(points) {
  const found = [];
  for (const point of [...points].sort((a, b) => a.x - b.x || b.y - a.y)) {
    if (!found.length || point.y > found[found.length - 1].y) found.push(point);
  }
  return found;
}
