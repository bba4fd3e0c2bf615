// What is known of one variant: its formula, what it costs in closed form, what was measured, how it is used.

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

/** Show the variant of the link, or none. */
function showDetail() {
  const dialog = one("detail");
  const number = DATA.variants.findIndex((_, place) => variantKey(place) === state.view.variant);
  if (state.view.variant === undefined || number < 0) {
    if (dialog.open) dialog.close();
    return;
  }
  put(dialog, detailHead(number), html("div", { class: "body" }, detailBody(number)));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
}

/** The title, and what closes the dialog. */
function detailHead(number) {
  return html(
    "header",
    {},
    html("h2", { id: "detail-title" }, breakable(labelOf(number, state.choice.operator))),
    html("button", { type: "button", id: "detail-close", onclick: () => one("detail").close() }, "Close"),
  );
}

/** Everything below the title. */
function detailBody(number) {
  const variant = DATA.variants[number];
  const about = DATA.schemes[variant.scheme];
  const at = chosen();
  const parts = [];
  if (DATA.runs[at.run].changed.includes(number)) {
    parts.push(html("p", { class: "warning" }, "Its source has changed since this run was measured: the text is of today's source."));
  }
  if (about) {
    parts.push(html("p", { class: "formula" }, about.summary || "Its source says nothing of it."));
    parts.push(...about.text.map((text) => html("p", {}, text)));
  } else {
    parts.push(html("p", { class: "warning" }, `No installed package registers ${variant.scheme}: only what was measured of it is known here.`));
  }
  if (variant.source) parts.push(html("p", { class: "quiet" }, `Source: ${variant.source}`));
  if (about) parts.push(html("p", { class: "quiet" }, `Defined in ${about.file}`));
  parts.push(...usage(variant, about, at), ...closedForm(variant.scheme, about), ...measured(number, at));
  parts.push(...qualityTable(number, at), ...kernelTable(about));
  return parts;
}

/** How a person trains with it: two lines. */
function usage(variant, about, at) {
  if (!variant.code) return [];
  const { members, sigma } = DATA.cases[at.case];
  const imports = about.module === "impls"
    ? `from impls import ${[variant.scheme, "perturb"].sort(inAscii).join(", ")}`
    : `from impls import perturb; from ${about.module} import ${variant.scheme}`;
  const code = `${imports}\npopulation = perturb(model, ${variant.code}, members=${members}, sigma=${sigma})`;
  return [
    html("h3", {}, "How to use it"),
    html("pre", { tabindex: "0", id: "usage" }, html("code", {}, code)),
  ];
}

/** Capitals before small letters, as import lines are sorted. */
function inAscii(a, b) {
  return a < b ? -1 : 1;
}

/** Memory, work and quality in closed form; of one that computes another scheme also that one's. */
function closedForm(scheme, about) {
  const found = [];
  for (const [name, one] of [[scheme, about], [about?.of, DATA.schemes[about?.of]]]) {
    const told = one ? CLOSED.filter((key) => one.closed[key]) : [];
    if (!told.length) continue;
    found.push(html("h3", {}, name === scheme ? "In closed form" : `In closed form: ${name}, which it computes`));
    found.push(html("dl", { class: "closed" }, told.map((key) => [html("dt", {}, key), html("dd", {}, one.closed[key])])));
  }
  if (found.length) {
    found.push(html("p", { class: "note" }, "n members, r repeats, g groups, o and i channels out and in, taps of a kernel, d perturbed numbers."));
  }
  return found;
}

/** A small table: what it is called among the regions of the page, its caption, its headings, its rows. */
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

/** What was measured of it on the chosen case: of the chosen run, or of the newest other one that has it. */
function measured(number, at) {
  for (const run of [at.run, ...(DEVICES.get(state.choice.device) ?? [])]) {
    const found = measuredIn(number, { ...at, run });
    if (found.length) return [html("h3", {}, "Measured"), ...found];
  }
  const label = DATA.cases[at.case].label;
  return [html("h3", {}, "Measured"), html("p", {}, `No run of this device has a time of it, or a reason, on ${label}.`)];
}

/** A row for each phase and method of a run, and the reasons for those that it lacks. */
function measuredIn(number, at) {
  const rows = [];
  const reasons = [];
  const quantities = quantitiesOf(at.run, at.case).filter((one) => DATA.quantities[one].metric === LATENCY);
  quantities.sort((a, b) => PHASES.indexOf(DATA.quantities[a].phase) - PHASES.indexOf(DATA.quantities[b].phase));
  for (const quantity of quantities) {
    const { phase, method } = DATA.quantities[quantity];
    const figure = figuresOf(at.run, quantity, at.case).find((one) => one.v === number);
    if (!figure) continue;
    if (figure.m === null) {
      reasons.push(html("p", { class: "note" }, `${phase} (${method}): ${figure.reason}`));
      continue;
    }
    const beside = (name) => {
      const found = other({ ...at, method }, phase, name).find((one) => one.v === number);
      return found ? figureText(found) : ABSENT;
    };
    rows.push([
      `${phase} (${method})`,
      figureText(figure),
      between(figure.m, figure.l, figure.h) || ABSENT,
      times(figure.t, figure.tl, figure.th),
      written(figure.f),
      written(figure.w, null, null, true),
      figure.b === null ? ABSENT : written(figure.b / 1e6),
      beside(PEAK),
      beside("noise_bytes"),
      beside("launches"),
    ]);
  }
  const heads = ["Phase", "Time (ms)", "95 % interval", "vs. base", "Floor (ms)", "Least flops", "Least traffic (MB)", "Peak (MB)", "Noise (MB)", "Launches"];
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
      const figure = figuresOf(run, quantity, at.case).find((one) => one.v === number);
      if (!figure || rank(figure) === null) continue;
      rows.push([title, method, figureText(figure), between(figure.m, figure.l, figure.h) || ABSENT]);
    }
    if (!rows.length) continue;
    const caption = `${DATA.cases[at.case].label}; run ${DATA.runs[run].id}`;
    return [html("h3", {}, "Quality of the gradient"), small("Quality", caption, ["Figure", "Method", "Value", "95 % interval"], rows)];
  }
  return [];
}

/** What its kernels compile to. */
function kernelTable(about) {
  if (!about?.kernels.length) return [];
  const heads = ["Kernel", "Capability", "Warps", "Stages", "Registers", "Shared (B)", "Spilled (B)", "Instructions"];
  const rows = about.kernels.map((kernel) => kernel.map((cell) => (typeof cell === "number" ? written(cell, null, null, true) : (cell ?? ABSENT))));
  return [html("h3", {}, "Kernels"), small("Kernels", "What the kernels that it launches compile to", heads, rows)];
}
