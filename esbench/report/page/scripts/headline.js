// The answer: which variant to train with at the chosen case, and why.

/** Write the answer of the chosen case. */
function showAnswer() {
  const at = chosen();
  const one = DATA.cases[at.case];
  const run = rankingRun(at);
  put("answer-where", `${one.operator} ${one.shape}, ${one.dtype}, ${one.members} members, on ${state.choice.device}`);
  const figures = run === null ? [] : ranked(run, at);
  const answer = figures.length ? byRate(figures, run, at) : byTime(at);
  put("answer-title", ...answer.title);
  put("answer-why", answer.why);
  const source = DATA.runs[figures.length ? run : at.run];
  const flaws = source.flaws.length ? ` This run ${source.flaws.join(" and ")}.` : "";
  put("answer-origin", `Run ${source.id}: ${source.origin}${flaws}`);
}

/** The run to rank by: the chosen one, or the newest of the device that ranks the case. */
function rankingRun(at) {
  const runs = [at.run, ...(DEVICES.get(state.choice.device) ?? [])];
  return runs.find((run) => quantityNumber(run, at.case, "step", RATE, at.method) !== undefined) ?? null;
}

/** The variants that have a rate, the best first. */
function ranked(run, at) {
  const figures = figuresOf(run, quantityNumber(run, at.case, "step", RATE, at.method), at.case);
  return figures.filter((figure) => !figure.baseline && (figure.m !== null || figure.k));
}

/** The answer where variants have a rate: the data has them in their order. */
function byRate(figures, run, at) {
  const [best, ...others] = figures;
  const members = DATA.cases[at.case].members;
  const latency = figuresOf(run, quantityNumber(run, at.case, "step", LATENCY, at.method), at.case);
  const step = latency.find((figure) => figure.v === best.v);
  const took = step ? `A step of ${members.toLocaleString("en-US")} members takes ${written(step.m, step.l, step.h)} ms` : "";
  const against = step && step.t !== null ? `, ${times(step.t, step.tl, step.th)} the plain layer's time` : "";
  const worth = best.k === "exact"
    ? "the exact gradient of a linear fitness in each step"
    : `${best.k ? `${best.k} ` : ""}${written(best.m, best.l, best.h)} effective members per ms`;
  const share = kept(best, members);
  const keeps = best.k === "exact" || !share ? "" : ` It keeps ${figureText(share)} % of its members.`;
  const close = others.filter((figure) => best.k !== "exact" && figure.h !== null && best.l !== null && figure.h >= best.l);
  const alike = close.length ? ` Not told apart from ${listed(close.map((figure) => figure.label))}: their intervals meet.` : "";
  const or = close.length ? [" or ", html("em", {}, breakable(close[0].label))] : [];
  const unsure = step && step.l === null ? " Its step has too few rounds for an interval: measure it again before you rely on it." : "";
  const fast = fastest(latency);
  const quick = fast && fast.v !== best.v
    ? ` ${fast.label} has the fastest step, ${written(fast.m, fast.l, fast.h)} ms, ${lost(figures, fast, members)}.`
    : "";
  return {
    title: ["Use ", html("em", {}, breakable(best.label)), ...or, `: ${worth}`],
    why: `${took}${against}.${keeps}${alike}${unsure}${quick}`,
  };
}

/** What the fastest step keeps of its members, in words. */
function lost(figures, fast, members) {
  const figure = figures.find((other) => other.v === fast.v);
  const share = figure ? kept(figure, members) : null;
  return share ? `but keeps ${figureText(share)} % of its members` : "but nobody knows what it keeps of its members";
}

/** The answer where only times are known. */
function byTime(at) {
  const figures = other(at, at.phase, LATENCY);
  const fast = fastest(figures);
  if (!fast) {
    return { title: ["No variant has a time here"], why: "The table shows what there is instead, with its reasons." };
  }
  const against = fast.t === null ? "" : `, ${times(fast.t, fast.tl, fast.th)} the plain layer's time`;
  return {
    title: ["Fastest ", `${at.phase}: `, html("em", {}, breakable(fast.label))],
    why: `It takes ${written(fast.m, fast.l, fast.h)} ms${against}. No run of this device ranks this case by effective members `
      + "per ms, and time alone says nothing of the gradient: a cheap scheme may throw most of the population away.",
  };
}

/** The fastest variant that is no baseline. */
function fastest(figures) {
  const known = figures.filter((figure) => !figure.baseline && figure.m !== null);
  return known.reduce((best, figure) => (best === null || figure.m < best.m ? figure : best), null);
}

/** The first names, and how many more there are. */
function listed(names) {
  const rest = names.length - 3;
  return names.slice(0, 3).join(", ") + (rest > 0 ? ` and ${rest} more` : "");
}
