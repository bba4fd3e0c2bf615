// How numbers are written: by the one rule of units.py, digit for digit, so that the page and the tables say the same.
// The figures of a run are embedded so that the rule gives the tables' text; what is formed here, such as a quotient
// of two runs, has the digits that its own interval settles. Only thousands are grouped.

const ABSENT = "n/a";
const UNSURE = 3;
const MOST = 6;
const SMALLEST = 1e-6;
const ROUNDING = 1e-9;
/** A half width that begins with less than 2, once it is rounded to two digits, keeps its second one. */
const COARSE = 1.95;

/** The power of ten of the leading digit, once the number is rounded to so many. */
function exponentOf(value, digits) {
  return Number(value.toExponential(digits - 1).split("e")[1]);
}

/** How far the farther end of an interval is from the number, null where one end is not known. */
function halfOf(value, low, high) {
  return low === null || high === null ? null : Math.max(high - value, value - low);
}

/** The power of ten of the last digit that is shown of a number: last_place in units.py. */
function lastPlace(value, half = null) {
  if (half === null || !Number.isFinite(half) || half <= ROUNDING * Math.abs(value)) {
    return value ? Math.min(0, exponentOf(value, UNSURE) - UNSURE + 1) : 0;
  }
  const first = exponentOf(half, 1);
  const place = half / Number(`1e${first}`) <= COARSE ? first - 1 : first;
  if (!value) return place;
  const leading = exponentOf(value, 1);
  return Math.max(Math.min(place, leading), Math.min(0, leading - MOST + 1));
}

/** A number down to a place, which may stand before the point; halves go to the even digit, as everywhere else. */
function fixed(value, place) {
  const size = Math.abs(value);
  const sign = value < 0 ? "-" : "";
  if (size && size < SMALLEST && place <= exponentOf(value, 1)) {
    return value.toExponential(exponentOf(value, 1) - place).replace(/e-(\d)$/, "e-0$1");
  }
  // All decimals of a number of this size, so that nothing is rounded twice.
  const [whole, part] = size < 1e21 ? size.toFixed(100).split(".") : [String(BigInt(size)), ""];
  const digits = whole + part;
  const kept = whole.length - place;
  const rest = digits.slice(Math.max(kept, 0)).padStart(digits.length - kept, "0");
  const half = "5".padEnd(rest.length, "0");
  let found = BigInt(digits.slice(0, Math.max(kept, 0)) || "0");
  if (rest > half || (rest && rest === half && found % 2n)) found += 1n;
  if (place > 0) return sign + (found * 10n ** BigInt(place)).toLocaleString("en-US");
  const text = found.toString().padStart(1 - place, "0");
  const front = BigInt(text.slice(0, text.length + place)).toLocaleString("en-US");
  return sign + front + (place ? `.${text.slice(place)}` : "");
}

/** A number with half the width of its interval, if that is known: format_number in units.py. */
function numberText(value, half = null) {
  if (value === null || value === undefined || !Number.isFinite(value)) return ABSENT;
  return value === 0 ? "0" : fixed(value, lastPlace(value, half));
}

/** A number with the ends of its interval as text; one that counts things has no decimals without an interval. */
function written(value, low = null, high = null, counts = false) {
  const half = halfOf(value, low, high);
  return counts && !half && Number.isInteger(value) ? fixed(value, 0) : numberText(value, half);
}

/** The 95 % interval of a figure as text, empty where it has none: as many digits as the figure, or as tell its ends apart. */
function between(value, low, high) {
  if (low === null || low === high) return "";
  if (high === null) return `at least ${written(low)}`;
  const middle = value ?? low;
  for (let place = lastPlace(middle, halfOf(middle, low, high)); ; place -= 1) {
    const ends = [low, high].map((end) => fixed(end, place));
    if (ends[0] !== ends[1] || place < -20) return ends.join(" to ");
  }
}

/** A ratio as text. */
function times(value, low = null, high = null) {
  const text = written(value, low, high);
  return text === ABSENT ? text : `${text}x`;
}

/** A figure as text, with what is known of it where it is no plain number. */
function figureText(figure) {
  if (figure.k === "exact") return "exact";
  const number = written(figure.m, figure.l, figure.h, figure.counts);
  return figure.k && figure.m !== null ? `${figure.k} ${number}` : number;
}

/** The name of a unit behind a number. */
function unitText(unit) {
  return unit ? ` ${unit}` : "";
}
