// The page: what follows what, the link in the address, and the theme.

const THEMES = ["system", "light", "dark"];
let theme = storedTheme();

/** Draw everything again from what is chosen. */
function refresh({ step = false } = {}) {
  writeLink(step);
  let found = {};
  for (const name of NAMES) {
    fill(one(`choose-${name}`), optionsOf(name, found), state.choice[name]);
    found = { ...found, [name]: state.choice[name] };
  }
  showAnswer();
  const shown = showTable();
  one("baselines").checked = state.view.baselines !== "no";
  if (one("filter").value !== (state.view.filter ?? "")) one("filter").value = state.view.filter ?? "";
  showPictures(shown);
  showDetail();
}

/** Draw the pictures of what the table shows. */
function showPictures(shown) {
  showBars(shown);
  showPareto(shown);
  showSweep(shown);
}

/** Choose something: the rest stays where it can. */
function choose(name, value) {
  const wanted = {};
  for (const one of NAMES) {
    wanted[one] = state.choice[one];
    if (one === name) break;
  }
  wanted[name] = value;
  const { found } = resolved(wanted);
  delete state.view.sort;
  state.choice = found;
  refresh({ step: true });
  showComparison();
}

/** Take over the link of the address. */
function follow() {
  const missing = readLink();
  put("status", missing.length ? `Not in this page: ${missing.join(", ")}. What is shown is the nearest there is.` : "");
  refresh();
  showComparison();
}

/** Which theme is asked for; where a browser stores nothing, the system's. */
function storedTheme() {
  try {
    const stored = localStorage.getItem("esbench-theme");
    return THEMES.includes(stored) ? stored : "system";
  } catch {
    return "system";
  }
}

/** Show a theme, and keep it. */
function setTheme(wanted) {
  theme = wanted;
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  put("theme", `Theme: ${theme}`);
  try {
    localStorage.setItem("esbench-theme", theme);
  } catch {
    // A page of a file may store nothing: the theme then lasts as long as the page.
  }
}

/** List the runs of the page. */
function showRuns() {
  const heads = ["Run", "Device", "Suite", "Started", "What is said of it"];
  const runs = [...DATA.runs].sort((a, b) => Number(a.published) - Number(b.published) || (a.id < b.id ? 1 : -1));
  const rows = runs.map((run) =>
    html(
      "tr",
      {},
      html("th", { scope: "row" }, run.id),
      html("td", { class: "words" }, run.device),
      html("td", { class: "words" }, run.suite),
      html("td", { class: "words" }, run.started),
      html("td", { class: "words" }, [run.thinned ? "thinned" : "", ...run.flaws].filter(Boolean).join("; ") || "whole"),
    ),
  );
  const head = html("tr", {}, heads.map((text) => html("th", { scope: "col" }, text)));
  put("runs-scroll", html("table", {}, html("thead", {}, head), html("tbody", {}, rows)));
}

/** Listen to everything that a person can do. */
function listen() {
  for (const name of NAMES) one(`choose-${name}`).addEventListener("change", (event) => choose(name, event.target.value));
  one("choice").addEventListener("submit", (event) => event.preventDefault());
  one("filter").addEventListener("input", (event) => {
    state.view.filter = event.target.value;
    refresh();
  });
  one("baselines").addEventListener("change", (event) => {
    state.view.baselines = event.target.checked ? "" : "no";
    refresh();
  });
  for (const name of ["a", "b", "quantity"]) {
    one(`compare-${name}`).addEventListener("change", (event) => {
      state.view[name] = event.target.value;
      writeLink();
      showComparison();
      one(`compare-${name}`).focus();
    });
  }
  one("compare-swap").addEventListener("click", () => {
    [state.view.a, state.view.b] = [state.view.b, state.view.a];
    writeLink();
    showComparison();
  });
  one("detail").addEventListener("close", () => {
    const { variant } = state.view;
    delete state.view.variant;
    writeLink();
    const number = DATA.variants.findIndex((_, place) => variantKey(place) === variant);
    document.querySelector(`#table [data-variant="${number}"]`)?.focus();
  });
  one("detail").addEventListener("click", (event) => {
    if (event.target === one("detail")) one("detail").close();
  });
  one("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]));
  one("skip").addEventListener("click", (event) => {
    event.preventDefault();
    one("main").focus();
  });
  for (const button of document.querySelectorAll("[data-section]")) {
    button.addEventListener("click", () => {
      one(button.dataset.section).scrollIntoView({ block: "start" });
      one(button.dataset.section).focus({ preventScroll: true });
    });
  }
  window.addEventListener("hashchange", follow);
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    showPictures(showTable());
  });
}

setTheme(theme);
put("rule", DATA.rule);
showRuns();
listen();
follow();
