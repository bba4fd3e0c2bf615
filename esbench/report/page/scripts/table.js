// The table: sorted by any column, filtered by words of the label, a reason where there is no figure.

/** Write the table of what is chosen; return what it shows, for the pictures. */
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
    "Under a figure stands its 95 % interval. A variant's name opens what is known of it; a heading sorts.",
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

/** Sort by a column: the better end first, and the other way round the second time. */
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
    html("button", { type: "button", class: "link", "data-variant": row.v, onclick: () => openDetail(row.v) }, breakable(row.label)),
  );
  const told = columns.filter((column) => row.cells[column.key] && rank(row.cells[column.key]) !== null);
  if (!told.length) {
    return html("tr", {}, name, html("td", { class: "reason", colspan: columns.length }, row.reason || "not in this run"));
  }
  const cells = columns.map((column) => cellOf(row, column));
  return html("tr", { class: isBest ? "best" : null }, name, cells);
}

/** A cell: the figure, its interval under it, or in the first column the reason why there is none. */
function cellOf(row, column) {
  const cell = row.cells[column.key];
  if (!cell || rank(cell) === null) {
    const reason = column.key === "main" ? (cell?.reason || row.reason) : "";
    return html("td", { class: reason ? "reason" : null }, reason || "–");
  }
  const number = column.kind === "times" ? times(cell.m, cell.l, cell.h) : figureText(cell);
  const range = cell.k === "exact" ? "" : between(cell.m, cell.l, cell.h);
  const remark = column.key === "main" && row.remark ? html("small", {}, row.remark) : "";
  return html("td", {}, number, range && cell.k !== "at least" ? html("small", {}, range) : "", remark);
}
